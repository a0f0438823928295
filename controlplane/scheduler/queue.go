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

// A pod that could not be scheduled waits for an event that may help, and at least this long,
// doubling with every attempt. Once in a while it is tried in any case.
const (
	firstBackoff = 100 * time.Millisecond
	mostBackoff  = 10 * time.Second
	retryAnyway  = 5 * time.Minute
)

// where a queued pod is.
type place uint8

const (
	inNone     place = iota
	inActive         // next to be scheduled, by QueueSort
	inBackoff        // not before its time
	inWaiting        // unschedulable until something changes
	inGated          // PreEnqueue refused it
	inProgress       // popped: its node is being chosen
	inBinding        // its node is chosen
)

// queued is a pod in the queue.
type queued struct {
	framework.QueuedPod
	place    place
	index    int // in its heap
	until    time.Time
	since    time.Time       // when it began to wait
	refused  map[string]bool // plugins that refused it last
	moved    bool            // an event that may help arrived while it was in progress
	events   []pending       // what happened while it was in progress
	message  string          // of the last failure that was written
	started  time.Time       // of the attempt
	replaced *v1.Pod         // newer object that arrived in progress
}

// pending is an event kept for a pod in progress.
type pending struct {
	event framework.Event
	obj   any
}

// queue holds the pods without a node. All methods are safe for concurrent use.
type queue struct {
	profiles                  *profiles
	now                       func() time.Time
	firstBackoff, mostBackoff time.Duration

	mu      sync.Mutex
	pods    map[types.UID]*queued
	active  podHeap
	backoff podHeap
	waiting map[types.UID]*queued
	flying  map[types.UID]*queued // in progress
	wake    chan struct{}
}

func newQueue(p *profiles, now func() time.Time) *queue {
	q := &queue{profiles: p, now: now, firstBackoff: firstBackoff, mostBackoff: mostBackoff, pods: make(map[types.UID]*queued),
		waiting: make(map[types.UID]*queued), flying: make(map[types.UID]*queued), wake: make(chan struct{}, 1)}
	q.active.less = func(a, b *queued) bool { return p.any.QueueSort.Less(&a.QueuedPod, &b.QueuedPod) }
	q.backoff.less = func(a, b *queued) bool { return a.until.Before(b.until) }
	return q
}

// add queues a pod that a profile serves, or takes its newer state.
func (q *queue) add(ctx context.Context, p *v1.Pod) {
	q.mu.Lock()
	defer q.mu.Unlock()
	have := q.pods[p.UID]
	if have == nil {
		have = &queued{QueuedPod: framework.QueuedPod{PodInfo: framework.NewPodInfo(p), Added: q.now()}}
		q.pods[p.UID] = have
		q.enter(ctx, have)
		return
	}
	changed := relevant(have.Pod, p)
	switch {
	case have.place == inProgress || have.place == inBinding:
		have.replaced = p
		have.moved = have.moved || changed
	case changed:
		q.leave(have)
		have.PodInfo = framework.NewPodInfo(p)
		q.enter(ctx, have)
	default: // its status, or something else that no plugin looks at
		info := *have.PodInfo
		info.Pod = p
		have.PodInfo = &info
	}
}

// enter puts a pod where PreEnqueue and its backoff say. The lock is held.
func (q *queue) enter(ctx context.Context, p *queued) {
	for _, e := range q.profiles.of(p.Pod).PreEnqueues {
		if s := e.PreEnqueue(ctx, p.Pod); !s.OK() {
			p.place = inGated
			return
		}
	}
	if q.now().Before(p.until) {
		p.place = inBackoff
		heap.Push(&q.backoff, p)
	} else {
		p.place = inActive
		heap.Push(&q.active, p)
	}
	q.poke()
}

func (q *queue) leave(p *queued) {
	switch p.place {
	case inActive:
		heap.Remove(&q.active, p.index)
	case inBackoff:
		heap.Remove(&q.backoff, p.index)
	}
	delete(q.waiting, p.Pod.UID)
	delete(q.flying, p.Pod.UID)
	p.place = inNone
}

func (q *queue) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// remove forgets a pod: it is gone, bound or finished.
func (q *queue) remove(uid types.UID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.pods[uid]
	if p == nil {
		return
	}
	q.leave(p)
	delete(q.pods, uid)
}

// chosen says that the pod has its node and is being bound: what happens in the cluster does not concern it now.
func (q *queue) chosen(p *queued) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[p.Pod.UID] == p && p.place == inProgress {
		q.leave(p)
		p.place = inBinding
	}
}

