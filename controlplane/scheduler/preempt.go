package scheduler

import (
	"context"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// preemptPods implements framework.Handle.Preempt. It nominates the node for the pod, and evicts
// the victims in a separate goroutine. Pods of lower priority that were nominated for the node lose
// their nomination. If an eviction fails, the pod's nomination is cleared and the pod is tried
// again.
func (s *Scheduler) preemptPods(ctx context.Context, info *framework.PodInfo, node string, victims []*framework.PodInfo) {
	s.cluster.nominateNode(info, node)
	for _, pod := range s.cluster.nominatedBelow(node, info.Priority) {
		s.nominatePod(pod.Pod, "") // its nominated node is now reserved for the preemptor
		s.queue.requeueNow(ctx, pod.Pod)
	}
	select {
	case s.bindingSlots <- struct{}{}:
	case <-ctx.Done():
		return
	}
	s.evictions.Go(func() {
		defer func() { <-s.bindingSlots }()
		for _, v := range victims {
			if err := s.evictVictim(ctx, v.Pod, info.Pod, node); err != nil && ctx.Err() == nil {
				s.log.Warn("preemption failed, will retry", "pod", info.Pod.Namespace+"/"+info.Pod.Name, "err", err)
				s.nominatePod(info.Pod, "")
				s.queue.requeueNow(ctx, info.Pod)
				return
			}
		}
	})
}

// nominatePod implements framework.Handle.Nominate. It sets the nominated node of a pod, and
// enqueues the update of the pod's status.
func (s *Scheduler) nominatePod(pod *v1.Pod, node string) {
	if s.cluster.nominateNode(framework.NewPodInfo(pod), node) {
		s.enqueueNote(&podUpdateNote{pod: pod, at: time.Now(), updatesNomination: true, mustCheckAPI: true})
	}
}

// evictVictim sets the condition DisruptionTarget of a victim and deletes the victim for the
// preemptor. A victim that is not bound yet, because Permit delays it, is rejected instead.
func (s *Scheduler) evictVictim(ctx context.Context, victim, preemptor *v1.Pod, node string) error {
	if x := s.waiting.waitingPod(victim.UID); x != nil {
		x.Reject("scheduler", "preempted")
		return nil
	}
	why := fmt.Sprintf("%s: preempting to accommodate a higher priority pod", schedulerOf(preemptor))
	mark := func(pod *v1.Pod) (*v1.Pod, bool) {
		return withCondition(pod, v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue,
			Reason: v1.PodReasonPreemptionByScheduler, Message: why, LastTransitionTime: metav1.Now()})
	}
	if err := updateStatus(ctx, s, victim, false, mark); err != nil {
		return err
	}
	err := client.Delete[*v1.Pod](ctx, s.writer.Load(), victim.Namespace, victim.Name,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &victim.UID}})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // already deleted; another pod may have its name
		return nil
	case err != nil:
		return fmt.Errorf("preempt pod %s/%s: %w", victim.Namespace, victim.Name, err)
	}
	s.enqueueNote(&podUpdateNote{pod: victim, reporter: schedulerOf(preemptor), at: time.Now(), eventType: v1.EventTypeNormal, reason: "Preempted",
		message: fmt.Sprintf("Preempted by pod %s on node %s", preemptor.UID, node)})
	return nil
}

// nominatedBelow returns the pods with a lower priority that are nominated for the node, by
// ascending priority.
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

// requeueNow moves an unschedulable pod to the active or backoff queue. A pod with a running
// attempt is queued again after the attempt.
func (q *queue) requeueNow(ctx context.Context, pod *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[pod.UID]
	switch {
	case have == nil:
	case have.state == inProgress:
		have.mayFit = true
	case have.state == inWaiting:
		delete(q.waiting, pod.UID)
		q.enqueue(ctx, have)
	}
}
