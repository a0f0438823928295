package endpointslice

import (
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/controllers/engine"
)

// topology caches the CPU of each zone, and the Events about topology hints that were recorded
// last, for one term of leadership.
type topology struct {
	nodes cache.SharedIndexInformer
	stale *atomic.Bool // true if cpu must be computed again

	mu         sync.Mutex
	cpu        map[string]int64
	lastEvents map[engine.Key]string // text of the Events that were recorded last for each Service
}

func newTopology(nodes cache.SharedIndexInformer, stale *atomic.Bool) *topology {
	stale.Store(true)
	return &topology{nodes: nodes, stale: stale, lastEvents: map[engine.Key]string{}}
}

// zoneCPUs returns the current result of function zoneCPUs for all nodes. Callers must not modify
// it.
func (t *topology) zoneCPUs() map[string]int64 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.stale.Swap(false) {
		var all []*corev1.Node
		for _, n := range t.nodes.GetStore().List() {
			all = append(all, n.(*corev1.Node))
		}
		t.cpu = zoneCPUs(all)
	}
	return t.cpu
}

// isNewEvent stores text as the last Events of the Service with this key. It reports whether Events
// with this text must be recorded: text is not "" and differs from the text stored before.
func (t *topology) isNewEvent(key engine.Key, text string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.lastEvents[key] == text {
		return false
	}
	if text == "" {
		delete(t.lastEvents, key)
		return false
	}
	t.lastEvents[key] = text
	return true
}

// ofCapacity returns the keys of the Services to reconcile after change c of a node. If c affects
// the CPU of a zone, it sets stale and returns all Services with endpoints that are allocated to
// zones. Otherwise it returns nil.
func ofCapacity(services cache.SharedIndexInformer, stale *atomic.Bool, c engine.Change[*corev1.Node]) []engine.Key {
	if c.Type == engine.Updated && c.Old != nil && sameCapacity(c.Old, c.New) {
		return nil
	}
	stale.Store(true)
	var keys []engine.Key
	for _, svc := range engine.CachedBy[*corev1.Service](services, spreadIndex, "auto") {
		keys = append(keys, engine.KeyOf(svc))
	}
	return keys
}
