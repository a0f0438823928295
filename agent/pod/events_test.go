package pod

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// told remembers the names of events.
type told struct {
	agent.Reporter
	names []string
}

func (t *told) Event(e *v1.Event) { t.names = append(t.names, e.Name) }

// Events of one moment, and those told after the clock was set back, have names in the order in which they happened.
func TestEventNamesAreInOrder(t *testing.T) {
	clock := time.Date(2026, 5, 1, 12, 0, 0, 0, time.UTC)
	var out told
	r := &recorder{reporter: &out, now: func() time.Time { return clock }, seen: map[string]*v1.Event{}}
	p := &v1.Pod{}
	p.Name = "web"
	for i, reason := range []string{"Pulled", "Created", "Started", "Unhealthy", "Killing"} {
		if i == 3 {
			clock = clock.Add(-time.Hour)
		}
		r.event(p, "", v1.EventTypeNormal, reason, "")
	}
	if len(out.names) != 5 || !slices.IsSorted(out.names) || len(slices.Compact(slices.Clone(out.names))) != 5 {
		t.Errorf("names: %q", out.names)
	}
}

// F110: a pod that is deleted stays while a volume of it cannot be unmounted, says why, and goes when it can be.
func TestVolumesThatStay(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.start()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.is("u1", running)
		n.vol.FailAlways("UnmountAll", errors.New("CSI volume v: there is no driver x"))
		deletePod(n, "u1", 1)
		time.Sleep(time.Minute)
		virtual.Wait()
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "FailedUnMount") || !strings.Contains(e, "CSI volume v: there is no driver x") {
			t.Errorf("nobody is told why the pod does not go: %s", e)
		}
		for _, s := range n.pod("u1").Status.ContainerStatuses {
			if s.State.Terminated == nil {
				t.Errorf("container %s has ended, and is %+v", s.Name, s.State)
			}
		}
		n.vol.FailAlways("UnmountAll", nil)
		time.Sleep(10 * time.Minute)
		virtual.Wait()
		if _, there := n.cluster.Pod("u1"); there {
			t.Error("the pod stays")
		}
	})
}
