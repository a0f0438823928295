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

// preempt implements framework.Handle.Preempt: it keeps room for the pod and ends the victims beside the loop.
func (s *Scheduler) preempt(ctx context.Context, info *framework.PodInfo, node string, victims []*framework.PodInfo) {
	s.cluster.nominate(info, node)
	for _, p := range s.cluster.nominatedBelow(node, info.Priority) {
		s.nominate(p.Pod, "") // it counted on room that is for another now
		s.queue.again(ctx, p.Pod)
	}
	select {
	case s.bindings <- struct{}{}:
	case <-ctx.Done():
		return
	}
	s.evictions.Go(func() {
		defer func() { <-s.bindings }()
		for _, v := range victims {
			if err := s.evict(ctx, v.Pod, info.Pod, node); err != nil && ctx.Err() == nil {
				s.log.Warn("preemption failed, will retry", "pod", info.Pod.Namespace+"/"+info.Pod.Name, "err", err)
				s.nominate(info.Pod, "")
				s.queue.again(ctx, info.Pod)
				return
			}
		}
	})
}

// nominate implements framework.Handle.Nominate.
func (s *Scheduler) nominate(p *v1.Pod, node string) {
	if s.cluster.nominate(framework.NewPodInfo(p), node) {
		s.note(&note{pod: p, at: time.Now(), nominates: true, again: true})
	}
}

// evict ends a pod of lower priority. One that waits for Permit only loses its place.
func (s *Scheduler) evict(ctx context.Context, victim, preemptor *v1.Pod, node string) error {
	if x := s.waiting.get(victim.UID); x != nil {
		x.Reject("scheduler", "preempted")
		return nil
	}
	why := fmt.Sprintf("%s: preempting to accommodate a higher priority pod", schedulerOf(preemptor))
	mark := func(p *v1.Pod) (*v1.Pod, bool) {
		return withCondition(p, v1.PodCondition{Type: v1.DisruptionTarget, Status: v1.ConditionTrue,
			Reason: v1.PodReasonPreemptionByScheduler, Message: why, LastTransitionTime: metav1.Now()})
	}
	if err := updateStatus(ctx, s, victim, false, mark); err != nil {
		return err
	}
	err := client.Delete[*v1.Pod](ctx, s.writer.Load(), victim.Namespace, victim.Name,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &victim.UID}})
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // gone: another one has its name, at most
		return nil
	case err != nil:
		return fmt.Errorf("preempt pod %s/%s: %w", victim.Namespace, victim.Name, err)
	}
	s.note(&note{pod: victim, by: schedulerOf(preemptor), at: time.Now(), kind: v1.EventTypeNormal, reason: "Preempted",
		message: fmt.Sprintf("Preempted by pod %s on node %s", preemptor.UID, node)})
	return nil
}

// nominatedBelow lists the pods of lower priority for which room is kept on the node.
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

// again puts a waiting pod back to be tried after its backoff.
func (q *queue) again(ctx context.Context, p *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[p.UID]
	switch {
	case have == nil:
	case have.place == inProgress:
		have.moved = true
	case have.place == inWaiting:
		delete(q.waiting, p.UID)
		q.enter(ctx, have)
	}
}
