package scheduler

import (
	"container/heap"
	"context"
	"maps"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Delays of pods that could not be scheduled. Such a pod waits for an event that may help, and at
// least for a backoff that doubles with every attempt. After maxWaitInQueue it is tried again in
// any case.
const (
	minBackoff     = 100 * time.Millisecond
	maxBackoff     = 10 * time.Second
	maxWaitInQueue = 5 * time.Minute
)

// queueState is the state of a queued pod.
type queueState uint8

const (
	inNone     queueState = iota
	inActive              // waits to be scheduled, ordered by QueueSort
	inBackoff             // waits for its backoff
	inWaiting             // unschedulable until an event may help
	inGated               // refused by PreEnqueue
	inProgress            // popped: a node is being chosen
	inBinding             // a node is chosen
)

// queuedPod is a pod without a node, with its state in the queue.
type queuedPod struct {
	framework.QueuedPod
	state           queueState
	heapIndex       int // index in the heap of its state (active or backoff)
	retryAfter      time.Time
	waitingSince    time.Time       // time at which it became unschedulable (inWaiting)
	refusedBy       map[string]bool // plugins that refused it in the last attempt
	mayFit          bool            // an event that may help arrived while it was in progress
	missedEvents    []pendingEvent  // events that arrived while it was in progress
	reportedMessage string          // message of the last reported failure
	attemptStart    time.Time       // start of the current or last attempt
	newerPod        *v1.Pod         // newer object that arrived while it was in progress
}

// pendingEvent is a cluster event that arrived during a pod's scheduling attempt.
type pendingEvent struct {
	event framework.Event
	obj   any
}

// queue holds the pods that have no node yet or are being bound. All methods are safe for
// concurrent use.
type queue struct {
	profiles               *profiles
	now                    func() time.Time
	minBackoff, maxBackoff time.Duration

	mu         sync.Mutex
	pods       map[types.UID]*queuedPod
	active     podHeap
	backoff    podHeap
	waiting    map[types.UID]*queuedPod
	inProgress map[types.UID]*queuedPod // the pods in state inProgress
	wake       chan struct{}
}

func newQueue(p *profiles, now func() time.Time) *queue {
	q := &queue{profiles: p, now: now, minBackoff: minBackoff, maxBackoff: maxBackoff, pods: make(map[types.UID]*queuedPod),
		waiting: make(map[types.UID]*queuedPod), inProgress: make(map[types.UID]*queuedPod), wake: make(chan struct{}, 1)}
	q.active.less = func(a, b *queuedPod) bool { return p.any.QueueSort.Less(&a.QueuedPod, &b.QueuedPod) }
	q.backoff.less = func(a, b *queuedPod) bool { return a.retryAfter.Before(b.retryAfter) }
	return q
}

// addOrUpdate adds a pod to the queue, or replaces the object of a queued pod. The scheduler must
// have a profile for the pod.
func (q *queue) addOrUpdate(ctx context.Context, pod *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[pod.UID]
	if have == nil {
		have = &queuedPod{QueuedPod: framework.QueuedPod{PodInfo: framework.NewPodInfo(pod), Added: q.now()}}
		q.pods[pod.UID] = have
		q.enqueue(ctx, have)
		return
	}
	changed := affectsScheduling(have.Pod, pod)
	switch {
	case have.state == inProgress || have.state == inBinding:
		have.newerPod = pod
		have.mayFit = have.mayFit || changed
	case changed:
		q.dequeue(have)
		have.PodInfo = framework.NewPodInfo(pod)
		q.enqueue(ctx, have)
	default: // a change of the status or of another field that no plugin uses
		info := *have.PodInfo
		info.Pod = pod
		have.PodInfo = &info
	}
}

// enqueue adds a pod to the active queue, or to the backoff queue until its backoff ends. If a
// PreEnqueue plugin refuses the pod, it is only marked as gated. The caller holds q.mu.
func (q *queue) enqueue(ctx context.Context, pod *queuedPod) {
	for _, e := range q.profiles.forPod(pod.Pod).PreEnqueues {
		if s := e.PreEnqueue(ctx, pod.Pod); !s.OK() {
			pod.state = inGated
			return
		}
	}
	if q.now().Before(pod.retryAfter) {
		pod.state = inBackoff
		heap.Push(&q.backoff, pod)
	} else {
		pod.state = inActive
		heap.Push(&q.active, pod)
	}
	q.signalLoop()
}

func (q *queue) dequeue(pod *queuedPod) {
	switch pod.state {
	case inActive:
		heap.Remove(&q.active, pod.heapIndex)
	case inBackoff:
		heap.Remove(&q.backoff, pod.heapIndex)
	}
	delete(q.waiting, pod.Pod.UID)
	delete(q.inProgress, pod.Pod.UID)
	pod.state = inNone
}

func (q *queue) signalLoop() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// removePod removes a pod from the queue, because it was deleted or bound or is terminal.
func (q *queue) removePod(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	if pod == nil {
		return
	}
	q.dequeue(pod)
	delete(q.pods, uid)
}

// markBinding records that a node was chosen for the pod, which is now being bound. From then on,
// events are no longer recorded for it.
func (q *queue) markBinding(pod *queuedPod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] == pod && pod.state == inProgress {
		q.dequeue(pod)
		pod.state = inBinding
	}
}

