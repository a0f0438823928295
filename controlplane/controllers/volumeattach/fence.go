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
	"keelson.dev/keelson/controlplane/controllers/engine"
)

const (
	// margin is added to the time after which a disconnected agent stops its pods with attached
	// volumes (api.FenceDelay). The agent needs it to stop the pods and to unmount their volumes.
	margin = 5 * time.Second
	// absence is the minimum time from the deletion of a Node until the node counts as fenced:
	// nothing on it uses attached volumes any more. The deletion revoked the node's certificate, so
	// that its agent cannot connect again.
	absence = 40 * time.Second
	// maxSilent is the maximum number of nodes in each of the maps of fenceTracker.
	maxSilent = 10_000
)

// fenceTracker decides when a node that is not connected or was deleted counts as fenced: it is
// certain that nothing on the node uses attached volumes. A node's fence delay is its agent's
// --fence-after. An agent that reaches no replica of the control plane for that long stops its pods
// with attached volumes. fenceTracker measures since when this leader has observed that a node is
// not connected. A new leader starts to measure again, because it does not trust the clocks of
// other machines.
type fenceTracker struct {
	mu    sync.Mutex
	since map[string]time.Time
	// reported holds the fence delay (api.AnnotationFencesAfter) that each node reported last. The
	// entry is kept when the Node is deleted.
	reported map[string]string
}

// isNodeLost reports whether the node's condition Ready is Unknown: no replica of the control plane
// has a session with its agent.
func isNodeLost(n *corev1.Node) bool {
	c := api.NodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionUnknown
}

// observeNode records the current state of a Node. It must be called for every change of a Node. If
// the node is connected, the measured time since it was lost is discarded.
func (s *fenceTracker) observeNode(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordFence(n)
	if !isNodeLost(n) {
		delete(s.since, n.Name)
	}
}

// recordFence records the fence delay that a node reports (api.AnnotationFencesAfter). After this
// time without the control plane, the node's agent stops its pods with attached volumes. s.mu must
// be held.
func (s *fenceTracker) recordFence(n *corev1.Node) {
	after, reports := n.Annotations[api.AnnotationFencesAfter]
	if !reports {
		delete(s.reported, n.Name)
		return
	}
	if s.reported == nil || len(s.reported) >= maxSilent && s.reported[n.Name] == "" {
		// clearing is safe: the VolumeAttachments store the fence delays too
		s.reported = map[string]string{}
	}
	s.reported[n.Name] = after
}

func (s *fenceTracker) clearSilences() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.since)
}

