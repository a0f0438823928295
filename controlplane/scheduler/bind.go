package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// bindPod waits until Permit plugins no longer delay the pod, runs PreBind and binds the pod to the
// chosen node. It runs concurrently with the scheduling loop. Meanwhile the pod is counted on its
// node.
func (s *Scheduler) bindPod(ctx context.Context, p *queuedPod, c *framework.Cycle, res framework.Result, hold *waitingPod) {
	if hold != nil {
		if st := s.waiting.awaitPermit(ctx, hold); !st.OK() {
			s.undoPlacement(ctx, p, c, res.Node, st)
			return
		}
	}
	decided := time.Now() // taken before Bind: the node may act on the binding, and report it, before Bind returns
	st := s.profiles.forPod(p.Pod).Bind(ctx, c, res.Node)
	if mayHaveBound(st) {
		st = s.awaitOutcome(ctx, p.PodInfo, res.Node, st)
	}
	switch {
	case st.OK():
	case (apierrors.IsNotFound(st.Err) || apierrors.IsConflict(st.Err)) && s.podIsGone(ctx, p.Pod):
		s.profiles.forPod(p.Pod).Unreserve(ctx, c, res.Node)
		s.forgetPod(ctx, p.Pod)
		s.queue.removePod(p.Pod.UID)
		return
	case apierrors.IsConflict(st.Err):
		// Another client may have bound the pod. The informer reports the result.
		s.profiles.forPod(p.Pod).Unreserve(ctx, c, res.Node)
		s.forgetPod(ctx, p.Pod)
		s.queue.requeueFailed(ctx, p, nil)
		return
	default:
		s.undoPlacement(ctx, p, c, res.Node, st)
		return
	}
	s.queue.removePod(p.Pod.UID)
	s.reportGroupPlaced(p.Pod)
	pod := p.Pod
	if id := api.TraceID(pod.Annotations[api.TraceParentAnnotation]); id != "" {
		s.cfg.Timeline.Record(api.Stage{
			TraceID: id, Name: "scheduled", Actor: s.cfg.Actor, Object: "pod/" + pod.Namespace + "/" + pod.Name,
			Start: p.attemptStart, Duration: time.Since(p.attemptStart), Detail: res.Explain(),
		})
	}
	s.sendNote(s.placedNotes, &podUpdateNote{pod: pod, at: decided, eventType: v1.EventTypeNormal, reason: "Scheduled",
		message: fmt.Sprintf("Successfully assigned %s/%s to %s", pod.Namespace, pod.Name, res.Node)})
}

// podIsGone reads the pod from the API. It reports whether the pod was deleted, or replaced by
// another pod with the same name. A pod that is gone can never be bound.
func (s *Scheduler) podIsGone(ctx context.Context, pod *v1.Pod) bool {
	now, err := client.Get[*v1.Pod](ctx, s.writer.Load(), pod.Namespace, pod.Name)
	return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID
}

// confirmedBinder is an extender that binds a pod only after it has been confirmed that this
// replica is still the leader.
type confirmedBinder struct {
	framework.Extender
	confirm func(context.Context) error
}

// Bind implements framework.Extender. It returns an error without calling the extender if this
// replica is not confirmed as the leader.
func (b confirmedBinder) Bind(ctx context.Context, pod *v1.Pod, node string) error {
	if err := b.confirm(ctx); err != nil {
		return fmt.Errorf("%s was not called: %w", b.Name(), err)
	}
	return b.Extender.Bind(ctx, pod, node)
}

// confirmLeadership returns nil if this replica is the raft leader in the term of the current Run,
// and otherwise an error.
func (s *Scheduler) confirmLeadership(ctx context.Context) error {
	if s.cfg.ConfirmLeadership == nil {
		return nil
	}
	return s.cfg.ConfirmLeadership(ctx, s.fence.Load())
}