// pop waits for the next pod to schedule and marks it as in progress. It returns nil when ctx ends.
// The caller must then call markBinding, removePod, requeueAfter or requeueFailed for the pod.
func (q *queue) pop(ctx context.Context) *queuedPod {
	for {
		pod, wait := q.popActive()
		if pod != nil {
			return pod
		}
		t := time.NewTimer(wait)
		select {
		case <-q.wake:
		case <-t.C:
		case <-ctx.Done():
			t.Stop()
			return nil
		}
		t.Stop()
	}
}

// popActive removes the first pod from the active queue and marks it as in progress. If there is
// none, it returns nil and the time until the next backoff ends.
func (q *queue) popActive() (*queuedPod, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	for q.backoff.Len() > 0 && !q.backoff.list[0].retryAfter.After(now) {
		pod := heap.Pop(&q.backoff).(*queuedPod)
		pod.state = inActive
		heap.Push(&q.active, pod)
	}
	if q.active.Len() > 0 {
		pod := heap.Pop(&q.active).(*queuedPod)
		q.startAttempt(pod)
		return pod, 0
	}
	wait := time.Minute
	if q.backoff.Len() > 0 {
		wait = q.backoff.list[0].retryAfter.Sub(now)
	}
	return nil, wait
}

// takeGroupMembers marks the other pods of a group as in progress, for an attempt to place the
// group. It returns the given pod, which was already popped, followed by these pods. Pods that are
// gated, in progress or being bound are left out.
func (q *queue) takeGroupMembers(pod *queuedPod, others []types.UID) []*queuedPod {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := []*queuedPod{pod}
	for _, uid := range others {
		m := q.pods[uid]
		if m == nil || m.state != inActive && m.state != inBackoff && m.state != inWaiting {
			continue
		}
		q.dequeue(m)
		q.startAttempt(m)
		out = append(out, m)
	}
	return out
}

// startAttempt marks a pod as in progress. The caller holds q.mu.
func (q *queue) startAttempt(pod *queuedPod) {
	pod.state, pod.attemptStart = inProgress, q.now()
	pod.mayFit, pod.missedEvents, pod.newerPod = false, nil, nil
	pod.Attempts++
	q.inProgress[pod.Pod.UID] = pod
}

// requeueAfter returns a pod to the queue that was popped but not tried. It is not popped again
// before the given time.
func (q *queue) requeueAfter(pod *queuedPod, until time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] != pod || pod.state != inProgress {
		return // removed in the meantime
	}
	q.dequeue(pod)
	q.applyNewerPod(pod)
	pod.Attempts--
	pod.retryAfter, pod.state = until, inBackoff
	heap.Push(&q.backoff, pod)
	q.signalLoop()
}

// applyNewerPod replaces the pod's object if a newer one arrived during the attempt. The caller
// holds q.mu.
func (q *queue) applyNewerPod(pod *queuedPod) {
	if pod.newerPod != nil {
		pod.PodInfo = framework.NewPodInfo(pod.newerPod)
		pod.newerPod = nil
	}
}

// backoffUntil returns the time at which the backoff of a pod ends after the given number of
// attempts.
func (q *queue) backoffUntil(attempts int) time.Time {
	return q.now().Add(min(q.minBackoff<<min(attempts-1, 10), q.maxBackoff))
}

