package nodegateway

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
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// podStatus queues a reported pod status for writing. A newer report of the same pod replaces it.
func (x *session) podStatus(m *fleetv1.PodStatus) error {
	if err := checkNames(m.Namespace, m.Name, m.Uid); err != nil {
		return err
	}
	uid := types.UID(m.Uid)
	// Decoding happens in the write: a queued report takes no more memory than its encoding.
	x.put("pod/"+m.Uid, len(m.Pod), func(ctx context.Context) error {
		reported := &v1.Pod{}
		if err := decode(m.Pod, "Pod", reported); err != nil {
			x.log.Warn("message from agent", "err", fmt.Errorf("status of pod %s/%s: %w", m.Namespace, m.Name, err))
			return nil // a retry would fail again
		}
		if err := x.writeStatus(ctx, m.Namespace, m.Name, uid, &reported.Status); err != nil {
			return err
		}
		x.ackPod(uid)
		return nil
	})
	return nil
}

// maxNames bounds the names of one object in a message; valid ones are shorter.
const maxNames = 4 << 10

// checkNames returns an error if the names are longer in total than those of any object.
func checkNames(names ...string) error {
	all := 0
	for _, n := range names {
		all += len(n)
	}
	if all > maxNames {
		return fmt.Errorf("a message names an object in %d bytes, at most %d are read", all, maxNames)
	}
	return nil
}

// put queues a write for the given key; bytes is its memory use. If too much is queued for the
// node, the session ends, and the agent reconnects with its full state.
func (x *session) put(key string, bytes int, do func(ctx context.Context) error) {
	if !x.work.put(key, bytes, do) {
		x.end(errTooMuch)
	}
}

var errTooMuch = status.Error(codes.ResourceExhausted, "fleet: the agent reports more than can be written for one node")

func (x *session) ackPod(uid types.UID) {
	x.post(&fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_StatusAck{StatusAck: &fleetv1.StatusAck{Uid: string(uid)}}})
}

// writeStatus writes the reported status if it differs from the stored one. It also returns nil if
// the status can never be written: the pod is gone, was replaced, or is not bound to this node.
func (x *session) writeStatus(ctx context.Context, namespace, name string, uid types.UID, reported *v1.PodStatus) error {
	x.says(uid, reported)
	pod, ok := x.newest(namespace, name, uid)
	for range 5 {
		if !ok {
			var err error
			if pod, err = x.read(ctx, namespace, name, uid); pod == nil {
				return err
			}
		}
		if pod.UID != uid || pod.Spec.NodeName != x.node {
			if ok { // the informer may lag behind: read from the store
				ok = false
				continue
			}
			return nil
		}
		want := mergePodStatus(&pod.Status, podspec.KeepTerminated(&pod.Spec, &pod.Status, reported))
		if equality.Semantic.DeepEqual(&pod.Status, want) {
			return nil
		}
		next := *pod // shares all fields but the status with the cached pod
		next.Status = *want
		stored, err := client.UpdateStatus(ctx, x.api, &next)
		if apierrors.IsInvalid(err) {
			x.log.Error("status refused", "pod", namespace+"/"+name, "err", err)
			return nil
		}
		if again, err := x.written("status", pod, stored, err); !again {
			return err
		}
		ok = false
	}
	return fmt.Errorf("fleet: status of pod %s/%s: too many conflicts", namespace, name)
}

// written handles the result of a write of a part of a pod. again is true if the write must be
// repeated on the newest stored pod. The error is also nil if the pod is gone or not bound to this
// node.
func (x *session) written(part string, pod, stored *v1.Pod, err error) (again bool, _ error) {
	switch {
	case err == nil:
		x.wrote(revisionOf(pod), stored)
		return false, nil
	case apierrors.IsConflict(err):
		return true, nil
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err) && !x.ours(pod.Namespace, pod.Name, pod.UID):
		return false, nil
	}
	return false, x.failed(err, "write %s of pod %s/%s", part, pod.Namespace, pod.Name)
}

