// Package storage describes the kinds of the API group storage.k8s.io.
package storage

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// DefaultClassAnnotation marks the default StorageClass. Claims without a class get that class.
const DefaultClassAnnotation = "storageclass.kubernetes.io/is-default-class"

// StorageClassKind returns the definition of the kind StorageClass.
func StorageClassKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "StorageClass", Plural: "storageclasses",
		Singular: "storageclass",
		Short:    []string{"sc"}, ClusterScoped: true,
	}, func(l *storagev1.StorageClassList) *[]storagev1.StorageClass { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(c *storagev1.StorageClass) {
		builder.SetDefaultPtr(&c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
		builder.SetDefaultPtr(&c.VolumeBindingMode, storagev1.VolumeBindingImmediate)
	})
	builder.AddValidation(k, func(c *storagev1.StorageClass) field.ErrorList {
		var errs field.ErrorList
		fldPath := field.NewPath("provisioner")
		if c.Provisioner == "" {
			errs = append(errs, field.Required(fldPath, ""))
		} else {
			errs = append(errs, fieldrules.InvalidErrors(fldPath, c.Provisioner,
				validation.IsQualifiedName(strings.ToLower(c.Provisioner)))...)
		}
		errs = append(errs, validateParameters(c.Parameters, field.NewPath("parameters"))...)
		// An empty policy is valid: the volume then gets the default, Retain.
		if p := ptr.Deref(c.ReclaimPolicy, ""); p != "" {
			errs = append(errs, fieldrules.ValidateSupported(p, field.NewPath("reclaimPolicy"),
				corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
		}
		errs = append(errs, fieldrules.ValidateOneOf(ptr.Deref(c.VolumeBindingMode, ""),
			field.NewPath("volumeBindingMode"),
			storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
		return append(errs, validateTopologies(c.AllowedTopologies, field.NewPath("allowedTopologies"))...)
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.StorageClass) field.ErrorList {
		errs := fieldrules.ValidateUnchanged(obj.Parameters, old.Parameters, field.NewPath("parameters"))
		errs = append(errs, fieldrules.ValidateUnchanged(obj.Provisioner, old.Provisioner,
			field.NewPath("provisioner"))...)
		errs = append(errs, fieldrules.ValidateUnchanged(obj.ReclaimPolicy, old.ReclaimPolicy,
			field.NewPath("reclaimPolicy"))...)
		return append(errs, fieldrules.ValidateUnchanged(obj.VolumeBindingMode, old.VolumeBindingMode,
			field.NewPath("volumeBindingMode"))...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Provisioner"),
		builder.StringColumn("ReclaimPolicy"), builder.StringColumn("VolumeBindingMode"),
		builder.StringColumn("AllowVolumeExpansion"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *storagev1.StorageClass, now time.Time) []any {
		name := c.Name
		if c.Annotations[DefaultClassAnnotation] == "true" {
			name += " (default)"
		}
		return []any{name, c.Provisioner, string(ptr.Deref(c.ReclaimPolicy, "")),
			string(ptr.Deref(c.VolumeBindingMode, "")),
			ptr.Deref(c.AllowVolumeExpansion, false), builder.Age(c, now)}
	})
	return k
}

// CSIDriverKind returns the definition of the kind CSIDriver.
func CSIDriverKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "CSIDriver", Conditional: true, Plural: "csidrivers",
		Singular: "csidriver", ClusterScoped: true,
	}, func(l *storagev1.CSIDriverList) *[]storagev1.CSIDriver { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(func(d *storagev1.CSIDriver) {
		s := &d.Spec
		builder.SetDefaultPtr(&s.AttachRequired, true)
		builder.SetDefaultPtr(&s.PodInfoOnMount, false)
		builder.SetDefaultPtr(&s.StorageCapacity, false)
		builder.SetDefaultPtr(&s.RequiresRepublish, false)
		builder.SetDefaultPtr(&s.SELinuxMount, false)
		builder.SetDefaultPtr(&s.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
		if len(s.VolumeLifecycleModes) == 0 {
			s.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
		}
	})
	builder.AddValidation(k, func(d *storagev1.CSIDriver) field.ErrorList {
		return validateCSIDriver(&d.Spec,
			field.NewPath("spec"))
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.CSIDriver) field.ErrorList {
		spec := field.NewPath("spec")
		errs := fieldrules.ValidateUnchanged(obj.Spec.AttachRequired, old.Spec.AttachRequired,
			spec.Child("attachedRequired"))
		errs = append(errs, fieldrules.ValidateUnchanged(obj.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes,
			spec.Child("volumeLifecycleModes"))...)
		return append(errs, fieldrules.ValidateUnchanged(obj.Spec.PreventPodSchedulingIfMissing,
			old.Spec.PreventPodSchedulingIfMissing,
			spec.Child("preventPodSchedulingIfMissing"))...)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.BoolColumn("AttachRequired"),
		builder.BoolColumn("PodInfoOnMount"), builder.BoolColumn("StorageCapacity"),
		builder.StringColumn("TokenRequests"), builder.BoolColumn("RequiresRepublish"), builder.StringColumn("Modes"),
		builder.AgeColumn)
	k.Lists.Row = builder.Row(func(d *storagev1.CSIDriver, now time.Time) []any {
		var modes, tokens []string
		for _, m := range d.Spec.VolumeLifecycleModes {
			modes = append(modes, string(m))
		}
		for _, t := range d.Spec.TokenRequests {
			tokens = append(tokens, t.Audience)
		}
		audience := builder.Unset
		if len(tokens) > 0 {
			audience = strings.Join(tokens, ",")
		}
		return []any{d.Name, d.Spec.AttachRequired == nil || *d.Spec.AttachRequired,
			ptr.Deref(d.Spec.PodInfoOnMount, false),
			ptr.Deref(d.Spec.StorageCapacity, false), audience, ptr.Deref(d.Spec.RequiresRepublish, false),
			builder.ValueOrNone(strings.Join(modes, ",")), builder.Age(d, now)}
	})
	return k
}

// CSINodeKind returns the definition of the kind CSINode.
func CSINodeKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "CSINode", Conditional: true, Plural: "csinodes",
		Singular: "csinode", ClusterScoped: true,
	}, func(l *storagev1.CSINodeList) *[]storagev1.CSINode { return &l.Items })
	builder.LocateStatus(k, func(n *storagev1.CSINode) *storagev1.CSINodeStatus { return &n.Status })
	k.Deletion.ReturnsDeleted = true
	builder.AddValidation(k, func(n *storagev1.CSINode) field.ErrorList {
		return validateCSINodeDrivers(n.Spec.Drivers, field.NewPath("spec", "drivers"))
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.CSINode) field.ErrorList {
		var errs field.ErrorList
		for _, previous := range old.Spec.Drivers {
			for _, updated := range obj.Spec.Drivers {
				if previous.Name == updated.Name {
					previous.Allocatable, updated.Allocatable = nil, nil
					errs = append(errs, fieldrules.ValidateUnchanged(updated, previous,
						field.NewPath("spec", "drivers"))...)
				}
			}
		}
		return errs
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Drivers"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(n *storagev1.CSINode, now time.Time) []any {
		return []any{n.Name, int64(len(n.Spec.Drivers)), builder.Age(n, now)}
	})
	return k
}

// VolumeAttachmentKind returns the definition of the kind VolumeAttachment.
func VolumeAttachmentKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: storagev1.SchemeGroupVersion, Kind: "VolumeAttachment", Conditional: true,
		Plural: "volumeattachments", Singular: "volumeattachment", ClusterScoped: true,
	}, func(l *storagev1.VolumeAttachmentList) *[]storagev1.VolumeAttachment { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	builder.SeparateStatus(k, func(o *storagev1.VolumeAttachment) *storagev1.VolumeAttachmentStatus {
		return &o.Status
	}, builder.Accessors[*storagev1.VolumeAttachment]{
		Spec:     func(a *storagev1.VolumeAttachment) any { return a.Spec },
		CopySpec: func(obj, old *storagev1.VolumeAttachment) { obj.Spec = *old.Spec.DeepCopy() },
		Status: func(obj, old *storagev1.VolumeAttachment) {
			obj.Status = storagev1.VolumeAttachmentStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	builder.KeepMetadataOnStatus(k)
	builder.PrepareCreate(k, func(a *storagev1.VolumeAttachment) { a.Generation = 0 })
	builder.AddValidation(k, func(a *storagev1.VolumeAttachment) field.ErrorList {
		return validateVolumeAttachment(&a.Spec, field.NewPath("spec"))
	})
	builder.AddStatusValidation(k, func(obj, _ *storagev1.VolumeAttachment) field.ErrorList {
		return validateAttachmentStatus(&obj.Status, field.NewPath("status"))
	})
	builder.AddUpdateValidation(k, func(obj, old *storagev1.VolumeAttachment) field.ErrorList {
		return fieldrules.ValidateUnchanged(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	attacher := builder.StringColumn("Attacher")
	attacher.Format = "name"
	k.Lists.Columns = builder.Columns(builder.NameColumn, attacher, builder.StringColumn("PV"),
		builder.StringColumn("Node"),
		builder.BoolColumn("Attached"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(a *storagev1.VolumeAttachment, now time.Time) []any {
		return []any{a.Name, a.Spec.Attacher, ptr.Deref(a.Spec.Source.PersistentVolumeName, ""), a.Spec.NodeName,
			a.Status.Attached, builder.Age(a, now)}
	})
	return k
}
