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

// maxCachedSelectors is the maximum number of compiled CEL device selectors that are cached.
const maxCachedSelectors = 256

// Ledger records which devices are in use: devices allocated to stored ResourceClaims, and promised
// devices. A promise reserves devices that were chosen for a claim until the allocation is stored
// in the claim. All profiles of a scheduler share one Ledger.
type Ledger struct {
	compiled func() *cel.Cache

	mu       sync.Mutex
	stored   map[types.UID]*resourcev1.AllocationResult // by claim UID, as last reported by the informer
	promised map[types.UID]promise                      // promise for the claim, by claim UID
	count    map[structured.DeviceID]int                // number of claims that use the device exclusively
	shares   map[structured.SharedDeviceID]int
	consumed structured.ConsumedCapacityCollection // capacity of shared devices that is in use
	state    *structured.AllocatedState            // result of State; nil if the fields above have changed
}

// promise is an allocation that was chosen for a claim of a pod, but is not known to be stored in
// the claim.
type promise struct {
	pod        types.UID
	allocation *resourcev1.AllocationResult
	sent       *SentAllocation // the write of the allocation, if it failed with an unknown outcome; set by Release
}

// SentAllocation identifies a write of an allocation into a ResourceClaim, by the claim's name and
// by the resourceVersion that was the precondition of the write.
type SentAllocation struct {
	Namespace, Name, Version string
}

// NewLedger returns a Ledger in which no devices are in use.
func NewLedger() *Ledger {
	return &Ledger{
		compiled: sync.OnceValue(func() *cel.Cache {
			return cel.NewCache(maxCachedSelectors, cel.Features{EnableConsumableCapacity: true,
				EnableListTypeAttributes: true})
		}),
		stored: map[types.UID]*resourcev1.AllocationResult{}, promised: map[types.UID]promise{},
		count: map[structured.DeviceID]int{}, shares: map[structured.SharedDeviceID]int{},
		consumed: structured.NewConsumedCapacityCollection(),
	}
}

// Observe records the devices of the claim c, as the informer has reported them. gone means that
// the claim was deleted. If the claim has devices or was deleted, the promise for it (the devices
// reserved for its allocation) ends.
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

// Promise records that the devices in the allocation a were chosen for a claim of a pod, both given
// by UID. The devices are in use until Observe, Release, Confirm or Settle ends the promise.
func (l *Ledger) Promise(claim, pod types.UID, a *resourcev1.AllocationResult) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.forgetClaim(claim)
	l.promised[claim] = promise{pod: pod, allocation: a}
	l.countAllocation(a, 1)
}

// Release ends the promise of devices to the claim, if it was made for the given pod. If sent is
// not nil, the write of the allocation failed with an unknown outcome: the devices then stay in use
// until Observe, Confirm or Settle ends the promise.
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

// Promised reports whether devices are promised to the claim with the given UID: they were chosen
// for the claim, but the allocation is not known to be stored.
func (l *Ledger) Promised(claim types.UID) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	_, ok := l.promised[claim]
	return ok
}

// State returns the devices and capacities in use, as an input of Kubernetes' device allocator. The
// result is shared and must not be modified.
func (l *Ledger) State() structured.AllocatedState {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.state == nil {
		l.state = &structured.AllocatedState{AllocatedDevices: sets.KeySet(l.count),
			AllocatedSharedDeviceIDs: sets.KeySet(l.shares), AggregatedCapacity: l.consumed.Clone()}
	}
	return *l.state
}

// Settle ends the promises of devices whose allocation was written with an unknown outcome. The
// caller must be in a new raft term and must have passed all claims to Observe: writes of earlier
// terms can no longer be stored then.
func (l *Ledger) Settle() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for claim, p := range l.promised {
		if p.sent != nil {
			l.forgetClaim(claim)
		}
	}
}

// Confirm finds out whether allocations whose write had an unknown outcome are stored, by reading
// the claims from the API. If an allocation is not stored and can no longer be stored, the promise
// of its devices ends. freed is true if any promise has ended.
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

// isNeverStored reports whether the write sent, which had an unknown outcome, was not stored and
// can no longer be stored. That is certain if the claim no longer exists, or has no devices and a
// different resourceVersion than the precondition of the write. If the resourceVersion is the same,
// isNeverStored changes it by removing the scheduler's finalizer from the claim.
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
		return false // Observe will end the promise
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

// countAllocation adds the devices in the allocation a to the devices in use if n is 1, and removes
// them if n is -1. It ignores devices with admin access, which do not reserve the device.
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
