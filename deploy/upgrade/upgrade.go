// Package upgrade determines the order in which a serving cluster is upgraded: replica by replica,
// the leader last and after a leadership transfer, then node by node. The next step follows from
// the observed state alone, so an interrupted upgrade continues from there. Next and Plan are pure.
// Run carries out the steps by a Cluster, which installs programs on hosts.
package upgrade

import "fmt"

// Member is the observed state of a replica.
type Member struct {
	Name    string
	Release string // "" if it does not report one
	Voter   bool
	Leader  bool
	Problem string // why it is unhealthy; "": healthy
}

// Node is the observed state of a worker.
type Node struct {
	Name    string
	Release string // of its agent
	Problem string // why it is unhealthy; "": healthy
	Drained bool   // drained by an upgrade, which uncordons it again
}

// State is the observed state of a cluster.
type State struct {
	Members []Member
	Nodes   []Node
	Level   uint32 // feature level of the stored data
	Busy    string // why the leader does not work yet; "": it does
}

// Goal is the wanted release.
type Goal struct {
	Release string
	Level   uint32   // the highest feature level of its replicas
	Drain   []string // nodes that are drained before their agent is upgraded; All: every node
	Skip    []string // replicas and nodes that are not upgraded
}

// All stands for every node in Goal.Drain.
const All = "all"

// Action is the action of a step.
type Action string

// The actions.
const (
	TransferLead Action = "hand over" // another replica becomes the leader
	Replica      Action = "replica"   // a host gets the goal's replica
	Drain        Action = "drain"     // a node is drained
	Agent        Action = "agent"     // a host gets the goal's agent; pods continue
	Return       Action = "return"    // a drained node is uncordoned
	Await        Action = "wait"      // waits until something with the goal's programs is healthy
	Finish       Action = "finish"    // nothing is left
)

// Step is one step of an upgrade.
type Step struct {
	Do Action
	On string // replica or node; "": the control plane
	To string // TransferLead: the next leader
}

// String returns a description of the step.
func (s Step) String() string {
	switch s.Do {
	case TransferLead:
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
