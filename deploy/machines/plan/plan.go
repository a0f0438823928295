// Package plan computes the steps that turn the machines of a cluster file into a cluster, or that
// change this cluster. Its inputs are the cluster file, the facts of each machine, the state of the
// cluster, and the contents of a release. It is pure: it has no side effects. It omits steps that
// have been carried out already, so a plan after an interruption contains the rest.
package plan

import (
	"fmt"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Release is the release of Keelson that the steps of a plan install: its version, and its files
// for each architecture.
type Release struct {
	Version  string
	Archives map[string]Archive // keys are architectures: amd64 or arm64
}

// Archive contains the files of a release for one architecture.
type Archive struct {
	Tarball File
	Images  *File // images of the cluster's own pods, for nodes without a registry; may be nil
	// Sums are the SHA-256 sums of the files that install.sh installs on every machine, by their
	// path on the machine. ImageSums are the sums of the image archives on a worker.
	Sums, ImageSums map[string]string
}

// File is a local file of a release that is uploaded to machines.
type File struct {
	Name, Path string // file name without folder, and local path
	Sum        string // SHA-256 in hex
	Size       int64
}

// State is the state of the cluster, as its API reports it. The zero value means that the cluster
// does not answer or does not exist.
type State struct {
	Known    bool
	Level    uint32 // feature level of the store; a release that only supports lower levels does not start
	Members  map[string]Member
	Nodes    map[string]Node
	Replaced map[string]string // from the name of a dead replica to the name of the standby that got its vote
}

// Member is the state of a member of the raft cluster, a replica.
type Member struct {
	Address       string // without port
	Voter, Leader bool
	Standby       bool   // the replica reports that it has no vote yet
	Ready         string // "yes", or the reason why the replica is not ready
}

// Node is the state of a Node object.
type Node struct {
	Ready, Unschedulable bool
	Why                  string // why the Node is not ready
	Network              string // why the node's agent reports unreachable pods; "": no problem
	Address              string
	Labels               map[string]string
	Taints               []string // KEY[=VALUE]:EFFECT
	Record               string   // value of RecordAnnotation
}

// Action is what a Step does, such as Upload or Drain.
type Action string

// The actions, in the order in which they are carried out. NewPlan uses Upload to Mark, and Remove
// uses Drain to DeleteNode.
const (
	Upload       Action = "upload"    // uploads files of the release to machines.Cache
	ControlPlane Action = "replica"   // installs or changes a replica with install.sh
	Agent        Action = "agent"     // installs or changes a worker's agent with install.sh
	Mark         Action = "node"      // changes the labels and taints of the Node
	Drain        Action = "drain"     // drains the node
	Cordon       Action = "cordon"    // cordons the node
	Leave        Action = "leave"     // removes the replica from the raft cluster
	Uninstall    Action = "uninstall" // runs uninstall.sh, which removes programs and data
	DeleteNode   Action = "forget"    // deletes the Node object
)

// StartMode is how a daemon becomes part of the cluster at its first start: Init or Join. It is ""
// if the daemon is part of the cluster already.
type StartMode string

// Init means that the daemon creates the cluster. Join means that it joins an existing cluster with
// a token.
const (
	Init StartMode = "init"
	Join StartMode = "join"
)

// Step is one action on a machine, or on the API objects of that machine. Some fields are only used
// by the actions that their comments name.
type Step struct {
	Machine string
	Do      Action
	Why     []string // reasons of the step, one per line

	Files           []File    // Upload: the files. ControlPlane and Agent: the tarball, and images if any
	Start           StartMode // ControlPlane and Agent: "" for a member or node
	Flags           []string  // Init: flags of 'keelson-controlplane init'
	Replace         bool      // Join: the token is valid for the name of an existing Node or replica
	Standby         bool      // ControlPlane with Join: the replica joins without a vote
	Settings        string    // ControlPlane and Agent: content of the settings file
	Admin           bool      // ControlPlane: an administrator's kubeconfig is written
	Leads           bool      // ControlPlane: its replica is the raft leader
	ChangesPrograms bool      // ControlPlane and Agent: installed programs change
	Node            Marks     // Mark: the changes
}

// NewPlan returns the steps that make the machines match the cluster file c: the release r,
// daemons, settings, labels, and taints. Inspect must have returned no blocking finding. If names
// is not empty, the result contains only the steps of the machines with these names. The steps are
// in the order of the hosts; see SortSteps.
func NewPlan(c machines.Cluster, facts map[string]machines.Facts, r Release, s State, names ...string) []Step {
	p := planner{Cluster: c, facts: facts, release: r, state: s}
	for _, h := range c.Hosts {
		if len(names) == 0 || slices.Contains(names, h.Name) {
			p.planHost(h)
		}
	}
	return p.steps
}

// SortSteps returns the steps of NewPlan in the order in which they must be carried out.
//
// Uploads come first, then replicas, then agents, then labels and taints. Of the replicas, the one
// that creates the cluster is first. Then come existing replicas, which joining replicas need, with
// the raft leader last. Then come joining replicas, and standbys last, when all votes are assigned.
//
// With the leader last, there is only one election. If the steps shorten the heartbeat timeout, the
// timeout of a changed follower can expire between two heartbeats until the leader is changed as
// well. The follower is then briefly not ready (docs/explanation/leader-election.md).
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

// NewMachines returns the names of the machines that lack a replica or an agent that the cluster
// file requires.
func NewMachines(c machines.Cluster, facts map[string]machines.Facts) (names []string) {
	for _, h := range c.Hosts {
		if lacksRole(h, facts[h.Name]) {
			names = append(names, h.Name)
		}
	}
	return names
}

// lacksRole reports whether the machine h has no complete replica although its roles require one,
// or is not a node although it is a worker.
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

// FoundingMachine returns the machine on which 'keelson-controlplane init' creates the cluster: the
// first host with the role ControlPlane. It returns "" if any machine already has a complete
// replica.
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
		s := Step{Do: ControlPlane, Files: []File{archive.Tarball}, Settings: ReplicaSettings(h),
			Why:   slices.Clone(programs),
			Leads: p.state.Members[h.Name].Leader, ChangesPrograms: len(programs) > 0}
		switch {
		case f.ReplicaWhole:
		case FoundingMachine(p.Cluster, p.facts) == h.Name:
			s.Start, s.Flags = Init, append([]string{"--cluster-name=" + p.Name}, p.Init...)
			s.Why = append(s.Why, "makes the cluster "+p.Name)
		default:
			s.Start, s.Admin = Join, true
			// a replica that has lost its disk gets its vote again
			s.Standby = h.HasRole(machines.Standby) && !hasVote(h.Name, f, p.state)
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
		s := Step{Do: Agent, Files: []File{archive.Tarball}, Settings: AgentSettings(p.Cluster, h),
			Why: slices.Clone(programs), ChangesPrograms: len(programs) > 0}
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

// nodeExists reports whether the state of the cluster contains a Node with the name of the host h.
func (p *planner) nodeExists(h machines.Host) bool {
	_, ok := p.state.Nodes[h.Name]
	return ok
}

// addSteps adds the candidates that have a reason. Before them, it adds one step that uploads
// the files of these steps, if the machine does not have the files.
func (p *planner) addSteps(h machines.Host, f machines.Facts, candidates []Step) {
	candidates = slices.DeleteFunc(candidates, func(s Step) bool { return len(s.Why) == 0 })
	var missing []File
	for _, s := range candidates {
		for _, file := range s.Files {
			if f.Sums[machines.Cache+"/"+file.Name] != file.Sum && !slices.Contains(missing, file) {
				missing = append(missing, file)
			}
		}
	}
	if len(missing) > 0 {
		p.steps = append(p.steps, Step{Machine: h.Name, Do: Upload, Files: missing})
	}
	for _, s := range candidates {
		s.Machine = h.Name
		p.steps = append(p.steps, s)
	}
}

// programReasons returns the reason why programs must be installed. It returns nil if all installed
// files equal the files of the release. sums contains the SHA-256 sums of the release's files by
// the path at which they are installed.
func programReasons(f machines.Facts, version string, sums map[string]string) []string {
	n := countDiffering(f.Sums, sums)
	switch {
	case n == 0:
		return nil
	case !f.HasPrograms():
		return []string{"installs " + version}
	case f.Version != "" && !strings.HasSuffix(f.Version, " "+version):
		return []string{fmt.Sprintf("installs %s instead of %s", version,
			f.Version[strings.LastIndex(f.Version, " ")+1:])}
	}
	return []string{countNoun(n, "file") + " of " + version + " differ"}
}

// countDiffering compares SHA-256 sums by path. It returns the number of paths in wanted that have
// another sum in current, or no sum.
func countDiffering(current, wanted map[string]string) (n int) {
	for path, sum := range wanted {
		if current[path] != sum {
			n++
		}
	}
	return n
}

// daemonReasons returns the reasons why the daemon of a role must be changed or started. It returns
// nil if there is no reason. current is the content of the daemon's settings file, and wanted is
// the content that the plan writes.
func daemonReasons(f machines.Facts, r machines.Role, current, wanted string) (why []string) {
	unit := r.UnitName()
	switch current {
	case wanted:
	case "":
		why = append(why, "has no settings of "+unit)
	default:
		why = append(append(why, "settings:"), lineDiff(current, wanted)...)
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
