package resource

import (
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// TimeDeviceTaints sets the time at which the taints of devices were added; old may be nil. A taint
// that the device already had keeps its time, because drivers replace their slices without it.
func TimeDeviceTaints(s, old *resourcev1.ResourceSlice, now metav1.Time) {
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
	if old != nil {
		each(old, func(at place, t *resourcev1.DeviceTaint) { had[at] = t.TimeAdded })
	}
	each(s, func(at place, t *resourcev1.DeviceTaint) {
		if t.TimeAdded == nil {
			t.TimeAdded = had[at].DeepCopy()
		}
		if t.TimeAdded == nil {
			t.TimeAdded = now.DeepCopy()
		}
	})
}

// DeviceAdminAccess returns the path where an object first requests or grants administrative access
// to devices, or nil if it does not. old is nil on create. Access that old has already is not
// returned.
func DeviceAdminAccess(obj, old api.Object) *field.Path {
	switch o := obj.(type) {
	case *resourcev1.ResourceClaim:
		if was, ok := old.(*resourcev1.ResourceClaim); ok {
			if grantedAsAdmin(was) != nil {
				return nil
			}
			return grantedAsAdmin(o)
		}
		return askedAsAdmin(o.Spec.Devices.Requests)
	case *resourcev1.ResourceClaimTemplate:
		if old == nil {
			return askedAsAdmin(o.Spec.Spec.Devices.Requests)
		}
	}
	return nil
}

func askedAsAdmin(list []resourcev1.DeviceRequest) *field.Path {
	for i := range list {
		if e := list[i].Exactly; e != nil && e.AdminAccess != nil && *e.AdminAccess {
			return field.NewPath("spec", "devices", "requests").Index(i).Child("adminAccess")
		}
	}
	return nil
}

func grantedAsAdmin(c *resourcev1.ResourceClaim) *field.Path {
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
