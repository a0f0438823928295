package endpointslice

import (
	"sync"
	"sync/atomic"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/controllers"
)

// topology caches the CPU of zones and the last recorded hint Events during one leadership.
type topology struct {
	nodes cache.SharedIndexInformer
	stale *atomic.Bool // the CPU of a zone has changed

	mu         sync.Mutex
	cpu        map[string]int64
	lastEvents map[controllers.Key]string // last recorded Events of each Service
}

func newTopology(nodes cache.SharedIndexInformer, stale *atomic.Bool) *topology {
	stale.Store(true)
	return &topology{nodes: nodes, stale: stale, lastEvents: map[controllers.Key]string{}}
}

// zoneCPUs returns the current CPU of the zones. Callers must not modify the map.
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

// isNewEvent reports whether text differs from the last recorded Events of a Service, and records
// it. An empty text removes the record and returns false.
func (t *topology) isNewEvent(key controllers.Key, text string) bool {
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

// ofCapacity maps a node change that affects a zone's CPU to the Services with endpoints that are
// allocated to zones.
func ofCapacity(services cache.SharedIndexInformer, stale *atomic.Bool, c controllers.Change[*corev1.Node]) []controllers.Key {
	if c.Type == controllers.Updated && c.Old != nil && sameCapacity(c.Old, c.New) {
		return nil
	}
	stale.Store(true)
	var keys []controllers.Key
	for _, svc := range controllers.CachedBy[*corev1.Service](services, spreadIndex, "auto") {
		keys = append(keys, controllers.KeyOf(svc))
	}
	return keys
}