// read gets a pod from the store. It returns neither pod nor error if the pod is gone or not bound
// to this node.
func (x *session) read(ctx context.Context, namespace, name string, uid types.UID) (*v1.Pod, error) {
	pod, err := client.Get[*v1.Pod](ctx, x.api, namespace, name)
	switch {
	case err == nil:
		return pod, nil
	case apierrors.IsNotFound(err), apierrors.IsForbidden(err) && !x.ours(namespace, name, uid):
		return nil, nil
	}
	return nil, x.failed(err, "read pod %s/%s", namespace, name)
}

// ours reports whether the informer shows the pod, with this UID, bound to this node. If so, a
// Forbidden error only means that the authorizer's index lags behind.
func (x *session) ours(namespace, name string, uid types.UID) bool {
	p, ok := x.srv.view.pod(namespace, name)
	return ok && p.UID == uid && p.Spec.NodeName == x.node
}

// failed wraps the error of an attempt. Repeated failures are logged by complaints.
func (x *session) failed(err error, format string, args ...any) error {
	what := fmt.Sprintf(format, args...)
	x.log.Debug("will retry", "what", what, "err", err)
	return fmt.Errorf("fleet: node %s: %s: %w", x.node, what, err)
}

// mergePodStatus returns the status to store: the reported one with the stored conditions of other
// writers. A final phase is never left. The result shares memory with both arguments.
func mergePodStatus(stored, reported *v1.PodStatus) *v1.PodStatus {
	out := *reported
	out.Conditions = mergePodConditions(stored.Conditions, reported.Conditions)
	if terminal(stored.Phase) && !terminal(reported.Phase) {
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
	out.ResourceClaimStatuses = stored.ResourceClaimStatuses // not from the report: a node may read the claims that are named here
	for _, list := range []*[]v1.ContainerStatus{&out.InitContainerStatuses, &out.ContainerStatuses, &out.EphemeralContainerStatuses} {
		*list = shortWaits(*list)
	}
	return &out
}

// mostOfAWait bounds the message of a waiting container. It is larger than agents send today;
// earlier agents sent whole pages of registries, and the status would be refused repeatedly.
const mostOfAWait = 8 << 10

// shortWaits returns the list with messages of waiting containers truncated to mostOfAWait. It
// copies the list only if it changes it.
func shortWaits(list []v1.ContainerStatus) []v1.ContainerStatus {
	cut := false
	for i := range list {
		w := list[i].State.Waiting
		if w == nil || len(w.Message) <= mostOfAWait {
			continue
		}
		if !cut {
			list, cut = slices.Clone(list), true
		}
		short := *w
		short.Message = api.Clip(w.Message, mostOfAWait)
		list[i].State.Waiting = &short
	}
	return list
}

func terminal(p v1.PodPhase) bool { return p == v1.PodSucceeded || p == v1.PodFailed }

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
				c = *old // written by the scheduler
			} else if old.Status == c.Status && !old.LastTransitionTime.IsZero() {
				c.LastTransitionTime = old.LastTransitionTime
			}
		}
		out = append(out, c)
	}
	for _, c := range stored {
		// Only the node sets the resize conditions: if it no longer reports one, the resize is
		// over.
		resize := c.Type == v1.PodResizePending || c.Type == v1.PodResizeInProgress
		if find(reported, c.Type) == nil && !resize {
			out = append(out, c)
		}
	}
	return out
}

// podGone deletes the Pod object after the node has removed everything of the pod.
func (x *session) podGone(m *fleetv1.PodGone) error {
	if err := checkNames(m.Namespace, m.Name, m.Uid); err != nil {
		return err
	}
	uid := types.UID(m.Uid)
	x.put("pod/"+m.Uid, 0, func(ctx context.Context) error {
		now := int64(0)
		err := client.Delete[*v1.Pod](ctx, x.api, m.Namespace, m.Name, metav1.DeleteOptions{
			GracePeriodSeconds: &now,
			Preconditions:      &metav1.Preconditions{UID: &uid},
		})
		// A conflict means that another pod has the name.
		gone := err == nil || apierrors.IsNotFound(err) || apierrors.IsConflict(err) ||
			apierrors.IsForbidden(err) && !x.ours(m.Namespace, m.Name, uid)
		if !gone {
			return x.failed(err, "delete pod %s/%s", m.Namespace, m.Name)
		}
		x.mu.Lock()
		delete(x.echoes, uid)
		delete(x.said, uid)
		x.mu.Unlock()
		x.ackPod(uid)
		return nil
	})
	return nil
}
