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

// tendEvery is the time between two looks at the network of all pods.
const tendEvery = 5 * time.Minute

// tender looks after the network of running pods: attachments that are not as they were made are told of in an event
// of their pod, and what belongs to no pod is given back.
type tender struct {
	runtime  agent.Runtime
	network  agent.Network
	objects  agent.Objects
	reporter agent.Reporter
	node     string
	log      *slog.Logger
	tried    bool                 // a Run before this one has failed
	failing  map[types.UID]string // what was told of a pod
}

// run works until ctx ends or something cannot be given back; called again, it tries that at once.
func (t *tender) run(ctx context.Context) error {
	for {
		if !t.tried {
			if err := wait.Delay(ctx, tendEvery); err != nil {
				return err
			}
		}
		t.tried = true
		if err := t.look(ctx); err != nil {
			return err
		}
		t.tried = false
	}
}

func (t *tender) look(ctx context.Context) error {
	res, err := t.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("looking after pod networks: listing sandboxes: %w", err)
	}
	var keep []string
	present := map[types.UID]bool{}
	for _, s := range res.GetItems() {
		keep = append(keep, s.Id)
		uid := types.UID(s.Labels[agent.LabelPodUID])
		present[uid] = true
		if s.State == cri.PodSandboxState_SANDBOX_READY {
			t.check(ctx, s.Id, uid)
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
	}
	for uid := range t.failing {
		if !present[uid] {
			delete(t.failing, uid)
		}
	}
	if err := t.network.GC(ctx, keep); err != nil {
		return fmt.Errorf("giving back networks that belong to no pod: %w", err)
	}
	return nil
}

// check tells of a pod whose network is not as it was made, once for each way in which it is not.
func (t *tender) check(ctx context.Context, id string, uid types.UID) {
	pod, ok := t.objects.Pod(uid)
	if !ok || pod.Spec.HostNetwork || pod.DeletionTimestamp != nil {
		return
	}
	err := t.network.Check(ctx, agent.NetworkRequest{SandboxID: id, Namespace: pod.Namespace, Name: pod.Name, UID: uid})
	if err == nil || ctx.Err() != nil || !t.ready(ctx, id) {
		delete(t.failing, uid)
		return
	}
	t.log.Warn("the network of a pod is not as it was made", "pod", pod.Namespace+"/"+pod.Name, "err", err)
	if t.failing[uid] == err.Error() {
		return
	}
	t.failing[uid] = err.Error()
	t.reporter.Event(networkEvent(pod, t.node, err.Error(), time.Now()))
}

// ready says that the sandbox still is there: one that was being taken down fails its check rightly.
func (t *tender) ready(ctx context.Context, id string) bool {
	res, err := t.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: id}})
	return err == nil && len(res.GetItems()) == 1 && res.Items[0].State == cri.PodSandboxState_SANDBOX_READY
}

func networkEvent(pod *v1.Pod, node, message string, now time.Time) *v1.Event {
	const limit = 1024 // as the API's validation
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
		Reason: "NetworkCheckFailed", Message: message, Type: v1.EventTypeWarning, FirstTimestamp: at, LastTimestamp: at, Count: 1,
		Source: v1.EventSource{Component: "kubelet", Host: node}, ReportingController: "kubelet", ReportingInstance: node,
	}
}
