package scheduler

import (
	"cmp"
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
	"keelson.dev/keelson/internal/wakeup"
)

// Delays of pods that could not be scheduled. Such a pod waits for an event after which it may fit,
// and at least for its backoff, which doubles with every attempt from minBackoff to maxBackoff.
// After maxWaitInQueue without such an event it is tried again.
const (
	minBackoff     = 100 * time.Millisecond
	maxBackoff     = 10 * time.Second
	maxWaitInQueue = 5 * time.Minute
)

// queueState is the state of a pod in the scheduling queue.
type queueState uint8

const (
	inNone     queueState = iota
	inActive              // in the active queue: waits to be popped, in the order of QueueSort
	inBackoff             // in the backoff queue until its backoff ends
	inWaiting             // unschedulable; waits for an event after which it may fit
	inGated               // refused by a PreEnqueue plugin
	inProgress            // popped: an attempt to choose a node is in progress
	inBinding             // a node was chosen; the pod is being bound
)

// queuedPod is a pod in the scheduling queue, with its state there and the results of its last
// attempt.
type queuedPod struct {
	framework.QueuedPod
	place   queuePlace
	attempt attemptRecord
	missed  missedChanges
}

// queuePlace is the state of a pod in the queue, and the times that decide when the pod is tried
// again.
type queuePlace struct {
	state        queueState
	heapIndex    int // index in the heap of the active or backoff queue
	retryAfter   time.Time
	waitingSince time.Time // time at which the state became inWaiting
	enteredAt    time.Time // time at which the pod first entered the active or backoff queue
}

// attemptRecord describes the current or last attempt to schedule a pod: its start, and its result.
type attemptRecord struct {
	start           time.Time
	refusedBy       map[string]bool // names of the plugins that refused the pod in the last attempt
	reportedMessage string          // last message that was recorded with recordMessage
	countedFor      map[string]bool // names of the plugins for which queueCounts counts the pod as refused
}

// missedChanges holds the events and the pod update that arrived while an attempt to schedule the
// pod was in progress. The queue applies them after the attempt.
type missedChanges struct {
	mayFit   bool // an event or update arrived after which the pod may fit
	events   []pendingEvent
	newerPod *v1.Pod
}

// pendingEvent is a cluster event that arrived while an attempt to schedule a pod was in progress.
// After a failed attempt the queue checks whether the pod may fit because of it.
type pendingEvent struct {
	event framework.Event
	obj   any
}

// queue is the scheduling queue: it holds the pods that have no node or are being bound. All
// methods are safe for concurrent use.
type queue struct {
	profiles               *profiles
	now                    func() time.Time
	minBackoff, maxBackoff time.Duration

	mu         sync.Mutex
	pods       map[types.UID]*queuedPod
	active     podHeap
	backoff    podHeap
	waiting    map[types.UID]*queuedPod
	inProgress map[types.UID]*queuedPod // pods in the state inProgress, by UID
	counts     queueCounts
	wake       wakeup.Signal
}

func newQueue(p *profiles, now func() time.Time) *queue {
	q := &queue{profiles: p, now: now, minBackoff: minBackoff, maxBackoff: maxBackoff,
		pods:    make(map[types.UID]*queuedPod),
		waiting: make(map[types.UID]*queuedPod), inProgress: make(map[types.UID]*queuedPod), wake: wakeup.New()}
	q.active.less = func(a, b *queuedPod) bool { return p.any.Queueing.Sort.Less(&a.QueuedPod, &b.QueuedPod) }
	q.backoff.less = func(a, b *queuedPod) bool { return a.place.retryAfter.Before(b.place.retryAfter) }
	return q
}

