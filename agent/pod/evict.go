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

// Evictable are the pods that hold something and have not been told to go by Evict, with the resources that they were
// granted. Shared: do not modify.
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

// Evict ends a pod at once because the node is short of something, and says so in its status. Of one that is being deleted
// the grace period is cut off. It says whether there was anything to end.
func (s *Set) Evict(uid types.UID, message string) bool {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e == nil {
		return false
	}
	return e.w.evict(Stop{Reason: "Evicted", Message: message, Disrupted: true})
}

// Ended says that nothing is left of an evicted pod that would take the node's memory, nor, while Spare is on, its disk.
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

// Evicting is a pod that an earlier life of the agent has evicted and of which something may be left; "" = none. One whose end
// the API has is among them once its worker has looked: until then it counts as ended.
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

// leaves says that something is left of an evicted pod. The lock is held.
func (w *worker) leaves() bool {
	return w.o.anyRunning() || !w.o.Volumes.Away || w.o.Spare && len(w.o.Containers) > 0
}

// Spare has the records, layers and logs removed of containers that have ended, of pods that have and of instances that
// were followed by another, or ends that. It returns of how many containers of ended pods there still are some.
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

// cutPatience is how long sums are waited for of walks that were cut short.
const cutPatience = time.Second

// MeasureStorage measures what these pods have on disk, those without limits too. What was not counted when ctx ended is
// missing from the sums; a pod whose files do not answer is missing altogether.
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
		// All at once: they take turns, and none comes too late for those before it.
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

// evict ends the pod for good, unless it has ended by itself. That is on disk before anything of the pod ends: an agent that
// is started anew does not bring it up again, whatever the control plane has heard.
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

// evictNow has the pod end, unless it did so while that was written down.
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
		w.desired.Stop = stop.within(why.Grace) // it has been given more time than there is
	}
	return true
}

// over says that the pod has ended. The lock is held.
func (w *worker) over() bool { return final(w.desired.Pod) || terminal(w.last.Phase) }

// within is the stop with no more than this time for it.
func (s *Stop) within(grace time.Duration) *Stop {
	if s.Grace <= grace {
		return s
	}
	short := *s
	short.Grace = grace
	return &short
}

// keepEviction writes down that the pod was evicted, where that failed before: a full disk has room once something has gone.
func (w *worker) keepEviction() {
	w.mu.Lock()
	pod, why := w.desired.Pod, w.evicted
	due := w.unsaved && w.desired.Stop == why
	w.mu.Unlock()
	if !due || saveEviction(w.cfg.Paths, pod, *why) != nil { // which has been told; the next turn tries again
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

// eviction is why a pod was evicted, on disk in its folder. Fields are added under new names and never change their meaning.
type eviction struct {
	Version   int    `json:"version"`
	Reason    string `json:"reason"`
	Message   string `json:"message"`
	Disrupted bool   `json:"disrupted,omitempty"`
}

const (
	evictionVersion = 1
	evictionFile    = "evicted.json"
	evictionLimit   = 1 << 20 // bytes of the file that are read
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

// syncFolder makes the names in a folder outlive a power cut.
func syncFolder(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// loadEviction is why an earlier life of the agent has evicted the pod; nil when none has. No time is left for what still runs.
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
