package plan

import (
	"fmt"
	"maps"
	"slices"

	"keelson.dev/keelson/deploy/machines"
)

// The name of a replica or node in the cluster may differ from the name of its machine in the
// cluster file. Either it was set up by hand with its hostname, or the cluster file was edited. The
// name in the cluster file would then not be a member, and an installation would delete the data of
// a running replica.

// otherReplica returns the name that the replica on the machine h has in the raft cluster, if it
// differs from h.Name. It returns "" if the names are equal, or if the replica's name is unknown.
// The members in the state s take precedence over the settings on the machine, which may be wrong.
// The name of a replica that has not joined yet is unknown; a member with its address is a previous
// replica.
func otherReplica(h machines.Host, f machines.Facts, s State) string {
	if !f.ReplicaWhole || f.Joining {
		return ""
	}
	return otherName(h, f.ReplicaName(), s.Known, s.replicaAddresses())
}

// otherNode returns the name of the machine's Node, if it differs from h.Name. It returns "" if the
// names are equal, or if the name of the Node is unknown.
func otherNode(h machines.Host, f machines.Facts, s State) string {
	switch {
	case !f.Node || f.NodeName == h.Name:
		return ""
	case f.NodeName != "":
		return f.NodeName // the name in the certificate; the agent refuses any other name
	}
	return otherName(h, f.AgentName(), s.Known, s.nodeAddresses())
}

// otherName returns the name that the machine h has in the cluster, as a replica or as a node, if
// it differs from h.Name. It returns "" if the names are equal, or if the name in the cluster is
// unknown. addresses contains the addresses of all replicas, or of all nodes, by name. If they
// could not be read, addressesKnown is false. If a name has the address of h, that is the name of h
// in the cluster. Otherwise, it is configured, the name in the settings on the machine.
func otherName(h machines.Host, configured string, addressesKnown bool, addresses map[string]string) string {
	at, is := addresses[h.Name]
	if addressesKnown && is && (at == h.Address || configured == h.Name) {
		return ""
	}
	if other := nameAt(addresses, h.Address); other != "" && other != h.Name {
		return other
	}
	if _, is := addresses[configured]; configured == h.Name || addressesKnown && !is {
		return ""
	}
	return configured
}

// nameAt returns the name with the given address in addresses, which maps names to addresses. If
// several names have the address, it returns the first name in alphabetical order. It returns "" if
// no name has the address.
func nameAt(addresses map[string]string, address string) string {
	for _, name := range slices.Sorted(maps.Keys(addresses)) {
		if address != "" && addresses[name] == address {
			return name
		}
	}
	return ""
}

// manualRemoval is the remedy for a machine with a name in the cluster that cannot be a name in a
// cluster file. The command 'kctl cluster remove' cannot remove such a machine.
const manualRemoval = "take it out by hand ('kctl drain' and 'kctl delete node' of a node, 'kctl cluster member " +
	"remove' of a replica, /usr/lib/keelson/uninstall.sh there)"

// checkNames returns false if the replica or the node on the machine h has another name in the
// cluster than h.Name. It adds an error for each of the two that has another name. It returns true
// if the names are equal or unknown.
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
		remedy := "name it " + other + " in the file; 'kctl cluster remove " + other +
			"' then takes it out, and 'up' takes it in by another name"
		if !machines.IsValidHostName(of.other) {
			remedy = "no file can name it so: " + manualRemoval + ", and 'up' takes it in as " + h.Name
		} else if !j.state.Known && f.NodeName == "" {
			remedy = "name it " + other + " in the file; or, if that is not its name, have " + of.key +
				" in /etc/keelson/" + of.file + " there say " + h.Name
		}
		j.addError(h.Name, "is "+fmt.Sprintf(of.what, other)+", and not "+h.Name, remedy)
	}
	return ok
}

// checkRemovable returns an error if the machine h has another name in the cluster than in the
// cluster file. A removal by the name h.Name would then miss the machine, or would remove another
// machine. lost means that no facts of the machine are available. Then checkRemovable only returns
// an error if no member or node has the name h.Name, but another one has the address of h.
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
			return fmt.Errorf("%s is the %s %s of the cluster%s", h.Name, of.what, printable(of.other),
				remedy(of.other))
		case lost && !isNode && !s.isMember(h.Name) && of.at != "":
			return fmt.Errorf("%s is no part of the cluster, and at its address is the %s %s%s", h.Name, of.what,
				printable(of.at), remedy(of.at))
		}
	}
	return nil
}

// replicaAddresses returns the address of each member of the raft cluster by its name.
// nodeAddresses returns the address of each Node by its name.
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