// addOrUpdate adds a pod to the queue, or updates it if it is queued. An unschedulable pod is tried
// again if the update may change which nodes fit it. The scheduler must have a profile for the pod.
func (q *queue) addOrUpdate(ctx context.Context, pod *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[pod.UID]
	if have == nil {
		have = &queuedPod{QueuedPod: framework.QueuedPod{PodInfo: framework.NewPodInfo(pod), Added: q.now()}}
		q.pods[pod.UID] = have
		q.enqueue(ctx, have, causePodAdded)
		return
	}
	changed := affectsScheduling(have.Pod, pod)
	switch {
	case have.place.state == inProgress || have.place.state == inBinding:
		have.missed.newerPod = pod
		have.missed.mayFit = have.missed.mayFit || changed
	case changed:
		q.dequeue(have)
		have.PodInfo = framework.NewPodInfo(pod)
		q.enqueue(ctx, have, causePodUpdated)
	default: // only the status or another field that no plugin uses has changed
		info := *have.PodInfo
		info.Pod = pod
		have.PodInfo = &info
	}
}

// enqueue adds a pod to the active queue, or to the backoff queue if its backoff has not ended. If
// a PreEnqueue plugin refuses the pod, it is added to neither and gets the state inGated. cause is
// the reason in the metrics. The caller holds q.mu.
func (q *queue) enqueue(ctx context.Context, pod *queuedPod, cause string) {
	for _, e := range q.profiles.forPod(pod.Pod).Queueing.PreEnqueues {
		if s := e.PreEnqueue(ctx, pod.Pod); !s.OK() {
			pod.place.state = inGated
			q.counts.gated++
			q.counts.countRefusals(pod, map[string]bool{e.Name(): true})
			q.counts.countEntry(queueUnschedulable, cause)
			return
		}
	}
	now := q.now()
	if pod.place.enteredAt.IsZero() {
		pod.place.enteredAt = now
	}
	if now.Before(pod.place.retryAfter) {
		pod.place.state = inBackoff
		heap.Push(&q.backoff, pod)
		q.counts.countEntry(queueBackoff, cause)
	} else {
		pod.place.state = inActive
		heap.Push(&q.active, pod)
		q.counts.countEntry(queueActive, cause)
	}
	q.signalLoop()
}

func (q *queue) dequeue(pod *queuedPod) {
	switch pod.place.state {
	case inActive:
		heap.Remove(&q.active, pod.place.heapIndex)
	case inBackoff:
		heap.Remove(&q.backoff, pod.place.heapIndex)
	case inGated:
		q.counts.gated--
		q.counts.countRefusals(pod, nil)
	}
	delete(q.waiting, pod.Pod.UID)
	delete(q.inProgress, pod.Pod.UID)
	pod.place.state = inNone
}

func (q *queue) signalLoop() {
	q.wake.Send()
}

// removePod removes a pod from the queue. It is called for pods that were deleted, bound or have
// terminated.
func (q *queue) removePod(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	if pod == nil {
		return
	}
	q.dequeue(pod)
	q.counts.countRefusals(pod, nil)
	delete(q.pods, uid)
}

// markBinding sets the state of a pod to inBinding, after a node was chosen for it. Events are no
// longer recorded for the pod.
func (q *queue) markBinding(pod *queuedPod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] == pod && pod.place.state == inProgress {
		q.dequeue(pod)
		pod.place.state = inBinding
	}
}

// pop waits for the next pod to schedule, removes it from the active queue and marks it as in
// progress. It returns nil when ctx ends. After the attempt the caller must call markBinding,
// removePod, requeueAfter or requeueFailed.
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

// popActive removes the first pod from the active queue and marks it as in progress. If the active
// queue is empty, it returns nil and the time until the next pod in the backoff queue becomes
// active.
func (q *queue) popActive() (*queuedPod, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	for q.backoff.Len() > 0 && !q.backoff.list[0].place.retryAfter.After(now) {
		pod := heap.Pop(&q.backoff).(*queuedPod)
		pod.place.state = inActive
		heap.Push(&q.active, pod)
		q.counts.countEntry(queueActive, causeBackoffOver)
	}
	if q.active.Len() > 0 {
		pod := heap.Pop(&q.active).(*queuedPod)
		q.startAttempt(pod)
		return pod, 0
	}
	wait := time.Minute
	if q.backoff.Len() > 0 {
		wait = q.backoff.list[0].place.retryAfter.Sub(now)
	}
	return nil, wait
}

