package machines

import (
	"bufio"
	"context"
	_ "embed"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Facts are what a machine is and has. The zero value is a machine of which nothing is known.
type Facts struct {
	Hostname, MachineID, Arch, Kernel string // Arch as releases name it, amd64 or arm64, else as the machine does
	Root, Systemd                     bool
	Cgroup                            []string // controllers of cgroup v2; none where it is not mounted
	Programs                          map[string]bool
	Modules                           map[string]bool // parts of the kernel: there, or false where it has them not; none of which it cannot be told
	IPVS                              bool            // the kernel has it loaded
	Addresses                         []string
	Networks                          []Network        // the same, with their links
	Ports                             map[int]bool     // TCP ports that somebody listens at
	UDP                               []netip.AddrPort // that a process has; the kernel's own are not among them
	OtherNetwork                      bool             // pods get the network of a product that has its configuration in /etc/cni/net.d
	Skew                              time.Duration    // how much its clock is ahead of ours
	SkewUnsure                        time.Duration    // and how much of that is the time that asking took
	Memory, Room                      int64            // bytes: all memory; what is free where Keelson's data goes
	Sync                              time.Duration    // how long one synchronous write takes there; 0 = unknown
	Surroundings

	// Sums are of installed files, SHA-256 by path; of releases that were put there (Cache) and of images that the agent imports too.
	Sums            map[string]string
	Version         string          // of the installed programs, as they say it
	Active, Enabled map[string]bool // units without .service
	Stale           map[string]bool // those that run since before something of theirs was changed
	// ControlPlane and Agent are the files of settings, "" where there is none.
	ControlPlane, Agent string

	Replica, ReplicaWhole bool   // it has keys of a replica; it has all that a replica needs
	Waiting               bool   // its replica has no vote yet, as far as it knows: it joined as a standby
	Joining               bool   // its replica has not been taken into the group yet
	ClusterID             string // of the cluster that the replica belongs to
	ClusterName           string
	// PodRanges and ServiceRanges are of that cluster, as flags of init have them.
	PodRanges, ServiceRanges string
	Admin                    bool   // it has an administrator's kubeconfig
	Node                     bool   // it has the certificate of a node
	NodeName                 string // of which, as the certificate says; "" where it cannot be read
	NodeCA, ReplicaCA        string
}

// Network is an address of a link, with the length of the network that it is in.
type Network struct {
	Link   string
	Prefix netip.Prefix
}

// factsScript has the shell of a machine say them.
//
//go:embed facts.sh
var factsScript string

// factsLimit is how long a machine may take to say what it is.
const factsLimit = 5 * time.Minute

// ReadFacts asks a machine what it is and has, and changes nothing on it.
func (m *Machine) ReadFacts(ctx context.Context) (Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, factsLimit)
	defer cancel()
	asked := time.Now()
	out, err := m.Run(ctx, factsScript, nil)
	if err != nil {
		return Facts{}, fmt.Errorf("asking what it has: %w", err)
	}
	f, clock, err := parseFacts(out)
	if err != nil {
		return Facts{}, fmt.Errorf("%s: asking what it has: %w", m.Host.Name, err)
	}
	f.From = m.seenFrom(ctx)
	if clock.IsZero() {
		return f, nil
	}
	// A second, short question tells the clock better: the first one wrote to the disk.
	before := time.Now()
	out, err = m.Run(ctx, "date +%s.%N", nil)
	if now, ok := unixTime(strings.TrimSpace(out)); err == nil && ok {
		clock, asked = now, before
	}
	took := time.Since(asked)
	f.Skew, f.SkewUnsure = clock.Sub(asked.Add(took/2)), took/2
	return f, nil
}

