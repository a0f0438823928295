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

// recorder words events. The same event told again keeps its name and counts up; a new
// message under the same name replaces the old one in the control plane.
type recorder struct {
	reporter agent.Reporter
	node     string
	mute     bool // an orphan's: the pod is no object any more
	now      func() time.Time

	mu     sync.Mutex
	seen   map[string]*v1.Event
	spent  float64 // events told lately: refilled as time passes
	filled time.Time
	stamp  int64 // in the last event's name
}

// A pod may tell 25 events at once and one more every five minutes, as under Kubernetes: each costs the
// cluster a write, and a pod that fails once a second has said all there is to say.
const (
	eventBurst  = 25
	eventRefill = 5 * time.Minute
)

// allowed says whether one more event may be told. The lock is held.
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

// name makes an event's name of the pod's and of the time in nanoseconds, as all components of Kubernetes do: stamps of
// events have seconds only, and within one of these a list by name is the order in which things happened. The lock is
// held.
func (r *recorder) name(pod string, now time.Time) string {
	r.stamp = max(r.stamp+1, now.UnixNano())
	return fmt.Sprintf("%s.%016x", pod, r.stamp)
}

// eventsPerPod bounds what is remembered for counting; beyond it all counts begin anew.
const eventsPerPod = 128

func (r *recorder) event(pod *v1.Pod, field, kind, reason, message string) {
	const limit = 1024 // as the API's validation
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
