package plan

import (
	"fmt"
	"maps"
	"slices"

	"keelson.dev/keelson/deploy/machines"
)

// A machine may be part of the cluster under another name than the file's: it was set up by hand
// with its hostname, or it was renamed in the file. Under the file's name, it would not be a
// member, and its data would be deleted while it runs.

// otherReplica returns the name of a machine's replica in the raft cluster if it differs from the
// file's, or "" if it does not or is unknown. The cluster takes precedence over settings, which can
// contain anything. A replica that has not joined yet is unknown; a member at its address is an
// earlier one.
func otherReplica(h machines.Host, f machines.Facts, s State) string {
	if !f.ReplicaWhole || f.Joining {
		return ""
	}
	return otherName(h, f.ReplicaName(), s.Known, s.replicaAddresses())
}

// otherNode returns the name of a machine's node if it differs from the file's, or "" if it does
// not or is unknown.
func otherNode(h machines.Host, f machines.Facts, s State) string {
	switch {
	case !f.Node || f.NodeName == h.Name:
		return ""
	case f.NodeName != "":
		return f.NodeName // from its certificate: the agent refuses any other name
	}
	return otherName(h, f.AgentName(), s.Known, s.nodeAddresses())
}

// otherName returns the name of a machine's member or node, from its own name and from the
// addresses in the cluster.
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

// nameAt returns the name with an address, or "".
func nameAt(addresses map[string]string, address string) string {
	for _, name := range slices.Sorted(maps.Keys(addresses)) {
		if address != "" && addresses[name] == address {
			return name
		}
	}
	return ""
}

// manualRemoval is the remedy for a machine with a name that no file can contain.
const manualRemoval = "take it out by hand ('kctl drain' and 'kctl delete node' of a node, 'kctl cluster member remove' of a replica, /usr/lib/keelson/uninstall.sh there)"

// checkNames checks whether a machine has its own name in the file.
func (j *inspector) checkNames(h machines.Host, f machines.Facts) bool {
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
		if !machines.IsValidHostName(of.other) {
			remedy = "no file can name it so: " + manualRemoval + ", and 'up' takes it in as " + h.Name
		} else if !j.state.Known && f.NodeName == "" {
			remedy = "name it " + other + " in the file; or, if that is not its name, have " + of.key + " in /etc/keelson/" + of.file + " there say " + h.Name
		}
		j.addError(h.Name, "is "+fmt.Sprintf(of.what, other)+", and not "+h.Name, remedy)
	}
	return ok
}

// checkRemovable returns an error if the machine's replica or node has another name, which would be
// removed by mistake. With lost, the machine cannot be asked, and the addresses in the cluster are
// compared.
func checkRemovable(h machines.Host, f machines.Facts, s State, lost bool) error {
	remedy := func(other string) string {
		if machines.IsValidHostName(other) {
			return ": name it " + printable(other) + " in the file, and remove that"
		}
		return ": no file can name it so: " + manualRemoval
	}
	_, isNode := s.Nodes[h.Name]
	for _, of := range []struct {
		other, at, what string
	}{
		{otherReplica(h, f, s), nameAt(s.replicaAddresses(), h.Address), "replica"},
		{otherNode(h, f, s), nameAt(s.nodeAddresses(), h.Address), "node"},
	} {
		switch {
		case of.other != "":
			return fmt.Errorf("%s is the %s %s of the cluster%s", h.Name, of.what, printable(of.other), remedy(of.other))
		case lost && !isNode && !s.isMember(h.Name) && of.at != "":
			return fmt.Errorf("%s is no part of the cluster, and at its address is the %s %s%s", h.Name, of.what, printable(of.at), remedy(of.at))
		}
	}
	return nil
}

// replicaAddresses and nodeAddresses return addresses by name.
func (s State) replicaAddresses() map[string]string {
	at := map[string]string{}
	for name, m := range s.Members {
		at[name] = m.Address
	}
	return at
}

func (s State) nodeAddresses() map[string]string {
	at := map[string]string{}
	for name, n := range s.Nodes {
		at[name] = n.Address
	}
	return at
}
