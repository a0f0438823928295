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

// expressions is how many compiled CEL device selectors are cached.
const expressions = 256

// Ledger records which devices are in use: devices allocated to stored ResourceClaims, and devices
// that were chosen for pods that are not bound yet (promises). All profiles of a scheduler share
// one Ledger.
type Ledger struct {
	compiled func() *cel.Cache

	mu       sync.Mutex
	stored   map[types.UID]*resourcev1.AllocationResult // allocation by claim UID, as the informer reported it last
	promised map[types.UID]promise                      // by claim UID
	count    map[structured.DeviceID]int                // number of claims with exclusive use of the device
	shares   map[structured.SharedDeviceID]int
	consumed structured.ConsumedCapacityCollection // capacity in use of shared devices
	state    *structured.AllocatedState            // copy for allocators; nil if it is outdated
}

// promise is an allocation that was chosen for a claim of a pod and is not known to be stored yet.
type promise struct {
	pod        types.UID
	allocation *resourcev1.AllocationResult
	sent       *SentAllocation // set by Release if the write of the allocation has no known outcome; otherwise nil
}

// SentAllocation identifies a write of a claim's allocation: the claim, and the resourceVersion
// that was the precondition of the write.
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

// Observe records the current state of a claim. gone means that the claim was deleted. If the claim
// is deleted or has devices, a promise for it ends.
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

// Promise records that the devices of an allocation were chosen for a claim of a pod. The devices
// are in use until Observe, Release, Confirm or Settle ends the promise.
func (l *Ledger) Promise(claim, pod types.UID, a *resourcev1.AllocationResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetClaim(claim)
	l.promised[claim] = promise{pod: pod, allocation: a}
	l.countAllocation(a, 1)
}

// Release ends the promise for a claim that was made for the pod. If sent is not nil, the
// allocation was written with an unknown outcome. The promise then stays until Observe, Confirm or
// Settle ends it.
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

// Promised reports whether there is a promise for the claim: devices were chosen, but the claim is
// not known to have them.
func (l *Ledger) Promised(claim types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.promised[claim]
	return ok
}

// State returns the devices and capacities in use, in the form that the allocator requires. It is
// shared and must not be modified.
func (l *Ledger) State() structured.AllocatedState {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == nil {
		l.state = &structured.AllocatedState{AllocatedDevices: sets.KeySet(l.count),
			AllocatedSharedDeviceIDs: sets.KeySet(l.shares), AggregatedCapacity: l.consumed.Clone()}
	}
	return *l.state
}

// Settle ends the released promises with writes of unknown outcome. It must be called at the start
// of a raft term, after all claims have been observed. Writes of an earlier term can then no longer
// be stored.
func (l *Ledger) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for claim, p := range l.promised {
		if p.sent != nil {
			l.forgetClaim(claim)
		}
	}
}

// Confirm reads the claims of released promises with writes of unknown outcome. It ends each
// promise with a write that certainly never is stored, and reports whether it ended any.
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

// isNeverStored reports whether a write of an allocation was not stored and can no longer be
// stored. That is certain if the claim is gone, or has no devices and a later resourceVersion than
// the write's precondition. If the claim still has that resourceVersion, isNeverStored updates the
// claim, by removing the scheduler's finalizer, so that the write can no longer succeed.
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

// countAllocation adds the devices of an allocation to the counts if n is 1, and removes them if n
// is -1. Devices with admin access are not in use.
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
