// Package resource describes the kinds of the API group resource.k8s.io (dynamic resource
// allocation).
package resource

import (
	"strings"
	"time"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// ResourceClaimKind returns the definition of the kind ResourceClaim.
func ResourceClaimKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: resourcev1.SchemeGroupVersion, Kind: "ResourceClaim", Plural: "resourceclaims",
		Singular: "resourceclaim",
	}, func(l *resourcev1.ResourceClaimList) *[]resourcev1.ResourceClaim { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(c *resourcev1.ResourceClaim) {
		defaultDevices(&c.Spec)
		if a := c.Status.Allocation; a != nil {
			for i := range a.Devices.Results {
				defaultTolerations(a.Devices.Results[i].Tolerations)
			}
		}
	})
	builder.SeparateStatus(k, func(o *resourcev1.ResourceClaim) *resourcev1.ResourceClaimStatus { return &o.Status },
		builder.Accessors[*resourcev1.ResourceClaim]{
			Spec:     func(c *resourcev1.ResourceClaim) any { return c.Spec },
			CopySpec: func(obj, old *resourcev1.ResourceClaim) { obj.Spec = *old.Spec.DeepCopy() },
			Status: func(obj, old *resourcev1.ResourceClaim) {
				obj.Status = resourcev1.ResourceClaimStatus{}
				if old != nil {
					obj.Status = *old.Status.DeepCopy()
				}
			},
		})
	builder.KeepMetadataOnStatus(k)
	builder.PrepareCreate(k, func(c *resourcev1.ResourceClaim) { c.Generation = 0 })
	// The spec is immutable, so only its creation is validated.
	k.Validation.Create = builder.CreateValidation(func(c *resourcev1.ResourceClaim) field.ErrorList {
		return validateClaim(&c.Spec, field.NewPath("spec", "devices"), o)
	})
	builder.AddUpdateValidation(k, func(obj, old *resourcev1.ResourceClaim) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	status := k.Subresources["status"]
	keepSpec := status.PrepareUpdate
	status.PrepareUpdate = func(obj, old api.Object) {
		keepSpec(obj, old)
		dropDeallocated(&obj.(*resourcev1.ResourceClaim).Status, &old.(*resourcev1.ResourceClaim).Status)
	}
	builder.AddStatusValidation(k, func(obj, old *resourcev1.ResourceClaim) field.ErrorList {
		return ValidateClaimStatus(obj, old, field.NewPath("status"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("State"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *resourcev1.ResourceClaim, now time.Time) []any {
		return []any{c.Name, ClaimState(c), builder.Age(c, now)}
	})
	return k
}

// ClaimState returns the text in the column STATE of a ResourceClaim.
func ClaimState(claim *resourcev1.ResourceClaim) string {
	var states []string
	if claim.DeletionTimestamp != nil {
		states = append(states, "deleted")
	}
	switch {
	case claim.Status.Allocation == nil && claim.DeletionTimestamp == nil:
		states = append(states, "pending")
	case claim.Status.Allocation != nil && len(claim.Status.ReservedFor) > 0:
		states = append(states, "allocated", "reserved")
	case claim.Status.Allocation != nil:
		states = append(states, "allocated")
	}
	return strings.Join(states, ",")
}

// ResourceClaimTemplateKind returns the definition of the kind ResourceClaimTemplate.
func ResourceClaimTemplateKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: resourcev1.SchemeGroupVersion, Kind: "ResourceClaimTemplate", Plural: "resourceclaimtemplates",
		Singular: "resourceclaimtemplate",
	}, func(l *resourcev1.ResourceClaimTemplateList) *[]resourcev1.ResourceClaimTemplate { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(c *resourcev1.ResourceClaimTemplate) { defaultDevices(&c.Spec.Spec) })
	k.Validation.Create = builder.CreateValidation(func(c *resourcev1.ResourceClaimTemplate) field.ErrorList {
		errs := podspec.ValidateTemplateMeta(&c.Spec.ObjectMeta, field.NewPath("spec", "metadata"))
		return append(errs, validateClaim(&c.Spec.Spec, field.NewPath("spec", "spec", "devices"), o)...)
	})
	builder.AddUpdateValidation(k, func(obj, old *resourcev1.ResourceClaimTemplate) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	return k
}

// DeviceClassKind returns the definition of the kind DeviceClass.
func DeviceClassKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: resourcev1.SchemeGroupVersion, Kind: "DeviceClass", Plural: "deviceclasses",
		Singular: "deviceclass", ClusterScoped: true, Rule: builder.DNSSubdomain,
	}, func(l *resourcev1.DeviceClassList) *[]resourcev1.DeviceClass { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	builder.CountGenerations(k, func(c *resourcev1.DeviceClass) any { return c.Spec })
	builder.AddValidation(k, func(c *resourcev1.DeviceClass) field.ErrorList {
		return validateDeviceClass(&c.Spec, field.NewPath("spec"), o)
	})
	return k
}

// ResourceSliceKind returns the definition of the kind ResourceSlice.
func ResourceSliceKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: resourcev1.SchemeGroupVersion, Kind: "ResourceSlice", Plural: "resourceslices",
		Singular: "resourceslice", ClusterScoped: true,
	}, func(l *resourcev1.ResourceSliceList) *[]resourcev1.ResourceSlice { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	builder.CountGenerations(k, func(s *resourcev1.ResourceSlice) any { return s.Spec })
	builder.AddValidation(k, func(s *resourcev1.ResourceSlice) field.ErrorList {
		return validateSlice(&s.Spec, field.NewPath("spec"))
	})
	builder.AddUpdateValidation(k, func(obj, old *resourcev1.ResourceSlice) field.ErrorList {
		spec := field.NewPath("spec")
		errs := fieldrules.ValidateUnchanged(obj.Spec.Pool.Name, old.Spec.Pool.Name, spec.Child("pool", "name"))
		errs = append(errs, fieldrules.ValidateUnchanged(obj.Spec.Driver, old.Spec.Driver, spec.Child("driver"))...)
		return append(errs, fieldrules.ValidateUnchanged(obj.Spec.NodeName, old.Spec.NodeName,
			spec.Child("nodeName"))...)
	})
	k.Lists.Fields = builder.Fields(func(s *resourcev1.ResourceSlice) fields.Set {
		return fields.Set{resourcev1.ResourceSliceSelectorNodeName: ptr.Deref(s.Spec.NodeName, ""),
			resourcev1.ResourceSliceSelectorDriver:   s.Spec.Driver,
			resourcev1.ResourceSliceSelectorPoolName: s.Spec.Pool.Name}
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Node"), builder.StringColumn("Driver"),
		builder.StringColumn("Pool"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(s *resourcev1.ResourceSlice, now time.Time) []any {
		return []any{s.Name, ptr.Deref(s.Spec.NodeName, ""), s.Spec.Driver, s.Spec.Pool.Name, builder.Age(s, now)}
	})
	return k
}

// defaultDevices sets the defaults: a request is for exactly one device, and a toleration has the
// operator Equal.
func defaultDevices(s *resourcev1.ResourceClaimSpec) {
	one := func(mode *resourcev1.DeviceAllocationMode, count *int64) {
		builder.SetDefault(mode, resourcev1.DeviceAllocationModeExactCount)
		if *mode == resourcev1.DeviceAllocationModeExactCount {
			builder.SetDefault(count, 1)
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
		builder.SetDefault(&list[i].Operator, resourcev1.DeviceTolerationOpEqual)
	}
}
