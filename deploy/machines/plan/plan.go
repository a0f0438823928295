// Package plan computes the steps that make machines the cluster of a file. Its inputs are the
// file, the facts of each machine, the state of the cluster, and the content of a release. It is
// pure. Steps that are done are not planned again.
package plan

import (
	"fmt"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Release is the release to install.
type Release struct {
	Version  string
	Archives map[string]Archive // by architecture: amd64 or arm64
}

// Archive is a release for one architecture.
type Archive struct {
	Tarball File
	Images  *File // images of the cluster's own pods, for nodes without a registry; nil if missing
	// Sums are the SHA-256 sums of the files that install.sh installs, by path; ImageSums those of
	// the additional files on a worker.
	Sums, ImageSums map[string]string
}

// File is a file that is uploaded to machines.
type File struct {
	Name, Path string // file name, and local path
	Sum        string // SHA-256
	Size       int64
}

// State is the state of a cluster. The zero value means that the cluster does not answer or does
// not exist.
type State struct {
	Known    bool
	Level    uint32 // feature level; replicas of an older release do not start
	Members  map[string]Member
	Nodes    map[string]Node
	Replaced map[string]string // dead replicas, with the standby that recently got their vote
}

// Member is a replica.
type Member struct {
	Address       string // without port
	Voter, Leader bool
	Standby       bool   // it reports that it waits for a vote
	Ready         string // "yes", or the reason
}

// Node is a node of the cluster.
type Node struct {
	Ready, Unschedulable bool
	Why                  string // why it is not ready
	Network              string // why its pods are not reachable, as its agent reports; "": no problem
	Address              string
	Labels               map[string]string
	Taints               []string // KEY[=VALUE]:EFFECT
	Record               string   // annotation RecordAnnotation
}

// Action is the action of a step.
type Action string

// The actions, in the order in which they are done.
const (
	Upload       Action = "upload"    // uploads files of the release to the machine's cache
	ControlPlane Action = "replica"   // creates, joins, or changes a replica with install.sh
	Agent        Action = "agent"     // creates or changes a worker's agent with install.sh
	Mark         Action = "node"      // sets the labels and taints of the file on the Node
	Drain        Action = "drain"     // drains a node
	Cordon       Action = "cordon"    // cordons a node
	Leave        Action = "leave"     // removes a replica from the raft cluster
	Uninstall    Action = "uninstall" // runs uninstall.sh, which removes everything
	DeleteNode   Action = "forget"    // deletes the Node
)

// StartMode is how a daemon starts for the first time.
type StartMode string

// The start modes; "" is that of a machine that is already part of the cluster.
const (
	Init StartMode = "init"
	Join StartMode = "join"
)

// Step is one action on a machine, or on its API objects.
type Step struct {
	Machine string
	Do      Action
	Why     []string // one reason per line

	Files           []File    // Upload: the files. ControlPlane and Agent: the tarball, and images if any
	Start           StartMode // ControlPlane and Agent
	Flags           []string  // Init
	Replace         bool      // Join: the token may take over an existing Node or replica of this name
	Standby         bool      // ControlPlane and Join: without a vote
	Settings        string    // ControlPlane and Agent: the whole settings file
	Admin           bool      // ControlPlane: the machine gets an administrator's kubeconfig
	Leads           bool      // ControlPlane: it is the raft leader
	ChangesPrograms bool      // ControlPlane and Agent: it installs other programs
	Node            Marks     // Mark
}

// NewPlan returns the steps that make the machines match the file. The machines must have no
// blocking finding of Inspect. With only, it returns the steps of those machines.
func NewPlan(c machines.Cluster, facts map[string]machines.Facts, r Release, s State, only ...string) []Step {
	p := planner{Cluster: c, facts: facts, release: r, state: s}
	for _, h := range c.Hosts {
		if len(only) == 0 || slices.Contains(only, h.Name) {
			p.planHost(h)
		}
	}
	return p.steps
}

// SortSteps returns the steps in the order in which they are done: uploads, replicas, agents, node
// labels. The replica that creates the cluster is first. Existing replicas come before joining
// ones, which need them, and standbys come last, so that all votes exist before a standby waits for
// one. The leader is the last of the existing replicas: then there is one election, and a follower
// with shorter election timeouts than before is not led by a leader that still has longer pauses
// (docs/explanation/leader-election.md).
func SortSteps(steps []Step) []Step {
	rank := func(s Step) int {
		at := 10 * slices.Index([]Action{Upload, ControlPlane, Agent, Mark}, s.Do)
		switch {
		case s.Do != ControlPlane || s.Start == Init:
			return at
		case s.Start == "" && !s.Leads:
			return at + 1
		case s.Start == "":
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

// NewMachines returns the machines that lack a role of the file.
func NewMachines(c machines.Cluster, facts map[string]machines.Facts) (names []string) {
	for _, h := range c.Hosts {
		if lacksRole(h, facts[h.Name]) {
			names = append(names, h.Name)
		}
	}
	return names
}

// lacksRole reports whether a machine lacks a role that the file gives it.
func lacksRole(h machines.Host, f machines.Facts) bool {
	return h.HasReplica() && !f.ReplicaWhole || h.HasRole(machines.Worker) && !f.Node
}

type planner struct {
	machines.Cluster
	facts   map[string]machines.Facts
	release Release
	state   State
	steps   []Step
}

// FoundingMachine returns the machine that creates the cluster: the first of the control plane. It
// is "" if a machine already has a replica.
func FoundingMachine(c machines.Cluster, facts map[string]machines.Facts) string {
	for _, h := range c.Hosts {
		if facts[h.Name].ReplicaWhole {
			return ""
		}
	}
	return c.HostsWithRole(machines.ControlPlane)[0].Name
}

func (p *planner) planHost(h machines.Host) {
	f := p.facts[h.Name]
	archive := p.release.Archives[f.Arch]
	var todo []Step
	programs := programReasons(f, p.release.Version, archive.Sums)
	if h.HasReplica() {
		s := Step{Do: ControlPlane, Files: []File{archive.Tarball}, Settings: ReplicaSettings(h), Why: slices.Clone(programs),
			Leads: p.state.Members[h.Name].Leader, ChangesPrograms: len(programs) > 0}
		switch {
		case f.ReplicaWhole:
		case FoundingMachine(p.Cluster, p.facts) == h.Name:
			s.Start, s.Flags = Init, append([]string{"--cluster-name=" + p.Name}, p.Init...)
			s.Why = append(s.Why, "makes the cluster "+p.Name)
		default:
			s.Start, s.Admin = Join, true
			s.Standby = h.HasRole(machines.Standby) && !hasVote(h.Name, f, p.state) // a replica that has lost its disk gets its vote again
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
		if s.Start == "" {
			s.Why = append(s.Why, daemonReasons(f, machines.ControlPlane, f.ControlPlane, s.Settings)...)
		}
		todo = append(todo, s)
	}
	if h.HasRole(machines.Worker) {
		s := Step{Do: Agent, Files: []File{archive.Tarball}, Settings: AgentSettings(p.Cluster, h), Why: slices.Clone(programs), ChangesPrograms: len(programs) > 0}
		if archive.Images != nil {
			s.Files = append(s.Files, *archive.Images)
			if n := countDiffering(f.Sums, archive.ImageSums); n > 0 {
				s.Why = append(s.Why, countNoun(n, "image archive")+" of the release")
			}
		}
		if !f.Node {
			_, exists := p.state.Nodes[h.Name]
			s.Start, s.Replace = Join, exists
			s.Why = append(s.Why, "joins as a node")
		}
		if s.Start == "" {
			s.Why = append(s.Why, daemonReasons(f, machines.Worker, f.Agent, s.Settings)...)
		}
		todo = append(todo, s)
	}
	p.addSteps(h, f, todo)
	if m := computeMarks(h, p.state.Nodes[h.Name], p.nodeExists(h)); m.hasChanges() {
		p.steps = append(p.steps, Step{Machine: h.Name, Do: Mark, Node: m, Why: m.describe()})
	}
}

// nodeExists reports whether the Node of a host is known to exist.
func (p *planner) nodeExists(h machines.Host) bool {
	_, ok := p.state.Nodes[h.Name]
	return ok
}

// addSteps adds the steps that have a reason, preceded by the uploads that they need.
func (p *planner) addSteps(h machines.Host, f machines.Facts, todo []Step) {
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

// programReasons returns how the installed programs differ from the release.
func programReasons(f machines.Facts, version string, sums map[string]string) []string {
	n := countDiffering(f.Sums, sums)
	switch {
	case n == 0:
		return nil
	case !f.HasPrograms():
		return []string{"installs " + version}
	case f.Version != "" && !strings.HasSuffix(f.Version, " "+version):
		return []string{fmt.Sprintf("installs %s instead of %s", version, f.Version[strings.LastIndex(f.Version, " ")+1:])}
	}
	return []string{countNoun(n, "file") + " of " + version + " differ"}
}

// countDiffering counts the files that differ from the wanted ones.
func countDiffering(is, want map[string]string) (n int) {
	for path, sum := range want {
		if is[path] != sum {
			n++
		}
	}
	return n
}

// daemonReasons returns why an installed daemon must be changed or started.
func daemonReasons(f machines.Facts, r machines.Role, is, want string) (why []string) {
	unit := r.UnitName()
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

func countNoun(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
