package scheduler

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	schedulingv1beta1 "k8s.io/api/scheduling/v1beta1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/retry"
)

// bindPod waits until the Permit plugins allow the pod, runs the PreBind plugins, and binds the pod
// to the node that was chosen for it. It runs concurrently with the scheduling loop. Meanwhile the
// cluster state counts the pod's requests on that node. If the binding fails, bindPod undoes it and
// requeues the pod.
func (s *Scheduler) bindPod(
	ctx context.Context, p *queuedPod, c *framework.Cycle, res framework.Result, hold *waitingPod,
) {
	if hold != nil {
		if st := s.binding.waiting.awaitPermit(ctx, hold); !st.OK() {
			s.undoPlacement(ctx, p, c, res.Node, st)
			return
		}
	}
	decided := time.Now() // taken before Bind: the node may act on the binding, and report it, before Bind returns
	st := s.profiles.forPod(p.Pod).Bind(ctx, c, res.Node)
	if mayHaveBound(st) {
		st = s.binding.unconfirmed.awaitOutcome(ctx, p.PodInfo, res.Node, st)
	}
	switch {
	case st.OK():
	case (apierrors.IsNotFound(st.Err) || apierrors.IsConflict(st.Err)) && s.lead.podIsGone(ctx, p.Pod):
		s.recordAttempt(p, resultError)
		s.profiles.forPod(p.Pod).Unreserve(ctx, c, res.Node)
		s.forgetPod(ctx, p.Pod)
		s.queue.removePod(p.Pod.UID)
		return
	case apierrors.IsConflict(st.Err):
		// Another client may have bound the pod. If so, the pod informer reports the binding.
		s.recordAttempt(p, resultError)
		s.profiles.forPod(p.Pod).Unreserve(ctx, c, res.Node)
		s.forgetPod(ctx, p.Pod)
		s.queue.requeueFailed(ctx, p, nil)
		return
	default:
		s.undoPlacement(ctx, p, c, res.Node, st)
		return
	}
	s.recordAttempt(p, resultScheduled)
	s.queue.removePod(p.Pod.UID)
	s.reportGroupPlaced(p.Pod)
	pod := p.Pod
	if id := api.TraceID(pod.Annotations[api.TraceParentAnnotation]); id != "" {
		s.cfg.Timeline.Record(api.Stage{
			TraceID: id, Name: "scheduled", Actor: s.cfg.Actor, Object: "pod/" + pod.Namespace + "/" + pod.Name,
			Start: p.attempt.start, Duration: time.Since(p.attempt.start), Detail: res.Explain(),
		})
	}
	s.reports.sendReport(s.reports.placed, &statusReport{pod: pod, at: decided, eventType: v1.EventTypeNormal,
		reason:  "Scheduled",
		message: fmt.Sprintf("Successfully assigned %s/%s to %s", pod.Namespace, pod.Name, res.Node)})
}

// podIsGone reads the pod from the API. It reports whether the pod was deleted, or replaced by
// another pod with the same name. A pod that is gone can never be bound.
func (l *leadership) podIsGone(ctx context.Context, pod *v1.Pod) bool {
	now, err := client.Get[*v1.Pod](ctx, l.writer.Load(), pod.Namespace, pod.Name)
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

// confirmLeadership returns nil if this replica is the raft leader in the raft term of the current
// Run, and otherwise an error. Without Config.ConfirmLeadership it always returns nil.
func (s *Scheduler) confirmLeadership(ctx context.Context) error {
	if s.cfg.ConfirmLeadership == nil {
		return nil
	}
	return s.cfg.ConfirmLeadership(ctx, s.lead.fence.Load())
}

// postBinding binds the pod to the node by creating a Binding through the API.
func (l *leadership) postBinding(ctx context.Context, pod *v1.Pod, node string) error {
	b := &v1.Binding{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID},
		Target:     v1.ObjectReference{Kind: "Node", Name: node},
	}
	if _, err := client.Sub[*v1.Pod](ctx, l.writer.Load(), pod.Namespace, pod.Name, "binding", b); err != nil {
		return fmt.Errorf("bind pod %s/%s to node %s: %w", pod.Namespace, pod.Name, node, err)
	}
	return nil
}

