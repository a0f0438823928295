package volumeattach

import (
	"context"
	"fmt"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
)

const (
	// margin is what a lost node has beyond its own limit, to end its pods and to unmount. It has been silent for a while
	// before it is called lost at all, which comes on top.
	margin = 5 * time.Second
	// absence is after which a Node that was deleted counts as fenced: its certificate was revoked with it, and its agent
	// is heard by nobody.
	absence = 40 * time.Second
	// maxSilent bounds what is remembered of nodes that are not heard.
	maxSilent = 10_000
)

// silences are the nodes that are lost or not there, and since when that is known. A leader begins with none: clocks of
// others are not believed. What a node says of itself ends it.
type silences struct {
	mu    sync.Mutex
	since map[string]time.Time
}

// lost says that nobody has a session with a node.
func lost(n *corev1.Node) bool {
	c := controllers.NodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionUnknown
}

// heard is called for every change of a node, so that one that came back for a moment begins anew.
func (s *silences) heard(n *corev1.Node) {
	if lost(n) {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.since, n.Name)
}

func (s *silences) clear() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.since)
}

// begin is since when a node is silent, from now at the latest.
func (s *silences) begin(node string, now time.Time) time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t, ok := s.since[node]; ok {
		return t
	}
	if len(s.since) >= maxSilent {
		for name, t := range s.since {
			if now.Sub(t) > time.Hour {
				delete(s.since, name)
			}
		}
	}
	s.since[node] = now
	return now
}

// host judges a node; n is nil when there is none of that name.
func (s *silences) host(name string, n *corev1.Node, now time.Time) Host {
	h := Host{Node: n}
	limit := absence
	if n != nil {
		if api.OutOfService(n) {
			h.Fenced = true
			return h
		}
		if !lost(n) {
			s.heard(n)
			return h
		}
		after := api.FencesAfter(n)
		if after == 0 {
			return h
		}
		limit = after + margin
	}
	left := limit - now.Sub(s.begin(name, now))
	h.Fenced, h.Fences = left <= 0, max(0, left)
	return h
}

// A restored store may not know a node that joined after the backup was made, and that has volumes. Its agent comes to the control plane,
// which makes its Node and hears what it has; or it does not, and then it ends the pods with attached volumes by itself, as any agent does
// that hears nothing. So it is waited as long as the slowest agent of which the store knows takes for that, within these bounds.
const (
	leastStrange = time.Minute
	mostStrange  = 10 * time.Minute
)

// unmark takes the mark of a restore away.
var unmark = fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnheard)

// strangersWait is for how long nodes are waited for that the store does not know: from when the leader first looks, by its own clock.
type strangersWait struct {
	once sync.Once
	till time.Time
}

func (s *strangersWait) left(now time.Time, nodes cache.SharedIndexInformer) time.Duration {
	s.once.Do(func() {
		wait := leastStrange
		for _, n := range controllers.CachedAll[*corev1.Node](nodes) {
			wait = max(wait, api.FencesAfter(n)+margin)
		}
		s.till = now.Add(min(wait, mostStrange))
	})
	return max(0, s.till.Sub(now))
}

// removePod ends a pod of a fenced node, of which its agent will not say that it has ended.
func (r *reconciler) removePod(ctx context.Context, p *corev1.Pod) error {
	message := fmt.Sprintf("node %s is lost, and has ended the pod by itself or will before it uses volumes again", p.Spec.NodeName)
	next := p.DeepCopy()
	next.Status.Phase = corev1.PodFailed
	next.Status.Conditions = append(next.Status.Conditions, corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
		Reason: "DeletionByPodGC", Message: message, LastTransitionTime: metav1.NewTime(r.term.Now())})
	next, err := client.UpdateStatus(ctx, r.term.Client, next)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("marking pod %s/%s of fenced node %s failed: %w", p.Namespace, p.Name, p.Spec.NodeName, err)
	}
	r.pods.Wrote(next)
	r.term.Events.Event(p, corev1.EventTypeWarning, "NodeFenced", message)
	o, now := controllers.ByUID(p), int64(0)
	o.GracePeriodSeconds = &now
	if err := client.Delete[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, o); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing pod %s/%s of fenced node %s: %w", p.Namespace, p.Name, p.Spec.NodeName, err)
	}
	return nil
}
