package session

import "testing"

// Objects that all nodes receive are stored once per process. Each session has the revision that it
// received, and its own pods.
func TestSharedObjects(t *testing.T) {
	var shared Shared
	sessions := []*Session{New(Config{NodeName: "w1", Shared: &shared}), New(Config{NodeName: "w2", Shared: &shared})}
	apply := func(i int, revision uint64) {
		t.Helper()
		v := sessions[i].view
		if err := v.applyObjects(fullSet(sentObject(t, "Service", "d", "s", revision),
			sentObject(t, "Pod", "d", "p", revision))); err != nil {
			t.Fatal(err)
		}
		v.completeBatch(revision, true)
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
