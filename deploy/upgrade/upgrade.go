// Package upgrade determines the order in which a running cluster is upgraded to another release.
// Replicas come first, one after the other, with the leader last, after a leadership transfer. Then
// come the nodes, one after the other. Each next step depends only on the observed state, so an
// interrupted upgrade can be continued. Next and Plan are pure functions. Run carries out the steps
// by means of a Cluster.
package upgrade

import "fmt"

// Member is the observed state of a replica, a member of the raft cluster.
type Member struct {
	Name    string
	Release string // "" if the replica does not report it
	Voter   bool
	Leader  bool
	Problem string // reason why the replica is unhealthy; "": it is healthy
}

// Node is the observed state of a worker and its agent.
type Node struct {
	Name    string
	Release string // release of the node's agent
	Problem string // reason why the node is unhealthy; "": it is healthy
	Drained bool   // an upgrade has drained the node, and must uncordon it
}

// State is the observed state of a cluster during an upgrade.
type State struct {
	Members []Member
	Nodes   []Node
	Level   uint32 // feature level of the data in the store
	Busy    string // reason why the leader cannot work yet; "": it works
}

// Goal is the release to which a cluster is upgraded, and how nodes are treated.
type Goal struct {
	Release string
	Level   uint32   // highest feature level that the release supports
	Drain   []string // names of nodes to drain before their agent is upgraded, or All
	Skip    []string // names of replicas and nodes that are not upgraded
}

// All in Goal.Drain stands for every node.
const All = "all"

// Action is what a Step does, such as Drain.
type Action string

// The actions. On and To are the fields of Step that name the affected replicas or node.
const (
	TransferLead Action = "hand over" // To becomes the raft leader instead of On
	Replica      Action = "replica"   // the replica On is upgraded and restarted
	Drain        Action = "drain"     // the node On is drained
	Agent        Action = "agent"     // the agent of the node On is upgraded; pods continue
	Return       Action = "return"    // the drained node On is uncordoned
	Await        Action = "wait"      // On has the release and is unhealthy: Run waits
	Finish       Action = "finish"    // no step is left
)

// Step is one step of an upgrade, which Next returns.
type Step struct {
	Do Action
	On string // name of a replica or node; "": the control plane
	To string // TransferLead: name of the next leader
}

// String returns a description of the step for users.
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
