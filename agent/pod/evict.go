package pod

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wholefile"
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
	o := &e.w.o
	return !o.anyRunning() && o.Volumes.Away && (!o.Spare || len(o.Containers) == 0)
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
	if final(w.desired.Pod) {
		left = len(w.o.Containers)
	}
	w.mu.Unlock()
	if turned {
		w.poke()
	}
	return left
}

// MeasureStorage measures what these pods have on disk, those without limits too. What was not counted when ctx ended is
// missing from the sums.
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
	wg.Wait()
	return out
}

// evict ends the pod for good. That is on disk before anything of the pod ends: an agent that is started anew does not
// bring it up again, whatever the control plane has heard.
func (w *worker) evict(why Stop) bool {
	w.mu.Lock()
	pod, stop := w.desired.Pod, w.desired.Stop
	w.pressed = w.pressed || why.Disrupted
	w.mu.Unlock()
	switch {
	case stop == nil:
		if err := saveEviction(w.cfg.Paths, pod, why); err != nil {
			w.log.Error("a pod is evicted, and would be started again by the next agent if the control plane did not hear of it", "err", err)
		}
	case !why.Disrupted || !stop.Delete:
		return false
	}
	w.mu.Lock()
	switch stop = w.desired.Stop; {
	case stop == nil:
		w.evicted = &why
		w.desired.Stop = w.evicted
	case stop.Delete && stop.Grace > why.Grace: // it has been given more time than there is
		short := *stop
		short.Grace = why.Grace
		w.desired.Stop = &short
	}
	w.mu.Unlock()
	w.events.event(pod, "", v1.EventTypeWarning, why.Reason, why.Message)
	w.poke()
	return true
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
	data, err := json.Marshal(eviction{Version: evictionVersion, Reason: why.Reason, Message: why.Message, Disrupted: why.Disrupted})
	if err == nil {
		err = wholefile.Write(filepath.Join(directory(p, pod.UID), evictionFile), data)
	}
	if err != nil {
		return fmt.Errorf("recording that pod %s/%s was evicted: %w", pod.Namespace, pod.Name, err)
	}
	return nil
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
	return &Stop{Reason: was.Reason, Message: was.Message, Disrupted: was.Disrupted}, nil
}
