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

// waitingPods holds the pods with a binding that Permit plugins delay.
type waitingPods struct {
	mu   sync.Mutex
	pods map[types.UID]*waitingPod
}

func newWaitingPods() *waitingPods { return &waitingPods{pods: make(map[types.UID]*waitingPod)} }

// waitingPod is a pod with a binding that Permit plugins delay. It implements framework.WaitingPod.
type waitingPod struct {
	pod      *v1.Pod
	deadline time.Time
	first    string // plugin with the earliest deadline

	mu      sync.Mutex
	missing map[string]bool
	result  chan *framework.Status // buffered: the first result counts
}

// addWaiting registers a pod that Permit plugins delay. delays contains the maximum delay by
// plugin. It returns nil if delays is empty.
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

// awaitPermit blocks until the pod is allowed or rejected, its earliest deadline passes, or ctx
// ends. It returns nil only if the pod is allowed.
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

func (w *waitingPods) forEach(f func(framework.WaitingPod)) {
	w.mu.Lock()
	list := make([]*waitingPod, 0, len(w.pods))
	for _, x := range w.pods {
		list = append(list, x)
	}
	w.mu.Unlock()
	for _, x := range list {
		f(x)
	}
}

func (w *waitingPods) rejectWaiting(uid types.UID, reason string) {
	if x := w.waitingPod(uid); x != nil {
		x.Reject("scheduler", reason)
	}
}

// Pod implements framework.WaitingPod.
func (x *waitingPod) Pod() *v1.Pod { return x.pod }

// Allow implements framework.WaitingPod.
func (x *waitingPod) Allow(plugin string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	delete(x.missing, plugin)
	if len(x.missing) == 0 {
		x.setResult(nil)
	}
}

// Reject implements framework.WaitingPod.
func (x *waitingPod) Reject(plugin, reason string) { x.setResult(framework.Refuse(plugin, reason)) }

func (x *waitingPod) setResult(s *framework.Status) {
	select {
	case x.result <- s:
	default:
	}
}

// broadcast wakes all goroutines that wait for a change of storage objects or device claims.
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
// check now and after each wakeAll, until check returns true or an error, or ctx ends.
func (b *broadcast) awaitChange(ctx context.Context, check func() (bool, error)) error {
	for {
		b.mu.Lock()
		changed := b.ch // read before check, so that no change in between is missed
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
