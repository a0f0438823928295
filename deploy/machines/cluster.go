// Package machines describes and reaches the machines of a cluster file. A plan is computed by pure
// functions from the file and the state of the machines, and the release's own scripts carry it
// out. Only the code that uses SSH touches a machine, and it needs nothing there but root's shell.
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

// The supported apiVersion and kind of a cluster file.
const (
	APIVersion = "keelson.dev/v1"
	Kind       = "Machines"
)

// Role is the role of a machine.
type Role string

// The roles of a machine. A worker may also be a controlplane or a standby, which run a replica of
// the control plane. A standby joins without a vote and gets the vote of a replica that dies.
// Later, the cluster decides which replicas have a vote, not the file.
const (
	ControlPlane Role = "controlplane"
	Standby      Role = "standby"
	Worker       Role = "worker"
)

// ReplaceDead is the replica setting for how long a voter must be silent before a standby gets its
// vote. ReplaceDeadAfter is its value if the file has standbys and does not set it.
const (
	ReplaceDead      = "replace-dead-after"
	ReplaceDeadAfter = 10 * time.Minute
)

// Cluster is a parsed cluster file with its defaults.
type Cluster struct {
	Name    string // name of the cluster and of the kubeconfig context
	Release string // tarball, folder of 'make dist', or URL; paths are relative to the file; "": none
	// Init are flags of 'keelson-controlplane init', as --KEY=VALUE. They only apply when the
	// cluster is created.
	Init  []string
	Hosts []Host // in the file's order
}

// Host is one machine.
type Host struct {
	Name    string
	Address string // its IP address, as the other machines reach it
	Roles   []Role
	Labels  map[string]string
	Taints  []string // KEY[=VALUE]:EFFECT
	SSH     SSH
	// ControlPlane and Agent are the settings of its daemons: the file's settings overridden by the
	// host's.
	ControlPlane, Agent Settings
}

// SSH describes how a machine is reached.
type SSH struct {
	Address string // default: the host's address
	Port    int
	User    string // root, or a user with sudo without a password
	Key     string // private key file; "": SSH agent, then ~/.ssh/id_ed25519, id_ecdsa, and id_rsa
	// KnownHosts is the known_hosts file. HostKey is the machine's public key ("ssh-ed25519
	// AAAA..."), and is used instead of the file if set.
	KnownHosts, HostKey string
}

// Settings are the keys of a daemon's settings file; each value is a text or a list.
type Settings map[string]Value

// Value is the value of a setting in YAML.
type Value struct {
	List bool
	Text []string // one text unless List; each in YAML form, quoted if necessary
}

// HasRole reports whether a machine has a role.
func (h Host) HasRole(r Role) bool { return slices.Contains(h.Roles, r) }

// HasReplica reports whether a machine runs a replica, with or without a vote.
func (h Host) HasReplica() bool { return h.HasRole(ControlPlane) || h.HasRole(Standby) }

// ReplicaHosts returns the hosts that run a replica, in the file's order.
func (c Cluster) ReplicaHosts() []Host {
	return slices.DeleteFunc(slices.Clone(c.Hosts), func(h Host) bool { return !h.HasReplica() })
}

// HostsWithRole returns the hosts with a role, in the file's order.
func (c Cluster) HostsWithRole(r Role) []Host {
	var out []Host
	for _, h := range c.Hosts {
		if h.HasRole(r) {
			out = append(out, h)
		}
	}
	return out
}

// Host returns the host with a name. The error lists the existing hosts.
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

// Load reads a cluster file. Errors contain the file, the line, and the key.
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

// applyDefaults sets defaults, and checks conditions that involve more than one key.
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
			return at("roles: a standby is a replica that waits for a vote, and a controlplane one that has one: want one of them")
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
		return fmt.Errorf(", line %d: host %s: is a standby, and no host has the role controlplane: a standby has no vote, and makes no cluster", lines[standbys[0].Name], standbys[0].Name)
	default:
		return fmt.Errorf(": no host has the role controlplane: a cluster needs one, and three to outlive the loss of one")
	}
	c.setReplaceDead()
	return nil
}

// setReplaceDead sets ReplaceDead for all replicas, because any of them may lead, if the file has
// standbys and does not set it.
func (c *Cluster) setReplaceDead() {
	if len(c.HostsWithRole(Standby)) == 0 {
		return
	}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		if _, said := h.ControlPlane[ReplaceDead]; !said && h.HasReplica() {
			h.ControlPlane = h.ControlPlane.overriddenBy(Settings{ReplaceDead: {Text: []string{strconv.Quote(shortDuration(ReplaceDeadAfter))}}})
		}
	}
}

// shortDuration formats a duration without zero seconds: 10m, not 10m0s.
func shortDuration(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }

// ReplaceDeadTime returns how long a voter must be silent before this host's replica, while it
// leads, has it replaced; 0 means never. It returns -1 for an invalid value, which the replica
// refuses at its start.
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

// resolvePath resolves a path of the file: relative to home after ~/, otherwise relative to the
// file's folder.
func resolvePath(folder, home, path string) string {
	switch {
	case len(path) > 1 && path[:2] == "~/":
		return filepath.Join(home, path[2:])
	case filepath.IsAbs(path):
		return path
	}
	return filepath.Join(folder, path)
}

// overriddenBy returns the settings with the keys of above replacing its own.
func (s Settings) overriddenBy(above Settings) Settings {
	out := maps.Clone(s)
	if out == nil {
		out = Settings{}
	}
	maps.Copy(out, above)
	return out
}
