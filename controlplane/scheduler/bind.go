package scheduler

import (
	"context"
	"errors"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// bind waits for Permit, prepares and binds. It runs beside the loop; the pod counts on its node meanwhile.
func (s *Scheduler) bind(ctx context.Context, p *queued, c *framework.Cycle, res framework.Result, hold *waitingPod) {
	if hold != nil {
		if st := s.waiting.await(ctx, hold); !st.OK() {
			s.undo(ctx, p, c, res.Node, st)
			return
		}
	}
	decided := time.Now() // the node may act, and tell of it, before Bind returns
	st := s.profile.Bind(ctx, c, res.Node)
	switch {
	case st.OK():
	case (apierrors.IsNotFound(st.Err) || apierrors.IsConflict(st.Err)) && s.gone(ctx, p.Pod):
		s.profile.Unreserve(ctx, c, res.Node)
		s.cluster.forget(p.Pod.UID)
		s.queue.remove(p.Pod.UID)
		return
	case apierrors.IsConflict(st.Err):
		// Bound by somebody else, perhaps: the informer tells what became of it.
		s.profile.Unreserve(ctx, c, res.Node)
		s.cluster.forget(p.Pod.UID)
		s.queue.failed(ctx, p, nil)
		return
	default:
		s.undo(ctx, p, c, res.Node, st)
		return
	}
	s.queue.remove(p.Pod.UID)
	pod := p.Pod
	if id := api.TraceID(pod.Annotations[api.TraceParentAnnotation]); id != "" {
		s.cfg.Timeline.Record(api.Stage{
			TraceID: id, Name: "scheduled", Actor: s.cfg.Actor, Object: "pod/" + pod.Namespace + "/" + pod.Name,
			Start: p.started, Duration: time.Since(p.started), Detail: res.Explain(),
		})
	}
	s.note(note{pod: pod, at: decided, kind: v1.EventTypeNormal, reason: "Scheduled",
		message: fmt.Sprintf("Successfully assigned %s/%s to %s", pod.Namespace, pod.Name, res.Node)})
}

// gone asks the API whether the pod is no more, or another one has its name. Nobody binds such a pod again.
func (s *Scheduler) gone(ctx context.Context, pod *v1.Pod) bool {
	now, err := client.Get[*v1.Pod](ctx, s.writer.Load(), pod.Namespace, pod.Name)
	return apierrors.IsNotFound(err) || err == nil && now.UID != pod.UID
}

// postBinding assigns the pod through the API.
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

// note is something to be written about a pod; losing one harms nobody.
type note struct {
	pod       *v1.Pod
	at        time.Time // when it happened; events of one second are listed in this order
	kind      string
	reason    string // of the event
	message   string
	condition string // reason of PodScheduled=False; "" = no condition
}

// report tells of a failure, unless the same has been told of this pod already.
func (s *Scheduler) report(p *queued, reason, message string) {
	if s.queue.said(p.Pod.UID, message) {
		s.note(note{pod: p.Pod, at: time.Now(), kind: v1.EventTypeWarning, reason: "FailedScheduling", message: message, condition: reason})
	}
}

func (s *Scheduler) note(n note) {
	select {
	case s.notes <- n:
	default:
		s.log.Debug("note dropped: too many wait", "pod", n.pod.Namespace+"/"+n.pod.Name, "reason", n.reason)
	}
}

// writeNotes writes events and conditions until ctx ends.
func (s *Scheduler) writeNotes(ctx context.Context) error {
	for {
		select {
		case n := <-s.notes:
			if n.condition != "" {
				if err := s.writeCondition(ctx, n); err != nil {
					s.log.Warn("condition not written", "err", err)
				}
			}
			if err := s.writeEvent(ctx, n); err != nil {
				s.log.Debug("event not written", "err", err)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// writeCondition sets PodScheduled=False with the reason, unless the pod says so already or has a node by now.
func (s *Scheduler) writeCondition(ctx context.Context, n note) error {
	pod, ok := client.Cached[*v1.Pod](s.cfg.Informers, n.pod.Namespace, n.pod.Name)
	for range 3 {
		if !ok || pod.UID != n.pod.UID || pod.Spec.NodeName != "" {
			return nil
		}
		next, changed := withCondition(pod, n.condition, n.message, metav1.Now())
		if !changed {
			return nil
		}
		_, err := client.UpdateStatus(ctx, s.writer.Load(), next)
		switch {
		case err == nil, apierrors.IsNotFound(err):
			return nil
		case !apierrors.IsConflict(err):
			return fmt.Errorf("write condition of pod %s/%s: %w", n.pod.Namespace, n.pod.Name, err)
		}
		if pod, err = client.Get[*v1.Pod](ctx, s.writer.Load(), n.pod.Namespace, n.pod.Name); err != nil {
			if apierrors.IsNotFound(err) {
				return nil
			}
			return fmt.Errorf("write condition of pod %s/%s: %w", n.pod.Namespace, n.pod.Name, err)
		}
	}
	return errors.New("write condition of pod " + n.pod.Namespace + "/" + n.pod.Name + ": too many conflicts")
}

// withCondition is the pod with PodScheduled=False; changed is false when it says the same already.
func withCondition(pod *v1.Pod, reason, message string, now metav1.Time) (next *v1.Pod, changed bool) {
	want := v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionFalse, Reason: reason, Message: message, LastTransitionTime: now}
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type != v1.PodScheduled {
			continue
		}
		if c.Status == want.Status && c.Reason == reason && c.Message == message {
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

func (s *Scheduler) writeEvent(ctx context.Context, n note) error {
	at := metav1.NewTime(n.at)
	e := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: n.pod.Namespace, Name: fmt.Sprintf("%s.%016x", n.pod.Name, n.at.UnixNano())},
		InvolvedObject: v1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: n.pod.Namespace, Name: n.pod.Name, UID: n.pod.UID, ResourceVersion: n.pod.ResourceVersion},
		Type: n.kind, Reason: n.reason, Message: n.message, Count: 1, FirstTimestamp: at, LastTimestamp: at,
		Source:              v1.EventSource{Component: v1.DefaultSchedulerName},
		ReportingController: v1.DefaultSchedulerName,
	}
	if _, err := client.Create(ctx, s.writer.Load(), e); err != nil {
		return fmt.Errorf("event %s of pod %s/%s: %w", n.reason, n.pod.Namespace, n.pod.Name, err)
	}
	return nil
}
