// Package machines makes a cluster of the machines that a file names: it reaches them by ssh, looks what each has, works out
// what is to be done, and has the release's own scripts do it. What is to be done is worked out by pure functions; only what
// speaks ssh touches a machine, and nothing but root's shell is needed there.
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

// The only form of the cluster file that there is.
const (
	APIVersion = "keelson.dev/v1"
	Kind       = "Machines"
)

// Role is what a machine does.
type Role string

// The roles of a machine. It may be a worker beside one of the others, which have a replica of the control plane: a standby joins
// without a vote and gets that of a replica that dies. Who has a vote by then the cluster says, not the file.
const (
	ControlPlane Role = "controlplane"
	Standby      Role = "standby"
	Worker       Role = "worker"
)

// ReplaceDead is the setting of replicas that says for how long a voter has to be silent for a standby to get its vote, and
// ReplaceDeadAfter what it is where the file has standbys and does not say.
const (
	ReplaceDead      = "replace-dead-after"
	ReplaceDeadAfter = 10 * time.Minute
)

// Cluster is what a cluster file says, with its defaults filled in.
type Cluster struct {
	Name    string // of the cluster and of the context in the kubeconfig
	Release string // tarball, folder of 'make dist' or URL; a path is taken from the file's folder; "" when the file names none
	// Init are flags of 'keelson-controlplane init', as --KEY=VALUE: what is chosen once, when the cluster is made.
	Init  []string
	Hosts []Host // control planes, standbys and workers, in the file's order
}

// Host is one machine.
type Host struct {
	Name    string
	Address string // the machine's own, by which the others reach it
	Roles   []Role
	Labels  map[string]string
	Taints  []string // KEY[=VALUE]:EFFECT
	SSH     SSH
	// ControlPlane and Agent are settings of its daemons: those of the whole file with the host's own over them.
	ControlPlane, Agent Settings
}

// SSH says how a machine is reached.
type SSH struct {
	Address string // default: the host's
	Port    int
	User    string // root, or one that may use sudo without a password
	Key     string // file of a private key; "" = keys of the agent at SSH_AUTH_SOCK, and ~/.ssh/id_ed25519, id_ecdsa and id_rsa
	// KnownHosts is the file of known machines; HostKey is the machine's public key itself ("ssh-ed25519 AAAA..."), and
	// counts instead of the file where it is given.
	KnownHosts, HostKey string
}

// Settings are keys of a daemon's file of settings; each value is one text, or a list.
type Settings map[string]Value

// Value is one setting, written as YAML.
type Value struct {
	List bool
	Text []string // one, unless it is a list: each as YAML has it, quoted where it has to be
}

// Is says whether a machine has a role.
func (h Host) Is(r Role) bool { return slices.Contains(h.Roles, r) }

// Replica says whether a machine has a replica, with a vote or without.
func (h Host) Replica() bool { return h.Is(ControlPlane) || h.Is(Standby) }

// Replicas are the hosts that have one, in the file's order.
func (c Cluster) Replicas() []Host {
	return slices.DeleteFunc(slices.Clone(c.Hosts), func(h Host) bool { return !h.Replica() })
}

// With are the hosts of a role, in the file's order.
func (c Cluster) With(r Role) []Host {
	var out []Host
	for _, h := range c.Hosts {
		if h.Is(r) {
			out = append(out, h)
		}
	}
	return out
}

// Host is the machine of a name.
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

// Load reads a cluster file. Errors name the file, the line and the key.
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

// complete fills in defaults, and judges what no single key shows.
func (c *Cluster) complete(folder, home string, lines map[string]int) error {
	if c.Release != "" && !isURL(c.Release) {
		c.Release = beside(folder, home, c.Release)
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
		if h.Is(ControlPlane) && h.Is(Standby) {
			return at("roles: a standby is a replica that waits for a vote, and a controlplane one that has one: want one of them")
		}
		a, err := netip.ParseAddr(h.Address)
		if err != nil || a.IsUnspecified() || a.IsLoopback() || a.IsMulticast() {
			return at("address %q: want the IP address by which the other machines reach this one", h.Address)
		}
		h.Address = a.Unmap().String()
		if first, again := addresses[h.Address]; again {
			return at("address %s is that of %s already", h.Address, first)
		}
		addresses[h.Address] = h.Name
		if !h.Is(Worker) && len(h.Labels)+len(h.Taints) > 0 {
			return at("labels and taints are of a worker, and it is none")
		}
		if h.SSH.Address == "" {
			h.SSH.Address = h.Address
		}
		if h.SSH.Key != "" {
			h.SSH.Key = beside(folder, home, h.SSH.Key)
		}
		if h.SSH.KnownHosts == "" {
			h.SSH.KnownHosts = "~/.ssh/known_hosts"
		}
		h.SSH.KnownHosts = beside(folder, home, h.SSH.KnownHosts)
	}
	switch standbys := c.With(Standby); {
	case len(c.With(ControlPlane)) > 0:
	case len(standbys) > 0:
		return fmt.Errorf(", line %d: host %s: is a standby, and no host has the role controlplane: a standby has no vote, and makes no cluster", lines[standbys[0].Name], standbys[0].Name)
	default:
		return fmt.Errorf(": no host has the role controlplane: a cluster needs one, and three to outlive the loss of one")
	}
	c.replaceDead()
	return nil
}

// replaceDead has replicas replace those that die, where there are standbys and the file does not say otherwise: all of them, for
// any may lead.
func (c *Cluster) replaceDead() {
	if len(c.With(Standby)) == 0 {
		return
	}
	for i := range c.Hosts {
		h := &c.Hosts[i]
		if _, said := h.ControlPlane[ReplaceDead]; !said && h.Replica() {
			h.ControlPlane = h.ControlPlane.over(Settings{ReplaceDead: {Text: []string{strconv.Quote(shortly(ReplaceDeadAfter))}}})
		}
	}
}

// shortly is a time without the parts that are nothing: 10m, not 10m0s.
func shortly(d time.Duration) string { return strings.TrimSuffix(d.String(), "0s") }

// Replaces is for how long a voter has to be silent for this host's replica to have it replaced while it leads; 0 = it never does.
// What is no time the replica refuses itself, when it starts.
func (h Host) Replaces() time.Duration {
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

// beside is a path of the file: from home where it begins with ~/, else from the file's folder.
func beside(folder, home, path string) string {
	switch {
	case len(path) > 1 && path[:2] == "~/":
		return filepath.Join(home, path[2:])
	case filepath.IsAbs(path):
		return path
	}
	return filepath.Join(folder, path)
}

// over is a map of settings with others that come before them.
func (s Settings) over(above Settings) Settings {
	out := maps.Clone(s)
	if out == nil {
		out = Settings{}
	}
	maps.Copy(out, above)
	return out
}
