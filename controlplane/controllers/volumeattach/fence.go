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
	// margin is added to the node's own limit, so that a lost node can stop its pods and unmount. A
	// node is lost only after it has been silent for a while, which gives more time.
	margin = 5 * time.Second
	// absence is the time after which a deleted Node counts as fenced, unless its reported fence is
	// longer. Its certificate was revoked with the deletion, so its agent cannot connect.
	absence = 40 * time.Second
	// maxSilent is the maximum number of silent nodes that are recorded.
	maxSilent = 10_000
)

// silences records which nodes are lost or deleted, and since when this leader has observed it. A
// new leader starts without records, because it does not trust the clocks of other machines. A
// report of the node removes its record.
type silences struct {
	mu    sync.Mutex
	since map[string]time.Time
	// reported holds the last fence (api.AnnotationFencesAfter) that each node reported. The entry
	// of a deleted Node is kept.
	reported map[string]string
}

// isNodeLost reports whether no replica has a session with a node.
func isNodeLost(n *corev1.Node) bool {
	c := controllers.NodeCondition(n, corev1.NodeReady)
	return c != nil && c.Status == corev1.ConditionUnknown
}

// observeNode is called for every change of a node. A node that was ready in between starts a new
// silence.
func (s *silences) observeNode(n *corev1.Node) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.recordFence(n)
	if !isNodeLost(n) {
		delete(s.since, n.Name)
	}
}

// recordFence records the fence that a node reports. s.mu must be held.
func (s *silences) recordFence(n *corev1.Node) {
	after, reports := n.Annotations[api.AnnotationFencesAfter]
	if !reports {
		delete(s.reported, n.Name)
		return
	}
	if s.reported == nil || len(s.reported) >= maxSilent && s.reported[n.Name] == "" { // the attachments store the fence too
		s.reported = map[string]string{}
	}
	s.reported[n.Name] = after
}

func (s *silences) clearSilences() {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.since)
}

// silentSince returns when the node's silence started. It starts now if the node was not silent
// before.
func (s *silences) silentSince(node string, now time.Time) time.Time {
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

// assessNode returns whether a node is fenced, or when it will be. n is nil if the Node does not
// exist; kept are then the fences that its attachments store.
func (s *silences) assessNode(name string, n *corev1.Node, now time.Time, kept ...string) Host {
	h := Host{Node: n}
	var limit time.Duration
	if n != nil {
		s.observeNode(n)
		if api.OutOfService(n) {
			h.Fenced = true
			return h
		}
		if !isNodeLost(n) {
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
	left := limit - now.Sub(s.silentSince(name, now))
	h.Fenced, h.Fences = left <= 0, max(0, left)
	return h
}

// goneLimit returns the time from the deletion of a Node until it counts as fenced: the longest
// known fence of the node, and at least absence. fences is false if the node's agent never stops
// pods by itself.
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

// keptFences returns the fences that the attachments of a node store.
func (r *reconciler) keptFences(node string) (kept []string) {
	for _, a := range r.attachments.By(byNode, node) {
		if after, keeps := a.Annotations[api.AnnotationNodeFencesAfter]; keeps {
			kept = append(kept, after)
		}
	}
	return kept
}

// assessNode assesses a node by its Node object. For a deleted Node it uses the fences that the
// attachments store.
func (r *reconciler) assessNode(name string, now time.Time) Host {
	n, ok := controllers.Cached[*corev1.Node](r.nodes, "", name)
	if !ok {
		return r.silences.assessNode(name, nil, now, r.keptFences(name)...)
	}
	return r.silences.assessNode(name, n, now)
}

// keepFences writes the fences of nodes to their attachments, because attachments outlive Nodes.
func (r *reconciler) keepFences(ctx context.Context, in State) error {
	for _, a := range in.Attachments {
		n := in.Hosts[a.Spec.NodeName].Node
		if n == nil || a.DeletionTimestamp != nil {
			continue
		}
		if _, changed := api.KeepFence(a, n); !changed {
			continue
		}
		n, err := client.Get[*corev1.Node](ctx, r.term.Client, "", n.Name) // the cached Node may be older than the attachment
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
		if err := r.recordAttachment(client.Update(ctx, r.term.Client, next)); err != nil {
			return fmt.Errorf("storing the fence of node %s in VolumeAttachment %s: %w", n.Name, a.Name, err)
		}
	}
	return nil
}

// keepsFence returns a check for writeAttachedList. The check fails if the attachment stores
// another fence than the node reports.
func (r *reconciler) keepsFence(in State, node string) func(*corev1.Node) error {
	return func(n *corev1.Node) error {
		a, ok := r.attachments.Get("", api.AttachmentName(in.Handle, in.Attacher, node))
		if !ok {
			return nil // the volume will soon be removed from the node's status
		}
		if _, behind := api.KeepFence(a, n); behind {
			return controllers.RaceError("node %s reports another --fence-after than VolumeAttachment %s stores", node, a.Name)
		}
		return nil
	}
}

// A restored store may lack a node that joined after the backup and that has volumes attached.
// Either the node's agent connects, and the control plane creates its Node and receives its list of
// volumes. Or the agent does not connect, and then it stops its pods with attached volumes by
// itself, like any disconnected agent. The wait is therefore the longest fence of all nodes in the
// store, within these bounds.
const (
	leastStrange = time.Minute
	mostStrange  = 10 * time.Minute
)

// unmark is the merge patch that removes the restore mark.
var unmark = fmt.Appendf(nil, `{"metadata":{"annotations":{%q:null}}}`, api.AnnotationUnheard)

// unrecordedWait measures how long to wait for nodes that a restored store lacks. The wait starts
// with the first call of remainingWait and uses the leader's own clock.
type unrecordedWait struct {
	once sync.Once
	till time.Time
}

func (s *unrecordedWait) remainingWait(now time.Time, nodes cache.SharedIndexInformer) time.Duration {
	s.once.Do(func() {
		wait := leastStrange
		for _, n := range controllers.CachedAll[*corev1.Node](nodes) {
			wait = max(wait, api.FencesAfter(n)+margin)
		}
		s.till = now.Add(min(wait, mostStrange))
	})
	return max(0, s.till.Sub(now))
}

// removePod marks a pod of a fenced node as failed and deletes it by force, because its agent
// cannot confirm that it has stopped.
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
	r.pods.RecordWrite(next)
	r.term.Events.Event(p, corev1.EventTypeWarning, "NodeFenced", message)
	o, now := controllers.DeleteOnlyUID(p), int64(0)
	o.GracePeriodSeconds = &now
	if err := client.Delete[*corev1.Pod](ctx, r.term.Client, p.Namespace, p.Name, o); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("removing pod %s/%s of fenced node %s: %w", p.Namespace, p.Name, p.Spec.NodeName, err)
	}
	return nil
}
