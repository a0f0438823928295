package scheduler

import (
	"context"
	"fmt"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// waitingPods holds the pods for which a node was chosen, but whose binding Permit plugins delay.
type waitingPods struct {
	mu   sync.Mutex
	pods map[types.UID]*waitingPod
}

func newWaitingPods() *waitingPods { return &waitingPods{pods: make(map[types.UID]*waitingPod)} }

// waitingPod is a pod for which a node was chosen, but whose binding Permit plugins delay. It
// implements framework.WaitingPod.
type waitingPod struct {
	pod      *v1.Pod
	deadline time.Time
	first    string // the Permit plugin with the earliest deadline

	mu      sync.Mutex
	missing map[string]bool
	result  chan *framework.Status // has a buffer of one; later results are dropped
}

// addWaiting registers a pod whose binding is delayed. delays contains the maximum delay by Permit
// plugin. If it is empty, addWaiting returns nil.
func (w *waitingPods) addWaiting(pod *v1.Pod, delays map[string]time.Duration) *waitingPod {
	if len(delays) == 0 {
		return nil
	}
	x := &waitingPod{pod: pod, missing: make(map[string]bool), result: make(chan *framework.Status, 1)}
	now := time.Now()
	for plugin, d := range delays {
		x.missing[plugin] = true
		if end := now.Add(d); x.first == "" || end.Before(x.deadline) {
			x.deadline, x.first = end, plugin
		}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.pods[pod.UID] = x
	return x
}

// awaitPermit waits until the pod x is allowed or rejected, the earliest deadline of a Permit
// plugin passes, or ctx ends. It returns nil only if the pod is allowed.
func (w *waitingPods) awaitPermit(ctx context.Context, x *waitingPod) *framework.Status {
	defer func() {
		w.mu.Lock()
		delete(w.pods, x.pod.UID)
		w.mu.Unlock()
	}()
	t := time.NewTimer(time.Until(x.deadline))
	defer t.Stop()
	select {
	case st := <-x.result:
		return st
	case <-t.C:
		return framework.Refuse(x.first, fmt.Sprintf("rejected: not permitted within the timeout of %s", x.first))
	case <-ctx.Done():
		return framework.Fail(x.first, ctx.Err())
	}
}

func (w *waitingPods) waitingPod(uid types.UID) framework.WaitingPod {
	w.mu.Lock()
	defer w.mu.Unlock()
	if x := w.pods[uid]; x != nil {
		return x
	}
	return nil
}

func (w *waitingPods) rejectWaiting(uid types.UID, reason string) {
	if x := w.waitingPod(uid); x != nil {
		x.Reject("scheduler", reason)
	}
}

// Pod implements framework.WaitingPod: it returns the pod.
func (x *waitingPod) Pod() *v1.Pod { return x.pod }

// Allow implements framework.WaitingPod: it ends the delay of the given Permit plugin. The pod is
// bound when no plugin delays it any more.
func (x *waitingPod) Allow(plugin string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.missing, plugin)
	if len(x.missing) == 0 {
		x.setResult(nil)
	}
}

// Reject implements framework.WaitingPod: it cancels the binding, with the given plugin and reason
// as the refusal.
func (x *waitingPod) Reject(plugin, reason string) { x.setResult(framework.Refuse(plugin, reason)) }

func (x *waitingPod) setResult(s *framework.Status) {
	select {
	case x.result <- s:
	default:
	}
}

// broadcast wakes the goroutines in awaitChange when storage objects or ResourceClaims change.
// PreBind plugins wait there.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ch: make(chan struct{})} }

func (b *broadcast) wakeAll() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}

// awaitChange implements framework.Handle.AwaitVolumes and framework.Devices.AwaitDevices. It calls
// check immediately and after each wakeAll, until check returns true or an error, or ctx ends.
func (b *broadcast) awaitChange(ctx context.Context, check func() (bool, error)) error {
	for {
		b.mu.Lock()
		changed := b.ch // read before check, so that a change during check is not missed
		b.mu.Unlock()
		if done, err := check(); done || err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
