package controllers

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Replacements paces the replacing of pods that failed in a place that is always the same: an ordinal of a
// StatefulSet, a node of a DaemonSet. There the failed pod is deleted for its successor's sake, so that nothing in the
// API remembers how many went before. The zero value is ready.
type Replacements struct {
	mu     sync.Mutex
	failed map[string]failures
}

type failures struct {
	pod   types.UID
	count int
	seen  time.Time // when the pod was found to have failed
}

// Wait says how long the failed pod p of a place is to stay before it is replaced: the first not at all, further ones
// 2 s, doubling to 5 min, until none has failed there for twice as long as the last pause and two minutes.
func (r *Replacements) Wait(place string, p *corev1.Pod, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, ok := r.failed[place]
	if !ok || f.pod != p.UID {
		if ok && now.Sub(f.seen) > r.memory(f) {
			f.count = 0
		}
		f = failures{pod: p.UID, count: f.count + 1, seen: now}
		r.sweep(now)
		if r.failed == nil {
			r.failed = map[string]failures{}
		}
		r.failed[place] = f
	}
	return max(0, f.seen.Add(f.pause()).Sub(now))
}

func (f failures) pause() time.Duration {
	if f.count <= 1 {
		return 0
	}
	return pause(f.count - 1)
}

func (r *Replacements) memory(f failures) time.Duration { return 2*f.pause() + 2*time.Minute }

// sweep forgets places where nothing has failed for long.
func (r *Replacements) sweep(now time.Time) {
	for place, f := range r.failed {
		if now.Sub(f.seen) > r.memory(f) {
			delete(r.failed, place)
		}
	}
}