// parseFacts reads what the script said, and when the machine thought it was.
func parseFacts(out string) (f Facts, clock time.Time, err error) {
	f = Facts{Programs: map[string]bool{}, Modules: map[string]bool{}, Ports: map[int]bool{}, Sums: map[string]string{},
		Active: map[string]bool{}, Enabled: map[string]bool{}, Stale: map[string]bool{}}
	whole := false
	certificate := ""
	texts := map[string]*string{"nodecert": &certificate, "controlplane": &f.ControlPlane, "agent": &f.Agent, "version": &f.Version, "nodeca": &f.NodeCA, "replicaca": &f.ReplicaCA}
	lines := bufio.NewScanner(strings.NewReader(out))
	lines.Buffer(nil, maxSaid)
	for lines.Scan() {
		k, v, _ := strings.Cut(lines.Text(), " ")
		if to, ok := texts[k]; ok {
			raw, err := base64.StdEncoding.DecodeString(v)
			if err != nil {
				return f, clock, fmt.Errorf("what it says of %s is no base64: %w", k, err)
			}
			*to = string(raw)
			continue
		}
		switch k {
		case "hostname":
			f.Hostname = v
		case "machine":
			f.MachineID = v
		case "arch":
			f.Arch = archOf(v)
		case "kernel":
			f.Kernel = v
		case "root":
			f.Root = true
		case "systemd":
			f.Systemd = true
		case "cgroup":
			f.Cgroup = strings.FieldsFunc(v, func(r rune) bool { return r == ',' })
		case "program":
			f.Programs[v] = true
		case "module":
			f.Modules[v] = true
		case "lacks":
			f.Modules[v] = false
		case "ipvs":
			f.IPVS = true
		case "clock":
			clock, _ = unixTime(v)
		case "memory":
			f.Memory = number(v) << 10
		case "room":
			f.Room = number(v) << 10
		case "address":
			f.Addresses = append(f.Addresses, v)
		case "network":
			link, p, _ := strings.Cut(v, " ")
			if p, err := netip.ParsePrefix(p); err == nil {
				f.Networks = append(f.Networks, Network{link, p})
			}
		case "udp":
			if at, ok := socket(v); ok {
				f.UDP = append(f.UDP, at)
			}
		case "othernetwork":
			f.OtherNetwork = true
		case "port":
			if n, err := strconv.ParseUint(v, 16, 16); err == nil {
				f.Ports[int(n)] = true
			}
		case "sync":
			f.Sync = time.Duration(number(v)) * time.Microsecond
		case "active":
			f.Active[v] = true
		case "enabled":
			f.Enabled[v] = true
		case "stale":
			f.Stale[v] = true
		case "sum":
			if sum, path, ok := strings.Cut(v, " "); ok {
				f.Sums[path] = sum
			}
		case "replica":
			f.Replica, f.ReplicaWhole = true, f.ReplicaWhole || v == "whole"
		case "waiting":
			f.Waiting = true
		case "joining":
			f.Joining = true
		case "admin":
			f.Admin = true
		case "node":
			f.Node = true
		case "cluster":
			f.ClusterID, f.ClusterName, f.PodRanges, f.ServiceRanges = identity(v)
		case "end":
			whole = true
		default:
			f.surroundings(k, v)
		}
	}
	if !whole {
		return f, clock, fmt.Errorf("it did not say all: %s", lastWords(out))
	}
	f.Version, f.NodeName = strings.TrimSpace(f.Version), nodeName(certificate)
	return f, clock, nil
}

// identity reads which cluster a replica belongs to, and which ranges that has.
func identity(encoded string) (id, name, pods, services string) {
	raw, err := base64.StdEncoding.DecodeString(encoded)
	var c struct{ ID, Name, ClusterCIDR, ServiceCIDR string }
	if err != nil || json.Unmarshal(raw, &c) != nil {
		return "", "", "", ""
	}
	return c.ID, c.Name, c.ClusterCIDR, c.ServiceCIDR
}

func archOf(machine string) string {
	switch machine {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return machine
}

// socket reads an address as /proc/net/udp writes it: words of 32 bits in the machine's own order, which is little-endian wherever
// Keelson runs, and a port.
func socket(s string) (netip.AddrPort, bool) {
	at, port, _ := strings.Cut(s, ":")
	raw, err := hex.DecodeString(at)
	n, err2 := strconv.ParseUint(port, 16, 16)
	if err != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	a, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(a.Unmap(), uint16(n)), ok
}

func number(s string) int64 {
	n, err := strconv.ParseInt(s, 10, 52)
	if err != nil || n < 0 {
		return 0
	}
	return n
}

func unixTime(s string) (time.Time, bool) {
	whole, part, _ := strings.Cut(s, ".")
	sec, err := strconv.ParseInt(whole, 10, 64)
	if err != nil {
		return time.Time{}, false
	}
	nano, _ := strconv.ParseInt((part + "000000000")[:9], 10, 64)
	return time.Unix(sec, nano), true
}

// Unit is the name of the daemon's unit, without .service.
func (r Role) Unit() string {
	if r == Worker {
		return "keelson-agent"
	}
	return "keelson-controlplane"
}

// Cache is the folder of a machine that releases are put into.
const Cache = "/var/cache/keelson"

// Installed says whether any program of Keelson's is there.
func (f Facts) Installed() bool {
	for path := range f.Sums {
		if strings.HasPrefix(path, "/usr/bin/keelson-") {
			return true
		}
	}
	return false
}
