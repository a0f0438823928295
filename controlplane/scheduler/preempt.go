package scheduler

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// evictor carries out preemption: it records the nominated nodes of pods, and evicts pods of lower
// priority for them in the background.
type evictor struct {
	log       *slog.Logger
	informers *client.Informers
	lead      *leadership
	reports   *reportWriter
	cluster   *cluster
	queue     *queue
	groups    *groupTracker
	waiting   *waitingPods
	metrics   preemptionMetrics
	slots     chan struct{}  // limits the concurrent bindings and evictions; shared with bindingState
	running   sync.WaitGroup // evictions in progress
}

// preemptPods implements framework.Handle.Preempt. It makes node the nominated node of the pod, and
// evicts the victims in the background. Pods of lower priority that were nominated for the node
// lose their nomination. If an eviction fails, the nomination is cleared and the pod is requeued.
func (e *evictor) preemptPods(ctx context.Context, info *framework.PodInfo, node string, victims []*framework.PodInfo) {
	e.cluster.nominateNode(info, node)
	e.metrics.victims.Observe(float64(len(victims)))
	for _, pod := range e.cluster.nominatedBelow(node, info.Priority) {
		e.nominatePod(pod.Pod, "") // the resources of the node are now reserved for the preemptor
		e.queue.requeueUnschedulable(ctx, pod.Pod)
	}
	select {
	case e.slots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	e.running.Go(func() {
		defer func() { <-e.slots }()
		for _, v := range victims {
			if err := e.evictVictim(ctx, v.Pod, info.Pod, node); err != nil && ctx.Err() == nil {
				e.log.Warn("preemption failed, will retry", "pod", info.Pod.Namespace+"/"+info.Pod.Name, "err", err)
				e.nominatePod(info.Pod, "")
				e.queue.requeueUnschedulable(ctx, info.Pod)
				return
			}
		}
	})
}

// nominatePod implements framework.Handle.Nominate. It sets the nominated node of a pod ("" clears
// it) in the cluster state, and enqueues the change of status.nominatedNodeName for writing.
func (e *evictor) nominatePod(pod *v1.Pod, node string) {
	if e.cluster.nominateNode(framework.NewPodInfo(pod), node) {
		e.reports.enqueueReport(&statusReport{pod: pod, at: time.Now(), updatesNomination: true, mustCheckAPI: true})
	}
}

// evictVictim evicts a pod for the preemptor, which is nominated for the node: it sets the victim's
// condition DisruptionTarget and deletes the victim. If Permit plugins delay the victim's binding,
// it cancels the binding instead.
func (e *evictor) evictVictim(ctx context.Context, victim, preemptor *v1.Pod, node string) error {
	if x := e.waiting.waitingPod(victim.UID); x != nil {
		x.Reject("scheduler", "preempted")
		return nil
	}
	why := fmt.Sprintf("%s: preempting to accommodate a higher priority pod", schedulerOf(preemptor))
	mark := func(pod *v1.Pod) (*v1.Pod, bool) {
		return withCondition(pod, v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue,
			Reason: v1.PodReasonPreemptionByScheduler, Message: why, LastTransitionTime: metav1.Now()})
	}
	if err := updateStatus(ctx, e.informers, e.lead, victim, false, mark); err != nil {
		return err
	}
	err := client.Delete[*v1.Pod](ctx, e.lead.writer.Load(), victim.Namespace, victim.Name,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &victim.UID}})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // already deleted, or replaced by another pod
		return nil
	case err != nil:
		return fmt.Errorf("preempt pod %s/%s: %w", victim.Namespace, victim.Name, err)
	}
	e.reports.enqueueReport(&statusReport{pod: victim, reporter: schedulerOf(preemptor), at: time.Now(),
		eventType: v1.EventTypeNormal, reason: "Preempted",
		message: fmt.Sprintf("Preempted by pod %s on node %s", preemptor.UID, node)})
	return nil
}

// nominatedBelow returns the pods whose nominated node is the given node and whose priority is
// lower than the given one, by ascending priority.
func (c *cluster) nominatedBelow(node string, priority int32) []*framework.PodInfo {
	c.mu.Lock()
	defer c.mu.Unlock()
	var out []*framework.PodInfo
	for _, p := range c.nominated {
		if p.node == node && p.info.Priority < priority {
			out = append(out, p.info)
		}
	}
	slices.SortFunc(out, func(a, b *framework.PodInfo) int { return int(a.Priority) - int(b.Priority) })
	return out
}

// requeueUnschedulable moves an unschedulable pod to the active queue, or to the backoff queue
// until its backoff ends. If an attempt to schedule the pod is in progress, the pod is queued again
// after that attempt.
func (q *queue) requeueUnschedulable(ctx context.Context, pod *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[pod.UID]
	switch {
	case have == nil:
	case have.place.state == inProgress:
		have.missed.mayFit = true
	case have.place.state == inWaiting:
		delete(q.waiting, pod.UID)
		q.enqueue(ctx, have, causeActivated)
	}
}
