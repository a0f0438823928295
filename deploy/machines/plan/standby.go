package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// Votes of replicas: a host with the role ControlPlane joins with a vote, and one with the role
// Standby without. Later, the raft cluster decides. When a replica dies, a standby gets its vote
// and keeps it. When the dead replica joins again, it joins without a vote.

// isMember reports whether the raft cluster has a member with this name, with or without a vote.
func (s State) isMember(name string) bool {
	_, ok := s.Members[name]
	return ok
}

// hasVote reports whether the replica with this name has a vote in the raft cluster. The state s
// takes precedence over the facts f of the machine, which are updated later.
func hasVote(name string, f machines.Facts, s State) bool {
	if m, ok := s.Members[name]; ok && s.Known && (m.Voter || m.Standby) {
		return m.Voter
	}
	return f.ReplicaWhole && !f.WithoutVote
}

// isRemovedMember reports whether the raft cluster has removed the replica on the machine h. That
// is the case if the replica joined once, and the raft cluster no longer has a member with its
// name.
func isRemovedMember(h machines.Host, f machines.Facts, s State) bool {
	return s.Known && f.ReplicaWhole && !f.Joining && !s.isMember(h.Name) && otherReplica(h, f, s) == ""
}

// standIns returns a map of replicas with the role ControlPlane that have lost their vote. The
// value is the name of a standby in the cluster file that has a vote instead. No standby occurs
// twice. If there are fewer such standbys than replicas without a vote, some replicas are omitted.
// Replicas that already run without a vote take precedence, then replicas in State.Replaced, then
// the order of the cluster file.
func standIns(c machines.Cluster, facts map[string]machines.Facts, s State) map[string]string {
	var without []string
	var promoted []string
	for _, h := range c.ReplicaHosts() {
		f := facts[h.Name]
		has := hasVote(h.Name, f, s) && !isRemovedMember(h, f, s)
		switch {
		case h.HasRole(machines.Standby) && has:
			promoted = append(promoted, h.Name)
		case h.HasRole(machines.ControlPlane) && !has:
			without = append(without, h.Name)
		}
	}
	rank := func(name string) int {
		switch {
		case facts[name].ReplicaWhole && facts[name].WithoutVote:
			return 0
		case s.Replaced[name] != "":
			return 1
		}
		return 2
	}
	slices.SortStableFunc(without, func(a, b string) int { return rank(a) - rank(b) })
	out := map[string]string{}
	for _, name := range without {
		at := slices.Index(promoted, s.Replaced[name])
		if at < 0 && len(promoted) > 0 {
			at = 0
		}
		if at >= 0 {
			out[name] = promoted[at]
			promoted = slices.Delete(promoted, at, at+1)
		}
	}
	return out
}

// plannedVotes returns the number of replicas in the cluster file that have a vote after the plan
// has been carried out.
func (j *inspector) plannedVotes() (n int) {
	stood := standIns(j.c, j.facts, j.state)
	for _, h := range j.c.ReplicaHosts() {
		f := j.facts[h.Name]
		switch {
		case isRemovedMember(h, f, j.state) || stood[h.Name] != "":
		case hasVote(h.Name, f, j.state) || !f.ReplicaWhole && h.HasRole(machines.ControlPlane):
			n++
		}
	}
	return n
}

// checkStandbys adds a warning if the cluster file has standbys, but the setting ReplaceDead is 0
// on all replicas or differs between the replicas.
func (j *inspector) checkStandbys() {
	waiting := j.c.HostsWithRole(machines.Standby)
	if len(waiting) == 0 {
		return
	}
	const remedy = "name a time of 30s or more under controlplane of the whole file, " +
		"or leave the key out there: it is 10m then"
	all := j.c.ReplicaHosts()
	var never []string
	differ := false
	for _, h := range all {
		if h.ReplaceDeadTime() == 0 {
			never = append(never, h.Name)
		}
		differ = differ || h.ReplaceDeadTime() != all[0].ReplaceDeadTime()
	}
	switch {
	case len(never) == len(all):
		j.addWarning("", machines.ReplaceDead+" is 0: "+joinNames(waiting)+
			" would never get the vote of a replica that dies", remedy)
	case differ:
		j.addWarning("", machines.ReplaceDead+" is not the same on every replica: who leads goes by its own", remedy)
	}
}