// statusReport describes the result of a scheduling attempt: what must be written to the API about
// a pod or a PodGroup. That is an Event, a status condition, the pod's nominated node, or several
// of these. It is written in the background. If it is lost, only this information is missing in the
// API.
type statusReport struct {
	pod               *v1.Pod
	reporter          string    // reporting controller of the Event; "" = the pod's schedulerName
	at                time.Time // time of the reported result; orders Events within one second
	eventType         string
	reason            string // reason of the Event
	message           string
	condition         string // reason of the condition to write (PodScheduled=False for a pod); "" = no condition
	updatesNomination bool   // the pod's status.nominatedNodeName is set to its nominated node in reportWriter.cluster
	mustCheckAPI      bool   // the cache may lack an earlier write: compare with the pod in the API too

	group  *schedulingv1beta1.PodGroup // the PodGroup that the report is about; nil = it is about pod
	status metav1.ConditionStatus      // status of the PodGroup's condition
}

// reportWriter writes statusReports (Events, conditions and nominated nodes) to the API in the
// background, so that the scheduling loop does not wait for the API. If a queue of reports is full,
// further reports are dropped.
type reportWriter struct {
	log       *slog.Logger
	informers *client.Informers
	lead      *leadership
	cluster   *cluster
	queues    [reportWorkers]chan *statusReport // pointers, so that empty queues take little memory (128 KiB)
	placed    chan *statusReport                // Events about pods that were bound
}

// reportFailure enqueues a failed attempt to schedule the pod for writing: a FailedScheduling
// Event, and the condition PodScheduled=False with the given reason. It does nothing if the message
// and the pod's nominated node are the same as in the last report about the pod.
func (s *Scheduler) reportFailure(pod *queuedPod, reason, message string) {
	again := s.queue.hasReported(pod.Pod.UID)
	if s.queue.recordMessage(pod.Pod.UID, message+"\x00"+s.cluster.nominatedNode(pod.Pod.UID)) {
		s.reports.enqueueReport(&statusReport{pod: pod.Pod, at: time.Now(), eventType: v1.EventTypeWarning,
			reason: "FailedScheduling", message: message,
			condition: reason, updatesNomination: true, mustCheckAPI: again})
	}
}

// enqueueReport enqueues the report n, which a goroutine then writes to the API. Reports about the
// same pod or PodGroup are written in the order in which they were enqueued. If the queue is full,
// the report is dropped.
func (w *reportWriter) enqueueReport(n *statusReport) {
	w.sendReport(w.queues[crc32.ChecksumIEEE([]byte(n.objectName()))%reportWorkers], n)
}

func (w *reportWriter) sendReport(to chan<- *statusReport, n *statusReport) {
	select {
	case to <- n:
	default:
		w.log.Debug("report dropped: the queue of reports is full", "about", n.objectName(), "reason", n.reason)
	}
}

func (n *statusReport) objectName() string {
	if n.group != nil {
		return "podgroup " + n.group.Namespace + "/" + n.group.Name
	}
	return "pod " + n.pod.Namespace + "/" + n.pod.Name
}

