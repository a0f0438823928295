// Package lab creates a Keelson cluster on one Linux machine, for tests and trials. Each replica
// and each worker is a Host, a simulated machine. It has a network namespace on a private bridge, a
// hostname, a cgroup, and a mount namespace with its own /run, /var/lib/keelson, and logs. The
// hosts run the real programs, and have no route out of the lab.
//
// A host does not depend on a process: bind mounts keep its namespaces alive. A daemon can be
// killed and started again in the same host. To simulate a power failure, the lab kills all
// processes in the host's cgroup and removes its mount namespace.
package lab

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"keelson.dev/keelson/internal/durable"
)

// Role is the purpose of a Host: it determines which daemon runs there.
type Role string

const (
	RoleControlPlane Role = "controlplane"
	RoleWorker       Role = "worker"
	RoleRegistry     Role = "registry"
)

// Host is a simulated machine of a lab: namespaces and cgroups on this machine, in which one daemon
// runs. See the package comment.
type Host struct {
	Name   string     `json:"name"`
	Role   Role       `json:"role"`
	IP     netip.Addr `json:"ip"`
	Second netip.Addr `json:"second,omitzero"` // IPv6 address of a dual-stack lab
	Link   int        `json:"link,omitempty"`  // number of the bridge to which the host is connected, from 0
	// Standby marks the host of a replica that joins the raft cluster without a vote.
	Standby bool `json:"standby,omitempty"`

	BinDir string `json:"binDir,omitempty"` // folder of the host's programs; "": Config.BinDir
}

// Config is the configuration of a lab. It is stored on disk in the file lab.json, which Open
// reads.
type Config struct {
	ControlPlanes   int    `json:"controlPlanes"`
	Standbys        int    `json:"standbys,omitempty"` // number of additional replicas without a vote
	Workers         int    `json:"workers"`
	Listen          string `json:"listen"`             // API address of the forwarder
	BinDir          string `json:"binDir"`             // folder of the programs
	Programs        string `json:"programs,omitempty"` // folder of the programs of replicas and workers; "": BinDir
	CNIBinDir       string `json:"cniBinDir"`          // folder of the CNI plugins
	ImageDir        string `json:"imageDir"`           // *.tar archives for registry and workers
	CPU             string `json:"cpu"`                // capacity that a worker reports
	Memory          string `json:"memory"`
	EvictionSeconds int    `json:"evictionSeconds"`      // value of the replicas' flag --eviction-seconds
	Links           int    `json:"links,omitempty"`      // number of bridges with workers, routed; 0 means 1
	Families        string `json:"families,omitempty"`   // address families: ipv4, dual, or ipv6; "": ipv4
	PodNetwork      string `json:"podNetwork,omitempty"` // value of the agents' flag --pod-network; "": auto
	Kubeconfig      string `json:"kubeconfig"`

	ControlPlaneFlags []string `json:"controlPlaneFlags,omitempty"` // additional flags of every replica
	ControlPlaneFiles string   `json:"controlPlaneFiles,omitempty"` // folder that replicas see as /etc/keelson

	Hosts []Host `json:"hosts"`

	TestRun bool     `json:"testRun,omitempty"` // a test run created the lab, and removes it
	Maker   *Process `json:"maker,omitempty"`   // process that called Up; nil in labs of older releases
	AtWork  *Process `json:"atWork,omitempty"`  // process that is creating, starting, or removing the lab
	Built   bool     `json:"built,omitempty"`   // Up has finished, and Down has not begun
}

// Address ranges and ports that are the same in every lab.
const (
	Subnet      = "10.89.0.0/24" // address range of the hosts on the first bridge
	ClusterCIDR = "10.244.0.0/16"
	ServiceCIDR = "10.96.0.0/16"
	// IPv6 address ranges of pods and Services
	ClusterCIDR6 = "fd44::/48"
	ServiceCIDR6 = "fd96::/112"

	APIPort      = 6443
	FleetPort    = 6444
	PeerPort     = 6445
	RegistryPort = 5000

	// ReplicaMemory is the memory limit of each replica in bytes. Without it, each of them would
	// use up to half of the machine's memory.
	ReplicaMemory = 2 << 30
)

