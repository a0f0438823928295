package scheduler

import (
	"context"
	"errors"
	"net/http"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/wait"
)

// Delays between two attempts to determine whether a pod was bound.
const (
	firstConfirmDelay = 100 * time.Millisecond
	maxConfirmDelay   = 5 * time.Second
)

// errBoundElsewhere is the outcome of a binding if the pod was bound by another client or no longer
// exists.
var errBoundElsewhere = errors.New("the pod was deleted or is assigned to another node")

// unconfirmedBindings is the set of pods with a binding that was sent and has no known outcome. It
// outlives a Run: a late binding of a term can still be applied in a later Run of the same term.
type unconfirmedBindings struct {
	mu   sync.Mutex
	pods map[types.UID]unconfirmedBinding
}

type unconfirmedBinding struct {
	info *framework.PodInfo
	node string
}

func (u *unconfirmedBindings) addBinding(pod *framework.PodInfo, node string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.pods == nil {
		u.pods = make(map[types.UID]unconfirmedBinding)
	}
	u.pods[pod.Pod.UID] = unconfirmedBinding{pod, node}
}

func (u *unconfirmedBindings) removeBinding(uid types.UID) {
	u.mu.Lock()
	defer u.mu.Unlock()
	delete(u.pods, uid)
}

// takeAll empties the set and returns what it held.
func (u *unconfirmedBindings) takeAll() map[types.UID]unconfirmedBinding {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := u.pods
	u.pods = nil
	return all
}

// mayHaveBound reports whether a failed Bind can have bound the pod, or can still bind it. A 4xx
// status is final.
func mayHaveBound(st *framework.Status) bool {
	if st.OK() || st.Refused() {
		return false
	}
	var status apierrors.APIStatus
	if !errors.As(st.Err, &status) {
		return true
	}
	code := status.Status().Code
	return code < http.StatusBadRequest || code >= http.StatusInternalServerError || code == http.StatusRequestTimeout
}

// awaitOutcome returns the outcome of a binding that failed with st. The outcome is nil if the pod
// is bound to the node, st if the pod is not bound and the binding can no longer be applied, and a
// conflict otherwise. The pod counts on the node until then. If ctx ends first, awaitOutcome
// returns st, and a later Run of the same term continues.
func (s *Scheduler) awaitOutcome(ctx context.Context, info *framework.PodInfo, node string, st *framework.Status) *framework.Status {
	pod := info.Pod
	s.unconfirmed.addBinding(info, node)
	for delay := firstConfirmDelay; ; delay = min(2*delay, maxConfirmDelay) {
		bound, err := s.confirmBinding(ctx, pod, st)
		switch {
		case err == nil || errors.Is(err, errBoundElsewhere):
			s.unconfirmed.removeBinding(pod.UID)
			switch {
			case err != nil:
				return framework.Fail(st.Plugin, apierrors.NewConflict(v1.Resource("pods/binding"), pod.Name, err))
			case bound == node:
				return nil
			}
			return st
		case ctx.Err() != nil:
			return st
		}
		s.log.Warn("the outcome of a binding is unknown: the pod counts on the node until it is confirmed",
			"pod", pod.Namespace+"/"+pod.Name, "node", node, "binding", st.AsError(), "err", err)
		if wait.Delay(ctx, delay) != nil {
			return st
		}
	}
}

// confirmBinding returns the node of the pod. An empty node is certain: confirmBinding has written
// the pod's status with the resource version that it read, and the store applies no earlier
// proposal for the pod after that write.
func (s *Scheduler) confirmBinding(ctx context.Context, pod *v1.Pod, st *framework.Status) (string, error) {
	have, err := client.Get[*v1.Pod](ctx, s.writer.Load(), pod.Namespace, pod.Name)
	switch {
	case apierrors.IsNotFound(err):
		return "", errBoundElsewhere
	case err != nil:
		return "", err
	case have.UID != pod.UID:
		return "", errBoundElsewhere
	case have.Spec.NodeName != "":
		return have.Spec.NodeName, nil
	}
	next := withProbedCondition(have, v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionFalse,
		Reason: v1.PodReasonSchedulerError, Message: st.AsError().Error(), LastTransitionTime: metav1.Now()})
	_, err = client.UpdateStatus(ctx, s.writer.Load(), next)
	return "", err
}

// withProbedCondition returns the pod with the condition and a LastProbeTime that differs from the
// stored one. The store therefore never skips the write as one that changes nothing.
func withProbedCondition(pod *v1.Pod, want v1.PodCondition) *v1.Pod {
	next, _ := withCondition(pod, want)
	next = next.DeepCopy()
	for i := range next.Status.Conditions {
		c := &next.Status.Conditions[i]
		if c.Type != want.Type {
			continue
		}
		was, now := c.LastProbeTime, metav1.Now().Rfc3339Copy()
		if !now.After(was.Time) {
			now = metav1.NewTime(was.Add(time.Second))
		}
		c.LastProbeTime = now
	}
	return next
}

// resumeUnconfirmed assumes the pods with bindings of unknown outcome from an earlier Run of the
// same term. It returns a function that waits for the outcomes.
func (s *Scheduler) resumeUnconfirmed() func(ctx context.Context) error {
	open := s.unconfirmed.takeAll()
	for uid, b := range open {
		s.unconfirmed.addBinding(b.info, b.node)
		if s.cluster.assumePod(b.info, b.node) {
			s.queue.removePod(uid)
		}
	}
	return func(ctx context.Context) error {
		var wg sync.WaitGroup
		slots := make(chan struct{}, noteWorkers)
		for uid, b := range open {
			select {
			case slots <- struct{}{}:
			case <-ctx.Done():
			}
			if ctx.Err() != nil {
				break
			}
			wg.Go(func() {
				defer func() { <-slots }()
				st := s.awaitOutcome(ctx, b.info, b.node, framework.Fail("Bind", errors.New("the outcome of the binding is unknown")))
				if st.OK() || ctx.Err() != nil {
					return
				}
				s.forgetPod(ctx, b.info.Pod)
				if now, ok := client.Cached[*v1.Pod](s.cfg.Informers, b.info.Pod.Namespace, b.info.Pod.Name); ok && now.UID == uid {
					s.applyChange(func() { s.podChanged(nil, now) })
				}
			})
		}
		wg.Wait()
		<-ctx.Done()
		return ctx.Err()
	}
}