// postBinding binds the pod to the node by creating a Binding through the API.
func (s *Scheduler) postBinding(ctx context.Context, pod *v1.Pod, node string) error {
	b := &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     v1.ObjectReference{Kind: "Node", Name: node},
	}
	if _, err := client.Sub[*v1.Pod](ctx, s.writer.Load(), pod.Namespace, pod.Name, "binding", b); err != nil {
		return fmt.Errorf("bind pod %s/%s to node %s: %w", pod.Namespace, pod.Name, node, err)
	}
	return nil
}

// podUpdateNote is an event or a condition that is to be written for a pod or a PodGroup in the
// background. A note may be lost without harm.
type podUpdateNote struct {
	pod               *v1.Pod
	reporter          string    // reporting component of the event; "" = the pod's scheduler
	at                time.Time // time of the occurrence; orders events within one second
	eventType         string
	reason            string // reason of the event
	message           string
	condition         string // reason of PodScheduled=False; "" = no condition
	updatesNomination bool   // status.nominatedNodeName must be set to the nominated node in Scheduler.cluster
	mustCheckAPI      bool   // an earlier note was written that the cache may not contain yet

	group  *schedulingv1beta1.PodGroup // the note is about this group and not about a pod
	status metav1.ConditionStatus      // status of the group's condition
}

// reportFailure enqueues an event and a PodScheduled condition about a failed attempt, with the
// given reason of the condition. It does nothing if the last report for the pod had the same
// message.
func (s *Scheduler) reportFailure(pod *queuedPod, reason, message string) {
	again := s.queue.hasReported(pod.Pod.UID)
	if s.queue.recordMessage(pod.Pod.UID, message+"\x00"+s.cluster.nominatedNode(pod.Pod.UID)) {
		s.enqueueNote(&podUpdateNote{pod: pod.Pod, at: time.Now(), eventType: v1.EventTypeWarning, reason: "FailedScheduling", message: message,
			condition: reason, updatesNomination: true, mustCheckAPI: again})
	}
}

// enqueueNote enqueues a note. Notes about the same object are written in order. If the queue is
// full, the note is dropped.
func (s *Scheduler) enqueueNote(n *podUpdateNote) {
	s.sendNote(s.notes[crc32.ChecksumIEEE([]byte(n.objectName()))%noteWorkers], n)
}

func (s *Scheduler) sendNote(to chan<- *podUpdateNote, n *podUpdateNote) {
	select {
	case to <- n:
	default:
		s.log.Debug("note dropped: the queue of notes is full", "about", n.objectName(), "reason", n.reason)
	}
}

func (n *podUpdateNote) objectName() string {
	if n.group != nil {
		return "podgroup " + n.group.Namespace + "/" + n.group.Name
	}
	return "pod " + n.pod.Namespace + "/" + n.pod.Name
}

