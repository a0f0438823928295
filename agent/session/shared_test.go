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
		if err := v.apply(full(wire(t, "Service", "d", "s", revision), wire(t, "Pod", "d", "p", revision))); err != nil {
			t.Fatal(err)
		}
		v.complete(revision, true)
	}
	same := func() (services, pods bool) {
		return sessions[0].Services()[0] == sessions[1].Services()[0], sessions[0].Pods()[0] == sessions[1].Pods()[0]
	}
	apply(0, 1)
	apply(1, 1)
	if services, pods := same(); !services || pods {
		t.Errorf("sessions share Services: %v, and pods: %v", services, pods)
	}
	apply(0, 2)
	if services, _ := same(); services {
		t.Error("sessions at different revisions share an object")
	}
	apply(1, 2)
	if services, _ := same(); !services {
		t.Error("sessions at the same revision again share nothing")
	}
}
