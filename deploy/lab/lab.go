// Package lab builds a whole Keelson cluster on one Linux machine. Every replica
// and every worker is a "host": a network namespace on a private bridge with no
// route out, a mount namespace with its own /run, /var/lib/keelson and logs, a
// hostname, and a cgroup subtree. The real binaries run in them.
//
// Nothing of a host lives in a process: its namespaces are pinned by bind mounts,
// so a daemon can be killed and started again in the same host, and a power cut
// is the kill of its cgroup plus the loss of its mount namespace.
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
)

// Role is what a host is for.
type Role string

const (
	RoleControlPlane Role = "controlplane"
	RoleWorker       Role = "worker"
	RoleRegistry     Role = "registry"
)

// Host is one machine of the lab.
type Host struct {
	Name   string     `json:"name"`
	Role   Role       `json:"role"`
	IP     netip.Addr `json:"ip"`
	Second netip.Addr `json:"second,omitzero"` // of the other family, where the lab has two
	Link   int        `json:"link,omitempty"`  // that its cable leads to, from 0
	// Standby is a replica that joined without a vote.
	Standby bool `json:"standby,omitempty"`

	BinDir string `json:"binDir,omitempty"` // of its programs, where they are not the lab's (Replace)
}

// Config says what to build. The zero values of sizes mean the defaults of Defaults.
type Config struct {
	ControlPlanes   int    `json:"controlPlanes"`
	Standbys        int    `json:"standbys,omitempty"` // further replicas, without a vote
	Workers         int    `json:"workers"`
	Listen          string `json:"listen"`             // of the forwarder: the only way in
	BinDir          string `json:"binDir"`             // where the daemons are
	Programs        string `json:"programs,omitempty"` // where those are with which replicas and workers begin; "" = BinDir
	CNIBinDir       string `json:"cniBinDir"`          // where the CNI plugins are
	ImageDir        string `json:"imageDir"`           // archives (*.tar) that every worker and the registry hold from the start
	CPU             string `json:"cpu"`                // capacity that a worker reports
	Memory          string `json:"memory"`
	EvictionSeconds int    `json:"evictionSeconds"`      // after which pods leave a lost node
	Links           int    `json:"links,omitempty"`      // on which the workers are in turn, with a router between; 0 = 1
	Families        string `json:"families,omitempty"`   // of addresses: ipv4, dual or ipv6; "" = ipv4
	PodNetwork      string `json:"podNetwork,omitempty"` // of the agents: how pods reach those of other workers; "" = auto
	Kubeconfig      string `json:"kubeconfig"`

	ControlPlaneFlags []string `json:"controlPlaneFlags,omitempty"` // that every replica runs with, besides the lab's own
	ControlPlaneFiles string   `json:"controlPlaneFiles,omitempty"` // a folder of this machine that they see as /etc/keelson

	Hosts []Host `json:"hosts"`

	TestRun bool     `json:"testRun,omitempty"` // made by a run of tests, with which it ends
	Maker   *Process `json:"maker,omitempty"`   // that called Up; nil in what releases before this field wrote
	AtWork  *Process `json:"atWork,omitempty"`  // that builds it, starts it again or takes it away; nil once it has done so
	Built   bool     `json:"built,omitempty"`   // Up came to its end, and no Down has begun
}

// Defaults of a lab.
const (
	Subnet      = "10.89.0.0/24" // of the first link
	ClusterCIDR = "10.244.0.0/16"
	ServiceCIDR = "10.96.0.0/16"
	// The same with IPv6.
	ClusterCIDR6 = "fd44::/48"
	ServiceCIDR6 = "fd96::/112"

	APIPort      = 6443
	FleetPort    = 6444
	PeerPort     = 6445
	RegistryPort = 5000

	// ReplicaMemory is the memory limit of a replica, in bytes: the default, half of the machine, is not for three on one.
	ReplicaMemory = 2 << 30
)

// Lab is one lab, up or not. Its state is on disk: any process may open it.
type Lab struct {
	Config Config
	out    io.Writer // progress for a person
}

