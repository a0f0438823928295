package volumeattach

import (
	"context"
	"fmt"
	"slices"
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
	// absence is after which a Node that was deleted counts as fenced, unless its fence takes longer: its certificate was
	// revoked with it, and its agent is heard by nobody.
	absence = 40 * time.Second
	// maxSilent bounds what is remembered of nodes that are not heard.
	maxSilent = 10_000
)

// silences are the nodes that are lost or not there, and since when that is known. A leader begins with none: clocks of
// others are not believed. What a node says of itself ends it.
type silences struct {
	mu    sync.Mutex
	since map[string]time.Time
	// reported is the fence (api.AnnotationFencesAfter) that each node reported last, also where the
	// Node was deleted since.
	reported map[string]string
}

// lost says that nobody has a session with a node.
func lost(n *corev1.Node) bool {
	c := controllers.NodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionUnknown
}

// heard is called for every change of a node, so that one that came back for a moment begins anew.
func (s *silences) heard(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.report(n)
	if !lost(n) {
		delete(s.since, n.Name)
	}
}

// report notes the fence that a node reports. The lock is held.
func (s *silences) report(n *corev1.Node) {
	after, reports := n.Annotations[api.AnnotationFencesAfter]
	if !reports {
		delete(s.reported, n.Name)
		return
	}
	if s.reported == nil || len(s.reported) >= maxSilent && s.reported[n.Name] == "" { // the attachments keep it as well
		s.reported = map[string]string{}
	}
	s.reported[n.Name] = after
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

// host judges a node; n is nil when there is none of that name. Then kept are the fences that attachments to it keep.
func (s *silences) host(name string, n *corev1.Node, now time.Time, kept ...string) Host {
	h := Host{Node: n}
	var limit time.Duration
	if n != nil {
		s.heard(n)
		if api.OutOfService(n) {
			h.Fenced = true
			return h
		}
		if !lost(n) {
			return h
		}
		after := api.FencesAfter(n)
		if after == 0 {
			return h
		}
		limit = after + margin
	} else {
		var fences bool
		if limit, fences = s.goneLimit(name, kept); !fences {
			return h
		}
	}
	left := limit - now.Sub(s.begin(name, now))
	h.Fenced, h.Fences = left <= 0, max(0, left)
	return h
}

// goneLimit returns the time from the deletion of a Node until it counts as fenced: the longest of the
// fences that are known of it, and absence at least. fences is false where its agent never ends pods by
// itself.
func (s *silences) goneLimit(name string, kept []string) (limit time.Duration, fences bool) {
	s.mu.Lock()
	if after, reported := s.reported[name]; reported {
		kept = append(slices.Clone(kept), after)
	}
	s.mu.Unlock()
	limit = absence
	for _, after := range kept {
		d := api.ParseFence(after)
		if d == 0 {
			return 0, false
		}
		limit = max(limit, d+margin)
	}
	return limit, true
}

// keptFences are the fences that the attachments to a node keep.
func (r *reconciler) keptFences(node string) (kept []string) {
	for _, a := range r.attachments.By(byNode, node) {
		if after, keeps := a.Annotations[api.AnnotationNodeFencesAfter]; keeps {
			kept = append(kept, after)
		}
	}
	return kept
}

// host judges a node by its object and, where that was deleted, by its attachments.
func (r *reconciler) host(name string, now time.Time) Host {
	n, ok := controllers.Cached[*corev1.Node](r.nodes, "", name)
	if !ok {
		return r.silences.host(name, nil, now, r.keptFences(name)...)
	}
	return r.silences.host(name, n, now)
}

// keepFences writes the fences of nodes into their attachments, which outlive the nodes.
func (r *reconciler) keepFences(ctx context.Context, in State) error {
	for _, a := range in.Attachments {
		n := in.Hosts[a.Spec.NodeName].Node
		if n == nil || a.DeletionTimestamp != nil {
			continue
		}
		if _, changed := api.KeepFence(a, n); !changed {
			continue
		}
		n, err := client.Get[*corev1.Node](ctx, r.term.Client, "", n.Name) // the cache may be behind the attachment
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading the fence of node %s: %w", a.Spec.NodeName, err)
		}
		next, changed := api.KeepFence(a, n)
		if !changed {
			continue
		}
		if err := r.wrote(client.Update(ctx, r.term.Client, next)); err != nil {
			return fmt.Errorf("keeping the fence of node %s in VolumeAttachment %s: %w", n.Name, a.Name, err)
		}
	}
	return nil
}

// keepsFence returns a check for list: the attachment to the node has the fence that the node reports.
func (r *reconciler) keepsFence(in State, node string) func(*corev1.Node) error {
	return func(n *corev1.Node) error {
		a, ok := r.attachments.Get("", api.AttachmentName(in.Handle, in.Attacher, node))
		if !ok {
			return nil // it is not listed for long
		}
		if _, behind := api.KeepFence(a, n); behind {
			return controllers.Race("node %s reports another --fence-after than VolumeAttachment %s keeps", node, a.Name)
		}
		return nil
	}
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
		Reason: "DeletionByPodGC", Message: message, LastTransitionTime: metav1.NewTime(r.term.Now()), ObservedGeneration: p.Generation})
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
