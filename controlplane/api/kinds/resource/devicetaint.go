package resource

import (
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// SetDeviceTaintTimes sets the time at which the taints of devices were added. stored is the stored
// slice, or nil. A taint that the device already had keeps its time, because drivers replace their
// slices without the time.
func SetDeviceTaintTimes(slice, stored *resourcev1.ResourceSlice, now metav1.Time) {
	type place struct{ device, key, value, effect string }
	at := func(device string, t *resourcev1.DeviceTaint) place {
		return place{device, t.Key, t.Value, string(t.Effect)}
	}
	had := map[place]*metav1.Time{}
	each := func(s *resourcev1.ResourceSlice, f func(at place, t *resourcev1.DeviceTaint)) {
		for i := range s.Spec.Devices {
			d := &s.Spec.Devices[i]
			for j := range d.Taints {
				f(at(d.Name, &d.Taints[j]), &d.Taints[j])
			}
		}
	}
	if stored != nil {
		each(stored, func(at place, t *resourcev1.DeviceTaint) { had[at] = t.TimeAdded })
	}
	each(slice, func(at place, t *resourcev1.DeviceTaint) {
		if t.TimeAdded == nil {
			t.TimeAdded = had[at].DeepCopy()
		}
		if t.TimeAdded == nil {
			t.TimeAdded = now.DeepCopy()
		}
	})
}

// DeviceAdminAccess returns the path of the first field in which an object requests or grants
// administrative access to devices. It returns nil if the object has no such field, or if the
// stored object already has administrative access. stored is nil on create.
func DeviceAdminAccess(obj, stored api.Object) *field.Path {
	switch o := obj.(type) {
	case *resourcev1.ResourceClaim:
		if previous, ok := stored.(*resourcev1.ResourceClaim); ok {
			if findAdminResult(previous) != nil {
				return nil
			}
			return findAdminResult(o)
		}
		return findAdminRequest(o.Spec.Devices.Requests)
	case *resourcev1.ResourceClaimTemplate:
		if stored == nil {
			return findAdminRequest(o.Spec.Spec.Devices.Requests)
		}
	}
	return nil
}

func findAdminRequest(list []resourcev1.DeviceRequest) *field.Path {
	for i := range list {
		if e := list[i].Exactly; e != nil && e.AdminAccess != nil && *e.AdminAccess {
			return field.NewPath("spec", "devices", "requests").Index(i).Child("adminAccess")
		}
	}
	return nil
}

func findAdminResult(c *resourcev1.ResourceClaim) *field.Path {
	if c.Status.Allocation == nil {
		return nil
	}
	for i, r := range c.Status.Allocation.Devices.Results {
		if r.AdminAccess != nil && *r.AdminAccess {
			return field.NewPath("status", "allocation", "devices", "results").Index(i).Child("adminAccess")
		}
	}
	return nil
}