// silentSince returns the time at which this leader first observed that a node is lost or deleted.
// The first call for such a node records now and returns it.
func (s *fenceTracker) silentSince(node string, now time.Time) time.Time {
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

// assessNode returns whether a node is fenced (nothing on it uses attached volumes) and, if it is
// not, the remaining time until it is. n is nil if the Node was deleted. Only then kept is used:
// the fence delays (api.AnnotationNodeFencesAfter) that the node's VolumeAttachments store.
func (s *fenceTracker) assessNode(name string, n *corev1.Node, now time.Time, kept ...string) Host {
	h := Host{Node: n}
	var limit time.Duration
	if n != nil {
		s.observeNode(n)
		if api.IsOutOfService(n) {
			h.Fenced = true
			return h
		}
		if !isNodeLost(n) {
			return h
		}
		after := api.FenceDelay(n)
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
	left := limit - now.Sub(s.silentSince(name, now))
	h.Fenced, h.Fences = left <= 0, max(0, left)
	return h
}

// goneLimit returns the time from the deletion of a Node until it counts as fenced: nothing on it
// uses attached volumes any more. A fence delay is the time after which an agent that reaches no
// replica of the control plane stops its pods with attached volumes. The result is the constant
// absence or, if longer, the longest fence delay plus margin. The fence delays are those in kept,
// which the node's VolumeAttachments store, and the delay that the node reported last. fences is
// false if one of them is 0: the agent never stops its pods by itself.
func (s *fenceTracker) goneLimit(name string, kept []string) (limit time.Duration, fences bool) {
	s.mu.Lock()
	if after, reported := s.reported[name]; reported {
		kept = append(slices.Clone(kept), after)
	}
	s.mu.Unlock()
	limit = absence
	for _, after := range kept {
		d := api.ParseFenceDelay(after)
		if d == 0 {
			return 0, false
		}
		limit = max(limit, d+margin)
	}
	return limit, true
}

// keptFences returns the fence delays that the VolumeAttachments of a node store
// (api.AnnotationNodeFencesAfter).
func (r *reconciler) keptFences(node string) (kept []string) {
	for _, a := range r.attachments.By(byNode, node) {
		if after, keeps := a.Annotations[api.AnnotationNodeFencesAfter]; keeps {
			kept = append(kept, after)
		}
	}
	return kept
}

// assessNode returns whether a node is fenced, or the remaining time until it is. It uses the
// cached Node. If the Node was deleted, it uses the fence delays that the node's VolumeAttachments
// store.
func (r *reconciler) assessNode(name string, now time.Time) Host {
	n, ok := engine.Cached[*corev1.Node](r.informers.nodes, "", name)
	if !ok {
		return r.silences.assessNode(name, nil, now, r.keptFences(name)...)
	}
	return r.silences.assessNode(name, n, now)
}

// keepFences copies the fence delay that each Node reports (api.AnnotationFencesAfter) to the
// VolumeAttachments of the node. They outlive the Node, so that the delay is known after the Node
// was deleted.
func (r *reconciler) keepFences(ctx context.Context, in State) error {
	for _, a := range in.Attachments {
		n := in.Hosts[a.Spec.NodeName].Node
		if n == nil || a.DeletionTimestamp != nil {
			continue
		}
		if _, changed := api.RecordFenceDelay(a, n); !changed {
			continue
		}
		// the cached Node may be older than the attachment
		n, err := client.Get[*corev1.Node](ctx, r.term.Client, "", n.Name)
		if apierrors.IsNotFound(err) {
			continue
		}
		if err != nil {
			return fmt.Errorf("reading the fence of node %s: %w", a.Spec.NodeName, err)
		}
		next, changed := api.RecordFenceDelay(a, n)
		if !changed {
			continue
		}
		if err := r.recordAttachment(client.Update(ctx, r.term.Client, next)); err != nil {
			return fmt.Errorf("storing the fence of node %s in VolumeAttachment %s: %w", n.Name, a.Name, err)
		}
	}
	return nil
}

// keepsFence returns a check for writeAttachedList. The check fails if the VolumeAttachment of the
// node stores another fence delay (api.AnnotationNodeFencesAfter) than the Node reports.
func (r *reconciler) keepsFence(in State, node string) func(*corev1.Node) error {
	return func(n *corev1.Node) error {
		a, ok := r.attachments.Get("", api.AttachmentName(in.Handle, in.Attacher, node))
		if !ok {
			return nil // the volume will soon be removed from the node's status
		}
		if _, behind := api.RecordFenceDelay(a, n); behind {
			return engine.RaceError("node %s reports another --fence-after than VolumeAttachment %s stores", node,
				a.Name)
		}
		return nil
	}
}

// Bounds of the time that a volume waits, after a backup was restored, for nodes that joined after
// the backup. Such a node is not in the restored store and may have the volume attached. If its
// agent connects, it reports its volumes. If its agent does not connect, it stops its pods with
// attached volumes after its fence delay. That delay is not known. The wait is therefore the
// longest fence delay of all nodes in the store, within these bounds.
const (
	leastStrange = time.Minute
	mostStrange  = 10 * time.Minute
)

// unmark is the merge patch that removes annotation api.AnnotationUnconfirmed.
var unmark = fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnconfirmed)

// unrecordedWait measures how long volumes still wait for nodes that are not in a restored store.
// The wait starts with the first call of remainingWait and uses the leader's own clock.
type unrecordedWait struct {
	once sync.Once
	till time.Time
}

func (s *unrecordedWait) remainingWait(now time.Time, nodes cache.SharedIndexInformer) time.Duration {
	s.once.Do(func() {
		wait := leastStrange
		for _, n := range engine.CachedAll[*corev1.Node](nodes) {
			wait = max(wait, api.FenceDelay(n)+margin)
		}
		s.till = now.Add(min(wait, mostStrange))
	})
	return max(0, s.till.Sub(now))
}

// removePod sets a pod of a fenced node to phase Failed and deletes it with grace period 0. The
// agent of such a node cannot confirm that the pod has stopped.
func (r *reconciler) removePod(ctx context.Context, p *corev1.Pod) error {
	message := fmt.Sprintf("node %s is lost: its agent stops the pod before it uses volumes again", p.Spec.NodeName)
	next := p.DeepCopy()
	next.Status.Phase = corev1.PodFailed
	next.Status.Conditions = append(next.Status.Conditions,
		corev1.PodCondition{Type: corev1.DisruptionTarget, Status: corev1.ConditionTrue,
			Reason: "DeletionByPodGC", Message: message, LastTransitionTime: metav1.NewTime(r.term.Now()),
			ObservedGeneration: p.Generation})
	next, err := client.UpdateStatus(ctx, r.term.Client, next)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("marking pod %s/%s of fenced node %s failed: %w", p.Namespace, p.Name, p.Spec.NodeName, err)
	}
	r.pods.RecordWrite(next)
	r.term.Events.Event(p, corev1.EventTypeWarning, "NodeFenced", message)
	o, now := engine.DeleteOnlyUID(p), int64(0)
	o.GracePeriodSeconds = &now
	if err := client.Delete[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, o); err != nil &&
		!apierrors.IsNotFound(err) {
		return fmt.Errorf("removing pod %s/%s of fenced node %s: %w", p.Namespace, p.Name, p.Spec.NodeName, err)
	}
	return nil
}