// takeGroupMembers marks the queued pods with the given UIDs as in progress, for an attempt to
// place their PodGroup together with pod, which was already popped. It returns pod and these pods.
// Pods that are gated, already in progress or being bound are left out.
func (q *queue) takeGroupMembers(pod *queuedPod, others []types.UID) []*queuedPod {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := []*queuedPod{pod}
	for _, uid := range others {
		m := q.pods[uid]
		if m == nil || m.place.state != inActive && m.place.state != inBackoff && m.place.state != inWaiting {
			continue
		}
		q.dequeue(m)
		q.startAttempt(m)
		out = append(out, m)
	}
	return out
}

// startAttempt marks the pod as in progress and increments its number of attempts. The caller holds
// q.mu.
func (q *queue) startAttempt(pod *queuedPod) {
	pod.place.state, pod.attempt.start = inProgress, q.now()
	pod.missed.mayFit, pod.missed.events, pod.missed.newerPod = false, nil, nil
	pod.Attempts++
	q.counts.countRefusals(pod, nil)
	q.inProgress[pod.Pod.UID] = pod
}

// requeueAfter returns a popped pod to the backoff queue without an attempt to schedule it. The pod
// is not popped again before the time until.
func (q *queue) requeueAfter(pod *queuedPod, until time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] != pod || pod.place.state != inProgress {
		return // removed in the meantime
	}
	q.dequeue(pod)
	q.applyNewerPod(pod)
	pod.Attempts--
	pod.place.retryAfter, pod.place.state = until, inBackoff
	heap.Push(&q.backoff, pod)
	q.counts.countEntry(queueBackoff, causeFailure)
	q.signalLoop()
}

// applyNewerPod replaces the pod by its newer version, if an update arrived during the attempt. The
// caller holds q.mu.
func (q *queue) applyNewerPod(pod *queuedPod) {
	if pod.missed.newerPod != nil {
		pod.PodInfo = framework.NewPodInfo(pod.missed.newerPod)
		pod.missed.newerPod = nil
	}
}

// backoffUntil returns the end of the backoff that starts now, for a pod or PodGroup with the given
// number of attempts.
func (q *queue) backoffUntil(attempts int) time.Time {
	return q.now().Add(min(q.minBackoff<<min(attempts-1, 10), q.maxBackoff))
}

// requeueFailed returns a pod to the queue after a failed attempt. plugins contains the names of
// the plugins that refused the pod; it then waits for an event after which one of them may accept
// it. If plugins is empty, the attempt ended with an error, and the pod is tried again after its
// backoff.
func (q *queue) requeueFailed(ctx context.Context, pod *queuedPod, plugins map[string]bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[pod.Pod.UID] != pod || pod.place.state != inProgress && pod.place.state != inBinding {
		return // removed in the meantime
	}
	q.dequeue(pod)
	q.applyNewerPod(pod)
	pod.place.retryAfter = q.backoffUntil(pod.Attempts)
	pod.attempt.refusedBy = plugins
	q.counts.countRefusals(pod, plugins)
	missed := pod.missed.mayFit
	for _, e := range pod.missed.events {
		missed = missed || q.mayHelp(pod, e.event, e.obj)
	}
	pod.missed.events = nil
	if len(plugins) == 0 || missed {
		q.enqueue(ctx, pod, causeFailure)
		return
	}
	pod.place.state, pod.place.waitingSince = inWaiting, q.now()
	q.waiting[pod.Pod.UID] = pod
	q.counts.countEntry(queueUnschedulable, causeFailure)
}

