package plan

import (
	"fmt"
	"maps"
	"slices"

	"keelson.dev/keelson/deploy/machines"
)

// A machine may be part of the cluster under another name than the file's: it was made by hand, and its name is its hostname, or
// somebody has renamed it in the file. By the file's name it would be none of the cluster's, and what it has be wiped while it lives.

// otherReplica is the name under which the group knows a machine's replica; "" where that is the file's, or nobody can tell. The cluster
// knows it better than settings, in which anything may have been written. One that was not taken in yet is known by nobody, and what
// the group has at its address is what was there before it.
func otherReplica(h machines.Host, f machines.Facts, s State) string {
	if !f.ReplicaWhole || f.Joining {
		return ""
	}
	return otherName(h, f.ReplicaName(), s.Known, s.replicas())
}

// otherNode is the name of a machine's node; "" where that is the file's, or nobody can tell.
func otherNode(h machines.Host, f machines.Facts, s State) string {
	switch {
	case !f.Node || f.NodeName == h.Name:
		return ""
	case f.NodeName != "":
		return f.NodeName // of its certificate: the agent starts under no other
	}
	return otherName(h, f.AgentName(), s.Known, s.nodes())
}

// otherName is the name of what a machine has, by what it calls itself and by the addresses of what there is.
func otherName(h machines.Host, own string, known bool, addresses map[string]string) string {
	at, is := addresses[h.Name]
	if known && is && (at == h.Address || own == h.Name) {
		return ""
	}
	if other := nameAt(addresses, h.Address); other != "" && other != h.Name {
		return other
	}
	if _, is := addresses[own]; own == h.Name || known && !is {
		return ""
	}
	return own
}

// nameAt is who has an address.
func nameAt(addresses map[string]string, address string) string {
	for _, name := range slices.Sorted(maps.Keys(addresses)) {
		if address != "" && addresses[name] == address {
			return name
		}
	}
	return ""
}

// byHand is how a machine leaves that no file can name.
const byHand = "take it out by hand ('kctl drain' and 'kctl delete node' of a node, 'kctl cluster member remove' of a replica, /usr/lib/keelson/uninstall.sh there)"

// named judges whether a machine has its own name in the file.
func (j *judge) named(h machines.Host, f machines.Facts) bool {
	ok := true
	for _, of := range []struct{ other, what, file, key string }{
		{otherReplica(h, f, j.state), "the replica %s of the group", "controlplane.yaml", "name"},
		{otherNode(h, f, j.state), "the node %s of the cluster", "agent.yaml", "node-name"},
	} {
		if of.other == "" {
			continue
		}
		ok = false
		other := printable(of.other)
		remedy := "name it " + other + " in the file; 'kctl cluster remove " + other + "' then takes it out, and 'up' takes it in by another name"
		if !machines.MayBeNamed(of.other) {
			remedy = "no file can name it so: " + byHand + ", and 'up' takes it in as " + h.Name
		} else if !j.state.Known && f.NodeName == "" {
			remedy = "name it " + other + " in the file; or, if that is not its name, have " + of.key + " in /etc/keelson/" + of.file + " there say " + h.Name
		}
		j.grave(h.Name, "is "+fmt.Sprintf(of.what, other)+", and not "+h.Name, remedy)
	}
	return ok
}

// mayGo refuses to take a machine out by a name that is not its own: what lives there has another one, and would end unasked. With lost
// the machine has said nothing, and what is at its address tells.
func mayGo(h machines.Host, f machines.Facts, s State, lost bool) error {
	remedy := func(other string) string {
		if machines.MayBeNamed(other) {
			return ": name it " + printable(other) + " in the file, and remove that"
		}
		return ": no file can name it so: " + byHand
	}
	_, isNode := s.Nodes[h.Name]
	for _, of := range []struct {
		other, at, what string
	}{
		{otherReplica(h, f, s), nameAt(s.replicas(), h.Address), "replica"},
		{otherNode(h, f, s), nameAt(s.nodes(), h.Address), "node"},
	} {
		switch {
		case of.other != "":
			return fmt.Errorf("%s is the %s %s of the cluster%s", h.Name, of.what, printable(of.other), remedy(of.other))
		case lost && !isNode && !s.has(h.Name) && of.at != "":
			return fmt.Errorf("%s is no part of the cluster, and at its address is the %s %s%s", h.Name, of.what, printable(of.at), remedy(of.at))
		}
	}
	return nil
}

// replicas and nodes are addresses by name.
func (s State) replicas() map[string]string {
	at := map[string]string{}
	for name, m := range s.Members {
		at[name] = m.Address
	}
	return at
}

func (s State) nodes() map[string]string {
	at := map[string]string{}
	for name, n := range s.Nodes {
		at[name] = n.Address
	}
	return at
}
