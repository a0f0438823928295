package session

import "testing"

// What all nodes are sent is held once in a process of many; each session has the revision that it was sent, and pods are
// its own.
func TestSharedObjects(t *testing.T) {
	var shared Shared
	sessions := []*Session{New(Config{NodeName: "w1", Shared: &shared}), New(Config{NodeName: "w2", Shared: &shared})}
	apply := func(i int, revision uint64) {
		t.Helper()
		v := sessions[i].view
		if err := v.apply(full(wire(t, "Node", "", "w1", revision), wire(t, "Pod", "d", "p", revision))); err != nil {
			t.Fatal(err)
		}
		v.complete(revision, true)
	}
	same := func() (nodes, pods bool) {
		return sessions[0].Nodes()[0] == sessions[1].Nodes()[0], sessions[0].Pods()[0] == sessions[1].Pods()[0]
	}
	apply(0, 1)
	apply(1, 1)
	if nodes, pods := same(); !nodes || pods {
		t.Errorf("sessions share nodes: %v, and pods: %v", nodes, pods)
	}
	apply(0, 2)
	if nodes, _ := same(); nodes {
		t.Error("sessions at different revisions share an object")
	}
	apply(1, 2)
	if nodes, _ := same(); !nodes {
		t.Error("sessions at the same revision again share nothing")
	}
}