// requeueFailed returns a pod to the queue after a failed attempt. plugins are the plugins that
// refused it; the pod then waits for an event that may help. If plugins is empty, the attempt
// itself failed, and the pod is tried again after its backoff.
func (q *queue) requeueFailed(ctx context.Context, pod *queuedPod, plugins map[string]bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] != pod || pod.state != inProgress && pod.state != inBinding {
		return // removed in the meantime
	}
	q.dequeue(pod)
	q.applyNewerPod(pod)
	pod.retryAfter = q.backoffUntil(pod.Attempts)
	pod.refusedBy = plugins
	missed := pod.mayFit
	for _, e := range pod.missedEvents {
		missed = missed || q.mayHelp(pod, e.event, e.obj)
	}
	pod.missedEvents = nil
	if len(plugins) == 0 || missed {
		q.enqueue(ctx, pod)
		return
	}
	pod.state, pod.waitingSince = inWaiting, q.now()
	q.waiting[pod.Pod.UID] = pod
}

// mayHelp reports whether the event may make a plugin accept the pod that refused it in the last
// attempt.
func (q *queue) mayHelp(pod *queuedPod, e framework.Event, obj any) bool {
	if len(pod.refusedBy) == 0 {
		return true
	}
	requeues := q.profiles.forPod(pod.Pod).Requeues
	for name := range pod.refusedBy {
		r := requeues[name]
		if r == nil || r.MayHelp(e, pod.Pod, obj) {
			return true
		}
	}
	return false
}

// handleEvent moves the unschedulable pods that the event may help to the active or backoff queue.
// For pods in progress, it records the event. obj is the changed object.
func (q *queue) handleEvent(ctx context.Context, e framework.Event, obj any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, pod := range q.inProgress {
		if len(pod.missedEvents) < 64 {
			pod.missedEvents = append(pod.missedEvents, pendingEvent{e, obj})
		} else {
			pod.mayFit = true // after so many events, one of them probably helps
		}
	}
	for uid, pod := range q.waiting {
		if q.mayHelp(pod, e, obj) {
			delete(q.waiting, uid)
			q.enqueue(ctx, pod)
		}
	}
}

// requeueOverdue moves the pods that have been unschedulable for maxWaitInQueue to the active or
// backoff queue, in case a plugin's MayHelp was wrong.
func (q *queue) requeueOverdue(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for uid, pod := range q.waiting {
		if q.now().Sub(pod.waitingSince) >= maxWaitInQueue {
			delete(q.waiting, uid)
			q.enqueue(ctx, pod)
		}
	}
}

// requeueAll queues every pod again without backoff. It is called when Run starts on a new leader.
func (q *queue) requeueAll(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, pod := range q.pods {
		q.dequeue(pod)
		pod.retryAfter, pod.reportedMessage = time.Time{}, ""
		q.enqueue(ctx, pod)
	}
}

// hasReported reports whether a failure of the pod was reported before.
func (q *queue) hasReported(uid types.UID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	return pod != nil && pod.reportedMessage != ""
}

// recordMessage records the message of a failure that is about to be reported. It returns false if
// the last recorded message is equal or the pod is not queued.
func (q *queue) recordMessage(uid types.UID, message string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	if pod == nil || pod.reportedMessage == message {
		return false
	}
	pod.reportedMessage = message
	return true
}

// affectsScheduling reports whether an update of a pod without a node may change the nodes that it
// fits.
func affectsScheduling(old, now *v1.Pod) bool {
	return !maps.Equal(old.Labels, now.Labels) || !equality.Semantic.DeepEqual(old.Spec, now.Spec) ||
		!resourceclaim.PodStatusEqual(old.Status.ResourceClaimStatuses, now.Status.ResourceClaimStatuses)
}

// podHeap is a heap of queued pods in the order of less. It implements heap.Interface.
type podHeap struct {
	list []*queuedPod
	less func(a, b *queuedPod) bool
}

func (h *podHeap) Len() int           { return len(h.list) }
func (h *podHeap) Less(i, j int) bool { return h.less(h.list[i], h.list[j]) }
func (h *podHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.list[i].heapIndex, h.list[j].heapIndex = i, j
}

// Push implements heap.Interface.
func (h *podHeap) Push(x any) {
	pod := x.(*queuedPod)
	pod.heapIndex = len(h.list)
	h.list = append(h.list, pod)
}

// Pop implements heap.Interface.
func (h *podHeap) Pop() any {
	last := len(h.list) - 1
	pod := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	return pod
}
