package replicaset_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/replicaset"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
	"keelson.dev/keelson/internal/wait"
)

// onlyReplicaSets is a world without other controllers, and with no nodes.
var onlyReplicaSets = testcluster.Options{NoMutationGuard: true, Controllers: func(d engine.Deps) []*engine.Descriptor {
	return []*engine.Descriptor{replicaset.New(d)}
}}

// set is a ReplicaSet.
func set(name string, replicas int32) *appsv1.ReplicaSet {
	d := testcluster.NewDeployment(name, replicas, "web:1")
	return &appsv1.ReplicaSet{ObjectMeta: d.ObjectMeta,
		Spec: appsv1.ReplicaSetSpec{Replicas: &replicas, Selector: d.Spec.Selector, Template: d.Spec.Template}}
}

func resize(w *testcluster.Cluster, name string, replicas int32) {
	w.T.Helper()
	w.Eventually("resizing "+name, func() error {
		rs, err := client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", name)
		if err != nil {
			return err
		}
		rs = rs.DeepCopy()
		rs.Spec.Replicas = &replicas
		_, err = client.Update(w.Ctx, w.Admin, rs)
		return err
	})
}

// A size that was requested by mistake can be corrected before it is reached.
func TestMillionThenOne(t *testing.T) {
	w := testcluster.New(t, onlyReplicaSets)
	w.Lead(engine.Options{})
	w.CreateObject(set("web", 1_000_000))
	w.Eventually("the first thousand pods", func() error {
		if n := len(w.LivePods()); n < 1000 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	w.Eventually("a status that shows how far it has come", func() error {
		rs, err := client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", "web")
		if err == nil && rs.Status.Replicas < 500 {
			err = fmt.Errorf("%d replicas", rs.Status.Replicas)
		}
		return err
	})
	resize(w, "web", 1)
	most := 0
	w.EventuallyWithin(time.Minute, "scaling to one", func() error {
		n := len(w.LivePods())
		if most = max(most, n); n != 1 {
			return fmt.Errorf("%d pods", n)
		}
		return nil
	})
	t.Logf("at most %d pods were there", most)
	w.Eventually("its status", func() error {
		rs, err := client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", "web")
		if err == nil && (rs.Status.Replicas != 1 || rs.Status.ObservedGeneration != rs.Generation) {
			err = fmt.Errorf("%+v", rs.Status)
		}
		return err
	})
}

// A node that refuses every pod is not offered hundreds of them.
func TestRefusedPods(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		o := onlyReplicaSets
		var refuses atomic.Bool
		refuses.Store(true)
		o.Controllers = func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{replicaset.New(d), refusing(d, &refuses)}
		}
		w := testcluster.New(t, o)
		w.Nodes.Mark(w.Nodes.Dead, "w1", true) // the other controller simulates it
		w.Lead(engine.Options{})
		w.CreateObject(set("web", 3))
		time.Sleep(6 * time.Second) // of the bubble's own time
		virtual.Wait()
		list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if len(list) < 4 || len(list) > 7 {
			t.Errorf("%d pods in 6 s", len(list))
		}
		rs, err := client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", "web")
		if err != nil {
			t.Fatal(err)
		}
		if c := rs.Status.Conditions; len(c) != 1 || c[0].Type != appsv1.ReplicaSetReplicaFailure ||
			!strings.Contains(c[0].Message, "refused by node w1: NodeAffinity") {
			t.Errorf("conditions %+v", c)
		}
		events, err := client.List[*corev1.Event](w.Ctx, w.Admin, "default", metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		said := 0
		for _, e := range events {
			if e.Reason == "BackOff" && strings.Contains(e.Message, ", attempt ") &&
				strings.Contains(e.Message, ": pod web-") {
				said++
			}
		}
		if said == 0 {
			t.Errorf("no event tells of it among %d", len(events))
		}
		refuses.Store(false)
		time.Sleep(time.Minute)
		virtual.Wait()
		running := 0
		for _, p := range w.LivePods() {
			if p.Status.Phase == corev1.PodRunning {
				running++
			}
		}
		if rs, err = client.Get[*appsv1.ReplicaSet](w.Ctx, w.Admin, "default", "web"); err != nil || running != 3 ||
			len(rs.Status.Conditions) > 0 {
			t.Errorf("a minute after the node takes pods again %d run, conditions %+v, %v", running,
				rs.Status.Conditions, err)
		}
	})
}

// refusing binds every pod to w1, which fails it while refuses is true, and runs it otherwise.
func refusing(d engine.Deps, refuses *atomic.Bool) *engine.Descriptor {
	pods := client.Informer[*corev1.Pod](d.Informers)
	return &engine.Descriptor{
		Name:    "refusing-node",
		Watches: []engine.Watch{engine.OnInformer(pods, engine.Self[*corev1.Pod])},
		Lead: func(t *engine.Term) engine.Reconcile {
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				p, ok := engine.Cached[*corev1.Pod](pods, key.Namespace, key.Name)
				switch {
				case !ok || p.Status.Phase == corev1.PodFailed || p.Status.Phase == corev1.PodRunning:
					return 0, nil
				case p.Spec.NodeName == "":
					b := &corev1.Binding{ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name},
						Target: corev1.ObjectReference{Kind: "Node", Name: "w1"}}
					_, err := client.Sub[*corev1.Pod](ctx, t.Client, p.Namespace, p.Name, "binding", b)
					return 0, err
				}
				if err := wait.Delay(ctx, 50*time.Millisecond); err != nil {
					return 0, err
				}
				next := p.DeepCopy()
				next.Status.Phase = corev1.PodRunning
				if refuses.Load() {
					next.Status = corev1.PodStatus{Phase: corev1.PodFailed, Reason: "NodeAffinity",
						Message: "Pod was rejected: it does not fit"}
				}
				_, err := client.UpdateStatus(ctx, t.Client, next)
				return 0, err
			}
		},
	}
}
