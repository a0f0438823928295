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

// Facts are the observed properties of a machine, and the parts of Keelson that are installed on
// it. The zero value means that nothing is known.
type Facts struct {
	Hostname, MachineID, Arch, Kernel string // Arch: amd64, arm64, or as uname reports it
	Root, Systemd                     bool
	Cgroup                            []string // controllers of cgroup v2; empty if it is not mounted
	Programs                          map[string]bool
	Modules                           map[string]bool // kernel modules; no entry: unknown
	IPVS                              bool            // the ip_vs module is loaded
	Addresses                         []string
	Networks                          []Network        // Addresses with their interfaces
	Ports                             map[int]bool     // TCP ports in use
	UDP                               []netip.AddrPort // sockets, except the kernel's
	OtherNetwork                      bool             // another CNI product is configured
	Skew                              time.Duration    // clock of the machine minus the clock of the caller
	SkewError                         time.Duration    // maximum error of Skew
	Memory, FreeBytes                 int64            // in bytes; FreeBytes is the free space at /var/lib/keelson
	SyncLatency                       time.Duration    // duration of one write with fsync; 0: unknown
	Surroundings

	// Sums are the SHA-256 sums of files on the machine by path: installed files, uploaded releases
	// in Cache, and image archives that the agent imports.
	Sums            map[string]string
	Version         string          // output of --version of the installed programs
	Active, Enabled map[string]bool // running and enabled systemd units; keys are unit names without .service
	Stale           map[string]bool // systemd units that have not restarted since their files changed
	// ControlPlane and Agent are the contents of the settings files; "" if a file is missing.
	ControlPlane, Agent string

	Replica, ReplicaWhole bool   // some files of a replica exist; all files of a replica exist
	WithoutVote           bool   // the replica joined as a standby, and its files show no vote
	Joining               bool   // the replica has not joined the raft cluster yet
	ClusterID             string // cluster ID in the files of the replica
	ClusterName           string
	// PodRanges and ServiceRanges are the pod and Service address ranges in the files of the
	// replica. They have the form of the flags --cluster-cidr and --service-cidr of
	// 'keelson-controlplane init'.
	PodRanges, ServiceRanges string
	Admin                    bool   // the machine has an administrator's kubeconfig
	Node                     bool   // the machine has a node certificate
	NodeName                 string // name in the node certificate; "" if it cannot be read
	NodeCA, ReplicaCA        string
}

// Network describes an address or a route of a machine. Link is the network interface. Prefix is
// the address of the interface or the destination of the route, with its prefix length.
type Network struct {
	Link   string
	Prefix netip.Prefix
}

// factsScript is a shell script that prints the facts of the machine on which it runs. parseFacts
// parses the output.
//
//go:embed facts.sh
var factsScript string

// factsTimeout is the maximum duration of ReadFacts.
const factsTimeout = 5 * time.Minute

// ReadFacts runs facts.sh on the machine and returns its facts, including the clock skew. It
// changes nothing on the machine.
func (m *Machine) ReadFacts(ctx context.Context) (Facts, error) {
	ctx, cancel := context.WithTimeout(ctx, factsTimeout)
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
	f.From = m.clientAddress(ctx)
	if clock.IsZero() {
		return f, nil
	}
	// A second, short command measures the clock more precisely, because the first one writes to
	// the disk.
	before := time.Now()
	out, err = m.Run(ctx, "date +%s.%N", nil)
	if now, ok := unixTime(strings.TrimSpace(out)); err == nil && ok {
		clock, asked = now, before
	}
	took := time.Since(asked)
	f.Skew, f.SkewError = clock.Sub(asked.Add(took/2)), took/2
	return f, nil
}

