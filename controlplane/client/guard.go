package client

import (
	"context"
	"fmt"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
)

// guard detects, in tests, modifications of objects that are shared with the watch cache. It keeps
// a copy of each object that an informer reports, and compares the objects with their copies. It
// calls fail with a description of each modified object.
type guard struct {
	fail func(string)

	mu   sync.Mutex
	seen []guarded
}

type guarded struct {
	shared runtime.Object
	copied runtime.Object
}

// guardInterval is the interval at which guard compares all shared objects with their copies.
const guardInterval = 200 * time.Millisecond

func (g *guard) checkPeriodically(ctx context.Context) {
	tick := time.NewTicker(guardInterval)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			g.compareObjects()
		case <-ctx.Done():
			g.compareObjects()
			return
		}
	}
}

func (g *guard) compareObjects() {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, s := range g.seen {
		if !equality.Semantic.DeepEqual(s.shared, s.copied) {
			o := s.copied.(api.Object)
			g.fail(fmt.Sprintf("a shared %T was modified: %s/%s at resourceVersion %s", s.copied, o.GetNamespace(),
				o.GetName(), o.GetResourceVersion()))
		}
	}
}

func (g *guard) addObject(obj any) {
	o, ok := obj.(api.Object)
	if !ok {
		return
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	g.seen = append(g.seen, guarded{shared: o, copied: o.DeepCopyObject()})
}

// OnAdd implements cache.ResourceEventHandler.
func (g *guard) OnAdd(obj any, _ bool) { g.addObject(obj) }

// OnUpdate implements cache.ResourceEventHandler.
func (g *guard) OnUpdate(_, obj any) { g.addObject(obj) }

// OnDelete implements cache.ResourceEventHandler.
func (g *guard) OnDelete(any) {}
