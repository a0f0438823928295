// Package upgrade says in which order the programs of a cluster that serves are exchanged for those of another release: replica
// by replica, the leader last and after a hand-over, then node by node. The next step follows from what can be seen of the
// cluster alone, so whoever was cut off goes on by looking again. Next and Plan are pure; Run does what they say by a Cluster,
// which knows how programs come to a host.
package upgrade

import "fmt"

// Member is a replica of the control plane as it can be seen now.
type Member struct {
	Name    string
	Release string // "" when it does not say
	Voter   bool
	Leader  bool
	Trouble string // why it is not well; "" = it is
}

// Node is a worker as it can be seen now.
type Node struct {
	Name    string
	Release string // of its agent
	Trouble string // why it is not well; "" = it is
	Drained bool   // by an upgrade, which gives it back
}

// State is a cluster as it can be seen now.
type State struct {
	Members []Member
	Nodes   []Node
	Level   uint32 // feature level of what is stored
	Busy    string // why the leader's work has not begun; "" = it has
}

// Goal is what is wanted.
type Goal struct {
	Release string
	Level   uint32   // the highest feature level that its replicas understand
	Drain   []string // nodes that are drained before their agent is exchanged; All = every one
	Skip    []string // replicas and nodes that are left as they are
}

// All stands for every node in Goal.Drain.
const All = "all"

// Deed is what a step does.
type Deed string

// The deeds.
const (
	HandOver Deed = "hand over" // has another replica lead
	Replica  Deed = "replica"   // has a host run the goal's replica
	Drain    Deed = "drain"     // has the pods leave a node
	Agent    Deed = "agent"     // has a host run the goal's agent; pods stay
	Return   Deed = "return"    // lets pods come again to a node that was drained
	Await    Deed = "wait"      // does nothing: what has the goal's programs already is to become well
	Finish   Deed = "finish"    // nothing is left
)

// Step is one thing to do.
type Step struct {
	Do Deed
	On string // replica or node; "" is the control plane
	To string // of HandOver: who is to lead
}

// String is what a step does, for a person.
func (s Step) String() string {
	switch s.Do {
	case HandOver:
		return fmt.Sprintf("%s hands the lead over to %s", s.On, s.To)
	case Replica:
		return fmt.Sprintf("replica %s: programs exchanged, started again", s.On)
	case Drain:
		return fmt.Sprintf("node %s: drained", s.On)
	case Agent:
		return fmt.Sprintf("node %s: programs exchanged, pods stay", s.On)
	case Return:
		return fmt.Sprintf("node %s: takes pods again", s.On)
	case Await:
		if s.On == "" {
			return "the control plane is waited for"
		}
		return fmt.Sprintf("%s has the programs already, and is waited for", s.On)
	}
	return "every replica and node has the programs"
}
