package scheduler_test

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

func (b *bed) deleted(namespace, name string, del func() error, there func() bool) {
	b.t.Helper()
	if err := del(); err != nil {
		b.t.Fatal(err)
	}
	b.eventually("the deletion of "+name, func() error {
		if there() {
			return fmt.Errorf("%s/%s is still known", namespace, name)
		}
		return nil
	})
}

// What was listed and then deleted before it was taken in stays deleted.
func TestAdoptResurrectsNothing(t *testing.T) {
	b := newBed(t, nil)
	b.node("n1", "8")
	bound := b.pod("bound", "1", func(pod *v1.Pod) { pod.Spec.NodeName = "n1" })
	free := b.pod("free", "1")
	known := func(what func(node, placed, queued bool) bool) func() bool {
		return func() bool {
			node, placed, _ := b.scheduler.Knows("n1", bound.UID)
			_, _, queued := b.scheduler.Knows("n1", free.UID)
			return what(node, placed, queued)
		}
	}
	b.eventually("the scheduler knows all", func() error {
		if !known(func(node, placed, queued bool) bool { return node && placed && queued })() {
			return errors.New("not yet")
		}
		return nil
	})
	nodes := client.CachedList[*v1.Node](b.informers, "", nil)
	pods := client.CachedList[*v1.Pod](b.informers, "", nil)
	now := int64(0)
	force := metav1.DeleteOptions{GracePeriodSeconds: &now}
	b.deleted("default", "bound", func() error {
		return client.Delete[*v1.Pod](b.ctx, b.client, "default", "bound", force)
	},
		known(func(_, placed, _ bool) bool { return placed }))
	b.deleted("default", "free", func() error {
		return client.Delete[*v1.Pod](b.ctx, b.client, "default", "free", force)
	},
		known(func(_, _, queued bool) bool { return queued }))
	b.deleted("", "n1", func() error {
		return client.Delete[*v1.Node](b.ctx, b.client, "", "n1", metav1.DeleteOptions{})
	},
		known(func(node, _, _ bool) bool { return node }))
	b.scheduler.AdoptLate(nodes, pods)
	if known(func(node, placed, queued bool) bool { return node || placed || queued })() {
		t.Error("a deleted node or pod is known again")
	}
}

// A pod that is no more, whatever the queue believes, is tried once.
func TestBindingAPodThatIsGoneEnds(t *testing.T) {
	b := newBed(t, nil)
	var tries atomic.Int64
	b.binds = func(string) error { tries.Add(1); return nil }
	b.node("n1", "8")
	ghost := b.pod("ghost", "1")
	b.eventually("the notice of its creation", func() error {
		if _, _, queued := b.scheduler.Knows("n1", ghost.UID); !queued {
			return errors.New("it is not queued yet")
		}
		return nil
	})
	now := int64(0)
	if err := client.Delete[*v1.Pod](b.ctx, b.client, "default", "ghost",
		metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
		t.Fatal(err)
	}
	b.eventually("the deletion", func() error {
		if _, _, queued := b.scheduler.Knows("n1", ghost.UID); queued {
			return errors.New("it is still queued")
		}
		return nil
	})
	b.lead()
	b.pod("first", "1") // once it is bound, the queue has been taken over
	b.awaitNode("first", "n1")
	tries.Store(0)
	b.scheduler.Requeue(ghost)
	b.eventually("giving the pod up", func() error {
		if _, placed, queued := b.scheduler.Knows("n1", ghost.UID); placed || queued || tries.Load() == 0 {
			return fmt.Errorf("placed %v, queued %v after %d tries", placed, queued, tries.Load())
		}
		return nil
	})
	if n := tries.Load(); n != 1 {
		t.Errorf("bound %d times", n)
	}
	b.pod("another", "1")
	b.awaitNode("another", "n1")
}

// A refusal of another sort is tried again, and told.
func TestBindingThatMissesSomethingElse(t *testing.T) {
	b := newBed(t, nil)
	var tries atomic.Int64
	b.binds = func(node string) error {
		if tries.Add(1) < 3 {
			return apierrors.NewNotFound(v1.Resource("nodes"), node)
		}
		return nil
	}
	b.node("n1", "8")
	b.lead()
	b.pod("p", "1")
	b.awaitNode("p", "n1")
	b.eventually("an event", func() error {
		for _, e := range b.events("p") {
			if e == `FailedScheduling: DefaultBinder: bind pod default/p to node n1: nodes "n1" not found` {
				return nil
			}
		}
		return fmt.Errorf("%q", b.events("p"))
	})
}

// clumsy is a plugin that panics over one pod.
type clumsy struct{}

func (clumsy) Name() string { return "Clumsy" }

func (clumsy) Filter(_ context.Context, c *framework.Cycle, _ *framework.NodeInfo) *framework.Status {
	if c.Pod.Pod.Name == "banana" {
		panic("slipped")
	}
	return nil
}

// A pod over which a plugin panics is the only one that is not scheduled.
func TestPanicOverOnePod(t *testing.T) {
	b := newBed(t, func(h *framework.Handle) []framework.WeightedPlugin {
		return append(plugins.Default(h), framework.WeightedPlugin{Plugin: clumsy{}})
	})
	b.node("n1", "8")
	b.lead()
	b.pod("banana", "1")
	b.eventually("an event", func() error {
		if e := b.events("banana"); len(e) == 0 || e[0] != "FailedScheduling: panic: slipped" {
			return fmt.Errorf("%q", e)
		}
		return nil
	})
	b.pod("other", "1")
	b.awaitNode("other", "n1")
}