// writeReports receives from the given channel until ctx ends. It writes the Event, the condition
// and the nominated node of each report to the API.
func (w *reportWriter) writeReports(ctx context.Context, reports <-chan *statusReport) error {
	for {
		select {
		case n := <-reports:
			if n.condition != "" || n.updatesNomination {
				write := w.writeCondition
				if n.group != nil {
					write = w.writeGroupCondition
				}
				if err := write(ctx, n); err != nil {
					w.log.Warn("writing a condition failed", "err", err)
				}
			}
			if n.reason != "" {
				w.writeEvent(ctx, n)
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// writePlaced writes the Events about pods that were bound, until ctx ends. It collects Events for
// eventDelay and writes them in parallel, so that the store combines them into one commit. One
// commit per Event would delay the creation and binding of other pods.
func (w *reportWriter) writePlaced(ctx context.Context) error {
	for {
		var batch []*statusReport
		select {
		case n := <-w.placed:
			batch = append(batch, n)
		case <-ctx.Done():
			return ctx.Err()
		}
		due, waiting := time.After(eventDelay), true
		for waiting && len(batch) < maxEvents {
			select {
			case n := <-w.placed:
				batch = append(batch, n)
			case <-due:
				waiting = false
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		var wg sync.WaitGroup
		for _, n := range batch {
			wg.Go(func() { w.writeEvent(ctx, n) })
		}
		wg.Wait()
	}
}

// writeCondition writes the condition PodScheduled=False and the nominated node of the report n to
// the status of the report's pod. It does nothing if the status has both already, or the pod is
// bound.
func (w *reportWriter) writeCondition(ctx context.Context, n *statusReport) error {
	return updateStatus(ctx, w.informers, w.lead, n.pod, n.mustCheckAPI, func(pod *v1.Pod) (*v1.Pod, bool) {
		if pod.Spec.NodeName != "" {
			return pod, false
		}
		next, changed := pod, false
		if n.condition != "" {
			next, changed = withCondition(pod, v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionFalse,
				Reason: n.condition, Message: n.message, LastTransitionTime: metav1.Now()})
		}
		if node := w.cluster.nominatedNode(pod.UID); n.updatesNomination && pod.Status.NominatedNodeName != node {
			if !changed {
				next = pod.DeepCopy()
			}
			next.Status.NominatedNodeName, changed = node, true
		}
		return next, changed
	})
}

// updateStatus calls change with the cached version of obj, and writes the status of the object
// that change returns. After a write conflict it calls change again, with the object from the API.
// It writes nothing if changed is false or the object was deleted. If confirm is true and changed
// is false for the cached object, it also calls change with the object from the API: the cache may
// lack an earlier write.
func updateStatus[T api.Object](
	ctx context.Context, informers *client.Informers, lead *leadership, obj T, confirm bool,
	change func(T) (next T, changed bool),
) error {
	namespace, name := obj.GetNamespace(), obj.GetName()
	failed := func(err error) error { return fmt.Errorf("write status of %T %s/%s: %w", obj, namespace, name, err) }
	have, ok := client.Cached[T](informers, namespace, name)
	return retry.OnConflict(statusTries, func() (again bool, err error) {
		if !ok || have.GetUID() != obj.GetUID() {
			return false, nil
		}
		next, changed := change(have)
		if !changed && !confirm {
			return false, nil
		}
		if changed {
			_, err = client.UpdateStatus(ctx, lead.writer.Load(), next)
			if err == nil || apierrors.IsNotFound(err) {
				return false, nil
			}
			if !apierrors.IsConflict(err) {
				return false, failed(err)
			}
		}
		confirm = false
		if have, err = client.Get[T](ctx, lead.writer.Load(), namespace, name); err != nil {
			if apierrors.IsNotFound(err) {
				return false, nil
			}
			return false, failed(err)
		}
		return true, failed(errors.New("too many conflicts"))
	})
}

// statusTries is the maximum number of times that updateStatus calls its function change.
const statusTries = 3

// withCondition returns a copy of the pod in which the condition want is set, and true. If the pod
// has an equal condition already, it returns the pod itself and false.
func withCondition(pod *v1.Pod, want v1.PodCondition) (next *v1.Pod, changed bool) {
	want.ObservedGeneration = pod.Generation
	for i := range pod.Status.Conditions {
		c := &pod.Status.Conditions[i]
		if c.Type != want.Type {
			continue
		}
		if c.Status == want.Status && c.Reason == want.Reason && c.Message == want.Message &&
			c.ObservedGeneration == want.ObservedGeneration {
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

// writeEvent creates the Event that reports the scheduling result in n. If it cannot be created,
// the error is only logged.
func (w *reportWriter) writeEvent(ctx context.Context, n *statusReport) {
	at, by := metav1.NewTime(n.at), cmp.Or(n.reporter, schedulerOf(n.pod))
	e := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: n.pod.Namespace,
			Name: fmt.Sprintf("%s.%016x", n.pod.Name, n.at.UnixNano())},
		InvolvedObject: v1.ObjectReference{
			APIVersion: "v1", Kind: "Pod", Namespace: n.pod.Namespace, Name: n.pod.Name, UID: n.pod.UID,
			ResourceVersion: n.pod.ResourceVersion},
		Type: n.eventType, Reason: n.reason, Message: n.message, Count: 1, FirstTimestamp: at, LastTimestamp: at,
		Source:              v1.EventSource{Component: by},
		ReportingController: by,
	}
	if _, err := client.Create(ctx, w.lead.writer.Load(), e); err != nil {
		w.log.Debug("writing an event failed", "pod", n.pod.Namespace+"/"+n.pod.Name, "reason", n.reason, "err", err)
	}
}
