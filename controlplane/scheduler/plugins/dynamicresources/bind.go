package dynamicresources

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/resourceclaim"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/internal/retry"
)

// writeTries is the maximum number of attempts to write a ResourceClaim after conflicts with other
// writes.
const writeTries = 5

// errClaimChanged means that a ResourceClaim was allocated, deallocated, deleted or replaced since
// the pod's node was chosen.
var errClaimChanged = errors.New("has changed since the node was chosen")

// Reserve implements framework.Reserve: it takes the devices that Filter found on the chosen node
// and promises them to the pod's claims in the Ledger, so that no other pod gets them.
func (p *Plugin) Reserve(_ context.Context, c *framework.Cycle, node string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok || len(st.wanting) == 0 {
		return nil
	}
	found := st.found[node]
	if len(found) != len(st.wanting) {
		return framework.Fail(Name, fmt.Errorf("no devices were chosen on node %s", node))
	}
	for _, one := range st.claims {
		if i := slices.Index(st.wanting, one.claim); i >= 0 {
			one.chosen = &found[i]
			p.Promise(one.claim.UID, c.Pod.Pod.UID, one.chosen)
		}
	}
	return nil
}

// PreBind implements framework.PreBind. It writes the allocated devices into the status of each
// claim and adds the pod to reservedFor. It then waits until the drivers have met the binding
// conditions of the devices, if there are any.
func (p *Plugin) PreBind(ctx context.Context, c *framework.Cycle, _ string) *framework.Status {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return nil
	}
	for _, one := range st.claims {
		if err := p.bindClaim(ctx, c.Pod.Pod, one); err != nil {
			return framework.Fail(Name, err)
		}
	}
	return p.awaitReady(ctx, st)
}

func (p *Plugin) bindClaim(ctx context.Context, pod *v1.Pod, one *claimState) error {
	claim, wrap := one.claim, func(err error) error {
		return fmt.Errorf("claim %s/%s for pod %s: %w", one.claim.Namespace, one.claim.Name, pod.Name, err)
	}
	return retry.OnConflict(writeTries, func() (again bool, err error) {
		if claim == nil { // after a conflict: read the claim again
			if claim, err = p.h.Devices.DeviceClaimNow(ctx, one.claim.Namespace, one.claim.Name); err != nil {
				return false, wrap(err)
			}
			if claim.UID != one.claim.UID {
				return false, wrap(errClaimChanged)
			}
		}
		stored, err := p.writeAllocation(ctx, pod, claim, one)
		if err == nil {
			one.stored = stored
			return false, nil
		}
		claim = nil
		return apierrors.IsConflict(err), wrap(err)
	})
}

// writeAllocation writes the devices that were chosen for the claim, if any, into its status, and
// adds the pod to reservedFor. It returns the stored claim. If the claim has changed since the node
// was chosen, the error is errClaimChanged.
func (p *Plugin) writeAllocation(ctx context.Context, pod *v1.Pod, claim *resourcev1.ResourceClaim, one *claimState) (
	*resourcev1.ResourceClaim, error,
) {
	if claim.DeletionTimestamp != nil || (claim.Status.Allocation == nil) != (one.chosen != nil) {
		return nil, errClaimChanged
	}
	if one.chosen == nil && resourceclaim.IsReservedForPod(pod, claim, false) {
		return claim, nil
	}
	if len(claim.Status.ReservedFor) >= resourcev1.ResourceClaimReservedForMaxSize {
		return nil, errors.New("is in use by the maximum number of pods")
	}
	next := claim.DeepCopy()
	if one.chosen != nil && !slices.Contains(claim.Finalizers, resourcev1.Finalizer) {
		next.Finalizers = append(next.Finalizers, resourcev1.Finalizer)
		stored, err := p.h.Devices.UpdateDeviceClaim(ctx, next)
		if err != nil {
			return nil, err
		}
		next = stored.DeepCopy()
	}
	if one.chosen != nil {
		next.Status.Allocation = one.chosen.DeepCopy()
		if hasBindingConditions(one.chosen) {
			next.Status.Allocation.AllocationTimestamp = &metav1.Time{Time: time.Now()}
		}
	}
	next.Status.ReservedFor = append(next.Status.ReservedFor, consumerReference(pod))
	if one.chosen != nil {
		one.sent = &SentAllocation{Namespace: next.Namespace, Name: next.Name, Version: next.ResourceVersion}
	}
	return p.h.Devices.UpdateDeviceClaimStatus(ctx, next)
}

func consumerReference(pod *v1.Pod) resourcev1.ResourceClaimConsumerReference {
	return resourcev1.ResourceClaimConsumerReference{Resource: "pods", Name: pod.Name, UID: pod.UID}
}

