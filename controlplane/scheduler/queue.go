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

// A pod that could not be scheduled waits for an event that may help. It also waits at least for a
// backoff, which doubles with every attempt. After maxWaitInQueue it is tried in any case.
const (
	minBackoff     = 100 * time.Millisecond
	maxBackoff     = 10 * time.Second
	maxWaitInQueue = 5 * time.Minute
)

// queueState is the state of a queued pod.
type queueState uint8

const (
	inNone     queueState = iota
	inActive              // ready to be scheduled, ordered by QueueSort
	inBackoff             // waits for its backoff
	inWaiting             // unschedulable until an event may help
	inGated               // refused by PreEnqueue
	inProgress            // popped: a node is being chosen
	inBinding             // a node is chosen
)

// queuedPod is a pod in the queue.
type queuedPod struct {
	framework.QueuedPod
	state           queueState
	heapIndex       int // in its heap
	retryAfter      time.Time
	waitingSince    time.Time       // start of the wait
	refusedBy       map[string]bool // plugins that refused it last
	mayFit          bool            // an event that may help arrived while it was in progress
	missedEvents    []pendingEvent  // events that arrived while it was in progress
	reportedMessage string          // message of the last reported failure
	attemptStart    time.Time       // start of the attempt
	newerPod        *v1.Pod         // newer object that arrived while it was in progress
}

// pendingEvent is an event that arrived while a pod was in progress.
type pendingEvent struct {
	event framework.Event
	obj   any
}

// queue holds the pods without a node. All methods are safe for concurrent use.
type queue struct {
	profiles               *profiles
	now                    func() time.Time
	minBackoff, maxBackoff time.Duration

	mu         sync.Mutex
	pods       map[types.UID]*queuedPod
	active     podHeap
	backoff    podHeap
	waiting    map[types.UID]*queuedPod
	inProgress map[types.UID]*queuedPod // in progress
	wake       chan struct{}
}

func newQueue(p *profiles, now func() time.Time) *queue {
	q := &queue{profiles: p, now: now, minBackoff: minBackoff, maxBackoff: maxBackoff, pods: make(map[types.UID]*queuedPod),
		waiting: make(map[types.UID]*queuedPod), inProgress: make(map[types.UID]*queuedPod), wake: make(chan struct{}, 1)}
	q.active.less = func(a, b *queuedPod) bool { return p.any.QueueSort.Less(&a.QueuedPod, &b.QueuedPod) }
	q.backoff.less = func(a, b *queuedPod) bool { return a.retryAfter.Before(b.retryAfter) }
	return q
}

// addOrUpdate queues a pod, or updates a queued one. A profile must be responsible for the pod.
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

// enqueue puts a pod into the queue that PreEnqueue and its backoff require. The caller holds the
// lock.
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

// removePod removes a pod that was deleted or bound or is terminal.
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

// markBinding records that the pod has a node and is being bound. Events are then not recorded for
// it.
func (q *queue) markBinding(pod *queuedPod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] == pod && pod.state == inProgress {
		q.dequeue(pod)
		pod.state = inBinding
	}
}

// pop waits for the next pod and returns it; nil when ctx ends. The caller must then call
// markBinding, removePod, requeueAfter or requeueFailed for the pod.
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

// popActive removes and returns the first active pod. Without one it returns how long to wait.
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

// takeGroupMembers removes the other pods of a group from the queue, for a group attempt. The
// result starts with the pod that was popped already.
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

// startAttempt marks a pod as in progress. The caller holds the lock.
func (q *queue) startAttempt(pod *queuedPod) {
	pod.state, pod.attemptStart = inProgress, q.now()
	pod.mayFit, pod.missedEvents, pod.newerPod = false, nil, nil
	pod.Attempts++
	q.inProgress[pod.Pod.UID] = pod
}

// requeueAfter returns a pod to the queue that was not tried. It is not tried before the given
// time.
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

// applyNewerPod replaces the pod by a newer object that arrived meanwhile. The caller holds the
// lock.
func (q *queue) applyNewerPod(pod *queuedPod) {
	if pod.newerPod != nil {
		pod.PodInfo = framework.NewPodInfo(pod.newerPod)
		pod.newerPod = nil
	}
}

// backoffUntil returns the end of the backoff after the given number of attempts.
func (q *queue) backoffUntil(attempts int) time.Time {
	return q.now().Add(min(q.minBackoff<<min(attempts-1, 10), q.maxBackoff))
}

// requeueFailed returns a pod to the queue after a failed attempt. If plugins refused it, it waits
// for an event that may help. If plugins is empty, the attempt itself failed and is repeated after
// the backoff.
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

// mayHelp reports whether the event may resolve the pod's last refusal.
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

// handleEvent queues the waiting pods that the event may help.
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

// requeueOverdue queues the pods that have waited for maxWaitInQueue, in case a plugin's hint was
// wrong.
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

// requeueAll makes every pod ready at once, for a new leadership.
func (q *queue) requeueAll(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, pod := range q.pods {
		q.dequeue(pod)
		pod.retryAfter, pod.reportedMessage = time.Time{}, ""
		q.enqueue(ctx, pod)
	}
}

// hasReported reports whether a failure of the pod was reported.
func (q *queue) hasReported(uid types.UID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	return pod != nil && pod.reportedMessage != ""
}

// recordMessage records the message of a failure and reports whether it is new.
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

// affectsScheduling reports whether an update of an unscheduled pod may change where it fits.
func affectsScheduling(old, now *v1.Pod) bool {
	return !maps.Equal(old.Labels, now.Labels) || !equality.Semantic.DeepEqual(old.Spec, now.Spec) ||
		!resourceclaim.PodStatusEqual(old.Status.ResourceClaimStatuses, now.Status.ResourceClaimStatuses)
}

// podHeap is a heap of queued pods.
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
