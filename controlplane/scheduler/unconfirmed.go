package scheduler

import (
	"context"
	"errors"
	"log/slog"
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

// The delays between attempts to find out whether a pod was bound. They double from
// firstConfirmDelay to maxConfirmDelay.
const (
	firstConfirmDelay = 100 * time.Millisecond
	maxConfirmDelay   = 5 * time.Second
)

// errPodGone means that a pod whose binding is being confirmed was deleted, or replaced by a pod
// with the same name.
var errPodGone = errors.New("the pod was deleted or is assigned to another node")

// unconfirmedBindings is the set of pods whose binding failed with an unknown outcome, for example
// a timeout: the binding may have been stored, or may still be. The set is kept after Run returns,
// because a binding that was sent in one raft term can still be stored during a later Run in the
// same term.
type unconfirmedBindings struct {
	log  *slog.Logger
	lead *leadership

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

// takeAll removes all bindings from the set and returns them by pod UID.
func (u *unconfirmedBindings) takeAll() map[types.UID]unconfirmedBinding {
	u.mu.Lock()
	defer u.mu.Unlock()
	all := u.pods
	u.pods = nil
	return all
}

// mayHaveBound reports whether the pod may have been bound, or may still be bound, although Bind
// returned the status st. It returns false for success, for a refusal by a plugin, and for a 4xx
// error of the API other than a timeout.
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

// awaitOutcome waits until it is known whether a binding that failed with status st was stored. It
// returns nil if the pod is bound to the node, a conflict error if the pod was deleted or replaced,
// and otherwise st: the pod is bound to another node, or the binding can no longer be stored. Until
// it returns, the pod must stay assumed on the node. If ctx ends first, it returns st with the
// outcome unknown; the next Run in the same raft term waits for the outcome again.
func (u *unconfirmedBindings) awaitOutcome(
	ctx context.Context, info *framework.PodInfo, node string, st *framework.Status,
) *framework.Status {
	pod := info.Pod
	u.addBinding(info, node)
	for delay := firstConfirmDelay; ; delay = min(2*delay, maxConfirmDelay) {
		bound, err := u.confirmBinding(ctx, pod, st)
		switch {
		case err == nil || errors.Is(err, errPodGone):
			u.removeBinding(pod.UID)
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
		u.log.Warn("the outcome of a binding is unknown: the pod counts on the node until it is confirmed",
			"pod", pod.Namespace+"/"+pod.Name, "node", node, "binding", st.AsError(), "err", err)
		if wait.Delay(ctx, delay) != nil {
			return st
		}
	}
}

// confirmBinding returns the name of the node to which the pod is bound. It returns "" if the pod
// is not bound and the binding that failed with st can no longer be stored. To ensure this, it
// updates the pod's status with the resourceVersion that it read: a binding that is stored later
// would conflict. Any error means that the outcome is unknown, except errPodGone.
func (u *unconfirmedBindings) confirmBinding(ctx context.Context, pod *v1.Pod, st *framework.Status) (string, error) {
	have, err := client.Get[*v1.Pod](ctx, u.lead.writer.Load(), pod.Namespace, pod.Name)
	switch {
	case apierrors.IsNotFound(err):
		return "", errPodGone
	case err != nil:
		return "", err
	case have.UID != pod.UID:
		return "", errPodGone
	case have.Spec.NodeName != "":
		return have.Spec.NodeName, nil
	}
	next := withProbedCondition(have, v1.PodCondition{Type: v1.PodScheduled, Status: v1.ConditionFalse,
		Reason: v1.PodReasonSchedulerError, Message: st.AsError().Error(), LastTransitionTime: metav1.Now()})
	_, err = client.UpdateStatus(ctx, u.lead.writer.Load(), next)
	return "", err
}

// withProbedCondition returns a copy of the pod with the condition want, whose LastProbeTime
// differs from the current one. The difference ensures that an update of the status is stored and
// changes the resourceVersion.
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

// resumeUnconfirmed handles the bindings that an earlier Run in the same raft term has sent and
// whose outcome is unknown. It assumes their pods on the nodes again. The returned function waits
// for the outcomes and returns when its context ends.
func (s *Scheduler) resumeUnconfirmed() func(ctx context.Context) error {
	open := s.binding.unconfirmed.takeAll()
	for uid, b := range open {
		s.binding.unconfirmed.addBinding(b.info, b.node)
		if s.cluster.assumePod(b.info, b.node) {
			s.queue.removePod(uid)
		}
	}
	return func(ctx context.Context) error {
		var wg sync.WaitGroup
		slots := make(chan struct{}, reportWorkers)
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
				st := s.binding.unconfirmed.awaitOutcome(ctx, b.info, b.node,
					framework.Fail("Bind", errors.New("the outcome of the binding is unknown")))
				if st.OK() || ctx.Err() != nil {
					return
				}
				s.forgetPod(ctx, b.info.Pod)
				if now, ok := client.Cached[*v1.Pod](s.cfg.Informers, b.info.Pod.Namespace, b.info.Pod.Name); ok &&
					now.UID == uid {
					s.changes.applyChange(func() { s.changes.podChanged(nil, now) })
				}
			})
		}
		wg.Wait()
		<-ctx.Done()
		return ctx.Err()
	}
}
