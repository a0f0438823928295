// Package machines parses a cluster file, which lists the machines of a Keelson cluster, and runs
// commands on these machines as root by SSH. A machine needs only an SSH server and a root shell.
// This package installs nothing by itself: package plan computes the steps, and package execute
// carries them out with the scripts of a release.
package machines

import (
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// APIVersion and Kind are the only values of apiVersion and kind that a cluster file may have.
const (
	APIVersion = "keelson.dev/v1"
	Kind       = "Machines"
)

// Role is a role that the cluster file gives a machine: ControlPlane, Standby, or Worker.
type Role string

// The roles of a machine. A ControlPlane machine runs a replica of the control plane with a vote in
// the raft cluster. A Standby machine runs a replica that joins without a vote, and gets the vote
// of a replica that dies. A Worker runs pods; it may also have one of the two other roles. The
// roles only apply when a replica joins. Later, the raft cluster decides which replicas have a
// vote.
const (
	ControlPlane Role = "controlplane"
	Standby      Role = "standby"
	Worker       Role = "worker"
)

// ReplaceDead is the key of a replica's setting. Its value is the time without contact after which
// the leader gives the vote of a dead replica to a standby. ReplaceDeadAfter is the value of this
// setting if the cluster file has standbys and does not set the key.
const (
	ReplaceDead      = "replace-dead-after"
	ReplaceDeadAfter = 10 * time.Minute
)

// Cluster is the content of a cluster file, with defaults in place of omitted values.
type Cluster struct {
	Name    string // name of the cluster and of the kubeconfig context
	Release string // location of the release: tarball, folder of 'make dist', or URL; "": not set
	// Init are flags of 'keelson-controlplane init', as --KEY=VALUE. They are used once, when the
	// cluster is created.
	Init  []string
	Hosts []Host // in the order of the cluster file
}

// Host is the entry of one machine in the cluster file, with defaults in place of omitted values.
type Host struct {
	Name    string
	Address string // IP address at which the other machines reach this machine
	Roles   []Role
	Labels  map[string]string
	Taints  []string // KEY[=VALUE]:EFFECT
	SSH     SSH
	// ControlPlane and Agent are the settings of the machine's replica and agent. A setting in the
	// entry of the machine takes precedence over the same setting for the whole cluster file.
	ControlPlane, Agent Settings
}

// SSH contains the address and the credentials for the SSH connection to a machine.
type SSH struct {
	Address string // default: Host.Address
	Port    int
	User    string // root, or a user with sudo without a password
	Key     string // private key file; "": SSH agent, then ~/.ssh/id_ed25519, id_ecdsa, and id_rsa
	// KnownHosts is the path of a known_hosts file. HostKey is the public host key of the machine,
	// such as "ssh-ed25519 AAAA...". If HostKey is set, KnownHosts is not used.
	KnownHosts, HostKey string
}

// Settings are the keys and values of the settings file of a daemon, a replica or an agent.
type Settings map[string]Value

// Value is the value of one key in a daemon's settings file: a scalar, or a list of scalars.
type Value struct {
	List bool
	Text []string // the scalars as YAML, quoted if necessary; exactly one unless List is set
}

// HasRole reports whether the cluster file gives the host the role r.
func (h Host) HasRole(r Role) bool { return slices.Contains(h.Roles, r) }

// HasReplica reports whether the host runs a replica of the control plane, with or without a vote:
// its roles include ControlPlane or Standby.
func (h Host) HasReplica() bool { return h.HasRole(ControlPlane) || h.HasRole(Standby) }

// ReplicaHosts returns the hosts that run a replica of the control plane, in the order of the
// cluster file.
func (c Cluster) ReplicaHosts() []Host {
	return slices.DeleteFunc(slices.Clone(c.Hosts), func(h Host) bool { return !h.HasReplica() })
}

// HostsWithRole returns the hosts with the role r, in the order of the cluster file.
func (c Cluster) HostsWithRole(r Role) []Host {
	var out []Host
	for _, h := range c.Hosts {
		if h.HasRole(r) {
			out = append(out, h)
		}
	}
	return out
}

// Host returns the host with the given name. If there is no such host, the error lists the names of
// all hosts.
func (c Cluster) Host(name string) (Host, error) {
	for _, h := range c.Hosts {
		if h.Name == name {
			return h, nil
		}
	}
	var names []string
	for _, h := range c.Hosts {
		names = append(names, h.Name)
	}
	return Host{}, fmt.Errorf("there is no host %q in the cluster file; there are %v", name, names)
}

// Load reads and parses the cluster file at a path. If the content is invalid, the error contains
// the path, the line, and the key.
func Load(path string) (Cluster, error) {
	info, err := os.Stat(path)
	if err != nil {
		return Cluster{}, fmt.Errorf("reading the cluster file: %w", err)
	}
	if !info.Mode().IsRegular() {
		return Cluster{}, fmt.Errorf("reading the cluster file: %s is no regular file", path)
	}
	if info.Size() > maxFile {
		return Cluster{}, fmt.Errorf("%s has %d bytes: a cluster file has at most %d", path, info.Size(), maxFile)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		return Cluster{}, fmt.Errorf("reading the cluster file: %w", err)
	}
	home, _ := os.UserHomeDir()
	c, err := Parse(raw, filepath.Dir(path), home)
	if err != nil {
		return Cluster{}, fmt.Errorf("%s%w", path, err)
	}
	return c, nil
}

// applyDefaults sets default values in the cluster and its hosts, and resolves paths against folder
// and home. It returns an error for values that contradict each other, such as two hosts with one
// name. The argument lines contains the line of each host in the cluster file, for errors.
func (c *Cluster) applyDefaults(folder, home string, lines map[string]int) error {
	if c.Release != "" && !isURL(c.Release) {
		c.Release = resolvePath(folder, home, c.Release)
	}
	seen, addresses := map[string]bool{}, map[string]string{}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		at := func(format string, args ...any) error {
			return fmt.Errorf(", line %d: host %s: "+format, append([]any{lines[h.Name], h.Name}, args...)...)
		}
		if seen[h.Name] {
			return at("another host has this name already: names are unique")
		}
		seen[h.Name] = true
		if len(h.Roles) == 0 {
			return at("roles is missing: want controlplane, standby or worker")
		}
		if h.HasRole(ControlPlane) && h.HasRole(Standby) {
			return at("roles: a standby is a replica that waits for a vote, and a controlplane one that has one: " +
				"want one of them")
		}
		a, err := netip.ParseAddr(h.Address)
		if err != nil || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
			return at("address %q: want the IP address at which the other machines reach this one", h.Address)
		}
		h.Address = a.Unmap().String()
		if first, again := addresses[h.Address]; again {
			return at("address %s is that of %s already", h.Address, first)
		}
		addresses[h.Address] = h.Name
		if !h.HasRole(Worker) && len(h.Labels)+len(h.Taints) > 0 {
			return at("labels and taints require the role worker")
		}
		if h.SSH.Address == "" {
			h.SSH.Address = h.Address
		}
		if h.SSH.Key != "" {
			h.SSH.Key = resolvePath(folder, home, h.SSH.Key)
		}
		if h.SSH.KnownHosts == "" {
			h.SSH.KnownHosts = "~/.ssh/known_hosts"
		}
		h.SSH.KnownHosts = resolvePath(folder, home, h.SSH.KnownHosts)
	}
	switch standbys := c.HostsWithRole(Standby); {
	case len(c.HostsWithRole(ControlPlane)) > 0:
	case len(standbys) > 0:
		return fmt.Errorf(", line %d: host %s: is a standby, and no host has the role controlplane: a standby has no "+
			"vote, and makes no cluster", lines[standbys[0].Name], standbys[0].Name)
	default:
		return fmt.Errorf(": no host has the role controlplane: a cluster needs one, and three to " +
			"outlive the loss of one")
	}
	c.setReplaceDead()
	return nil
}

