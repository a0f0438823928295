package policy

import (
	"log/slog"
	"net/netip"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/fake"
)

type inMemory = fake.Cluster // an alias, because one of its methods has the same name

// moving is a view that changes right after its pods have been read.
type moving struct {
	*inMemory
	then func()
}

func (m *moving) Pods() []*v1.Pod {
	out := m.inMemory.Pods()
	if f := m.then; f != nil {
		m.then = nil
		f()
	}
	return out
}

// A pod for which Guard is called while the pods of the view are read is not considered removed.
// Otherwise it would run without its policies.
func TestPodThatComesMeanwhile(t *testing.T) {
	view := &moving{inMemory: fake.NewCluster()}
	e := New(Config{Objects: view, Sandboxes: sandboxes{}, Disabled: func() bool {
		return false
	}, Log: slog.New(slog.DiscardHandler)})
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p", UID: "u"}}
	attach := func() bool { return e.setAddresses(pod.UID, []netip.Addr{netip.MustParseAddr("10.88.0.7")}) }
	came := false
	view.then = func() {
		view.Put(pod)
		if came = e.mu.TryLock(); came { // otherwise it waits for the lock, as Guard does
			defer e.mu.Unlock()
			attach()
		}
	}
	e.podsWithAddresses(true)
	if e.mu.Lock(); !came {
		attach()
	}
	e.mu.Unlock()
	if pods, _, _ := e.podsWithAddresses(true); len(pods) != 1 || pods[0].UID != pod.UID {
		t.Errorf("the pods are %+v", pods)
	}
	view.Delete(pod)
	if pods, _, _ := e.podsWithAddresses(true); len(pods) != 0 {
		t.Errorf("once it has gone the pods are %+v", pods)
	}
}
