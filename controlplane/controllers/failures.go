package controllers

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Replacements delays the replacement of failed pods in a fixed place: an ordinal of a StatefulSet,
// or a node of a DaemonSet. A failed pod there is deleted before its successor is created, so the
// API does not show how many pods failed before. The zero value is ready for use.
type Replacements struct {
	mu     sync.Mutex
	failed map[string]failures
}

type failures struct {
	pod   types.UID
	count int
	seen  time.Time // when the controller first observed that the pod had failed
}

// Wait returns how long the failed pod p must remain before it is replaced. The first failed pod of
// a place is replaced at once. Further delays double from 2 s to 5 min. The count starts again when
// no pod has failed in the place for twice the last delay plus two minutes.
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

// sweep removes the records of places whose retention has passed.
func (r *Replacements) sweep(now time.Time) {
	for place, f := range r.failed {
		if now.Sub(f.seen) > r.memory(f) {
			delete(r.failed, place)
		}
	}
}
