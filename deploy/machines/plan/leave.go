package plan

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Remove returns the steps that remove a machine from the cluster. They drain its pods, remove its
// replica from the raft cluster, uninstall the programs and data, and delete its Node. If lost is
// true, the machine no longer exists, and no step runs on it. Remove returns an error if the state
// of the cluster is unknown, or if the remaining replicas would have no quorum.
func Remove(c machines.Cluster, name string, f machines.Facts, s State, lost bool) ([]Step, error) {
	if !s.Known {
		return nil, errors.New("the cluster does not answer, so it is unknown what can be removed")
	}
	h, err := c.Host(name)
	if err != nil {
		return nil, err
	}
	if err := checkRemovable(h, f, s, lost); err != nil {
		return nil, err
	}
	var steps []Step
	step := func(d Action, why string) { steps = append(steps, Step{Machine: name, Do: d, Why: []string{why}}) }
	node, isNode := s.Nodes[name]
	_, isMember := s.Members[name]
	switch {
	case lost || !isNode:
	case node.Ready:
		step(Drain, "pods leave it for other nodes")
	default: // without a ready agent, no Pod would be reported as stopped
		step(Cordon, "it is not ready: no new pods are scheduled on it, and its pods end with the Node")
	}
	if isMember {
		if err := checkQuorum(name, s); err != nil {
			return nil, err
		}
		step(Leave, "the replica leaves the raft cluster")
	}
	if !lost && hasAnyInstalled(f) {
		step(Uninstall, "everything of Keelson's is removed, including its data")
	}
	if isNode {
		step(DeleteNode, "the Node is deleted, and its certificates are no longer accepted")
	}
	return steps, nil
}

// checkQuorum returns an error if the named replica must not be removed from the raft cluster. A
// replica must not be removed if no other voter remains, or if fewer than a majority of the other
// voters are ready.
func checkQuorum(name string, s State) error {
	voters, ready, others := 0, 0, 0
	for other, m := range s.Members {
		if other == name {
			continue
		}
		if others++; !m.Voter {
			continue
		}
		voters++
		if m.Ready == "yes" {
			ready++
		}
	}
	switch {
	case voters == 0 && others > 0:
		return fmt.Errorf("%s is the last replica with a vote: with it the cluster goes. 'kctl cluster reset' takes "+
			"all of it away", name)
	case voters == 0:
		return fmt.Errorf("%s is the last replica: with it the cluster goes. 'kctl cluster reset' takes all of it away",
			name)
	case ready < voters/2+1:
		return fmt.Errorf("without %s there are %s, of which %d are ready: nothing could be written any more. Bring "+
			"others back first, or remove one that does not answer", name, countNoun(voters, "replica"), ready)
	}
	return nil
}

// CheckForeignNodes returns an error if machines may be nodes of another cluster. It returns nil if
// a machine of the cluster file has a replica, because ForeignReason then compares the CAs of the
// machines. Otherwise, the error lists each node with an agent that is not configured for any
// replica in the cluster file. A node without agent settings and without a running agent is left
// from an interrupted reset, and is not an error.
func CheckForeignNodes(c machines.Cluster, facts map[string]machines.Facts) error {
	if id, ca, _ := (&inspector{c: c, facts: facts}).fileCluster(); id+ca != "" {
		return nil
	}
	var all []string
	for _, h := range c.Hosts {
		f := facts[h.Name]
		ours := slices.ContainsFunc(f.AgentServers(), func(server string) bool {
			at, _, err := net.SplitHostPort(server)
			return slices.ContainsFunc(c.ReplicaHosts(), func(r machines.Host) bool {
				return r.Address == at || err != nil && r.Address == server
			})
		})
		if f.Node && !ours && (f.Agent != "" || f.Active[machines.Worker.UnitName()]) {
			all = append(all, h.Name)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("%s: a node of a cluster, of which no control plane of the file was reached, and by its "+
		"settings it may be another one: start one of those, "+
		"take the machine out of the file, or run '/usr/lib/keelson/uninstall.sh' there", strings.Join(all, ", "))
}

// Reset returns the steps that uninstall Keelson, with all data, from all machines. The steps in
// workers must be carried out before the steps in rest, which are for machines with a replica.
func Reset(c machines.Cluster, facts map[string]machines.Facts) (workers, rest []Step) {
	for _, h := range c.Hosts {
		step := Step{Machine: h.Name, Do: Uninstall,
			Why: []string{"everything of Keelson's is removed, including its data"}}
		switch {
		case !hasAnyInstalled(facts[h.Name]):
		case h.HasReplica():
			rest = append(rest, step)
		default:
			workers = append(workers, step)
		}
	}
	return workers, rest
}

// hasAnyInstalled reports whether a machine has any file, setting, or running systemd unit of
// Keelson. CNI plugins do not count, because they may belong to other software.
func hasAnyInstalled(f machines.Facts) bool {
	for path := range f.Sums {
		if !strings.HasPrefix(path, "/opt/cni/bin/") {
			return true
		}
	}
	return f.Replica || f.Node || f.ControlPlane != "" || f.Agent != "" || len(f.Active) > 0
}
