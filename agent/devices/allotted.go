package devices

import (
	"fmt"
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
)

// A claim's devices are other claims' no more until it has been released here, whatever the control plane says: one that was restored from a
// backup may know nothing of the claim, or not that it has devices, and gives them away again while pods use them; so may one whose pods were
// deleted by force. Who holds a device keeps it; the other claim's pods wait.

// allotment is one device that was given to a claim.
type allotment struct {
	Driver string `json:"driver"`
	Pool   string `json:"pool"`
	Device string `json:"device"`
	Share  string `json:"share,omitempty"` // of a device that several claims share
	Admin  bool   `json:"admin,omitempty"` // it is looked at only, which takes it from nobody
}

func (a allotment) String() string {
	return fmt.Sprintf("device %s of pool %s of DRA driver %s", shortened(a.Device), shortened(a.Pool), a.Driver)
}

func (a allotment) sameDevice(b allotment) bool {
	return a.Driver == b.Driver && a.Pool == b.Pool && a.Device == b.Device
}

// allotted are the devices of a claim, in one order whatever the order of its results.
func allotted(claim *resourcev1.ResourceClaim) []allotment {
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
		return strings.Compare(a.Driver+"\x00"+a.Pool+"\x00"+a.Device+"\x00"+a.Share, b.Driver+"\x00"+b.Pool+"\x00"+b.Device+"\x00"+b.Share)
	})
	return out
}

// has are the devices of a record: as it says, or, where an agent wrote it that did not note them, as its drivers called them and as the
// control plane knows them. all is false where there may be others.
func (d *Devices) has(r *record) (has []allotment, all bool) {
	if r.Allotted != nil {
		return r.Allotted, true
	}
	for _, dev := range r.Devices {
		if dev.Device != "" {
			has = append(has, allotment{Driver: dev.Driver, Pool: dev.Pool, Device: dev.Device, Share: dev.ShareID})
		}
	}
	if c, ok := d.cfg.Objects.ResourceClaim(r.Namespace, r.Name); ok && c.UID == r.UID && c.Status.Allocation != nil {
		return append(has, allotted(c)...), true
	}
	return has, len(has) > 0
}

// known says that the control plane knows of a device that a record has. What claims take of a device that they share is right in its
// books then.
func (d *Devices) known(r *record, a allotment) bool {
	c, ok := d.cfg.Objects.ResourceClaim(r.Namespace, r.Name)
	return ok && c.UID == r.UID && slices.Contains(allotted(c), a)
}

// free says why a claim's devices are not to be had yet: pods of another claim have one on this node. Of a damaged record nothing is known
// but its claim, which holds nobody up.
func (d *Devices) free(claim *resourcev1.ResourceClaim) error {
	all, _, err := d.records()
	if err != nil {
		return err
	}
	for _, r := range all {
		if r.UID == claim.UID {
			continue
		}
		if what := d.conflict(r, allotted(claim)); what != "" {
			return fmt.Errorf("%s is in use on this node by resourceclaim %s/%s of uid %s (%s): it is free when they have ended", what, r.Namespace, r.Name, r.UID, r.users())
		}
	}
	return nil
}

// conflict names what of these devices the claim of a record has; "" = nothing.
func (d *Devices) conflict(r *record, wanted []allotment) string {
	has, all := d.has(r)
	for _, w := range wanted {
		if w.Admin {
			continue
		}
		if !all && slices.Contains(r.Drivers, w.Driver) {
			return w.String() + ", or may be,"
		}
		for _, h := range has {
			if !h.Admin && h.sameDevice(w) && (h.Share == "" || w.Share == "" || h.Share == w.Share || !d.known(r, h)) {
				return w.String()
			}
		}
	}
	return ""
}

// unchanged says why a claim of which this node has a record cannot be had: pods have it with other devices than it has now.
func (r *record) unchanged(claim *resourcev1.ResourceClaim) error {
	if r.Allotted == nil || slices.Equal(r.Allotted, allotted(claim)) {
		return nil
	}
	former := "no device"
	if len(r.Allotted) > 0 {
		former = r.Allotted[0].String()
	}
	return fmt.Errorf("it is in use on this node with other devices than it has now (%s, for %s): it can be had when they have ended; delete them where they do not end by themselves", former, r.users())
}

// users names the pods of a record, a few of them.
func (r *record) users() string {
	const most = 3
	out := "pods of uid " + strings.Join(asStrings(r.Pods[:min(len(r.Pods), most)]), ", ")
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
