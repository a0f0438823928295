package pod

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/agent/pod/podfiles"
)

// evictor stops the pod although its spec says that it should run: it evicts, rejects or fences the
// pod. A pod is evicted in favor of other pods or because of a storage limit. It is fenced because
// its attached volumes may be attached to another node. The fields are guarded by worker.mu.
type evictor struct {
	w         *worker
	stop      *lifecycle.Stop // why the worker stopped the pod; nil: it did not
	fenced    bool            // fencePod was called
	requested bool            // an eviction in favor of other pods was requested
	unsaved   bool            // stop must still be written to disk
}

// evictPod stops the pod and makes its phase Failed, with the reason and message of cause. It
// returns false if the pod has ended or already stops for another reason. It writes the eviction to
// disk before any container is stopped. A restarted agent therefore does not start the pod again,
// even if the control plane never received the eviction.
func (ev *evictor) evictPod(cause lifecycle.Stop) bool {
	ev.w.mu.Lock()
	pod, stop, ended := ev.w.desired.Pod, ev.w.desired.Stop, ev.w.hasEnded()
	ev.requested = ev.requested || cause.Disrupted && !ended
	ev.w.mu.Unlock()
	if ended || stop != nil && !(cause.Disrupted && stop.Delete) {
		return false
	}
	var err error
	if stop == nil {
		if err = podfiles.SaveEviction(ev.w.cfg.Paths, pod, cause); err != nil {
			ev.w.log.Error(
				"cannot record the eviction of a pod: a restarted agent starts the pod again unless the control plane "+
					"has received the eviction",
				"err", err)
		}
		cause.Recorded = err == nil
	}
	if !ev.stopEvicted(cause, err != nil) {
		return false
	}
	ev.w.events.Emit(pod, "", v1.EventTypeWarning, cause.Reason, cause.Message)
	ev.w.wakeUp()
	return true
}

// stopEvicted stops the pod for cause, unless the pod has ended while the eviction was written. In
// that case it removes the eviction file and returns false. unsaved is true if the eviction file
// could not be written.
func (ev *evictor) stopEvicted(cause lifecycle.Stop, unsaved bool) bool {
	ev.w.mu.Lock()
	defer ev.w.mu.Unlock()
	switch stop := ev.w.desired.Stop; {
	case ev.w.hasEnded():
		if ev.stop == nil {
			if err := os.Remove(filepath.Join(podfiles.PodDirectory(ev.w.cfg.Paths, ev.w.desired.Pod.UID),
				podfiles.EvictionFile)); err != nil && !errors.Is(err, fs.ErrNotExist) {
				ev.w.log.Warn("cannot remove the eviction record of a pod that ended by itself", "err", err)
			}
		}
		return false
	case stop == nil:
		ev.stop, ev.unsaved = &cause, unsaved
		ev.w.desired.Stop = ev.stop
	case stop.Delete:
		ev.w.desired.Stop = stop.LimitGrace(cause.Grace) // the deletion allowed more time than the eviction does
	}
	return true
}

// retrySaveEviction writes the eviction file again if the first write failed: a full disk may have
// space again.
func (ev *evictor) retrySaveEviction() {
	ev.w.mu.Lock()
	pod, cause := ev.w.desired.Pod, ev.stop
	due := ev.unsaved && ev.w.desired.Stop == cause
	ev.w.mu.Unlock()
	// the first failure was logged; the next turn retries
	if !due || podfiles.SaveEviction(ev.w.cfg.Paths, pod, *cause) != nil {
		return
	}
	kept := *cause
	kept.Recorded = true
	ev.w.mu.Lock()
	defer ev.w.mu.Unlock()
	ev.unsaved = false
	if ev.w.desired.Stop == cause {
		ev.w.desired.Stop = &kept
	}
	ev.stop = &kept
}

// rejectPod fails a pod permanently for stop, before anything of the pod is created.
func (ev *evictor) rejectPod(pod *v1.Pod, stop *lifecycle.Stop) {
	ev.w.mu.Lock()
	first := ev.stop == nil && ev.w.desired.Stop == nil
	if first {
		ev.stop = stop
		ev.w.desired.Stop = stop
	}
	ev.w.mu.Unlock()
	if first {
		ev.w.events.Emit(pod, "", v1.EventTypeWarning, stop.Reason, stop.Message)
		ev.w.wakeUp()
	}
}

func (ev *evictor) fencePod(message string) {
	ev.w.mu.Lock()
	pod, fenced := ev.w.desired.Pod, ev.fenced
	ev.fenced = true
	switch stop := ev.w.desired.Stop; {
	case fenced:
	case stop == nil:
		ev.stop = &lifecycle.Stop{Reason: "Fenced", Message: message, Grace: evictionGrace}
		ev.w.desired.Stop = ev.stop
	case stop.Grace > evictionGrace: // the previous reason allowed more time than fencing does
		short := *stop
		short.Grace = evictionGrace
		ev.w.desired.Stop = &short
	}
	ev.w.mu.Unlock()
	if !fenced {
		ev.w.events.Emit(pod, "", v1.EventTypeWarning, "Fenced", message)
		ev.w.wakeUp()
	}
}
