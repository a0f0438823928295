package report

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/retry"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// HandlePodStatus queues a reported pod status for writing. It replaces an older report of the same
// pod in the queue.
func (r *Reporter) HandlePodStatus(m *fleetv1.PodStatus) error {
	if err := wire.CheckNameLengths(m.Namespace, m.Name, m.Uid); err != nil {
		return err
	}
	uid := types.UID(m.Uid)
	// The status is decoded by the write, so that a queued report needs no more memory than its
	// encoding.
	r.QueueWrite("pod/"+m.Uid, len(m.Pod), func(ctx context.Context) error {
		reported := &v1.Pod{}
		if err := wire.DecodeObject(m.Pod, "Pod", reported); err != nil {
			r.log.Warn("message from agent", "err", fmt.Errorf("status of pod %s/%s: %w", m.Namespace, m.Name, err))
			return nil // another attempt would fail again
		}
		if err := r.writePodStatus(ctx, m.Namespace, m.Name, uid, &reported.Status); err != nil {
			return err
		}
		r.acknowledgePod(uid)
		return nil
	})
	return nil
}

// QueueWrite queues a write with a key, which replaces a queued write with the same key. bytes is
// its memory use. If the queue of the node exceeds its limit, the session ends, and the agent
// reconnects and reports its full state.
func (r *Reporter) QueueWrite(key string, bytes int, write func(ctx context.Context) error) {
	if !r.writes.enqueueWrite(key, bytes, write) {
		r.session.End(errTooManyWrites)
	}
}

var errTooManyWrites = status.Error(codes.ResourceExhausted,
	"fleet: the agent reports more than can be written for one node")

func (r *Reporter) acknowledgePod(uid types.UID) {
	r.session.QueueMessage(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_StatusAck{
		StatusAck: &fleetv1.StatusAck{Uid: string(uid)}}})
}

// writePodStatus writes the reported status of a pod if it differs from the stored status. It also
// returns nil if the status can never be written: the pod is deleted, was replaced, or is not bound
// to this node.
func (r *Reporter) writePodStatus(ctx context.Context, namespace, name string, uid types.UID,
	reported *v1.PodStatus) error {
	r.recordReadiness(uid, reported)
	pod, ok := r.newestPod(namespace, name, uid)
	tooMany := func() error { return fmt.Errorf("fleet: status of pod %s/%s: too many conflicts", namespace, name) }
	return retry.OnConflict(retry.DefaultTries, func() (again bool, err error) {
		if !ok {
			if pod, err = r.readPod(ctx, namespace, name, uid); pod == nil {
				return false, err
			}
		}
		if pod.UID != uid || pod.Spec.NodeName != r.node {
			if ok { // the informer cache may be out of date: read from the store
				ok = false
				return true, tooMany()
			}
			return false, nil
		}
		want := mergePodStatus(&pod.Status, podspec.KeepTerminated(&pod.Spec, &pod.Status, reported))
		if equality.Semantic.DeepEqual(&pod.Status, want) {
			return false, nil
		}
		next := *pod // the copy shares all fields except the status with the cached pod
		next.Status = *want
		stored, err := client.UpdateStatus(ctx, r.api, &next)
		if apierrors.IsInvalid(err) {
			r.log.Error("status refused", "pod", namespace+"/"+name, "err", err)
			return false, nil
		}
		if again, err = r.handleWriteResult("status", pod, stored, err); again {
			ok, err = false, tooMany()
		}
		return again, err
	})
}

// handleWriteResult handles the result of writing a part of a pod. again is true if the write must
// be repeated with the newest stored pod. The error is nil if the pod is deleted or not bound to
// this node.
func (r *Reporter) handleWriteResult(part string, pod, stored *v1.Pod, err error) (again bool, _ error) {
	switch {
	case err == nil:
		r.recordWrite(wire.RevisionOf(pod), stored)
		return false, nil
	case apierrors.IsConflict(err):
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err) && !r.ownsPod(pod.Namespace, pod.Name, pod.UID):
		return false, nil
	}
	return false, r.wrapFailure(err, "write %s of pod %s/%s", part, pod.Namespace, pod.Name)
}

// readPod reads a pod from the store. It returns nil without an error if the pod is deleted or not
// bound to this node.
func (r *Reporter) readPod(ctx context.Context, namespace, name string, uid types.UID) (*v1.Pod, error) {
	pod, err := client.Get[*v1.Pod](ctx, r.api, namespace, name)
	switch {
	case err == nil:
		return pod, nil
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err) && !r.ownsPod(namespace, name, uid):
		return nil, nil
	}
	return nil, r.wrapFailure(err, "read pod %s/%s", namespace, name)
}

