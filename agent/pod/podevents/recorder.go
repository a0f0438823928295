// Package podevents emits the events of a pod, rate-limited as in the kubelet.
package podevents

import (
	"fmt"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
)

// Recorder emits the events of one pod. A repeated event keeps its name, and its count increases:
// the control plane replaces the stored event of that name.
type Recorder struct {
	reporter agent.Reporter
	node     string
	muted    bool // for an orphan: its pod no longer exists in the API
	now      func() time.Time

	mu         sync.Mutex
	seen       map[string]*v1.Event
	spent      float64 // recently emitted events; decreases over time
	refilledAt time.Time
	lastStamp  int64 // suffix of the last event name
}

// New returns a Recorder that reports events of the kubelet on the node. A muted Recorder emits no
// events. now returns the current time.
func New(reporter agent.Reporter, node string, now func() time.Time, muted bool) *Recorder {
	return &Recorder{reporter: reporter, node: node, now: now, muted: muted, seen: map[string]*v1.Event{}}
}

// The rate limit of a pod's events, as in Kubernetes: a burst of 25, then one every five minutes.
// Each event costs the cluster a write, and a pod that fails every second would repeat the same
// events.
const (
	Burst       = 25
	eventRefill = 5 * time.Minute
)

// allowEvent reports whether another event may be emitted, and counts it. The lock is held.
func (r *Recorder) allowEvent(currentTime time.Time) bool {
	if !r.refilledAt.IsZero() {
		r.spent = max(0, r.spent-float64(currentTime.Sub(r.refilledAt))/float64(eventRefill))
	}
	r.refilledAt = currentTime
	if r.spent+1 > Burst {
		return false
	}
	r.spent++
	return true
}

// newEventName returns an event name from the pod's name and the time in nanoseconds, as Kubernetes
// components do. Names are unique and ascending. A list sorted by name therefore shows the order of
// events within a second, which is the resolution of event timestamps. The lock is held.
func (r *Recorder) newEventName(pod string, currentTime time.Time) string {
	r.lastStamp = max(r.lastStamp+1, currentTime.UnixNano())
	return fmt.Sprintf("%s.%016x", pod, r.lastStamp)
}

// eventsPerPod is the maximum number of distinct events with counted repetitions. When it is
// reached, all counts start again.
const eventsPerPod = 128

// Emit emits an event of the pod. field is the field path of a container, or "". kind is Normal or
// Warning. Messages above 1024 bytes are truncated. Events above the rate limit are dropped. It is
// safe for concurrent use.
func (r *Recorder) Emit(pod *v1.Pod, field, kind, reason, message string) {
	const limit = 1024 // the limit of the API's validation
	if len(message) > limit {
		message = strings.ToValidUTF8(message[:limit-3], "") + "..."
	}
	now := metav1.NewTime(r.now())
	key := field + "\x00" + reason + "\x00" + message
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.muted || !r.allowEvent(now.Time) {
		return
	}
	e := r.seen[key]
	if e == nil {
		if len(r.seen) >= eventsPerPod {
			clear(r.seen)
		}
		e = &v1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: r.newEventName(pod.Name, now.Time), Namespace: pod.Namespace},
			InvolvedObject: v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name,
				UID: pod.UID, ResourceVersion: pod.ResourceVersion, FieldPath: field},
			Reason: reason, Message: message, Type: kind, FirstTimestamp: now,
			Source:              v1.EventSource{Component: "kubelet", Host: r.node},
			ReportingController: "kubelet", ReportingInstance: r.node,
		}
	} else {
		e = e.DeepCopy()
	}
	e.Count++
	e.LastTimestamp = now
	r.seen[key] = e
	r.reporter.Event(e.DeepCopy())
}