// mayHelp reports whether one of the plugins that refused the pod in its last attempt may accept
// the pod after the event. obj is the changed object.
func (q *queue) mayHelp(pod *queuedPod, e framework.Event, obj any) bool {
	if len(pod.attempt.refusedBy) == 0 {
		return true
	}
	requeues := q.profiles.forPod(pod.Pod).Queueing.Requeues
	for name := range pod.attempt.refusedBy {
		r := requeues[name]
		if r == nil || r.MayHelp(e, pod.Pod, obj) {
			return true
		}
	}
	return false
}

// handleEvent moves each unschedulable pod that may fit after the event to the active or backoff
// queue. For pods with an attempt in progress it records the event. obj is the changed object.
func (q *queue) handleEvent(ctx context.Context, e framework.Event, obj any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, pod := range q.inProgress {
		if len(pod.missed.events) < 64 {
			pod.missed.events = append(pod.missed.events, pendingEvent{e, obj})
		} else {
			pod.missed.mayFit = true // after so many events, the pod probably fits
		}
	}
	for uid, pod := range q.waiting {
		if q.mayHelp(pod, e, obj) {
			delete(q.waiting, uid)
			q.enqueue(ctx, pod, cmp.Or(eventLabels[e], string(e)))
		}
	}
}

// requeueOverdue moves the pods that have been unschedulable for maxWaitInQueue to the active or
// backoff queue. This is necessary if a plugin's MayHelp has wrongly returned false for an event.
func (q *queue) requeueOverdue(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for uid, pod := range q.waiting {
		if q.now().Sub(pod.place.waitingSince) >= maxWaitInQueue {
			delete(q.waiting, uid)
			q.enqueue(ctx, pod, causeOverdue)
		}
	}
}

// requeueAll moves every pod of the queue to the active queue without a backoff, unless a
// PreEnqueue plugin refuses it. Run calls it when it starts.
func (q *queue) requeueAll(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, pod := range q.pods {
		q.dequeue(pod)
		pod.place.retryAfter, pod.attempt.reportedMessage = time.Time{}, ""
		q.enqueue(ctx, pod, causeActivated)
	}
}

// hasReported reports whether a failure to schedule the pod was reported since Run started.
func (q *queue) hasReported(uid types.UID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	return pod != nil && pod.attempt.reportedMessage != ""
}

// recordMessage records the message of a failed attempt that the caller is about to report, and
// returns true. It returns false if the message is equal to the last recorded one, or the pod is
// not queued; the caller must then report nothing.
func (q *queue) recordMessage(uid types.UID, message string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	pod := q.pods[uid]
	if pod == nil || pod.attempt.reportedMessage == message {
		return false
	}
	pod.attempt.reportedMessage = message
	return true
}

// affectsScheduling reports whether old and now, two versions of a pod without a node, differ in a
// field that may change which nodes fit the pod.
func affectsScheduling(old, now *v1.Pod) bool {
	return !maps.Equal(old.Labels, now.Labels) || !equality.Semantic.DeepEqual(old.Spec, now.Spec) ||
		!resourceclaim.PodStatusEqual(old.Status.ResourceClaimStatuses, now.Status.ResourceClaimStatuses)
}

// podHeap is a heap of pods in the active or backoff queue, ordered by the function less. It
// implements heap.Interface.
type podHeap struct {
	list []*queuedPod
	less func(a, b *queuedPod) bool
}

func (h *podHeap) Len() int           { return len(h.list) }
func (h *podHeap) Less(i, j int) bool { return h.less(h.list[i], h.list[j]) }
func (h *podHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.list[i].place.heapIndex, h.list[j].place.heapIndex = i, j
}

// Push implements heap.Interface: it appends the pod x.
func (h *podHeap) Push(x any) {
	pod := x.(*queuedPod)
	pod.place.heapIndex = len(h.list)
	h.list = append(h.list, pod)
}

// Pop implements heap.Interface: it removes and returns the last pod.
func (h *podHeap) Pop() any {
	last := len(h.list) - 1
	pod := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	return pod
}