// ownsPod reports whether the informer cache contains the pod with this UID, bound to this node. If
// so, a Forbidden error only means that the authorizer's index is out of date.
func (r *Reporter) ownsPod(namespace, name string, uid types.UID) bool {
	p, ok := r.cfg.Objects.Pod(namespace, name)
	return ok && p.UID == uid && p.Spec.NodeName == r.node
}

// wrapFailure wraps the error of a failed attempt. The failureLog logs repeated failures.
func (r *Reporter) wrapFailure(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	r.log.Debug("will retry", "what", what, "err", err)
	return fmt.Errorf("fleet: node %s: %s: %w", r.node, what, err)
}

// mergePodStatus returns the status to store: the reported status with the stored conditions of
// other writers. A pod with a final phase keeps it. The result shares memory with both arguments.
func mergePodStatus(stored, reported *v1.PodStatus) *v1.PodStatus {
	out := *reported
	out.Conditions = mergePodConditions(stored.Conditions, reported.Conditions)
	if api.IsTerminalPhase(stored.Phase) && !api.IsTerminalPhase(reported.Phase) {
		out.Phase, out.Reason, out.Message = stored.Phase, stored.Reason, stored.Message
	}
	if out.QOSClass == "" {
		out.QOSClass = stored.QOSClass
	}
	if out.StartTime == nil {
		out.StartTime = stored.StartTime
	}
	if out.NominatedNodeName == "" {
		out.NominatedNodeName = stored.NominatedNodeName
	}
	// not taken from the report, because a node may read the claims that are named here
	out.ResourceClaimStatuses = stored.ResourceClaimStatuses
	for _, list := range []*[]v1.ContainerStatus{&out.InitContainerStatuses, &out.ContainerStatuses,
		&out.EphemeralContainerStatuses} {
		*list = truncateWaitingMessages(*list)
	}
	return &out
}

// maxWaitingMessage is the maximum length of the message of a waiting container. Current agents
// send less. Earlier agents sent whole pages of registries, and the status was refused repeatedly.
const maxWaitingMessage = 8 << 10

// truncateWaitingMessages returns list with the messages of waiting containers truncated to
// maxWaitingMessage. It copies the list only if it changes something.
func truncateWaitingMessages(list []v1.ContainerStatus) []v1.ContainerStatus {
	cut := false
	for i := range list {
		w := list[i].State.Waiting
		if w == nil || len(w.Message) <= maxWaitingMessage {
			continue
		}
		if !cut {
			list, cut = slices.Clone(list), true
		}
		short := *w
		short.Message = api.Truncate(w.Message, maxWaitingMessage)
		list[i].State.Waiting = &short
	}
	return list
}

func mergePodConditions(stored, reported []v1.PodCondition) []v1.PodCondition {
	out := make([]v1.PodCondition, 0, len(stored)+len(reported))
	find := func(list []v1.PodCondition, t v1.PodConditionType) *v1.PodCondition {
		for i := range list {
			if list[i].Type == t {
				return &list[i]
			}
		}
		return nil
	}
	for _, c := range reported {
		if old := find(stored, c.Type); old != nil {
			if c.Type == v1.PodScheduled {
				c = *old // the scheduler writes this condition
			} else if old.Status == c.Status && !old.LastTransitionTime.IsZero() {
				c.LastTransitionTime = old.LastTransitionTime
			}
		}
		out = append(out, c)
	}
	for _, c := range stored {
		// Only the node sets the resize conditions: if it no longer reports such a condition, the
		// resize is complete.
		resize := c.Type == v1.PodResizePending || c.Type == v1.PodResizeInProgress
		if find(reported, c.Type) == nil && !resize {
			out = append(out, c)
		}
	}
	return out
}

// HandlePodGone deletes the Pod after the node has removed everything that belonged to it.
func (r *Reporter) HandlePodGone(m *fleetv1.PodGone) error {
	if err := wire.CheckNameLengths(m.Namespace, m.Name, m.Uid); err != nil {
		return err
	}
	uid := types.UID(m.Uid)
	r.QueueWrite("pod/"+m.Uid, 0, func(ctx context.Context) error {
		now := int64(0)
		err := client.Delete[*v1.Pod](ctx, r.api, m.Namespace, m.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &now,
			Preconditions:      &metav1.Preconditions{UID: &uid},
		})
		// A conflict means that another pod has this name.
		gone := err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) ||
			apierrors.IsForbidden(err) && !r.ownsPod(m.Namespace, m.Name, uid)
		if !gone {
			return r.wrapFailure(err, "delete pod %s/%s", m.Namespace, m.Name)
		}
		r.mu.Lock()
		delete(r.ownWrites, uid)
		delete(r.readiness, uid)
		r.mu.Unlock()
		r.acknowledgePod(uid)
		return nil
	})
	return nil
}
