package pod

import (
	"context"
	"maps"
	"math"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
)

// EvictablePods returns the pods that use the node's resources and are not being evicted. Their
// specs contain the granted resources. The pods are shared: do not modify them.
func (s *Set) EvictablePods() []*v1.Pod {
	var out []*v1.Pod
	s.forEachWorker(func(e *podEntry) {
		w := e.worker
		if e.rejection != nil || !w.usesNodeResources() {
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if orphan := w.desired.Stop != nil && w.desired.Stop.Orphan; !w.evictor.requested &&
			w.evictor.stop == nil && !orphan {
			out = append(out, w.desired.Pod)
		}
	})
	return out
}

// EvictPod stops a pod immediately because the node is short of a resource, and sets the message in
// its status. It shortens the grace period of a pod that is being deleted. It returns false if
// there was no pod to stop.
func (s *Set) EvictPod(uid types.UID, message string) bool {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e == nil {
		return false
	}
	return e.worker.evictor.evictPod(lifecycle.Stop{Reason: "Evicted", Message: message, Disrupted: true})
}

// HasEnded reports whether an evicted pod has no running containers and no mounted volumes. While
// disk space is being reclaimed, its containers must also have been removed.
func (s *Set) HasEnded(uid types.UID) bool {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e == nil {
		return true
	}
	e.worker.mu.Lock()
	defer e.worker.mu.Unlock()
	return !e.worker.hasRemains()
}

// EvictingPod returns the UID of a pod that an earlier agent process evicted and that still has
// running containers or mounted volumes. It returns "" if there is no such pod. A pod with a
// terminal phase in the API counts as ended until its worker has queried the runtime.
func (s *Set) EvictingPod() (uid types.UID) {
	var uids []types.UID
	s.forEachWorker(func(e *podEntry) {
		e.worker.mu.Lock()
		defer e.worker.mu.Unlock()
		if e.eviction != nil && (e.worker.observed.Listed || !lifecycle.IsTerminal(e.worker.desired.Pod)) &&
			e.worker.hasRemains() {
			uids = append(uids, e.pod.UID)
		}
	})
	if len(uids) > 0 {
		uid = slices.Min(uids)
	}
	return uid
}

// SetDiskReclaim starts or stops the reclaim of disk space. While space is being reclaimed, workers
// remove the records, layers and logs of exited containers: all of ended pods, and replaced
// instances of other pods. left is the number of containers of ended pods that still exist.
func (s *Set) SetDiskReclaim(enabled bool) (left int) {
	s.forEachWorker(func(e *podEntry) { left += e.worker.setDiskReclaim(enabled) })
	return left
}

// cutPatience is how long MeasureStorage waits for partial results after its context has ended.
const cutPatience = time.Second

// MeasureStorage measures the disk usage of the given pods, also of pods without limits. When ctx
// ends, it returns what was counted until then. A pod is missing from the result if its file system
// does not respond.
func (s *Set) MeasureStorage(ctx context.Context, pods []*v1.Pod) map[types.UID]agent.PodStorage {
	out := make(map[types.UID]agent.PodStorage, len(pods))
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, p := range pods {
		s.mu.Lock()
		e := s.workers[p.UID]
		s.mu.Unlock()
		if e == nil {
			continue
		}
		// Start all measurements together: they take turns, so a large pod does not delay the
		// others.
		wg.Go(func() {
			use, err := e.worker.storage.measureStorage(ctx, p, math.MaxInt64)
			if err == nil {
				e.worker.storage.recordStorage(use)
			}
			mu.Lock()
			defer mu.Unlock()
			out[p.UID] = use.ToPodStorage()
		})
	}
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-ctx.Done():
		select {
		case <-done:
		case <-time.After(cutPatience):
		}
	}
	mu.Lock()
	defer mu.Unlock()
	return maps.Clone(out)
}

// FencePod stops a pod immediately, even if the pod is already stopping for another reason. The
// pod's phase becomes Failed, with the message, when its status can be reported.
func (s *Set) FencePod(uid types.UID, message string) {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e != nil {
		e.worker.evictor.fencePod(message)
	}
}