// checkVote adds a finding if the replica on the machine h was removed from the raft cluster. It
// adds a warning if a standby of the cluster file has a vote, or a control plane has no vote. A
// control plane without a vote is correct if a standby has a vote instead; see standIns.
func (j *inspector) checkVote(h machines.Host, f machines.Facts) {
	if !f.ReplicaWhole || !h.HasReplica() {
		return
	}
	has := hasVote(h.Name, f, j.state)
	switch {
	case isRemovedMember(h, f, j.state):
		what := "its replica was removed from the raft cluster, and cannot rejoin with its data"
		if other := j.state.Replaced[h.Name]; other != "" {
			what = "was replaced by " + other + " while it was away, and cannot rejoin with its data"
		}
		j.addError(h.Name, what, rejoinRemedy(h.Name))
	case h.HasRole(machines.Standby) && has:
		what := "is a standby in the file, and has a vote, which it keeps"
		remedy := "nothing has to be done; give it the role controlplane to have the file say so"
		for _, dead := range slices.Sorted(maps.Keys(j.state.Replaced)) {
			if j.state.Replaced[dead] == h.Name {
				what = "is a standby in the file, and has the vote of " + dead + ", which it keeps"
				if _, err := j.c.Host(dead); err == nil {
					remedy += ", and " + dead + " the role standby"
				}
			}
		}
		j.addWarning(h.Name, what, remedy)
	case h.HasRole(machines.ControlPlane) && !has && f.WithoutVote && standIns(j.c, j.facts, j.state)[h.Name] == "":
		j.addWarning(h.Name, "is a standby without a vote, and the file gives it the role controlplane: "+
			"it stays a standby",
			"'kctl cluster remove "+h.Name+"' takes it out of the cluster, and 'up' takes it in again, with a vote")
	}
}

// rejoinRemedy returns the remedy for a replica that the raft cluster has removed.
func rejoinRemedy(name string) string {
	return "'kctl cluster remove " + name + "' takes away what it has, and 'kctl cluster up' takes it in again, " +
		"as a standby where another one has its vote"
}

// MissingReplaceDead returns a finding if steps add a standby, while other running replicas lack
// the setting ReplaceDead and no step changes them. Such a replica, as the leader, would never give
// the standby a vote. It returns nil otherwise.
func MissingReplaceDead(c machines.Cluster, facts map[string]machines.Facts, steps []Step) *Finding {
	joins := slices.ContainsFunc(steps, func(s Step) bool { return s.Standby })
	var without []machines.Host
	for _, h := range c.ReplicaHosts() {
		touched := slices.ContainsFunc(steps, func(s Step) bool { return s.Machine == h.Name && s.Do == ControlPlane })
		f := facts[h.Name]
		set := strings.Contains("\n"+f.ControlPlane, "\n"+machines.ReplaceDead+":")
		if f.ReplicaWhole && !touched && h.ReplaceDeadTime() != 0 && !set {
			without = append(without, h)
		}
	}
	if !joins || len(without) == 0 {
		return nil
	}
	return &Finding{
		What: fmt.Sprintf("%s: without %s, and no standby gets a vote while one of these leads",
			joinNames(without), machines.ReplaceDead),
		Remedy: "'kctl cluster up' has them run with it",
	}
}

func joinNames(hosts []machines.Host) string {
	var all []string
	for _, h := range hosts {
		all = append(all, h.Name)
	}
	return strings.Join(all, ", ")
}

func replicaWord(standby bool) string {
	if standby {
		return "a standby"
	}
	return "a replica"
}
