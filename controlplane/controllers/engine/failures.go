package engine

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// ReplacementBackoff delays the replacement of pods that fail repeatedly in one place: an ordinal
// of a StatefulSet, or a node of a DaemonSet. A failed pod there is deleted before its successor is
// created, so that the API does not show how many pods have failed before. The zero value is ready
// for use.
type ReplacementBackoff struct {
	mu     sync.Mutex
	failed map[string]failureRecord
}

type failureRecord struct {
	pod        types.UID
	count      int
	observedAt time.Time // when the controller first observed that the pod had failed
}

// RemainingDelay returns how long failed pod p must be kept before it is replaced. place is the
// pod's ordinal or node. The first failed pod in a place is replaced at once. Further delays double
// from 2 s to 5 min. The count starts again when no pod has failed in the place for twice the last
// delay plus two minutes.
func (r *ReplacementBackoff) RemainingDelay(place string, p *corev1.Pod, now time.Time) time.Duration {
	r.mu.Lock()
	defer r.mu.Unlock()
	f, ok := r.failed[place]
	if !ok || f.pod != p.UID {
		if ok && now.Sub(f.observedAt) > r.retention(f) {
			f.count = 0
		}
		f = failureRecord{pod: p.UID, count: f.count + 1, observedAt: now}
		r.removeExpiredFailures(now)
		if r.failed == nil {
			r.failed = map[string]failureRecord{}
		}
		r.failed[place] = f
	}
	return max(0, f.observedAt.Add(f.replacementDelay()).Sub(now))
}

func (f failureRecord) replacementDelay() time.Duration {
	if f.count <= 1 {
		return 0
	}
	return refusalDelay(f.count - 1)
}

func (r *ReplacementBackoff) retention(f failureRecord) time.Duration {
	return 2*f.replacementDelay() + 2*time.Minute
}

// removeExpiredFailures removes the records of places (ordinals or nodes) in which no pod has
// failed for the retention time of the record.
func (r *ReplacementBackoff) removeExpiredFailures(now time.Time) {
	for place, f := range r.failed {
		if now.Sub(f.observedAt) > r.retention(f) {
			delete(r.failed, place)
		}
	}
}