// pop returns the next pod, waiting for one; nil when ctx ends. The caller ends it with done or failed.
func (q *queue) pop(ctx context.Context) *queued {
	for {
		p, wait := q.next()
		if p != nil {
			return p
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

// next takes the first active pod, or says how long there will be none.
func (q *queue) next() (*queued, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	now := q.now()
	for q.backoff.Len() > 0 && !q.backoff.list[0].until.After(now) {
		p := heap.Pop(&q.backoff).(*queued)
		p.place = inActive
		heap.Push(&q.active, p)
	}
	if q.active.Len() > 0 {
		p := heap.Pop(&q.active).(*queued)
		q.begin(p)
		return p, 0
	}
	wait := time.Minute
	if q.backoff.Len() > 0 {
		wait = q.backoff.list[0].until.Sub(now)
	}
	return nil, wait
}

// join takes the others of a group out of the queue, for a turn with the pod that was taken already, wherever they wait.
func (q *queue) join(p *queued, others []types.UID) []*queued {
	q.mu.Lock()
	defer q.mu.Unlock()
	out := []*queued{p}
	for _, uid := range others {
		m := q.pods[uid]
		if m == nil || m.place != inActive && m.place != inBackoff && m.place != inWaiting {
			continue
		}
		q.leave(m)
		q.begin(m)
		out = append(out, m)
	}
	return out
}

// begin marks a pod whose node is being chosen from now on. The lock is held.
func (q *queue) begin(p *queued) {
	p.place, p.started = inProgress, q.now()
	p.moved, p.events, p.replaced = false, nil, nil
	p.Attempts++
	q.flying[p.Pod.UID] = p
}

// postpone gives a pod back that was not tried: not before its time.
func (q *queue) postpone(p *queued, until time.Time) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[p.Pod.UID] != p || p.place != inProgress {
		return // removed meanwhile
	}
	q.leave(p)
	q.renew(p)
	p.Attempts--
	p.until, p.place = until, inBackoff
	heap.Push(&q.backoff, p)
	q.poke()
}

// renew takes the newer object that arrived meanwhile. The lock is held.
func (q *queue) renew(p *queued) {
	if p.replaced != nil {
		p.PodInfo = framework.NewPodInfo(p.replaced)
		p.replaced = nil
	}
}

// rest is how long to wait after so many attempts, from now.
func (q *queue) rest(attempts int) time.Time {
	return q.now().Add(min(q.firstBackoff<<min(attempts-1, 10), q.mostBackoff))
}

// failed gives a pod back after an attempt. With plugins, those refused it and it waits for an event that may help;
// without, the attempt itself failed and it is tried again after its backoff.
func (q *queue) failed(ctx context.Context, p *queued, plugins map[string]bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.pods[p.Pod.UID] != p || p.place != inProgress && p.place != inBinding {
		return // removed meanwhile
	}
	q.leave(p)
	q.renew(p)
	p.until = q.rest(p.Attempts)
	p.refused = plugins
	missed := p.moved
	for _, e := range p.events {
		missed = missed || q.mayHelp(p, e.event, e.obj)
	}
	p.events = nil
	if len(plugins) == 0 || missed {
		q.enter(ctx, p)
		return
	}
	p.place, p.since = inWaiting, q.now()
	q.waiting[p.Pod.UID] = p
}

// mayHelp says whether the event may mend the last refusal.
func (q *queue) mayHelp(p *queued, e framework.Event, obj any) bool {
	if len(p.refused) == 0 {
		return true
	}
	requeues := q.profiles.of(p.Pod).Requeues
	for name := range p.refused {
		r := requeues[name]
		if r == nil || r.MayHelp(e, p.Pod, obj) {
			return true
		}
	}
	return false
}

// happened moves the waiting pods that the event may help.
func (q *queue) happened(ctx context.Context, e framework.Event, obj any) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range q.flying {
		if len(p.events) < 64 {
			p.events = append(p.events, pending{e, obj})
		} else {
			p.moved = true // so much happened that some of it will have helped
		}
	}
	for uid, p := range q.waiting {
		if q.mayHelp(p, e, obj) {
			delete(q.waiting, uid)
			q.enter(ctx, p)
		}
	}
}

// overdue moves the pods that have waited longest: a safety net should a plugin's hint be wrong.
func (q *queue) overdue(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for uid, p := range q.waiting {
		if q.now().Sub(p.since) >= retryAnyway {
			delete(q.waiting, uid)
			q.enter(ctx, p)
		}
	}
}

// restart makes every pod due at once, for a new leadership.
func (q *queue) restart(ctx context.Context) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, p := range q.pods {
		q.leave(p)
		p.until, p.message = time.Time{}, ""
		q.enter(ctx, p)
	}
}

// told says whether a failure of the pod was written.
func (q *queue) told(uid types.UID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.pods[uid]
	return p != nil && p.message != ""
}

// said remembers the message of a failure and reports whether it is new.
func (q *queue) said(uid types.UID, message string) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	p := q.pods[uid]
	if p == nil || p.message == message {
		return false
	}
	p.message = message
	return true
}

// relevant says whether an update of a pod without a node may change where it fits.
func relevant(old, now *v1.Pod) bool {
	return !maps.Equal(old.Labels, now.Labels) || !equality.Semantic.DeepEqual(old.Spec, now.Spec) ||
		!resourceclaim.PodStatusEqual(old.Status.ResourceClaimStatuses, now.Status.ResourceClaimStatuses)
}

// podHeap is a heap of queued pods.
type podHeap struct {
	list []*queued
	less func(a, b *queued) bool
}

func (h *podHeap) Len() int           { return len(h.list) }
func (h *podHeap) Less(i, j int) bool { return h.less(h.list[i], h.list[j]) }
func (h *podHeap) Swap(i, j int) {
	h.list[i], h.list[j] = h.list[j], h.list[i]
	h.list[i].index, h.list[j].index = i, j
}

// Push implements heap.Interface.
func (h *podHeap) Push(x any) {
	p := x.(*queued)
	p.index = len(h.list)
	h.list = append(h.list, p)
}

// Pop implements heap.Interface.
func (h *podHeap) Pop() any {
	last := len(h.list) - 1
	p := h.list[last]
	h.list[last] = nil
	h.list = h.list[:last]
	return p
}
