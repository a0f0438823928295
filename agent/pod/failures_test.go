package pod

import (
	"errors"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/internal/virtual"
)

// A long error, such as a registry's HTML page, is shortened to its start and end in a status.
func TestWordsOfAFailureAreFew(t *testing.T) {
	x := newWorld(t, simplePod("u1"))
	page := "registry mirror: " + strings.Repeat("\xffé", 100<<10) + "registry docker.io: not found"
	for _, a := range []lifecycle.Action{{Kind: lifecycle.EnsureImage, Container: "c"},
		{Kind: lifecycle.StartContainer, Container: "c"}, {Kind: lifecycle.CreateSandbox}} {
		for _, err := range []error{errors.New(page), &waitingError{"ErrImagePull", errors.New(page)}} {
			x.worker.actions.recordResult(a, err, false)
			if said := x.worker.observed.Failures[a.Key()].Message; len(said) > 5<<10 || !utf8.ValidString(said) ||
				!strings.HasPrefix(said, "registry mirror: é") ||
				!strings.HasSuffix(said, "registry docker.io: not found") {
				t.Errorf("%v: %d bytes", a, len(said))
			}
		}
	}
	x.worker.actions.recordResult(lifecycle.Action{Kind: lifecycle.CreateSandbox},
		errors.New("no address is left"), false)
	if said := x.worker.observed.Failures[(lifecycle.Action{Kind: lifecycle.CreateSandbox}).Key()].Message; said !=
		"no address is left" {
		t.Error(said)
	}
}

// F110: a deleted pod stays while one of its volumes cannot be unmounted, reports why, and is
// removed afterwards.
func TestVolumesThatStay(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		n := newNode(t)
		n.startAgent()
		defer func() { n.stop() }()
		n.cluster.Put(simplePod("u1"))
		n.expectStatus("u1", running)
		n.vol.FailAlways("UnmountAll", errors.New("CSI volume v: there is no driver x"))
		deletePod(n, "u1", 1)
		time.Sleep(time.Minute)
		virtual.Wait()
		if e := strings.Join(n.cluster.Events("u1"), "\n"); !strings.Contains(e, "FailedUnMount") ||
			!strings.Contains(e, "CSI volume v: there is no driver x") {
			t.Errorf("no event has the reason why the pod is not removed: %s", e)
		}
		for _, s := range n.reportedPod("u1").Status.ContainerStatuses {
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
