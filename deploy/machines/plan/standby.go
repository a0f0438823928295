package plan

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"keelson.dev/keelson/deploy/machines"
)

// The file says how many votes there are, by its control planes, and who waits for one, by its standbys. Who has the
// votes later on is the cluster's: a standby that has got one keeps it, and the control plane that lost it waits for
// one, once it has joined anew.

// has says whether a replica is a member.
func (s State) has(name string) bool {
	_, ok := s.Members[name]
	return ok
}

// voter says whether the replica of a machine has a vote. The machine itself knows it, a moment later than the cluster.
func voter(name string, f machines.Facts, s State) bool {
	if m, ok := s.Members[name]; ok && s.Known && (m.Voter || m.Standby) {
		return m.Voter
	}
	return f.ReplicaWhole && !f.Waiting
}

// removed says whether a machine has a replica that the group has taken out: it was a member, and is none by any name.
func removed(h machines.Host, f machines.Facts, s State) bool {
	return s.Known && f.ReplicaWhole && !f.Joining && !s.has(h.Name) && otherReplica(h, f, s) == ""
}

// standIns are the control planes of the file in whose place a standby of it has a vote, each with that standby. They
// are as many as such standbys at most: those that wait for a vote already come first, then those that were replaced,
// then the file's order.
func standIns(c machines.Cluster, facts map[string]machines.Facts, s State) map[string]string {
	var without []string
	var promoted []string
	for _, h := range c.Replicas() {
		f := facts[h.Name]
		has := voter(h.Name, f, s) && !removed(h, f, s)
		switch {
		case h.Is(machines.Standby) && has:
			promoted = append(promoted, h.Name)
		case h.Is(machines.ControlPlane) && !has:
			without = append(without, h.Name)
		}
	}
	rank := func(name string) int {
		switch {
		case facts[name].ReplicaWhole && facts[name].Waiting:
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

// votes are how many there are to be, once the plan was carried out.
func (j *judge) votes() (n int) {
	stood := standIns(j.c, j.facts, j.state)
	for _, h := range j.c.Replicas() {
		f := j.facts[h.Name]
		switch {
		case removed(h, f, j.state) || stood[h.Name] != "":
		case voter(h.Name, f, j.state) || !f.ReplicaWhole && h.Is(machines.ControlPlane):
			n++
		}
	}
	return n
}

// standbys judges what the file says of them.
func (j *judge) standbys() {
	waiting := j.c.With(machines.Standby)
	if len(waiting) == 0 {
		return
	}
	const remedy = "name a time of 30s or more under controlplane of the whole file, " +
		"or leave the key out there: it is 10m then"
	all := j.c.Replicas()
	var never []string
	differ := false
	for _, h := range all {
		if h.Replaces() == 0 {
			never = append(never, h.Name)
		}
		differ = differ || h.Replaces() != all[0].Replaces()
	}
	switch {
	case len(never) == len(all):
		j.light("", machines.ReplaceDead+" is 0: "+names(waiting)+" would never get the vote of a replica that dies", remedy)
	case differ:
		j.light("", machines.ReplaceDead+" is not the same on every replica: who leads goes by its own", remedy)
	}
}

// vote judges whether the replica that a machine has is the one that the file says.
func (j *judge) vote(h machines.Host, f machines.Facts) {
	if !f.ReplicaWhole || !h.Replica() {
		return
	}
	has := voter(h.Name, f, j.state)
	switch {
	case removed(h, f, j.state):
		what := "its replica was taken out of the group, and cannot take part again with what it has"
		if other := j.state.Replaced[h.Name]; other != "" {
			what = "was replaced by " + other + " while it was away, and cannot take part again with what it has"
		}
		j.grave(h.Name, what, anew(h.Name))
	case h.Is(machines.Standby) && has:
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
		j.light(h.Name, what, remedy)
	case h.Is(machines.ControlPlane) && !has && f.Waiting && standIns(j.c, j.facts, j.state)[h.Name] == "":
		j.light(h.Name, "is a standby without a vote, and the file gives it the role controlplane: it stays a standby",
			"'kctl cluster remove "+h.Name+"' takes it out of the cluster, and 'up' takes it in again, with a vote")
	}
}

// anew is how a replica that was taken out comes into the group again.
func anew(name string) string {
	return "'kctl cluster remove " + name + "' takes away what it has, and 'kctl cluster up' takes it in again, " +
		"as a standby where another one has its vote"
}

// Unready says of replicas that run, and that 'add' does not touch, that they have no standby get a vote; nil where
// they do.
func Unready(c machines.Cluster, facts map[string]machines.Facts, steps []Step) *Finding {
	joins := slices.ContainsFunc(steps, func(s Step) bool { return s.Standby })
	var without []machines.Host
	for _, h := range c.Replicas() {
		touched := slices.ContainsFunc(steps, func(s Step) bool { return s.Machine == h.Name && s.Do == ControlPlane })
		f := facts[h.Name]
		set := strings.Contains("\n"+f.ControlPlane, "\n"+machines.ReplaceDead+":")
		if f.ReplicaWhole && !touched && h.Replaces() != 0 && !set {
			without = append(without, h)
		}
	}
	if !joins || len(without) == 0 {
		return nil
	}
	return &Finding{
		What: fmt.Sprintf("%s: without %s, and no standby gets a vote while one of these leads",
			names(without), machines.ReplaceDead),
		Remedy: "'kctl cluster up' has them run with it",
	}
}

func names(hosts []machines.Host) string {
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
