package plan

import (
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Remove says what has to be done so that a machine is part of the cluster no more: its pods leave it, its replica leaves the
// group, what is installed goes, and its Node. It refuses what would cost the control plane its majority, or its last replica.
// With lost, the machine is never asked again: nothing is done on it.
func Remove(c machines.Cluster, name string, f machines.Facts, s State, lost bool) ([]Step, error) {
	if !s.Known {
		return nil, errors.New("the cluster does not answer: without it nobody can tell what may go")
	}
	h, err := c.Host(name)
	if err != nil {
		return nil, err
	}
	if err := mayGo(h, f, s, lost); err != nil {
		return nil, err
	}
	var steps []Step
	step := func(d Deed, why string) { steps = append(steps, Step{Machine: name, Do: d, Why: []string{why}}) }
	node, isNode := s.Nodes[name]
	_, isMember := s.Members[name]
	switch {
	case lost || !isNode:
	case node.Ready:
		step(Drain, "pods leave it for other nodes")
	default: // no agent would say that a pod has ended
		step(Cordon, "it is not ready: no pod comes to it any more, and those that are there end with the Node")
	}
	if isMember {
		if err := mayLeave(name, s); err != nil {
			return nil, err
		}
		step(Leave, "the replica leaves the group")
	}
	if !lost && has(f) {
		step(Uninstall, "everything of Keelson's is taken away, its data too")
	}
	if isNode {
		step(Forget, "the Node is deleted, and with it the right of its certificates")
	}
	return steps, nil
}

// mayLeave refuses what the group does not outlive: those that are left and ready have to be a majority of those that are left.
func mayLeave(name string, s State) error {
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
		return fmt.Errorf("%s is the last replica with a vote: with it the cluster goes. 'kctl cluster reset' takes all of it away", name)
	case voters == 0:
		return fmt.Errorf("%s is the last replica: with it the cluster goes. 'kctl cluster reset' takes all of it away", name)
	case ready < voters/2+1:
		return fmt.Errorf("without %s there are %s, of which %d are ready: nothing could be written any more. Bring others back first, or remove one that does not answer", name, count(voters, "replica"), ready)
	}
	return nil
}

// Strange says which machines may be nodes of another cluster, where none of the file's has a replica that would tell: their agents were
// told of no replica at an address of the file. One whose settings are gone, and whose agent does not run, is what a reset has left.
func Strange(c machines.Cluster, facts map[string]machines.Facts) error {
	if id, ca, _ := (&judge{c: c, facts: facts}).own(); id+ca != "" {
		return nil
	}
	var all []string
	for _, h := range c.Hosts {
		f := facts[h.Name]
		ours := slices.ContainsFunc(f.AgentServers(), func(server string) bool {
			at, _, err := net.SplitHostPort(server)
			return slices.ContainsFunc(c.Replicas(), func(r machines.Host) bool { return r.Address == at || err != nil && r.Address == server })
		})
		if f.Node && !ours && (f.Agent != "" || f.Active[machines.Worker.Unit()]) {
			all = append(all, h.Name)
		}
	}
	if len(all) == 0 {
		return nil
	}
	return fmt.Errorf("%s: a node of a cluster, of which no control plane of the file was reached, and by its settings it may be another one: start one of those, "+
		"take the machine out of the file, or run '/usr/lib/keelson/uninstall.sh' there", strings.Join(all, ", "))
}

// Reset says what has to be done so that nothing is left of the cluster: of workers, and then of the control plane.
func Reset(c machines.Cluster, facts map[string]machines.Facts) (workers, rest []Step) {
	for _, h := range c.Hosts {
		step := Step{Machine: h.Name, Do: Uninstall, Why: []string{"everything of Keelson's is taken away, its data too"}}
		switch {
		case !has(facts[h.Name]):
		case h.Replica():
			rest = append(rest, step)
		default:
			workers = append(workers, step)
		}
	}
	return workers, rest
}

// has says whether there is anything of Keelson's on a machine. CNI plugins may be of others, who had them before.
func has(f machines.Facts) bool {
	for path := range f.Sums {
		if !strings.HasPrefix(path, "/opt/cni/bin/") {
			return true
		}
	}
	return f.Replica || f.Node || f.ControlPlane != "" || f.Agent != "" || len(f.Active) > 0
}
