package pod

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/virtual"
)

// told records the names of events.
type told struct {
	agent.Reporter
	names []string
	last  *v1.Event
}

func (t *told) Event(e *v1.Event) { t.names, t.last = append(t.names, e.Name), e }

// Event names sort in the order of occurrence, also within one instant and after the clock was set
// back.
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

// A long error, such as a registry's HTML page, is shortened to its start and end in a status. An
// event is cut at a character boundary.
func TestWordsOfAFailureAreFew(t *testing.T) {
	x := newWorld(t, simplePod("u1"))
	page := "registry mirror: " + strings.Repeat("\xffé", 100<<10) + "registry docker.io: not found"
	for _, a := range []Action{{Kind: EnsureImage, Container: "c"}, {Kind: StartContainer, Container: "c"}, {Kind: CreateSandbox}} {
		for _, err := range []error{errors.New(page), &reasoned{"ErrImagePull", errors.New(page)}} {
			x.w.settle(a, err, false)
			if said := x.w.o.Failures[a.Key()].Message; len(said) > 5<<10 || !utf8.ValidString(said) || !strings.HasPrefix(said, "registry mirror: é") ||
				!strings.HasSuffix(said, "registry docker.io: not found") {
				t.Errorf("%v: %d bytes", a, len(said))
			}
		}
	}
	x.w.settle(Action{Kind: CreateSandbox}, errors.New("no address is left"), false)
	if said := x.w.o.Failures[(Action{Kind: CreateSandbox}).Key()].Message; said != "no address is left" {
		t.Error(said)
	}
	var out told
	r := &recorder{reporter: &out, now: time.Now, seen: map[string]*v1.Event{}}
	r.event(&v1.Pod{}, "", v1.EventTypeWarning, "Failed", strings.Repeat("é", 1000))
	if m := out.last.Message; len(m) > 1024 || !utf8.ValidString(m) || !strings.HasSuffix(m, "é...") {
		t.Errorf("an event of %d bytes", len(m))
	}
}

// F110: a deleted pod stays while one of its volumes cannot be unmounted, reports why, and is
// removed afterwards.
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
