package node

import (
	"context"
	"fmt"
	"hash/fnv"
	"log/slog"
	"time"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/wait"
)

// networkCheckInterval is the time between two checks of all pod networks.
const networkCheckInterval = 5 * time.Minute

// networkChecker checks the networks of running pods with the CNI operation CHECK, and reports a
// failed check as an event of the pod. It also releases the network attachments of sandboxes that
// no longer exist.
type networkChecker struct {
	runtime  agent.Runtime
	network  agent.Network
	objects  agent.Objects
	reporter agent.Reporter
	node     string
	log      *slog.Logger
	retryNow bool                 // the previous run failed: check immediately
	reported map[types.UID]string // last reported error of a pod
}

// checkPodNetworks checks the networks of all pods at intervals. It returns when ctx ends, or an
// error when sandboxes cannot be listed or attachments cannot be released. After an error, the next
// call checks immediately.
func (t *networkChecker) checkPodNetworks(ctx context.Context) error {
	for {
		if !t.retryNow {
			if err := wait.Delay(ctx, networkCheckInterval); err != nil {
				return err
			}
		}
		t.retryNow = true
		if err := t.checkAll(ctx); err != nil {
			return err
		}
		t.retryNow = false
	}
}

func (t *networkChecker) checkAll(ctx context.Context) error {
	res, err := t.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("checking pod networks: listing sandboxes: %w", err)
	}
	var keep []string
	present := map[types.UID]bool{}
	for _, s := range res.GetItems() {
		keep = append(keep, s.Id)
		uid := types.UID(s.Labels[agent.LabelPodUID])
		present[uid] = true
		if s.State == cri.PodSandboxState_SANDBOX_READY {
			t.checkPod(ctx, s.Id, uid)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	for uid := range t.reported {
		if !present[uid] {
			delete(t.reported, uid)
		}
	}
	if err := t.network.GC(ctx, keep); err != nil {
		return fmt.Errorf("releasing networks without a pod: %w", err)
	}
	return nil
}

// checkPod checks the network of a pod in its sandbox, and reports each distinct failure once.
func (t *networkChecker) checkPod(ctx context.Context, sandbox string, podUID types.UID) {
	pod, ok := t.objects.Pod(podUID)
	if !ok || pod.Spec.HostNetwork || pod.DeletionTimestamp != nil {
		return
	}
	err := t.network.Check(ctx, agent.NetworkRequest{SandboxID: sandbox, Namespace: pod.Namespace, Name: pod.Name,
		UID: podUID})
	if err == nil || ctx.Err() != nil || !t.isSandboxReady(ctx, sandbox) {
		delete(t.reported, podUID)
		return
	}
	t.log.Warn("the network check of a pod failed", "pod", pod.Namespace+"/"+pod.Name, "err", err)
	if t.reported[podUID] == err.Error() {
		return
	}
	t.reported[podUID] = err.Error()
	t.reporter.Event(networkEvent(pod, t.node, err.Error(), time.Now()))
}

// isSandboxReady reports whether the sandbox with this ID is still ready. If it is not, a failed
// check of its network is expected and not reported.
func (t *networkChecker) isSandboxReady(ctx context.Context, sandbox string) bool {
	res, err := t.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: sandbox}})
	return err == nil && len(res.GetItems()) == 1 && res.Items[0].State == cri.PodSandboxState_SANDBOX_READY
}

func networkEvent(pod *v1.Pod, node, message string, now time.Time) *v1.Event {
	const limit = 1024 // limit of API validation
	if len(message) > limit {
		message = message[:limit-3] + "..."
	}
	h := fnv.New64a()
	fmt.Fprint(h, pod.UID, message, now.UnixNano())
	at := metav1.NewTime(now)
	return &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", pod.Name, h.Sum64()), Namespace: pod.Namespace},
		InvolvedObject: v1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace,
			Name: pod.Name, UID: pod.UID,
			ResourceVersion: pod.ResourceVersion},
		Reason: "NetworkCheckFailed", Message: message, Type: v1.EventTypeWarning, FirstTimestamp: at,
		LastTimestamp: at, Count: 1,
		Source: v1.EventSource{Component: "kubelet", Host: node}, ReportingController: "kubelet",
		ReportingInstance: node,
	}
}
