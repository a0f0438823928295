package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/durable"
)

// Evictable returns the pods that hold resources and were not evicted yet. Their specs contain the
// granted resources. The pods are shared: do not modify them.
func (s *Set) Evictable() []*v1.Pod {
	var out []*v1.Pod
	s.each(func(e *entry) {
		w := e.w
		if e.refused != nil || !w.holds() {
			return
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if orphan := w.desired.Stop != nil && w.desired.Stop.Orphan; !w.pressed && w.evicted == nil && !orphan {
			out = append(out, w.desired.Pod)
		}
	})
	return out
}

// Evict stops a pod at once because the node is short of a resource, and sets the message in its
// status. It cuts short the grace period of a pod that is being deleted. It reports whether there
// was a pod to stop.
func (s *Set) Evict(uid types.UID, message string) bool {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e == nil {
		return false
	}
	return e.w.evict(Stop{Reason: "Evicted", Message: message, Disrupted: true})
}

// Ended reports whether an evicted pod no longer uses the node's memory. While Spare is on, it must
// not use disk either.
func (s *Set) Ended(uid types.UID) bool {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e == nil {
		return true
	}
	e.w.mu.Lock()
	defer e.w.mu.Unlock()
	return !e.w.leaves()
}

// Evicting returns the UID of a pod that an earlier agent process evicted and that has not fully
// ended; "" if there is no such pod. A pod already terminal in the API counts as ended until its
// worker has observed it.
func (s *Set) Evicting() (uid types.UID) {
	var all []types.UID
	s.each(func(e *entry) {
		e.w.mu.Lock()
		defer e.w.mu.Unlock()
		if e.evicted != nil && (e.w.o.Listed || !final(e.w.desired.Pod)) && e.w.leaves() {
			all = append(all, e.pod.UID)
		}
	})
	if len(all) > 0 {
		uid = slices.Min(all)
	}
	return uid
}

// leaves reports whether an evicted pod still has running containers or mounted volumes. While
// Spare is on, container records count too. The lock is held.
func (w *worker) leaves() bool {
	return w.o.anyRunning() || !w.o.Volumes.Away || w.o.Spare && len(w.o.Containers) > 0
}

// Spare turns disk saving on or off. While it is on, records, layers and logs of ended containers
// are removed: all of ended pods, and replaced instances of others. It returns the number of
// remaining containers of ended pods.
func (s *Set) Spare(on bool) (left int) {
	s.each(func(e *entry) { left += e.w.spare(on) })
	return left
}

func (w *worker) spare(on bool) (left int) {
	w.mu.Lock()
	turned := on && !w.o.Spare
	w.o.Spare = on
	if onRecord(w.desired) {
		left = len(w.o.Containers)
	}
	w.mu.Unlock()
	if turned {
		w.poke()
	}
	return left
}

// cutPatience is how long MeasureStorage waits for partial results after its context has ended.
const cutPatience = time.Second

// MeasureStorage measures the disk usage of the given pods, also of pods without limits. Files that
// were not counted when ctx ended are missing from the sums. A pod is missing from the result if
// its file system does not respond.
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
			use, err := e.w.measure(ctx, p, math.MaxInt64)
			if err == nil {
				e.w.measured(use)
			}
			mu.Lock()
			defer mu.Unlock()
			out[p.UID] = use.storage()
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

// evict fails the pod permanently, unless it has already ended. The eviction is on disk before
// anything of the pod stops. A restarted agent therefore does not start the pod again, even if the
// control plane never received the eviction.
func (w *worker) evict(why Stop) bool {
	w.mu.Lock()
	pod, stop, over := w.desired.Pod, w.desired.Stop, w.over()
	w.pressed = w.pressed || why.Disrupted && !over
	w.mu.Unlock()
	if over || stop != nil && !(why.Disrupted && stop.Delete) {
		return false
	}
	var err error
	if stop == nil {
		if err = saveEviction(w.cfg.Paths, pod, why); err != nil {
			w.log.Error("a pod is evicted, and would be started again by the next agent if the control plane did not hear of it", "err", err)
		}
		why.Kept = err == nil
	}
	if !w.evictNow(why, err != nil) {
		return false
	}
	w.events.event(pod, "", v1.EventTypeWarning, why.Reason, why.Message)
	w.poke()
	return true
}

// evictNow stops the pod, unless it has ended while the eviction was written. In that case it
// removes the eviction file.
func (w *worker) evictNow(why Stop, unsaved bool) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch stop := w.desired.Stop; {
	case w.over():
		if w.evicted == nil {
			if err := os.Remove(filepath.Join(directory(w.cfg.Paths, w.desired.Pod.UID), evictionFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				w.log.Warn("a pod that ended by itself is on record as evicted", "err", err)
			}
		}
		return false
	case stop == nil:
		w.evicted, w.unsaved = &why, unsaved
		w.desired.Stop = w.evicted
	case stop.Delete:
		w.desired.Stop = stop.within(why.Grace) // the deletion allowed more time than the eviction does
	}
	return true
}

// over reports whether the pod has ended. The lock is held.
func (w *worker) over() bool { return final(w.desired.Pod) || terminal(w.last.Phase) }

// within returns the Stop with a grace period of at most grace.
func (s *Stop) within(grace time.Duration) *Stop {
	if s.Grace <= grace {
		return s
	}
	short := *s
	short.Grace = grace
	return &short
}

// keepEviction retries to write the eviction file if that failed before: a full disk may have space
// again.
func (w *worker) keepEviction() {
	w.mu.Lock()
	pod, why := w.desired.Pod, w.evicted
	due := w.unsaved && w.desired.Stop == why
	w.mu.Unlock()
	if !due || saveEviction(w.cfg.Paths, pod, *why) != nil { // the first failure was logged; the next turn retries
		return
	}
	kept := *why
	kept.Kept = true
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unsaved = false
	if w.desired.Stop == why {
		w.desired.Stop = &kept
	}
	w.evicted = &kept
}

// eviction is the file in the pod's directory with the reason of its eviction. Fields may be added
// but never change their meaning.
type eviction struct {
	Version   int    `json:"version"`
	Reason    string `json:"reason"`
	Message   string `json:"message"`
	Disrupted bool   `json:"disrupted,omitempty"`
}

const (
	evictionVersion = 1
	evictionFile    = "evicted.json"
	evictionLimit   = 1 << 20 // largest file that is read, in bytes
)

func saveEviction(p agent.Paths, pod *v1.Pod, why Stop) error {
	dir := directory(p, pod.UID)
	data, err := json.Marshal(eviction{Version: evictionVersion, Reason: why.Reason, Message: why.Message, Disrupted: why.Disrupted})
	if err == nil {
		err = durable.Write(filepath.Join(dir, evictionFile), data)
	}
	if err == nil {
		err = syncFolder(dir)
	}
	if err != nil {
		return fmt.Errorf("recording that pod %s/%s was evicted: %w", pod.Namespace, pod.Name, err)
	}
	return nil
}

// syncFolder syncs a directory, so that its entries survive a power failure.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// loadEviction returns the eviction of the pod by an earlier agent process; nil if there was none.
// The grace period of the returned Stop is zero.
func loadEviction(p agent.Paths, pod *v1.Pod) (*Stop, error) {
	file := filepath.Join(directory(p, pod.UID), evictionFile)
	st, err := os.Stat(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	var data []byte
	if err == nil && st.Size() > evictionLimit {
		err = fmt.Errorf("%s has more than %d bytes", file, evictionLimit)
	}
	if err == nil {
		data, err = os.ReadFile(file)
	}
	var was eviction
	if err == nil {
		err = json.Unmarshal(data, &was)
	}
	if err != nil {
		return nil, fmt.Errorf("reading why pod %s/%s was evicted: %w", pod.Namespace, pod.Name, err)
	}
	return &Stop{Reason: was.Reason, Message: was.Message, Disrupted: was.Disrupted, Kept: true}, nil
}
