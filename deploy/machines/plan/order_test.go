package plan

import (
	"testing"

	"keelson.dev/keelson/deploy/machines"
)

// Of replicas that are changed the leader is the last, wherever it is in the file; those that join come after it.
func TestLeaderIsChangedLast(t *testing.T) {
	for _, leader := range []string{"cp1", "cp2", "cp3"} {
		w := newWorld(aCluster(3, 1))
		for _, s := range w.plan() {
			w.do(t, s)
		}
		m := w.state.Members[leader]
		m.Leader = true
		w.state.Members[leader] = m
		for i := range w.cluster.Hosts {
			w.cluster.Hosts[i].ControlPlane = machines.Settings{"heartbeat-timeout": {Text: []string{`"3s"`}}}
		}
		w.cluster = withStandbys(w.cluster, 1)
		f := emptyFacts()
		f.MachineID, f.Addresses = "sb1", []string{"192.0.2.31"}
		w.facts["sb1"] = f
		var order []string
		for _, s := range w.plan() {
			if s.Do == ControlPlane {
				order = append(order, s.Machine)
			}
		}
		if len(order) != 4 || order[2] != leader || order[3] != "sb1" {
			t.Errorf("%s leads, and the order is %v", leader, order)
		}
	}
}