// setReplaceDead sets the setting ReplaceDead of each replica to ReplaceDeadAfter, unless the
// cluster file sets it for that replica. All replicas get the setting, because any of them can
// become the leader. If the cluster file has no standbys, it sets nothing.
func (c *Cluster) setReplaceDead() {
	if len(c.HostsWithRole(Standby)) == 0 {
		return
	}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		if _, said := h.ControlPlane[ReplaceDead]; !said && h.HasReplica() {
			h.ControlPlane = h.ControlPlane.overriddenBy(
				Settings{ReplaceDead: {Text: []string{strconv.Quote(shortDuration(ReplaceDeadAfter))}}})
		}
	}
}

// shortDuration formats a duration and omits seconds that are zero: 10m, not 10m0s.
func shortDuration(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }

// ReplaceDeadTime returns the time without contact after which this host's replica, as the leader,
// gives the vote of a dead replica to a standby. It returns 0 for never, and -1 for an invalid
// value: the replica refuses to start with that.
func (h Host) ReplaceDeadTime() time.Duration {
	v := h.ControlPlane[ReplaceDead]
	if v.List || len(v.Text) != 1 {
		return 0
	}
	d, err := time.ParseDuration(strings.Trim(v.Text[0], `"`))
	if err != nil {
		return -1
	}
	return d
}

// resolvePath returns a path in the cluster file as an absolute path. A leading ~/ stands for home.
// Any other relative path is relative to folder, the folder of the cluster file.
func resolvePath(folder, home, path string) string {
	switch {
	case len(path) > 1 && path[:2] == "~/":
		return filepath.Join(home, path[2:])
	case filepath.IsAbs(path):
		return path
	}
	return filepath.Join(folder, path)
}

// overriddenBy returns a copy of s with all keys of other. For a key in both, the value of other is
// used.
func (s Settings) overriddenBy(other Settings) Settings {
	out := maps.Clone(s)
	if out == nil {
		out = Settings{}
	}
	maps.Copy(out, other)
	return out
}