// hasBindingConditions reports whether a device in the allocation has binding conditions, which its
// driver must set to true before the pod may be bound.
func hasBindingConditions(a *resourcev1.AllocationResult) bool {
	return slices.ContainsFunc(a.Devices.Results, func(r resourcev1.DeviceRequestAllocationResult) bool {
		return len(r.BindingConditions) > 0
	})
}

func (p *Plugin) awaitReady(ctx context.Context, st *state) *framework.Status {
	var waiting []*claimState
	for _, one := range st.claims {
		if one.stored.Status.Allocation != nil && hasBindingConditions(one.stored.Status.Allocation) {
			waiting = append(waiting, one)
		}
	}
	if len(waiting) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, p.patience)
	defer cancel()
	err := p.h.Devices.AwaitDevices(ctx, func() (bool, error) {
		for _, one := range waiting {
			claim, ok := p.h.Devices.DeviceClaim(one.claim.Namespace, one.claim.Name)
			if !ok || claim.UID != one.claim.UID {
				return false, fmt.Errorf("claim %s was deleted", one.claim.Name)
			}
			if ready, err := conditionsMet(claim); !ready || err != nil {
				return false, err
			}
		}
		return true, nil
	})
	if err == nil {
		return nil
	}
	for _, one := range waiting {
		one.failed = true
	}
	return framework.Fail(Name, fmt.Errorf("waiting for devices to become ready: %w", err))
}

// conditionsMet reports whether the binding conditions of all devices of the claim are true. It
// returns an error if one of the binding failure conditions is true, because the devices will then
// never become ready.
func conditionsMet(claim *resourcev1.ResourceClaim) (bool, error) {
	a := claim.Status.Allocation
	if a == nil {
		return false, nil // the driver has not set the condition yet, or the device status was removed: wait
	}
	all := true
	for i := range a.Devices.Results {
		r := &a.Devices.Results[i]
		var have []metav1.Condition
		for _, d := range claim.Status.Devices {
			if d.Driver == r.Driver && d.Pool == r.Pool && d.Device == r.Device &&
				(d.ShareID == nil) == (r.ShareID == nil) &&
				(d.ShareID == nil || types.UID(*d.ShareID) == *r.ShareID) {
				have = d.Conditions
			}
		}
		for _, name := range r.BindingFailureConditions {
			if meta.IsStatusConditionTrue(have, name) {
				return false, fmt.Errorf("device %s/%s/%s of claim %s: %s", r.Driver, r.Pool, r.Device,
					claim.Name, name)
			}
		}
		for _, name := range r.BindingConditions {
			all = all && meta.IsStatusConditionTrue(have, name)
		}
	}
	return all, nil
}

// Unreserve implements framework.Reserve: it releases the devices that Reserve marked as in use in
// the Ledger, in memory, and removes the pod from reservedFor of its claims. An allocation that was
// already written is kept, unless its devices did not become ready.
func (p *Plugin) Unreserve(ctx context.Context, c *framework.Cycle, _ string) {
	st, ok := c.Get(Name).(*state)
	if !ok {
		return
	}
	pod := c.Pod.Pod
	for _, one := range st.claims {
		if one.chosen != nil {
			p.Release(one.claim.UID, pod.UID, one.sent)
		}
		if one.stored != nil && !resourceclaim.IsReservedForPod(pod, one.claim, false) {
			p.removeReservation(ctx, pod, one)
		}
		one.chosen, one.stored, one.sent = nil, nil, nil
	}
}

// removeReservation removes the pod from reservedFor of the claim. If the claim's devices did not
// become ready and no other pod uses the claim, it also removes the allocation. A failed write is
// ignored: the pod's next attempt starts from the stored claim, and a controller removes deleted
// pods from reservedFor.
func (p *Plugin) removeReservation(ctx context.Context, pod *v1.Pod, one *claimState) {
	claim := one.stored
	_ = retry.OnConflict(writeTries, func() (again bool, err error) {
		next := claim.DeepCopy()
		next.Status.ReservedFor = slices.DeleteFunc(next.Status.ReservedFor,
			func(r resourcev1.ResourceClaimConsumerReference) bool { return r.UID == pod.UID })
		if one.failed && len(next.Status.ReservedFor) == 0 {
			next.Status.Allocation = nil
		}
		_, err = p.h.Devices.UpdateDeviceClaimStatus(ctx, next)
		if !apierrors.IsConflict(err) {
			return false, err
		}
		claim, err = p.h.Devices.DeviceClaimNow(ctx, claim.Namespace, claim.Name)
		return err == nil && claim.UID == one.claim.UID, err
	})
}
