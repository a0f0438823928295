package devices

import (
	"fmt"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
)

// A claim's devices remain in use on this node until the claim has been released here, whatever the
// control plane reports. A control plane that was restored from a backup may not have the claim or
// its allocation. It may then allocate the devices to another claim while pods use them. The same
// can happen after pods were deleted by force. The claim that holds a device on the node keeps it,
// and the pods of the other claim wait.

// allotment is one device in the allocation of a ResourceClaim, as claim records store it.
type allotment struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
	Share  string `json:"share,omitempty"` // set for a device that several claims share
	Admin  bool   `json:"admin,omitempty"` // admin access, which does not exclude other claims
}

func (a allotment) String() string {
	return fmt.Sprintf("device %s of pool %s of DRA driver %s", truncateText(a.Device), truncateText(a.Pool), a.Driver)
}

func (a allotment) sameDevice(b allotment) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device
}

// allocatedDevices returns the devices in the allocation of a claim, sorted.
func allocatedDevices(claim *resourcev1.ResourceClaim) []allotment {
	out := []allotment{}
	if claim.Status.Allocation == nil {
		return out
	}
	for i := range claim.Status.Allocation.Devices.Results {
		r := &claim.Status.Allocation.Devices.Results[i]
		a := allotment{Driver: r.Driver, Pool: r.Pool, Device: r.Device, Admin: r.AdminAccess != nil && *r.AdminAccess}
		if r.ShareID != nil {
			a.Share = string(*r.ShareID)
		}
		out = append(out, a)
	}
	slices.SortFunc(out, func(a, b allotment) int {
		return strings.Compare(a.Driver+"\x00"+a.Pool+"\x00"+a.Device+"\x00"+a.Share,
			b.Driver+"\x00"+b.Pool+"\x00"+b.Device+"\x00"+b.Share)
	})
	return out
}

// recordedDevices returns the devices that a claim holds on this node according to its record.
// Records of earlier agents do not contain them. For such a record it returns the devices that the
// drivers prepared and those that the control plane has allocated. complete is false if the claim
// may hold more devices.
func (d *Devices) recordedDevices(r *claimRecord) (held []allotment, complete bool) {
	if r.Allotted != nil {
		return r.Allotted, true
	}
	for _, dev := range r.Devices {
		if dev.Device != "" {
			held = append(held, allotment{Driver: dev.Driver, Pool: dev.Pool, Device: dev.Device, Share: dev.ShareID})
		}
	}
	if c, ok := d.cfg.Objects.ResourceClaim(r.Namespace, r.Name); ok && c.UID == r.UID && c.Status.Allocation != nil {
		return append(held, allocatedDevices(c)...), true
	}
	return held, len(held) > 0
}

// isAllocatedTo reports whether the control plane currently allocates the device to the record's
// claim. If so, the control plane's accounting of shared devices includes this claim.
func (d *Devices) isAllocatedTo(r *claimRecord, device allotment) bool {
	c, ok := d.cfg.Objects.ResourceClaim(r.Namespace, r.Name)
	return ok && c.UID == r.UID && slices.Contains(allocatedDevices(c), device)
}

// checkFree returns an error if, on this node, pods of another claim use a device that is allocated
// to this claim. Damaged records are ignored, because their devices are unknown.
func (d *Devices) checkFree(claim *resourcev1.ResourceClaim) error {
	all, _, err := d.records.readAllRecords()
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.UID == claim.UID {
			continue
		}
		if what := d.findConflict(r, allocatedDevices(claim)); what != "" {
			return fmt.Errorf("%s is in use on this node by resourceclaim %s/%s with uid %s (%s): it is available "+
				"after they have ended", what, r.Namespace, r.Name, r.UID, r.describeUsers())
		}
	}
	return nil
}

// findConflict returns a description of the first of the wanted devices that the record's claim
// holds and does not share. It returns "" if there is no such device.
func (d *Devices) findConflict(r *claimRecord, wanted []allotment) string {
	has, all := d.recordedDevices(r)
	for _, w := range wanted {
		if w.Admin {
			continue
		}
		if !all && slices.Contains(r.Drivers, w.Driver) {
			return w.String() + ", or may be,"
		}
		for _, h := range has {
			if !h.Admin && h.sameDevice(w) && (h.Share == "" || w.Share == "" || h.Share == w.Share ||
				!d.isAllocatedTo(r, h)) {
				return w.String()
			}
		}
	}
	return ""
}

// checkUnchanged returns an error if the claim's current allocation has other devices than the
// devices that pods on this node use.
func (r *claimRecord) checkUnchanged(claim *resourcev1.ResourceClaim) error {
	if r.Allotted == nil || slices.Equal(r.Allotted, allocatedDevices(claim)) {
		return nil
	}
	former := "no device"
	if len(r.Allotted) > 0 {
		former = r.Allotted[0].String()
	}
	return fmt.Errorf("it is in use on this node with other devices than its current ones (%s, for %s): it is "+
		"available after they have ended; delete them if they do not end by themselves", former, r.describeUsers())
}

// describeUsers returns the UIDs of a few pods that use the claim of the record, for error
// messages.
func (r *claimRecord) describeUsers() string {
	const most = 3
	out := "pods with uid " + strings.Join(asStrings(r.Pods[:min(len(r.Pods), most)]), ", ")
	if len(r.Pods) > most {
		out += fmt.Sprintf(" and %d more", len(r.Pods)-most)
	}
	return out
}

func asStrings[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}
