package pod

import (
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
)

// Fence stops a pod at once, even if it is already stopping for another reason. Its status becomes
// Failed with the message when the status can be reported.
func (s *Set) Fence(uid types.UID, message string) {
	s.mu.Lock()
	e := s.workers[uid]
	s.mu.Unlock()
	if e != nil {
		e.w.fence(message)
	}
}

func (w *worker) fence(message string) {
	w.mu.Lock()
	pod, again := w.desired.Pod, w.fenced
	w.fenced = true
	switch stop := w.desired.Stop; {
	case again:
	case stop == nil:
		w.evicted = &Stop{Reason: "Fenced", Message: message, Grace: evictionGrace}
		w.desired.Stop = w.evicted
	case stop.Grace > evictionGrace: // the previous reason allowed more time than fencing does
		short := *stop
		short.Grace = evictionGrace
		w.desired.Stop = &short
	}
	w.mu.Unlock()
	if !again {
		w.events.event(pod, "", v1.EventTypeWarning, "Fenced", message)
		w.poke()
	}
}