// writeNotes writes the events and conditions of one queue of notes until ctx ends.
func (s *Scheduler) writeNotes(ctx context.Context, notes <-chan *podUpdateNote) error {
	for {
		select {
		case n := <-notes:
			if n.condition != "" || n.updatesNomination {
				write := s.writeCondition
				if n.group != nil {
					write = s.writeGroupCondition
				}
				if err := write(ctx, n); err != nil {
					s.log.Warn("writing a condition failed", "err", err)
				}
			}
			if n.reason != "" {
				s.writeEvent(ctx, n)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// writePlaced writes the events about pods that were bound, until ctx ends. It collects events for
// eventDelay and writes them in parallel, so that the store combines them into one commit. Separate
// commits would delay the creation and binding of other pods.
func (s *Scheduler) writePlaced(ctx context.Context) error {
	for {
		var batch []*podUpdateNote
		select {
		case n := <-s.placedNotes:
			batch = append(batch, n)
		case <-ctx.Done():
			return ctx.Err()
		}
		due, waiting := time.After(eventDelay), true
		for waiting && len(batch) < maxEvents {
			select {
			case n := <-s.placedNotes:
				batch = append(batch, n)
			case <-due:
				waiting = false
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		var wg sync.WaitGroup
		for _, n := range batch {
			wg.Go(func() { s.writeEvent(ctx, n) })
		}
		wg.Wait()
	}
}

// writeCondition sets the condition PodScheduled=False and the nominated node of a note's pod. It
// does nothing if the pod has both already or is bound.
func (s *Scheduler) writeCondition(ctx context.Context, n *podUpdateNote) error {
	return updateStatus(ctx, s, n.pod, n.mustCheckAPI, func(pod *v1.Pod) (*v1.Pod, bool) {
		if pod.Spec.NodeName != "" {
			return pod, false
		}
		next, changed := pod, false
		if n.condition != "" {
			next, changed = withCondition(pod, v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionFalse,
				Reason: n.condition, Message: n.message, LastTransitionTime: metav1.Now()})
		}
		if node := s.cluster.nominatedNode(pod.UID); n.updatesNomination && pod.Status.NominatedNodeName != node {
			if !changed {
				next = pod.DeepCopy()
			}
			next.Status.NominatedNodeName, changed = node, true
		}
		return next, changed
	})
}

// updateStatus writes the status of the object that change returns for the current state of "of",
// and retries on a conflict. It does nothing if change reports no change, or if the object was
// deleted. change is called with the cached object first. If sure is set and there is no change, it
// is called again with the object from the API. The cache may not contain an earlier write yet.
func updateStatus[T api.Object](ctx context.Context, s *Scheduler, of T, sure bool, change func(T) (next T, changed bool)) error {
	namespace, name := of.GetNamespace(), of.GetName()
	failed := func(err error) error { return fmt.Errorf("write status of %T %s/%s: %w", of, namespace, name, err) }
	have, ok := client.Cached[T](s.cfg.Informers, namespace, name)
	for range 3 {
		if !ok || have.GetUID() != of.GetUID() {
			return nil
		}
		next, changed := change(have)
		if !changed && !sure {
			return nil
		}
		var err error
		if changed {
			_, err = client.UpdateStatus(ctx, s.writer.Load(), next)
			if err == nil || apierrors.IsNotFound(err) {
				return nil
			}
			if !apierrors.IsConflict(err) {
				return failed(err)
			}
		}
		sure = false
		if have, err = client.Get[T](ctx, s.writer.Load(), namespace, name); err != nil {
			if apierrors.IsNotFound(err) {
				return nil
			}
			return failed(err)
		}
	}
	return failed(errors.New("too many conflicts"))
}

// withCondition returns a copy of the pod with the condition. If the pod has an equal condition
// already, it returns the pod itself and false.
func withCondition(pod *v1.Pod, want v1.PodCondition) (next *v1.Pod, changed bool) {
	want.ObservedGeneration = pod.Generation
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type != want.Type {
			continue
		}
		if c.Status == want.Status && c.Reason == want.Reason && c.Message == want.Message && c.ObservedGeneration == want.ObservedGeneration {
			return pod, false
		}
		if c.Status == want.Status {
			want.LastTransitionTime = c.LastTransitionTime
		}
		next = pod.DeepCopy()
		next.Status.Conditions[i] = want
		return next, true
	}
	next = pod.DeepCopy()
	next.Status.Conditions = append(next.Status.Conditions, want)
	return next, true
}

// writeEvent creates the Event of a note. An error is only logged.
func (s *Scheduler) writeEvent(ctx context.Context, n *podUpdateNote) {
	at, by := metav1.NewTime(n.at), cmp.Or(n.reporter, schedulerOf(n.pod))
	e := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: n.pod.Namespace, Name: fmt.Sprintf("%s.%016x", n.pod.Name, n.at.UnixNano())},
		InvolvedObject: v1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: n.pod.Namespace, Name: n.pod.Name, UID: n.pod.UID, ResourceVersion: n.pod.ResourceVersion},
		Type: n.eventType, Reason: n.reason, Message: n.message, Count: 1, FirstTimestamp: at, LastTimestamp: at,
		Source:              v1.EventSource{Component: by},
		ReportingController: by,
	}
	if _, err := client.Create(ctx, s.writer.Load(), e); err != nil {
		s.log.Debug("writing an event failed", "pod", n.pod.Namespace+"/"+n.pod.Name, "reason", n.reason, "err", err)
	}
}