// New returns a lab to be built by Up.
func New(c Config, out io.Writer) (*Lab, error) {
	if errName != nil {
		return nil, errName
	}
	if c.ControlPlanes < 1 || c.Workers < 0 || c.ControlPlanes > 9 || c.Workers > 99 {
		return nil, fmt.Errorf("lab: %d control planes and %d workers: want 1 to 9 and 0 to 99", c.ControlPlanes, c.Workers)
	}
	if c.Standbys < 0 || c.ControlPlanes+c.Standbys > 9 {
		return nil, fmt.Errorf("lab: %d standbys: want 0 to %d beside %d control planes", c.Standbys, 9-c.ControlPlanes, c.ControlPlanes)
	}
	if err := c.checkControlPlane(); err != nil {
		return nil, err
	}
	// It may be started again or taken away from another folder.
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
		h := c.host(fmt.Sprintf("cp%d", i), RoleControlPlane, 0, 10+i)
		h.Standby = i > c.ControlPlanes
		c.Hosts = append(c.Hosts, h)
	}
	for i := 1; i <= c.Workers; i++ {
		c.Hosts = append(c.Hosts, c.host(fmt.Sprintf("w%d", i), RoleWorker, (i-1)%max(1, c.Links), 100+i))
	}
	if c.Programs != "" && c.Programs != c.BinDir {
		for i := range c.Hosts {
			c.Hosts[i].BinDir = c.Programs
		}
	}
	c.Hosts = append(c.Hosts, c.host("registry", RoleRegistry, 0, 5))
	return &Lab{Config: c, out: out}, nil
}

// checkControlPlane refuses flags that are the lab's own, and a folder that the replicas could not see.
func (c *Config) checkControlPlane() error {
	for _, flag := range c.ControlPlaneFlags {
		name, _, _ := strings.Cut(flag, "=")
		if !strings.HasPrefix(name, "--") || name == "--" {
			return fmt.Errorf("lab: control plane flag %q: want one that begins with --, as in --audit-log-maxsize=10", flag)
		}
		if slices.Contains([]string{"--name", "--data-dir", "--advertise-address"}, name) {
			return fmt.Errorf("lab: control plane flag %q: the lab sets %s by itself, for each replica another", flag, name)
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
		return fmt.Errorf("lab: %s cannot be the folder of the control plane's files: every host has a /run of its own", folder)
	}
	c.ControlPlaneFiles = folder
	return nil
}

// ErrNotUp says that there is no lab on this machine.
var ErrNotUp = errors.New("lab is not up: start it with 'kctl lab up'")

// Open reads what a lab of this machine is made of, or ErrNotUp. Whether it runs says Look.
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
		return nil, fmt.Errorf("lab: reading %s: %w: take away what is left of the lab with 'kctl lab down'", configFile(), err)
	}
	return l, nil
}

func configFile() string { return filepath.Join(stateRoot, "lab.json") }

func (l *Lab) save() error {
	raw, err := json.MarshalIndent(l.Config, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return err
	}
	// A machine that loses power must not leave an empty file.
	tmp, err := os.OpenFile(configFile()+".new", os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	_, err = tmp.Write(raw)
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return err
	}
	return os.Rename(tmp.Name(), configFile())
}

// begin notes that this process is at work on the lab, done that it is no longer.
func (l *Lab) begin() error {
	l.Config.AtWork = thisProcess()
	if err := l.save(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	return nil
}

func (l *Lab) done() error {
	l.Config.AtWork = nil
	if err := l.save(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	return nil
}

// Host finds a host by name; the error lists what there is.
func (l *Lab) Host(name string) (Host, error) {
	i := slices.IndexFunc(l.Config.Hosts, func(h Host) bool { return h.Name == name })
	if i < 0 {
		var names []string
		for _, h := range l.Config.Hosts {
			names = append(names, h.Name)
		}
		return Host{}, fmt.Errorf("lab: no host %q: there are %v", name, names)
	}
	return l.Config.Hosts[i], nil
}

// hosts returns the hosts of one role.
func (l *Lab) hosts(r Role) []Host {
	var out []Host
	for _, h := range l.Config.Hosts {
		if h.Role == r {
			out = append(out, h)
		}
	}
	return out
}

func (l *Lab) say(format string, args ...any) {
	if l.out != nil {
		fmt.Fprintf(l.out, format+"\n", args...)
	}
}

// The folders of a host on the machine.
func (h Host) stateDir() string { return filepath.Join(stateRoot, "hosts", h.Name) }

// DataDir is what the host has at /var/lib/keelson.
func (h Host) DataDir() string { return filepath.Join(h.stateDir(), "lib") }

func (h Host) runDir() string  { return filepath.Join(runRoot, "hosts", h.Name) }
func (h Host) pidFile() string { return filepath.Join(h.runDir(), "daemon.pid") }

// LogFile is where the host's daemon writes.
func (h Host) LogFile() string { return filepath.Join(h.stateDir(), "daemon.log") }

// NetNS, MountNS and UTSNS are the pins of the host's namespaces.
func (h Host) NetNS() string   { return filepath.Join("/run/netns", root+"-"+h.Name) }
func (h Host) MountNS() string { return filepath.Join(runRoot, "ns", h.Name+".mnt") }
func (h Host) UTSNS() string   { return filepath.Join(runRoot, "ns", h.Name+".uts") }

// CgroupPath is the host's cgroup below every hierarchy.
func (h Host) CgroupPath() string { return CgroupRoot() + "/" + h.Name }
