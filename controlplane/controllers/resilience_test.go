package controllers_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// F123: a cluster that loses half of its notifications reaches the same state as without losses.
func TestLosingHalfOfTheNotifications(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var seed atomic.Uint64
		w := testcluster.StartCluster(t, testcluster.Options{
			Engine:          engine.Options{Resync: 50 * time.Millisecond},
			NoMutationGuard: true,
			ChangeController: func(c *engine.Descriptor) {
				for i := range c.Watches {
					// Handlers of one registration run one after the other, so each has its own
					// random source.
					c.Watches[i].Informer = testcluster.LossyInformer{SharedIndexInformer: c.Watches[i].Informer,
						Rand: rand.New(rand.NewPCG(seed.Add(1), 0))}
				}
				if c.Dynamic != nil {
					testcluster.LoseSomeEvents(c.Dynamic, &seed)
				}
			},
		})
		w.CreateObject(testcluster.NewService("web"))
		w.CreateObject(testcluster.NewDeployment("web", 10, "web:1"))
		w.AwaitRollout("web", 10)
		testcluster.Update(w, "web", func(d *appsv1.Deployment) {
			n := int32(6)
			d.Spec.Replicas = &n
			d.Spec.Template.Spec.Containers[0].Image = "web:2"
		})
		w.AwaitRollout("web", 6)
		w.Eventually("endpoints", func() error { return endpoints(w, "web", 6) })
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { n := int32(0); d.Spec.Replicas = &n })
		w.AwaitRollout("web", 0)
		if n := len(w.LivePods()); n != 0 {
			t.Errorf("%d pods", n)
		}
	})
}

// F125: a leadership that ends at any moment of a rollout costs nothing: no excess pods while
// another replica leads, and no missing pods at the end.
func TestLeadershipChangesDuringRollouts(t *testing.T) {
	w := testcluster.New(t, testcluster.Options{NoMutationGuard: true})
	stop := w.Lead(engine.Options{})
	w.AddNode("w1")
	w.CreateObject(testcluster.NewDeployment("web", 20, "web:0"))
	w.AwaitRollout("web", 20)
	changes, err := w.WatchPods()
	if err != nil {
		t.Fatal(err)
	}
	defer changes.Stop()
	chance := rand.New(rand.NewPCG(7, 7))
	for i := range 15 {
		testcluster.Update(w, "web", func(d *appsv1.Deployment) {
			d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i%4+1)
		})
		// The leadership ends at a random point of the rollout, measured in writes.
		until := w.Calls.Writes.Load() + int64(chance.IntN(60))
		ctx, cancel := context.WithTimeout(w.Ctx, 200*time.Millisecond)
		for w.Calls.Writes.Load() < until && ctx.Err() == nil {
		}
		cancel()
		stop()
		stop = w.Lead(engine.Options{})
	}
	w.AwaitRollout("web", 20)
	alive := map[string]bool{}
	for _, p := range w.PodsAtStart {
		alive[string(p.UID)] = true
	}
	last := revisionNow(w)
	for {
		e, ok := <-changes.ResultChan()
		if !ok {
			t.Fatal("the watch ended")
		}
		p, ok := e.Object.(*corev1.Pod)
		if !ok {
			continue
		}
		if e.Type == "DELETED" || p.DeletionTimestamp != nil {
			delete(alive, string(p.UID))
		} else {
			alive[string(p.UID)] = true
		}
		if len(alive) > 25 { // 20 and 25% surge
			t.Fatalf("%d pods at revision %s", len(alive), p.ResourceVersion)
		}
		if p.Name == last {
			break
		}
	}
}

// revisionNow makes a last change that a watch will show and returns the name to wait for.
func revisionNow(w *testcluster.Cluster) string {
	w.T.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "last"},
		Spec: testcluster.NewDeployment("x", 1, "x").Spec.Template.Spec}
	p.Labels = map[string]string{"last": "yes"}
	w.CreateObject(p)
	return p.Name
}

// F68 over the real registry: the numbers as every watcher sees them, at every instant of a rollout.
func TestRolloutStaysWithinBounds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.CreateObject(testcluster.NewDeployment("web", 12, "web:0"))
		w.AwaitRollout("web", 12)
		changes, err := w.WatchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer changes.Stop()
		for i := range 5 {
			testcluster.Update(w, "web", func(d *appsv1.Deployment) {
				d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i+1)
			})
			w.AwaitRollout("web", 12)
		}
		alive, ready := map[string]bool{}, map[string]bool{}
		for _, p := range w.PodsAtStart {
			alive[string(p.UID)], ready[string(p.UID)] = true, true
		}
		last := revisionNow(w)
		for e := range changes.ResultChan() {
			p, ok := e.Object.(*corev1.Pod)
			if !ok {
				continue
			}
			if p.Name == last {
				return
			}
			uid := string(p.UID)
			delete(alive, uid)
			delete(ready, uid)
			if e.Type != "DELETED" && p.DeletionTimestamp == nil {
				alive[uid] = true
				if api.IsPodReady(p) {
					ready[uid] = true
				}
			}
			if len(alive) > 15 || len(ready) < 9 { // 12, surge 3, unavailable 3
				t.Fatalf("%d pods, %d ready at revision %s", len(alive), len(ready), p.ResourceVersion)
			}
		}
		t.Fatal("the watch ended")
	})
}

// No limit of the controllers delays a large Deployment, and no pod is created twice.
func TestManyReplicas(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const n = 2000
		w := testcluster.StartCluster(t, testcluster.Options{NoMutationGuard: true})
		w.Nodes.Mark(w.Nodes.Held, "web", true)
		began := time.Now()
		w.CreateObject(testcluster.NewDeployment("web", n, "web:1"))
		pods := client.Informer[*corev1.Pod](w.Informers)
		w.EventuallyWithin(30*time.Second, "creating the pods", func() error {
			if have := len(pods.GetIndexer().ListKeys()); have != n {
				return fmt.Errorf("%d pods", have)
			}
			return nil
		})
		took := time.Since(began)
		t.Logf("%d pods created and bound in %v, %.0f a second", n, took, n/took.Seconds())
		if have := len(w.LivePods()); have != n {
			t.Errorf("%d pods instead of %d", have, n)
		}
	})
}