// parseFacts parses the output of facts.sh. clock is the time of the machine according to the
// output. It is zero if the output does not contain the time. parseFacts returns an error if the
// output is incomplete.
func parseFacts(out string) (f Facts, clock time.Time, err error) {
	f = Facts{Programs: map[string]bool{}, Modules: map[string]bool{}, Ports: map[int]bool{}, Sums: map[string]string{},
		Active: map[string]bool{}, Enabled: map[string]bool{}, Stale: map[string]bool{}}
	whole, certificate := false, ""
	texts := map[string]*string{"nodecert": &certificate, "controlplane": &f.ControlPlane, "agent": &f.Agent,
		"version": &f.Version, "nodeca": &f.NodeCA, "replicaca": &f.ReplicaCA}
	lines := bufio.NewScanner(strings.NewReader(out))
	lines.Buffer(nil, maxOutput)
	for lines.Scan() {
		k, v, _ := strings.Cut(lines.Text(), " ")
		if to, ok := texts[k]; ok {
			raw, err := base64.StdEncoding.DecodeString(v)
			if err != nil {
				return f, clock, fmt.Errorf("its value of %s is not valid base64: %w", k, err)
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
			f.Arch = releaseArch(v)
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
			f.Memory = nonNegativeNumber(v) << 10
		case "room":
			f.FreeBytes = nonNegativeNumber(v) << 10
		case "address":
			f.Addresses = append(f.Addresses, v)
		case "network":
			link, p, _ := strings.Cut(v, " ")
			if p, err := netip.ParsePrefix(p); err == nil {
				f.Networks = append(f.Networks, Network{link, p})
			}
		case "udp":
			if at, ok := parseUDPSocket(v); ok {
				f.UDP = append(f.UDP, at)
			}
		case "othernetwork":
			f.OtherNetwork = true
		case "port":
			if n, err := strconv.ParseUint(v, 16, 16); err == nil {
				f.Ports[int(n)] = true
			}
		case "sync":
			f.SyncLatency = time.Duration(nonNegativeNumber(v)) * time.Microsecond
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
			f.WithoutVote = true
		case "joining":
			f.Joining = true
		case "admin":
			f.Admin = true
		case "node":
			f.Node = true
		case "cluster":
			f.ClusterID, f.ClusterName, f.PodRanges, f.ServiceRanges = decodeClusterIdentity(v)
		case "end":
			whole = true
		default:
			f.parseSurroundings(k, v)
		}
	}
	if !whole {
		return f, clock, fmt.Errorf("its answer is incomplete: %s", outputTail(out))
	}
	f.Version, f.NodeName = strings.TrimSpace(f.Version), nodeName(certificate)
	return f, clock, nil
}

// decodeClusterIdentity decodes the content of a replica's file cluster.json from base64. It
// returns the ID and name of the cluster, and the cluster's pod and Service address ranges. For
// invalid content, it returns four empty strings.
func decodeClusterIdentity(encoded string) (id, name, pods, services string) {
	raw, err := base64.StdEncoding.DecodeString(encoded)
	var c struct{ ID, Name, ClusterCIDR, ServiceCIDR string }
	if err != nil || json.Unmarshal(raw, &c) != nil {
		return "", "", "", ""
	}
	return c.ID, c.Name, c.ClusterCIDR, c.ServiceCIDR
}

func releaseArch(machine string) string {
	switch machine {
	case "x86_64":
		return "amd64"
	case "aarch64":
		return "arm64"
	}
	return machine
}

// parseUDPSocket parses the local address of a line of /proc/net/udp or udp6, ADDRESS:PORT in hex.
// ADDRESS consists of 32-bit words in host byte order, which is little-endian on all supported
// architectures.
func parseUDPSocket(s string) (netip.AddrPort, bool) {
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

func nonNegativeNumber(s string) int64 {
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

// UnitName returns the name of the systemd unit of the role, without .service. It is the unit of
// the agent for Worker, and the unit of the replica for the other roles.
func (r Role) UnitName() string {
	if r == Worker {
		return "keelson-agent"
	}
	return "keelson-controlplane"
}

// Cache is the folder on a machine to which the files of a release are uploaded.
const Cache = "/var/cache/keelson"

// HasPrograms reports whether at least one program of Keelson is installed in /usr/bin.
func (f Facts) HasPrograms() bool {
	for path := range f.Sums {
		if strings.HasPrefix(path, "/usr/bin/keelson-") {
			return true
		}
	}
	return false
}
