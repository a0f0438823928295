// Package plan works out what is to be done on machines so that they are the cluster that a file says: what the file says, what each
// machine has, what the cluster says of itself and what a release is made of in, steps out. It is pure. What a plan has done is
// nothing to be done any more.
package plan

import (
	"fmt"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Release is what machines are installed from.
type Release struct {
	Version  string
	Archives map[string]Archive // by architecture, amd64 or arm64
}

// Archive is a release for one architecture.
type Archive struct {
	Tarball File
	Images  *File // what the cluster itself needs of images, for nodes that reach no registry; nil where the release has none beside it
	// Sums are SHA-256 sums of what the release's install.sh puts on a machine, by path; ImageSums of what it puts on a worker besides.
	Sums, ImageSums map[string]string
}

// File is a file that goes to a machine as it is.
type File struct {
	Name, Path string // of the release, and on this machine
	Sum        string // SHA-256
	Size       int64
}

// State is what a cluster says of itself. The zero value is that of a cluster that does not answer, or that there is none.
type State struct {
	Known    bool
	Level    uint32 // the feature level: a release that understands less has no replica start
	Members  map[string]Member
	Nodes    map[string]Node
	Replaced map[string]string // dead replicas whose vote a standby has got lately: who
}

// Member is a replica.
type Member struct {
	Address       string // without a port
	Voter, Leader bool
	Standby       bool   // it says that it waits for a vote
	Ready         string // "yes", or why not
}

// Node is one of the cluster's.
type Node struct {
	Ready, Unschedulable bool
	Why                  string // it is not ready
	Network              string // what keeps traffic from its pods, as its agent says; "" = nothing
	Address              string
	Labels               map[string]string
	Taints               []string // KEY[=VALUE]:EFFECT
	Record               string   // annotation Recorded
}

// Deed is what a step does.
type Deed string

// The deeds, in the order in which they are done.
const (
	Upload       Deed = "upload"    // puts files of the release into the machine's cache
	ControlPlane Deed = "replica"   // has install.sh make, join or change a replica
	Agent        Deed = "agent"     // has install.sh make or change a worker's agent
	Mark         Deed = "node"      // gives the Node the labels and taints of the file
	Drain        Deed = "drain"     // has the pods leave a node
	Cordon       Deed = "cordon"    // has no further pods come to a node
	Leave        Deed = "leave"     // takes a replica out of the group
	Uninstall    Deed = "uninstall" // has uninstall.sh take everything away
	Forget       Deed = "forget"    // deletes the Node
)

// Beginning is how a daemon begins on a machine.
type Beginning string

// The beginnings; none is that of a machine that belongs to the cluster already.
const (
	Init Beginning = "init"
	Join Beginning = "join"
)

// Step is one thing that is done on a machine, or for it at the API.
type Step struct {
	Machine string
	Do      Deed
	Why     []string // a line each

	Files    []File    // of Upload: what goes there. Of ControlPlane and Agent: the tarball and, if there are any, the images
	Begin    Beginning // of ControlPlane and Agent
	Flags    []string  // of Init
	Replace  bool      // of Join: the token may take over a Node or replica of this name that exists
	Standby  bool      // of ControlPlane and Join: without a vote
	Settings string    // of ControlPlane and Agent: the whole file
	Admin    bool      // of ControlPlane: the machine gets an administrator's kubeconfig
	Leads    bool      // of ControlPlane: it leads the group
	Puts     bool      // of ControlPlane and Agent: programs of the release that the machine has not
	Node     Marks     // of Mark
}

// Make says what has to be done so that machines are what the file says. It is for machines that Judge has nothing grave to say of.
// With only, it is about those machines alone.
func Make(c machines.Cluster, facts map[string]machines.Facts, r Release, s State, only ...string) []Step {
	p := planner{Cluster: c, facts: facts, release: r, state: s}
	for _, h := range c.Hosts {
		if len(only) == 0 || slices.Contains(only, h.Name) {
			p.host(h)
		}
	}
	return p.steps
}

// InOrder are steps in the order in which they are done: uploads, replicas, agents, marks of nodes. Of replicas the one that makes the
// cluster is the first; those that are there come before those that join, which need them, and standbys last: the group has all its
// votes before somebody waits for one. Of those that are there the leader is the last: the group elects once, and a follower that
// waits for less long than it did is not led by one whose pauses are still longer (docs/explanation/leader-election.md).
func InOrder(steps []Step) []Step {
	rank := func(s Step) int {
		at := 10 * slices.Index([]Deed{Upload, ControlPlane, Agent, Mark}, s.Do)
		switch {
		case s.Do != ControlPlane || s.Begin == Init:
			return at
		case s.Begin == "" && !s.Leads:
			return at + 1
		case s.Begin == "":
			return at + 2
		case s.Standby:
			return at + 4
		}
		return at + 3
	}
	out := slices.Clone(steps)
	slices.SortStableFunc(out, func(a, b Step) int { return rank(a) - rank(b) })
	return out
}

// New are the machines of the file that lack a role which it gives them.
func New(c machines.Cluster, facts map[string]machines.Facts) (names []string) {
	for _, h := range c.Hosts {
		if lacks(h, facts[h.Name]) {
			names = append(names, h.Name)
		}
	}
	return names
}

// lacks says whether a machine lacks a role that the file gives it.
func lacks(h machines.Host, f machines.Facts) bool {
	return h.Replica() && !f.ReplicaWhole || h.Is(machines.Worker) && !f.Node
}

type planner struct {
	machines.Cluster
	facts   map[string]machines.Facts
	release Release
	state   State
	steps   []Step
}

// Founder is the machine that makes the cluster: the first of the control plane. It is "" where one has a replica already.
func Founder(c machines.Cluster, facts map[string]machines.Facts) string {
	for _, h := range c.Hosts {
		if facts[h.Name].ReplicaWhole {
			return ""
		}
	}
	return c.With(machines.ControlPlane)[0].Name
}

func (p *planner) host(h machines.Host) {
	f := p.facts[h.Name]
	archive := p.release.Archives[f.Arch]
	var todo []Step
	programs := programs(f, p.release.Version, archive.Sums)
	if h.Replica() {
		s := Step{Do: ControlPlane, Files: []File{archive.Tarball}, Settings: ReplicaSettings(h), Why: slices.Clone(programs),
			Leads: p.state.Members[h.Name].Leader, Puts: len(programs) > 0}
		switch {
		case f.ReplicaWhole:
		case Founder(p.Cluster, p.facts) == h.Name:
			s.Begin, s.Flags = Init, append([]string{"--cluster-name=" + p.Name}, p.Init...)
			s.Why = append(s.Why, "makes the cluster "+p.Name)
		default:
			s.Begin, s.Admin = Join, true
			s.Standby = h.Is(machines.Standby) && !voter(h.Name, f, p.state) // one whose disk is lost has its vote again
			if other := standIns(p.Cluster, p.facts, p.state)[h.Name]; other != "" {
				s.Standby = true
				s.Why = append(s.Why, "waits for a vote: its own is that of "+other+" now")
			}
			s.Why = append(s.Why, "joins as "+replicaWord(s.Standby))
		}
		if f.ReplicaWhole && !f.Admin {
			s.Admin = true
			s.Why = append(s.Why, "has no administrator's kubeconfig")
		}
		if s.Begin == "" {
			s.Why = append(s.Why, daemon(f, machines.ControlPlane, f.ControlPlane, s.Settings)...)
		}
		todo = append(todo, s)
	}
	if h.Is(machines.Worker) {
		s := Step{Do: Agent, Files: []File{archive.Tarball}, Settings: AgentSettings(p.Cluster, h), Why: slices.Clone(programs), Puts: len(programs) > 0}
		if archive.Images != nil {
			s.Files = append(s.Files, *archive.Images)
			if n := differing(f.Sums, archive.ImageSums); n > 0 {
				s.Why = append(s.Why, count(n, "image archive")+" of the release")
			}
		}
		if !f.Node {
			_, exists := p.state.Nodes[h.Name]
			s.Begin, s.Replace = Join, exists
			s.Why = append(s.Why, "joins as a node")
		}
		if s.Begin == "" {
			s.Why = append(s.Why, daemon(f, machines.Worker, f.Agent, s.Settings)...)
		}
		todo = append(todo, s)
	}
	p.add(h, f, todo)
	if m := marks(h, p.state.Nodes[h.Name], p.exists(h)); m.any() {
		p.steps = append(p.steps, Step{Machine: h.Name, Do: Mark, Node: m, Why: m.lines()})
	}
}

// exists says whether the Node of a host is known to be there.
func (p *planner) exists(h machines.Host) bool {
	_, ok := p.state.Nodes[h.Name]
	return ok
}

// add has the steps done for which there is a reason, and before them the files put there that they need.
func (p *planner) add(h machines.Host, f machines.Facts, todo []Step) {
	todo = slices.DeleteFunc(todo, func(s Step) bool { return len(s.Why) == 0 })
	var missing []File
	for _, s := range todo {
		for _, file := range s.Files {
			if f.Sums[machines.Cache+"/"+file.Name] != file.Sum && !slices.Contains(missing, file) {
				missing = append(missing, file)
			}
		}
	}
	if len(missing) > 0 {
		p.steps = append(p.steps, Step{Machine: h.Name, Do: Upload, Files: missing})
	}
	for _, s := range todo {
		s.Machine = h.Name
		p.steps = append(p.steps, s)
	}
}

// programs says how what is installed differs from the release.
func programs(f machines.Facts, version string, sums map[string]string) []string {
	n := differing(f.Sums, sums)
	switch {
	case n == 0:
		return nil
	case !f.Installed():
		return []string{"installs " + version}
	case f.Version != "" && !strings.HasSuffix(f.Version, " "+version):
		return []string{fmt.Sprintf("installs %s instead of %s", version, f.Version[strings.LastIndex(f.Version, " ")+1:])}
	}
	return []string{count(n, "file") + " of " + version + " differ"}
}

// differing counts what is not as it is wanted.
func differing(is, want map[string]string) (n int) {
	for path, sum := range want {
		if is[path] != sum {
			n++
		}
	}
	return n
}

// daemon says what is to be done about a daemon that is installed, or will be.
func daemon(f machines.Facts, r machines.Role, is, want string) (why []string) {
	unit := r.Unit()
	switch is {
	case want:
	case "":
		why = append(why, "has no settings of "+unit)
	default:
		why = append(append(why, "settings:"), lineDiff(is, want)...)
	}
	switch {
	case !f.Active[unit]:
		why = append(why, "starts "+unit)
	case !f.Enabled[unit]:
		why = append(why, "has "+unit+" started at boot")
	case f.Stale[unit]:
		why = append(why, "restarts "+unit+", which runs as it was before")
	}
	return why
}

func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