// Lab is a Keelson cluster for tests and trials, running or not. Its hosts are simulated with
// namespaces and cgroups on this machine. Its configuration is on disk, so that any process can
// open it.
type Lab struct {
	Config Config
	out    io.Writer // destination of progress messages
}

// New returns a lab with the configuration c and its hosts. It changes nothing on the machine; Up
// creates the lab. It returns an error if c is invalid. out receives progress messages.
func New(c Config, out io.Writer) (*Lab, error) {
	if errName != nil {
		return nil, errName
	}
	if c.ControlPlanes < 1 || c.Workers < 0 || c.ControlPlanes > 9 || c.Workers > 99 {
		return nil, fmt.Errorf("lab: %d control planes and %d workers: want 1 to 9 and 0 to 99",
			c.ControlPlanes, c.Workers)
	}
	if c.Standbys < 0 || c.ControlPlanes+c.Standbys > 9 {
		return nil, fmt.Errorf("lab: %d standbys: want 0 to %d beside %d control planes", c.Standbys, 9-c.ControlPlanes,
			c.ControlPlanes)
	}
	if err := c.checkControlPlane(); err != nil {
		return nil, err
	}
	// Another command may start or remove the lab from another working directory.
	for _, path := range []*string{&c.BinDir, &c.Programs, &c.CNIBinDir, &c.ImageDir, &c.Kubeconfig} {
		if *path == "" {
			continue
		}
		full, err := filepath.Abs(*path)
		if err != nil {
			return nil, fmt.Errorf("lab: folder %s: %w", *path, err)
		}
		*path = full
	}
	if err := c.checkNetwork(); err != nil {
		return nil, err
	}
	c.Hosts = nil
	for i := 1; i <= c.ControlPlanes+c.Standbys; i++ {
		h := c.newHost(fmt.Sprintf("cp%d", i), RoleControlPlane, 0, 10+i)
		h.Standby = i > c.ControlPlanes
		c.Hosts = append(c.Hosts, h)
	}
	for i := 1; i <= c.Workers; i++ {
		c.Hosts = append(c.Hosts, c.newHost(fmt.Sprintf("w%d", i), RoleWorker, (i-1)%max(1, c.Links), 100+i))
	}
	if c.Programs != "" && c.Programs != c.BinDir {
		for i := range c.Hosts {
			c.Hosts[i].BinDir = c.Programs
		}
	}
	c.Hosts = append(c.Hosts, c.newHost("registry", RoleRegistry, 0, 5))
	return &Lab{Config: c, out: out}, nil
}

// checkControlPlane returns an error for invalid ControlPlaneFlags, for flags that the lab sets
// itself, and for a folder ControlPlaneFiles that hosts cannot mount. It makes that path absolute.
func (c *Config) checkControlPlane() error {
	for _, flag := range c.ControlPlaneFlags {
		name, _, _ := strings.Cut(flag, "=")
		if !strings.HasPrefix(name, "--") || name == "--" {
			return fmt.Errorf("lab: control plane flag %q: want one that begins with --, as in --audit-log-maxsize=10",
				flag)
		}
		if slices.Contains([]string{"--name", "--data-dir", "--advertise-address"}, name) {
			return fmt.Errorf("lab: control plane flag %q: the lab sets %s itself, to a different value for each "+
				"replica", flag, name)
		}
	}
	if c.ControlPlaneFiles == "" {
		return nil
	}
	folder, err := filepath.Abs(c.ControlPlaneFiles)
	if err == nil {
		folder, err = filepath.EvalSymlinks(folder)
	}
	switch info, err := os.Stat(folder); {
	case err != nil:
		return fmt.Errorf("lab: folder of the control plane's files: %w", err)
	case !info.IsDir():
		return fmt.Errorf("lab: %s for the control plane's files is not a folder", folder)
	case folder == "/run" || strings.HasPrefix(folder, "/run/"):
		return fmt.Errorf("lab: %s cannot be the folder of the control plane's files: every host has a /run of its own",
			folder)
	}
	c.ControlPlaneFiles = folder
	return nil
}

// ErrNotUp is returned if there is no lab on this machine.
var ErrNotUp = errors.New("lab is not up: start it with 'kctl lab up'")

