package pod

import (
	"fmt"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent"
)

// recorder emits the events of one pod. A repeated event keeps its name and increments its count. A
// changed event of the same name replaces the old one in the control plane.
type recorder struct {
	reporter agent.Reporter
	node     string
	mute     bool // for an orphan: its pod no longer exists in the API
	now      func() time.Time

	mu     sync.Mutex
	seen   map[string]*v1.Event
	spent  float64 // recently emitted events; decreases over time
	filled time.Time
	stamp  int64 // suffix of the last event name
}

// The rate limit of a pod's events, as in Kubernetes: a burst of 25, then one every five minutes.
// Each event costs the cluster a write, and a pod that fails every second would repeat the same
// events.
const (
	eventBurst  = 25
	eventRefill = 5 * time.Minute
)

// allowed reports whether another event may be emitted, and counts it. The lock is held.
func (r *recorder) allowed(now time.Time) bool {
	if !r.filled.IsZero() {
		r.spent = max(0, r.spent-float64(now.Sub(r.filled))/float64(eventRefill))
	}
	r.filled = now
	if r.spent+1 > eventBurst {
		return false
	}
	r.spent++
	return true
}

// name returns an event name from the pod's name and the time in nanoseconds, as Kubernetes
// components do. Event time stamps have a resolution of one second. Within a second, a list sorted
// by name still shows the order of events. The lock is held.
func (r *recorder) name(pod string, now time.Time) string {
	r.stamp = max(r.stamp+1, now.UnixNano())
	return fmt.Sprintf("%s.%016x", pod, r.stamp)
}

// eventsPerPod bounds the number of distinct events that are counted. When it is reached, all
// counts restart.
const eventsPerPod = 128

func (r *recorder) event(pod *v1.Pod, field, kind, reason, message string) {
	const limit = 1024 // the limit of the API's validation
	if len(message) > limit {
		message = strings.ToValidUTF8(message[:limit-3], "") + "..."
	}
	now := metav1.NewTime(r.now())
	key := field + "\x00" + reason + "\x00" + message
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mute || !r.allowed(now.Time) {
		return
	}
	e := r.seen[key]
	if e == nil {
		if len(r.seen) >= eventsPerPod {
			clear(r.seen)
		}
		e = &v1.Event{
			ObjectMeta: metav1.ObjectMeta{Name: r.name(pod.Name, now.Time), Namespace: pod.Namespace},
			InvolvedObject: v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID,
				ResourceVersion: pod.ResourceVersion, FieldPath: field},
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
