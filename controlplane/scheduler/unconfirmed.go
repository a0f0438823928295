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

// The delays between attempts to determine whether a pod was bound double from firstConfirmDelay to
// maxConfirmDelay.
const (
	firstConfirmDelay = 100 * time.Millisecond
	maxConfirmDelay   = 5 * time.Second
)

// errBoundElsewhere means that a pod was bound to another node by another client, or no longer
// exists.
var errBoundElsewhere = errors.New("the pod was deleted or is assigned to another node")

// unconfirmedBindings is the set of pods with a binding that was sent, but has no known outcome. It
// is kept between calls of Run. A binding that was sent in one raft term can still be stored during
// a later Run in the same term.
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

// takeAll empties the set and returns its previous content by pod UID.
func (u *unconfirmedBindings) takeAll() map[types.UID]unconfirmedBinding {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := u.pods
	u.pods = nil
	return all
}

// mayHaveBound reports whether the pod may have been bound, or may still be bound, although Bind
// returned the status st. A 4xx status, except a timeout, means that it is not.
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

// awaitOutcome determines the outcome of a binding that failed with st. It returns nil if the pod
// is bound to the node. It returns st if the pod is not bound and the binding can no longer be
// stored. Otherwise it returns a conflict. Meanwhile the pod is counted on the node. If ctx ends
// before, it returns st, and a later Run in the same raft term continues.
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

// confirmBinding returns the node to which the pod is bound, or "". The result "" is final for the
// earlier binding st. confirmBinding has updated the pod's status with the resourceVersion that it
// read, and the store then applies no earlier write of the pod.
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
// stored one. Without the difference, the API server could skip the update as one that changes
// nothing.
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

// resumeUnconfirmed counts pods on their nodes again if a Run in the same raft term has sent their
// bindings and the outcome is unknown. It returns a function that determines the outcomes until its
// context ends.
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