// Open returns the lab that NameEnv selects on this machine, with its stored configuration. It
// returns ErrNotUp if there is no such lab. It does not check whether the lab runs; see FindLab.
func Open(out io.Writer) (*Lab, error) {
	if errName != nil {
		return nil, errName
	}
	raw, err := os.ReadFile(configFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil, ErrNotUp
	}
	if err != nil {
		return nil, fmt.Errorf("lab: %w", err)
	}
	l := &Lab{out: out}
	if err := json.Unmarshal(raw, &l.Config); err != nil {
		return nil, fmt.Errorf("lab: reading %s: %w: remove the remains of the lab with 'kctl lab down'",
			configFile(), err)
	}
	return l, nil
}

// hosts returns a hostBuilder for the hosts of the lab.
func (l *Lab) hosts() hostBuilder { return hostBuilder{&l.Config} }

// registry returns a registryLoader for the image registry of the lab.
func (l *Lab) registry() registryLoader { return registryLoader{l} }

// readiness returns a readiness, which waits until replicas and nodes of the lab are ready.
func (l *Lab) readiness() readiness { return readiness{l} }

func configFile() string { return filepath.Join(stateRoot, "lab.json") }

func (l *Lab) saveConfig() error {
	raw, err := json.MarshalIndent(l.Config, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return err
	}
	return durable.Write(configFile(), raw, durable.Intact)
}

// markBusy records in lab.json that this process is creating, starting, or removing the lab.
// clearBusy removes this record.
func (l *Lab) markBusy() error {
	l.Config.AtWork = thisProcess()
	if err := l.saveConfig(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	return nil
}

func (l *Lab) clearBusy() error {
	l.Config.AtWork = nil
	if err := l.saveConfig(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	return nil
}

// Host returns the host with the given name. If there is no such host, the error lists the names of
// all hosts.
func (l *Lab) Host(name string) (Host, error) { return findHost(l.Config.Hosts, name) }

// findHost returns the host with the given name. If there is no such host, the error lists the
// names of all hosts.
func findHost(hosts []Host, name string) (Host, error) {
	i := slices.IndexFunc(hosts, func(h Host) bool { return h.Name == name })
	if i < 0 {
		var names []string
		for _, h := range hosts {
			names = append(names, h.Name)
		}
		return Host{}, fmt.Errorf("lab: no host %q: there are %v", name, names)
	}
	return hosts[i], nil
}

// hostsWithRole returns the hosts with the role r, in the order of Config.Hosts.
func (hb hostBuilder) hostsWithRole(r Role) []Host {
	var out []Host
	for _, h := range hb.config.Hosts {
		if h.Role == r {
			out = append(out, h)
		}
	}
	return out
}

func (l *Lab) printf(format string, args ...any) {
	if l.out != nil {
		fmt.Fprintf(l.out, format+"\n", args...)
	}
}

// stateDir returns the folder on the machine that serves as the disk of the host: it survives a
// simulated power failure.
func (h Host) stateDir() string { return filepath.Join(stateRoot, "hosts", h.Name) }

// DataDir returns the folder on the machine that is mounted as /var/lib/keelson on the host.
func (h Host) DataDir() string { return filepath.Join(h.stateDir(), "lib") }

func (h Host) runDir() string  { return filepath.Join(runRoot, "hosts", h.Name) }
func (h Host) pidFile() string { return filepath.Join(h.runDir(), "daemon.pid") }

// LogFile returns the path, on the machine, of the log of the host's daemon.
func (h Host) LogFile() string { return filepath.Join(h.stateDir(), "daemon.log") }

// NetNS, MountNS, and UTSNS return the paths of the bind mounts that keep the host's namespaces
// alive.
func (h Host) NetNS() string   { return filepath.Join("/run/netns", root+"-"+h.Name) }
func (h Host) MountNS() string { return filepath.Join(runRoot, "ns", h.Name+".mnt") }
func (h Host) UTSNS() string   { return filepath.Join(runRoot, "ns", h.Name+".uts") }

// CgroupPath returns the path of the host's cgroup, which is the same in every cgroup hierarchy.
func (h Host) CgroupPath() string { return CgroupRoot() + "/" + h.Name }
