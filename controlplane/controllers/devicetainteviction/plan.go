// Package devicetainteviction deletes pods that use a device with a NoExecute taint. A pod stays if
// its ResourceClaim tolerates the taint, but not longer than the toleration's time.
package devicetainteviction

import (
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/resourceclaim"
)

// Eviction returns the time at which the pods that use ResourceClaim c must be deleted. A time in
// the past means at once. evict is false if the pods may stay. taints returns the taints of a
// device. Claims with admin access are treated like other claims.
func Eviction(c *resourcev1.ResourceClaim, taints func(driver, pool, device string) []resourcev1.DeviceTaint) (
	at time.Time, evict bool,
) {
	if c.Status.Allocation == nil {
		return time.Time{}, false
	}
	for i := range c.Status.Allocation.Devices.Results {
		d := &c.Status.Allocation.Devices.Results[i]
		for _, t := range taints(d.Driver, d.Pool, d.Device) {
			if t.Effect != resourcev1.DeviceTaintEffectNoExecute {
				continue
			}
			stay, forever := tolerationTime(d.Tolerations, t)
			if forever {
				continue
			}
			leave := time.Time{}
			if t.TimeAdded != nil {
				leave = t.TimeAdded.Add(stay)
			}
			if !evict || leave.Before(at) {
				at, evict = leave, true
			}
		}
	}
	return at, evict
}

// tolerationTime returns how long taint t is tolerated: the shortest time of the tolerations in
// list that match t. stay is 0 if no toleration matches. forever is true if at least one toleration
// matches and no matching toleration has a time.
func tolerationTime(list []resourcev1.DeviceToleration, t resourcev1.DeviceTaint) (stay time.Duration, forever bool) {
	forever = true
	matches := false
	for _, tol := range list {
		if !resourceclaim.ToleratesTaint(tol, t) {
			continue
		}
		matches = true
		if tol.TolerationSeconds == nil {
			continue
		}
		if d := time.Duration(max(0, *tol.TolerationSeconds)) * time.Second; forever || d < stay {
			stay, forever = d, false
		}
	}
	return stay, matches && forever
}

// Newest returns the slices of a pool that belong to its latest generation. A driver replaces the
// slices of a pool one after the other.
func Newest(pool []*resourcev1.ResourceSlice) (out []*resourcev1.ResourceSlice) {
	for _, s := range pool {
		switch {
		case len(out) > 0 && s.Spec.Pool.Generation < out[0].Spec.Pool.Generation:
			continue
		case len(out) > 0 && s.Spec.Pool.Generation > out[0].Spec.Pool.Generation:
			out = nil
		}
		out = append(out, s)
	}
	return out
}
