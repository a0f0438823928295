package kinds

import (
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func resourceClaimKind(o *options) *api.Kind {
	k := newKind(names{
		gv: resourcev1.SchemeGroupVersion, kind: "ResourceClaim", plural: "resourceclaims", singular: "resourceclaim",
	}, func(l *resourcev1.ResourceClaimList) *[]resourcev1.ResourceClaim { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(func(c *resourcev1.ResourceClaim) {
		defaultDevices(&c.Spec)
		if a := c.Status.Allocation; a != nil {
			for i := range a.Devices.Results {
				defaultTolerations(a.Devices.Results[i].Tolerations)
			}
		}
	})
	hasStatus(k, func(o *resourcev1.ResourceClaim) *resourcev1.ResourceClaimStatus { return &o.Status }, halves[*resourcev1.ResourceClaim]{
		spec: func(c *resourcev1.ResourceClaim) any { return c.Spec },
		keep: func(obj, old *resourcev1.ResourceClaim) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *resourcev1.ResourceClaim) {
			obj.Status = resourcev1.ResourceClaimStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	keepsMetadata(k)
	prepare(k, func(c *resourcev1.ResourceClaim) { c.Generation = 0 })
	// What is asked for never changes, so that it is judged once.
	k.ValidateCreate = onCreate(func(c *resourcev1.ResourceClaim) field.ErrorList {
		return validateClaim(&c.Spec, field.NewPath("spec", "devices"), o)
	})
	checkUpdate(k, func(obj, old *resourcev1.ResourceClaim) field.ErrorList {
		return sameOr(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	status := k.Subresources["status"]
	keepSpec := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keepSpec(obj, old)
		dropDeallocated(&obj.(*resourcev1.ResourceClaim).Status, &old.(*resourcev1.ResourceClaim).Status)
	}
	checkStatus(k, func(obj, old *resourcev1.ResourceClaim) field.ErrorList {
		return validateClaimStatus(obj, old, field.NewPath("status"))
	})
	k.Columns = columns(nameCol, col("State"), ageCol)
	k.Row = row(func(c *resourcev1.ResourceClaim, now time.Time) []any {
		return []any{c.Name, claimState(c), age(c, now)}
	})
	return k
}

func claimState(c *resourcev1.ResourceClaim) string {
	var states []string
	if c.DeletionTimestamp != nil {
		states = append(states, "deleted")
	}
	switch {
	case c.Status.Allocation == nil && c.DeletionTimestamp == nil:
		states = append(states, "pending")
	case c.Status.Allocation != nil && len(c.Status.ReservedFor) > 0:
		states = append(states, "allocated", "reserved")
	case c.Status.Allocation != nil:
		states = append(states, "allocated")
	}
	return strings.Join(states, ",")
}

func resourceClaimTemplateKind(o *options) *api.Kind {
	k := newKind(names{
		gv: resourcev1.SchemeGroupVersion, kind: "ResourceClaimTemplate", plural: "resourceclaimtemplates", singular: "resourceclaimtemplate",
	}, func(l *resourcev1.ResourceClaimTemplateList) *[]resourcev1.ResourceClaimTemplate { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(func(c *resourcev1.ResourceClaimTemplate) { defaultDevices(&c.Spec.Spec) })
	k.ValidateCreate = onCreate(func(c *resourcev1.ResourceClaimTemplate) field.ErrorList {
		errs := validateTemplateMeta(&c.Spec.ObjectMeta, field.NewPath("spec", "metadata"))
		return append(errs, validateClaim(&c.Spec.Spec, field.NewPath("spec", "spec", "devices"), o)...)
	})
	checkUpdate(k, func(obj, old *resourcev1.ResourceClaimTemplate) field.ErrorList {
		return sameOr(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	return k
}

func deviceClassKind(o *options) *api.Kind {
	k := newKind(names{
		gv: resourcev1.SchemeGroupVersion, kind: "DeviceClass", plural: "deviceclasses", singular: "deviceclass", global: true, rule: longName,
	}, func(l *resourcev1.DeviceClassList) *[]resourcev1.DeviceClass { return &l.Items })
	k.ReturnsDeleted = true
	countsGeneration(k, func(c *resourcev1.DeviceClass) any { return c.Spec })
	check(k, func(c *resourcev1.DeviceClass) field.ErrorList {
		return validateDeviceClass(&c.Spec, field.NewPath("spec"), o)
	})
	return k
}

func resourceSliceKind() *api.Kind {
	k := newKind(names{
		gv: resourcev1.SchemeGroupVersion, kind: "ResourceSlice", plural: "resourceslices", singular: "resourceslice", global: true,
	}, func(l *resourcev1.ResourceSliceList) *[]resourcev1.ResourceSlice { return &l.Items })
	k.ReturnsDeleted = true
	countsGeneration(k, func(s *resourcev1.ResourceSlice) any { return s.Spec })
	check(k, func(s *resourcev1.ResourceSlice) field.ErrorList {
		return validateSlice(&s.Spec, field.NewPath("spec"))
	})
	checkUpdate(k, func(obj, old *resourcev1.ResourceSlice) field.ErrorList {
		spec := field.NewPath("spec")
		errs := sameOr(obj.Spec.Pool.Name, old.Spec.Pool.Name, spec.Child("pool", "name"))
		errs = append(errs, sameOr(obj.Spec.Driver, old.Spec.Driver, spec.Child("driver"))...)
		return append(errs, sameOr(obj.Spec.NodeName, old.Spec.NodeName, spec.Child("nodeName"))...)
	})
	k.Fields = fieldsOf(func(s *resourcev1.ResourceSlice) fields.Set {
		return fields.Set{resourcev1.ResourceSliceSelectorNodeName: val(s.Spec.NodeName), resourcev1.ResourceSliceSelectorDriver: s.Spec.Driver,
			resourcev1.ResourceSliceSelectorPoolName: s.Spec.Pool.Name}
	})
	k.Columns = columns(nameCol, col("Node"), col("Driver"), col("Pool"), ageCol)
	k.Row = row(func(s *resourcev1.ResourceSlice, now time.Time) []any {
		return []any{s.Name, val(s.Spec.NodeName), s.Spec.Driver, s.Spec.Pool.Name, age(s, now)}
	})
	return k
}

// defaultDevices: a request is for one device, and what tolerates a taint tolerates its value.
func defaultDevices(s *resourcev1.ResourceClaimSpec) {
	one := func(mode *resourcev1.DeviceAllocationMode, count *int64) {
		setDefault(mode, resourcev1.DeviceAllocationModeExactCount)
		if *mode == resourcev1.DeviceAllocationModeExactCount {
			setDefault(count, 1)
		}
	}
	for i := range s.Devices.Requests {
		r := &s.Devices.Requests[i]
		if e := r.Exactly; e != nil {
			one(&e.AllocationMode, &e.Count)
			defaultTolerations(e.Tolerations)
		}
		for j := range r.FirstAvailable {
			one(&r.FirstAvailable[j].AllocationMode, &r.FirstAvailable[j].Count)
			defaultTolerations(r.FirstAvailable[j].Tolerations)
		}
	}
}

func defaultTolerations(list []resourcev1.DeviceToleration) {
	for i := range list {
		setDefault(&list[i].Operator, resourcev1.DeviceTolerationOpEqual)
	}
}
