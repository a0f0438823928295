package controllers_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// lossy is an informer that loses half of its notifications.
type lossy struct {
	cache.SharedIndexInformer
	rand *rand.Rand
}

func (l lossy) AddEventHandler(h cache.ResourceEventHandler) (cache.ResourceEventHandlerRegistration, error) {
	// Each handler has its own random source: the handler of an ended leadership may still be
	// called when the next leadership starts.
	return l.SharedIndexInformer.AddEventHandler(half{h, rand.New(rand.NewPCG(l.rand.Uint64(), 0))})
}

type half struct {
	cache.ResourceEventHandler
	rand *rand.Rand
}

func (h half) OnAdd(obj any, initial bool) {
	if h.rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnAdd(obj, initial)
	}
}

func (h half) OnUpdate(old, obj any) {
	if h.rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnUpdate(old, obj)
	}
}

func (h half) OnDelete(obj any) {
	if h.rand.IntN(2) == 0 {
		h.ResourceEventHandler.OnDelete(obj)
	}
}

// F123: a cluster that loses half of its notifications reaches the same state as without losses.
func TestLosingHalfOfTheNotifications(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		var seed atomic.Uint64
		w := start(t, options{
			engine: controllers.Options{Resync: 50 * time.Millisecond},
			quiet:  true,
			change: func(c *controllers.Controller) {
				for i := range c.Watches {
					// Handlers of one registration run one after the other, so each has its own
					// random source.
					c.Watches[i].Informer = lossy{c.Watches[i].Informer, rand.New(rand.NewPCG(seed.Add(1), 0))}
				}
				if c.Dynamic != nil {
					loseSome(c.Dynamic, &seed)
				}
			},
		})
		w.create(service("web"))
		w.create(app("web", 10, "web:1"))
		w.rolledOut("web", 10)
		update(w, "web", func(d *appsv1.Deployment) {
			n := int32(6)
			d.Spec.Replicas = &n
			d.Spec.Template.Spec.Containers[0].Image = "web:2"
		})
		w.rolledOut("web", 6)
		w.eventually("endpoints", func() error { return w.endpoints("web", 6) })
		update(w, "web", func(d *appsv1.Deployment) { n := int32(0); d.Spec.Replicas = &n })
		w.rolledOut("web", 0)
		if n := len(w.pods()); n != 0 {
			t.Errorf("%d pods", n)
		}
	})
}

// loseSome makes the informers of all kinds lossy.
func loseSome(e *controllers.DynamicWatch, seed *atomic.Uint64) {
	now, made := e.Current, map[cache.SharedIndexInformer]cache.SharedIndexInformer{}
	var mu sync.Mutex // each controller calls this
	e.Current = func() *client.Informed {
		mu.Lock()
		defer mu.Unlock()
		out := *now()
		out.Kinds = slices.Clone(out.Kinds)
		for i, k := range out.Kinds {
			if made[k.Informer] == nil {
				made[k.Informer] = lossy{k.Informer, rand.New(rand.NewPCG(seed.Add(1), 0))}
			}
			out.Kinds[i].Informer = made[k.Informer]
		}
		return &out
	}
}

// F125: a leadership that ends at any moment of a rollout costs nothing: no excess pods while
// another replica leads, and no missing pods at the end.
func TestLeadershipChangesDuringRollouts(t *testing.T) {
	w := newWorld(t, options{quiet: true})
	stop := w.lead(controllers.Options{})
	w.node("w1")
	w.create(app("web", 20, "web:0"))
	w.rolledOut("web", 20)
	changes, err := w.watchPods()
	if err != nil {
		t.Fatal(err)
	}
	defer changes.Stop()
	chance := rand.New(rand.NewPCG(7, 7))
	for i := range 15 {
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i%4+1) })
		// The leadership ends at a random point of the rollout, measured in writes.
		until := w.calls.writes.Load() + int64(chance.IntN(60))
		ctx, cancel := context.WithTimeout(w.ctx, 200*time.Millisecond)
		for w.calls.writes.Load() < until && ctx.Err() == nil {
		}
		cancel()
		stop()
		stop = w.lead(controllers.Options{})
	}
	w.rolledOut("web", 20)
	alive := map[string]bool{}
	for _, p := range w.podsAtStart {
		alive[string(p.UID)] = true
	}
	last := w.revisionNow()
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
func (w *world) revisionNow() string {
	w.t.Helper()
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "last"}, Spec: app("x", 1, "x").Spec.Template.Spec}
	p.Labels = map[string]string{"last": "yes"}
	w.create(p)
	return p.Name
}

// F68 over the real registry: the numbers as every watcher sees them, at every instant of a rollout.
func TestRolloutStaysWithinBounds(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{quiet: true})
		w.create(app("web", 12, "web:0"))
		w.rolledOut("web", 12)
		changes, err := w.watchPods()
		if err != nil {
			t.Fatal(err)
		}
		defer changes.Stop()
		for i := range 5 {
			update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = fmt.Sprintf("web:%d", i+1) })
			w.rolledOut("web", 12)
		}
		alive, ready := map[string]bool{}, map[string]bool{}
		for _, p := range w.podsAtStart {
			alive[string(p.UID)], ready[string(p.UID)] = true, true
		}
		last := w.revisionNow()
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
				if controllers.IsPodReady(p) {
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
		w := start(t, options{quiet: true})
		w.nodes.set(w.nodes.held, "web", true)
		began := time.Now()
		w.create(app("web", n, "web:1"))
		pods := client.Informer[*corev1.Pod](w.informers)
		w.within(30*time.Second, "creating the pods", func() error {
			if have := len(pods.GetIndexer().ListKeys()); have != n {
				return fmt.Errorf("%d pods", have)
			}
			return nil
		})
		took := time.Since(began)
		t.Logf("%d pods created and bound in %v, %.0f a second", n, took, n/took.Seconds())
		if have := len(w.pods()); have != n {
			t.Errorf("%d pods instead of %d", have, n)
		}
	})
}
