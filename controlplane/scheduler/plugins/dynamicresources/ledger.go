package dynamicresources

import (
	"context"
	"slices"
	"sync"

	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/dynamic-resource-allocation/cel"
	"k8s.io/dynamic-resource-allocation/structured"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// expressions is how many compiled selectors are cached.
const expressions = 256

// Ledger records which devices are allocated: by stored claims, and by choices for pods that are
// not bound yet. All profiles of a scheduler share one Ledger.
type Ledger struct {
	compiled func() *cel.Cache

	mu       sync.Mutex
	stored   map[types.UID]*resourcev1.AllocationResult // by claim, as observed last
	promised map[types.UID]promise                      // by claim
	count    map[structured.DeviceID]int                // number of claims with exclusive use of the device
	shares   map[structured.SharedDeviceID]int
	consumed structured.ConsumedCapacityCollection // of shared devices
	state    *structured.AllocatedState            // copy for allocators; nil if it is outdated
}

// promise is an allocation that was chosen for a pod.
type promise struct {
	pod        types.UID
	allocation *resourcev1.AllocationResult
	sent       *SentAllocation // the released promise's write without a known outcome; nil = not released
}

// SentAllocation names the write of a claim's allocation: the claim, and the resource version that
// the write was based on.
type SentAllocation struct {
	Namespace, Name, Version string
}

// NewLedger returns an empty ledger.
func NewLedger() *Ledger {
	return &Ledger{
		compiled: sync.OnceValue(func() *cel.Cache {
			return cel.NewCache(expressions, cel.Features{EnableConsumableCapacity: true, EnableListTypeAttributes: true})
		}),
		stored: map[types.UID]*resourcev1.AllocationResult{}, promised: map[types.UID]promise{},
		count: map[structured.DeviceID]int{}, shares: map[structured.SharedDeviceID]int{},
		consumed: structured.NewConsumedCapacityCollection(),
	}
}

// Observe records the current state of a claim; gone means that it was deleted. A promise for a
// claim that has devices ends, because the claim contains them.
func (l *Ledger) Observe(c *resourcev1.ResourceClaim, gone bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	now := c.Status.Allocation
	if gone {
		now = nil
	}
	if now != nil || gone {
		l.forgetClaim(c.UID)
	}
	was := l.stored[c.UID]
	if was == now {
		return
	}
	l.countAllocation(was, -1)
	l.countAllocation(now, 1)
	if l.stored[c.UID] = now; now == nil {
		delete(l.stored, c.UID)
	}
}

// Promise records devices that were chosen for a claim of a pod.
func (l *Ledger) Promise(claim, pod types.UID, a *resourcev1.AllocationResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetClaim(claim)
	l.promised[claim] = promise{pod: pod, allocation: a}
	l.countAllocation(a, 1)
}

// Release ends the promise of a claim to a pod. If sent is not nil, the write of the allocation may
// be stored now or later. The devices then stay allocated until Observe or Confirm shows otherwise.
func (l *Ledger) Release(claim, pod types.UID, sent *SentAllocation) {
	l.mu.Lock()
	defer l.mu.Unlock()
	p, ok := l.promised[claim]
	switch {
	case !ok || p.pod != pod:
	case sent != nil:
		p.sent = sent
		l.promised[claim] = p
	default:
		l.forgetClaim(claim)
	}
}

// Promised reports whether devices were chosen for a claim that does not have them yet.
func (l *Ledger) Promised(claim types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.promised[claim]
	return ok
}

// State returns the devices that allocators must not use. It is shared and never modified.
func (l *Ledger) State() structured.AllocatedState {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == nil {
		l.state = &structured.AllocatedState{AllocatedDevices: sets.KeySet(l.count),
			AllocatedSharedDeviceIDs: sets.KeySet(l.shares), AggregatedCapacity: l.consumed.Clone()}
	}
	return *l.state
}

// Settle ends the promises with writes of unknown outcome. It is called at the start of a term,
// after all claims have been observed: no write of an earlier term can be stored any more.
func (l *Ledger) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for claim, p := range l.promised {
		if p.sent != nil {
			l.forgetClaim(claim)
		}
	}
}

// Confirm frees the devices of released promises if their write is known never to be stored, and
// reports whether it freed any.
func (l *Ledger) Confirm(ctx context.Context, d framework.Devices) (freed bool) {
	for claim, sent := range l.unconfirmedAllocations() {
		if !isNeverStored(ctx, d, claim, sent) {
			continue
		}
		l.mu.Lock()
		if l.promised[claim].sent == sent {
			l.forgetClaim(claim)
			freed = true
		}
		l.mu.Unlock()
	}
	return freed
}

func (l *Ledger) unconfirmedAllocations() map[types.UID]*SentAllocation {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := map[types.UID]*SentAllocation{}
	for claim, p := range l.promised {
		if p.sent != nil {
			out[claim] = p.sent
		}
	}
	return out
}

// isNeverStored reports whether a write of an allocation is not stored and cannot be stored any
// more: the claim is gone, or has no devices at a later resource version than the write was based
// on. Where the claim still has that version, isNeverStored removes the finalizer that the
// scheduler added, which makes the version a later one.
func isNeverStored(ctx context.Context, d framework.Devices, uid types.UID, sent *SentAllocation) bool {
	claim, err := d.DeviceClaimNow(ctx, sent.Namespace, sent.Name)
	switch {
	case apierrors.IsNotFound(err):
		return true
	case err != nil:
		return false
	case claim.UID != uid:
		return true
	case claim.Status.Allocation != nil:
		return false // Observe ends the promise
	case claim.ResourceVersion != sent.Version:
		return true
	}
	next := claim.DeepCopy()
	next.Finalizers = slices.DeleteFunc(next.Finalizers, func(f string) bool { return f == resourcev1.Finalizer })
	stored, err := d.UpdateDeviceClaim(ctx, next)
	return err == nil && stored.ResourceVersion != sent.Version
}

func (l *Ledger) forgetClaim(claim types.UID) {
	if p, ok := l.promised[claim]; ok {
		delete(l.promised, claim)
		l.countAllocation(p.allocation, -1)
	}
}

// countAllocation adds n times the devices of an allocation to the counts. Admin access does not
// use devices.
func (l *Ledger) countAllocation(a *resourcev1.AllocationResult, n int) {
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
			adjustCount(l.count, id, n)
			continue
		}
		adjustCount(l.shares, structured.MakeSharedDeviceID(id, r.ShareID), n)
		if used := structured.NewDeviceConsumedCapacity(id, r.ConsumedCapacity); n > 0 {
			l.consumed.Insert(used)
		} else {
			l.consumed.Remove(used)
		}
	}
}

func adjustCount[K comparable](counts map[K]int, k K, n int) {
	if counts[k] += n; counts[k] == 0 {
		delete(counts, k)
	}
}
