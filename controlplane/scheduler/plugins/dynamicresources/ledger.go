package dynamicresources

import (
	"sync"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"
)

// doubt is how long a device counts as given away after a write of which nobody knows whether it was done. By then it has
// been, or never will be.
const doubt = time.Minute

// expressions is how many compiled selectors are kept.
const expressions = 256

// Ledger says which devices are given away: by what claims say, and by what was chosen for pods that are not bound yet. All
// profiles of a scheduler go by the same.
type Ledger struct {
	compiled func() *cel.Cache
	now      func() time.Time

	mu       sync.Mutex
	stored   map[types.UID]*resourcev1.AllocationResult // by claim, as told last
	promised map[types.UID]promise                      // by claim
	count    map[structured.DeviceID]int                // claims that have the device for themselves
	shares   map[structured.SharedDeviceID]int
	consumed structured.ConsumedCapacityCollection // of devices that are shared
	state    *structured.AllocatedState            // a copy for allocators; nil when it is out of date
}

// promise is what was chosen for a pod.
type promise struct {
	pod        types.UID
	allocation *resourcev1.AllocationResult
	expires    time.Time // zero = never
}

// NewLedger knows of no claims.
func NewLedger() *Ledger {
	return &Ledger{
		compiled: sync.OnceValue(func() *cel.Cache {
			return cel.NewCache(expressions, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})
		}),
		now:    time.Now,
		stored: map[types.UID]*resourcev1.AllocationResult{}, promised: map[types.UID]promise{},
		count: map[structured.DeviceID]int{}, shares: map[structured.SharedDeviceID]int{},
		consumed: structured.NewConsumedCapacityCollection(),
	}
}

// Observe takes in a claim as it is now; gone says that it is no more. What was promised of a claim that has devices is
// promised no longer: the claim says it.
func (l *Ledger) Observe(c *resourcev1.ResourceClaim, gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := c.Status.Allocation
	if gone {
		now = nil
	}
	if now != nil || gone {
		l.forget(c.UID)
	}
	was := l.stored[c.UID]
	if was == now {
		return
	}
	l.enter(was, -1)
	l.enter(now, 1)
	if l.stored[c.UID] = now; now == nil {
		delete(l.stored, c.UID)
	}
}

// Promise gives devices to a claim for a pod.
func (l *Ledger) Promise(claim, pod types.UID, a *resourcev1.AllocationResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forget(claim)
	l.promised[claim] = promise{pod: pod, allocation: a}
	l.enter(a, 1)
}

// Release takes back what was promised of a claim to a pod. With uncertain, the claim may have been told of it: the
// devices count as given away until it says so, or can say so no more.
func (l *Ledger) Release(claim, pod types.UID, uncertain bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p, ok := l.promised[claim]
	switch {
	case !ok || p.pod != pod:
	case uncertain:
		p.expires = l.now().Add(doubt)
		l.promised[claim] = p
	default:
		l.forget(claim)
	}
}

// Promised says whether devices were chosen for a claim that it does not have yet.
func (l *Ledger) Promised(claim types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expire()
	_, ok := l.promised[claim]
	return ok
}

// State is what allocators may not give away, as it is now. It is shared and never modified.
func (l *Ledger) State() structured.AllocatedState {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.expire()
	if l.state == nil {
		l.state = &structured.AllocatedState{AllocatedDevices: sets.KeySet(l.count),
			AllocatedSharedDeviceIDs: sets.KeySet(l.shares), AggregatedCapacity: l.consumed.Clone()}
	}
	return *l.state
}

// Expire frees devices of which it is certain by now that no claim was told of them, and says whether there were any.
func (l *Ledger) Expire() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.expire()
}

// Settle is Expire for the beginning of a leadership: what an earlier one asked to be written has been, or will not be,
// and all claims have been observed since.
func (l *Ledger) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for claim, p := range l.promised {
		if !p.expires.IsZero() {
			l.forget(claim)
		}
	}
}

func (l *Ledger) expire() (some bool) {
	for claim, p := range l.promised {
		if !p.expires.IsZero() && l.now().After(p.expires) {
			l.forget(claim)
			some = true
		}
	}
	return some
}

func (l *Ledger) forget(claim types.UID) {
	if p, ok := l.promised[claim]; ok {
		delete(l.promised, claim)
		l.enter(p.allocation, -1)
	}
}

// enter counts what an allocation takes away from others, n times. Access as an administrator takes nothing away.
func (l *Ledger) enter(a *resourcev1.AllocationResult, n int) {
	if a == nil {
		return
	}
	l.state = nil
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		if r.AdminAccess != nil && *r.AdminAccess {
			continue
		}
		id := structured.MakeDeviceID(r.Driver, r.Pool, r.Device)
		if r.ShareID == nil {
			tally(l.count, id, n)
			continue
		}
		tally(l.shares, structured.MakeSharedDeviceID(id, r.ShareID), n)
		if used := structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity); n > 0 {
			l.consumed.Insert(used)
		} else {
			l.consumed.Remove(used)
		}
	}
}

func tally[K comparable](counts map[K]int, k K, n int) {
	if counts[k] += n; counts[k] == 0 {
		delete(counts, k)
	}
}
