// Package lab creates a Keelson cluster on one Linux machine. Every replica and every worker is a
// "host": a network namespace on a private bridge without a route out, a mount namespace with its
// own /run, /var/lib/keelson, and logs, a hostname, and a cgroup subtree. The real binaries run in
// the hosts.
//
// A host does not depend on a process: its namespaces are pinned by bind mounts. A daemon can be
// killed and started again in the same host. A power failure is the kill of its cgroup and the loss
// of its mount namespace.
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

// Role is the purpose of a host.
type Role string

const (
	RoleControlPlane Role = "controlplane"
	RoleWorker       Role = "worker"
	RoleRegistry     Role = "registry"
)

// Host is one simulated machine of the lab.
type Host struct {
	Name   string     `json:"name"`
	Role   Role       `json:"role"`
	IP     netip.Addr `json:"ip"`
	Second netip.Addr `json:"second,omitzero"` // secondary address in a dual-stack lab
	Link   int        `json:"link,omitempty"`  // number of its network link, from 0
	// Standby marks a replica that joins without a vote.
	Standby bool `json:"standby,omitempty"`

	BinDir string `json:"binDir,omitempty"` // its own programs after Replace; "": the lab's
}

// Config is the configuration of a lab. Zero sizes mean the values of Defaults.
type Config struct {
	ControlPlanes   int    `json:"controlPlanes"`
	Standbys        int    `json:"standbys,omitempty"` // additional replicas without a vote
	Workers         int    `json:"workers"`
	Listen          string `json:"listen"`             // API address of the forwarder, the only way into the lab
	BinDir          string `json:"binDir"`             // folder of the programs
	Programs        string `json:"programs,omitempty"` // initial programs of replicas and workers; "": BinDir
	CNIBinDir       string `json:"cniBinDir"`          // folder of the CNI plugins
	ImageDir        string `json:"imageDir"`           // *.tar archives for the registry and every worker
	CPU             string `json:"cpu"`                // capacity that a worker reports
	Memory          string `json:"memory"`
	EvictionSeconds int    `json:"evictionSeconds"`      // before pods are evicted from a lost node
	Links           int    `json:"links,omitempty"`      // number of routed links for the workers; 0: 1
	Families        string `json:"families,omitempty"`   // address families: ipv4, dual, or ipv6; "": ipv4
	PodNetwork      string `json:"podNetwork,omitempty"` // --pod-network of the agents; "": auto
	Kubeconfig      string `json:"kubeconfig"`

	ControlPlaneFlags []string `json:"controlPlaneFlags,omitempty"` // additional flags of every replica
	ControlPlaneFiles string   `json:"controlPlaneFiles,omitempty"` // folder that replicas see as /etc/keelson

	Hosts []Host `json:"hosts"`

	TestRun bool     `json:"testRun,omitempty"` // created by a test run and removed with it
	Maker   *Process `json:"maker,omitempty"`   // process that called Up; nil in files of older releases
	AtWork  *Process `json:"atWork,omitempty"`  // process that is creating, starting, or removing it
	Built   bool     `json:"built,omitempty"`   // Up has finished, and Down was not called
}

// Fixed addresses and ports of a lab.
const (
	Subnet      = "10.89.0.0/24" // of the first link
	ClusterCIDR = "10.244.0.0/16"
	ServiceCIDR = "10.96.0.0/16"
	// The IPv6 ranges.
	ClusterCIDR6 = "fd44::/48"
	ServiceCIDR6 = "fd96::/112"

	APIPort      = 6443
	FleetPort    = 6444
	PeerPort     = 6445
	RegistryPort = 5000

	// ReplicaMemory is the memory limit of a replica in bytes. The default, half of the machine, is
	// too much for several replicas on one machine.
	ReplicaMemory = 2 << 30
)

// Lab is one lab in any state. Its configuration is on disk, so any process can open it.
type Lab struct {
	Config Config
	out    io.Writer // progress messages
}

// New returns a lab that Up can create.
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
	// The lab may be started or removed from another working directory.
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

// checkControlPlane refuses flags that the lab sets itself, and a folder that the replicas could
// not see.
func (c *Config) checkControlPlane() error {
	for _, flag := range c.ControlPlaneFlags {
		name, _, _ := strings.Cut(flag, "=")
		if !strings.HasPrefix(name, "--") || name == "--" {
			return fmt.Errorf("lab: control plane flag %q: want one that begins with --, as in --audit-log-maxsize=10", flag)
		}
		if slices.Contains([]string{"--name", "--data-dir", "--advertise-address"}, name) {
			return fmt.Errorf("lab: control plane flag %q: the lab sets %s itself, to a different value for each replica", flag, name)
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

// ErrNotUp is returned if there is no lab on this machine.
var ErrNotUp = errors.New("lab is not up: start it with 'kctl lab up'")

// Open returns the lab of this machine from its configuration, or ErrNotUp. FindLab also returns
// its state.
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
		return nil, fmt.Errorf("lab: reading %s: %w: remove the remains of the lab with 'kctl lab down'", configFile(), err)
	}
	return l, nil
}

func configFile() string { return filepath.Join(stateRoot, "lab.json") }

func (l *Lab) saveConfig() error {
	raw, err := json.MarshalIndent(l.Config, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(stateRoot, 0o755); err != nil {
		return err
	}
	// A power failure must not leave an empty file.
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

// markBusy records that this process is creating, starting, or removing the lab. clearBusy undoes
// it.
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

// Host returns a host by name. The error lists the existing hosts.
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

// hostsWithRole returns the hosts with a role.
func (l *Lab) hostsWithRole(r Role) []Host {
	var out []Host
	for _, h := range l.Config.Hosts {
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

// The host's folders on the machine.
func (h Host) stateDir() string { return filepath.Join(stateRoot, "hosts", h.Name) }

// DataDir returns the folder that is /var/lib/keelson on the host.
func (h Host) DataDir() string { return filepath.Join(h.stateDir(), "lib") }

func (h Host) runDir() string  { return filepath.Join(runRoot, "hosts", h.Name) }
func (h Host) pidFile() string { return filepath.Join(h.runDir(), "daemon.pid") }

// LogFile returns the log file of the host's daemon.
func (h Host) LogFile() string { return filepath.Join(h.stateDir(), "daemon.log") }

// NetNS, MountNS, and UTSNS return the paths where the host's namespaces are pinned.
func (h Host) NetNS() string   { return filepath.Join("/run/netns", root+"-"+h.Name) }
func (h Host) MountNS() string { return filepath.Join(runRoot, "ns", h.Name+".mnt") }
func (h Host) UTSNS() string   { return filepath.Join(runRoot, "ns", h.Name+".uts") }

// CgroupPath returns the host's cgroup in every hierarchy.
func (h Host) CgroupPath() string { return CgroupRoot() + "/" + h.Name }
