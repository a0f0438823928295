package kinds

import (
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

// DefaultClassAnnotation marks the storage class of claims that name none.
const DefaultClassAnnotation = "storageclass.kubernetes.io/is-default-class"

func storageClassKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "StorageClass", plural: "storageclasses", singular: "storageclass",
		short: []string{"sc"}, global: true,
	}, func(l *storagev1.StorageClassList) *[]storagev1.StorageClass { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(func(c *storagev1.StorageClass) {
		setDefaultPtr(&c.ReclaimPolicy, corev1.PersistentVolumeReclaimDelete)
		setDefaultPtr(&c.VolumeBindingMode, storagev1.VolumeBindingImmediate)
	})
	check(k, func(c *storagev1.StorageClass) field.ErrorList {
		var errs field.ErrorList
		at := field.NewPath("provisioner")
		if c.Provisioner == "" {
			errs = append(errs, field.Required(at, ""))
		} else {
			errs = append(errs, invalid(at, c.Provisioner, validation.IsQualifiedName(strings.ToLower(c.Provisioner)))...)
		}
		errs = append(errs, validateParameters(c.Parameters, field.NewPath("parameters"))...)
		if p := val(c.ReclaimPolicy); p != "" { // an empty policy leaves the volume its default, Retain
			errs = append(errs, listed(p, field.NewPath("reclaimPolicy"),
				corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
		}
		errs = append(errs, oneOf(val(c.VolumeBindingMode), field.NewPath("volumeBindingMode"),
			storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
		return append(errs, validateTopologies(c.AllowedTopologies, field.NewPath("allowedTopologies"))...)
	})
	checkUpdate(k, func(obj, old *storagev1.StorageClass) field.ErrorList {
		errs := sameOr(obj.Parameters, old.Parameters, field.NewPath("parameters"))
		errs = append(errs, sameOr(obj.Provisioner, old.Provisioner, field.NewPath("provisioner"))...)
		errs = append(errs, sameOr(obj.ReclaimPolicy, old.ReclaimPolicy, field.NewPath("reclaimPolicy"))...)
		return append(errs, sameOr(obj.VolumeBindingMode, old.VolumeBindingMode, field.NewPath("volumeBindingMode"))...)
	})
	k.Columns = columns(nameCol, col("Provisioner"), col("ReclaimPolicy"), col("VolumeBindingMode"), col("AllowVolumeExpansion"), ageCol)
	k.Row = row(func(c *storagev1.StorageClass, now time.Time) []any {
		name := c.Name
		if c.Annotations[DefaultClassAnnotation] == "true" {
			name += " (default)"
		}
		return []any{name, c.Provisioner, string(val(c.ReclaimPolicy)), string(val(c.VolumeBindingMode)),
			isTrue(c.AllowVolumeExpansion), age(c, now)}
	})
	return k
}

func csiDriverKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "CSIDriver", conditional: true, plural: "csidrivers", singular: "csidriver", global: true,
	}, func(l *storagev1.CSIDriverList) *[]storagev1.CSIDriver { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(func(d *storagev1.CSIDriver) {
		s := &d.Spec
		setDefaultPtr(&s.AttachRequired, true)
		setDefaultPtr(&s.PodInfoOnMount, false)
		setDefaultPtr(&s.StorageCapacity, false)
		setDefaultPtr(&s.RequiresRepublish, false)
		setDefaultPtr(&s.SELinuxMount, false)
		setDefaultPtr(&s.FSGroupPolicy, storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy)
		if len(s.VolumeLifecycleModes) == 0 {
			s.VolumeLifecycleModes = []storagev1.VolumeLifecycleMode{storagev1.VolumeLifecyclePersistent}
		}
	})
	check(k, func(d *storagev1.CSIDriver) field.ErrorList { return validateCSIDriver(&d.Spec, field.NewPath("spec")) })
	checkUpdate(k, func(obj, old *storagev1.CSIDriver) field.ErrorList {
		spec := field.NewPath("spec")
		errs := sameOr(obj.Spec.AttachRequired, old.Spec.AttachRequired, spec.Child("attachedRequired"))
		errs = append(errs, sameOr(obj.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes, spec.Child("volumeLifecycleModes"))...)
		return append(errs, sameOr(obj.Spec.PreventPodSchedulingIfMissing, old.Spec.PreventPodSchedulingIfMissing,
			spec.Child("preventPodSchedulingIfMissing"))...)
	})
	k.Columns = columns(nameCol, boolCol("AttachRequired"), boolCol("PodInfoOnMount"), boolCol("StorageCapacity"),
		col("TokenRequests"), boolCol("RequiresRepublish"), col("Modes"), ageCol)
	k.Row = row(func(d *storagev1.CSIDriver, now time.Time) []any {
		var modes, tokens []string
		for _, m := range d.Spec.VolumeLifecycleModes {
			modes = append(modes, string(m))
		}
		for _, t := range d.Spec.TokenRequests {
			tokens = append(tokens, t.Audience)
		}
		audience := unset
		if len(tokens) > 0 {
			audience = strings.Join(tokens, ",")
		}
		return []any{d.Name, d.Spec.AttachRequired == nil || *d.Spec.AttachRequired, isTrue(d.Spec.PodInfoOnMount),
			isTrue(d.Spec.StorageCapacity), audience, isTrue(d.Spec.RequiresRepublish), orNone(strings.Join(modes, ",")), age(d, now)}
	})
	return k
}

func csiNodeKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "CSINode", conditional: true, plural: "csinodes", singular: "csinode", global: true,
	}, func(l *storagev1.CSINodeList) *[]storagev1.CSINode { return &l.Items })
	statusIn(k, func(n *storagev1.CSINode) *storagev1.CSINodeStatus { return &n.Status })
	k.ReturnsDeleted = true
	check(k, func(n *storagev1.CSINode) field.ErrorList {
		return validateCSINodeDrivers(n.Spec.Drivers, field.NewPath("spec", "drivers"))
	})
	checkUpdate(k, func(obj, old *storagev1.CSINode) field.ErrorList {
		var errs field.ErrorList
		for _, was := range old.Spec.Drivers {
			for _, now := range obj.Spec.Drivers {
				if was.Name == now.Name {
					was.Allocatable, now.Allocatable = nil, nil
					errs = append(errs, sameOr(now, was, field.NewPath("spec", "drivers"))...)
				}
			}
		}
		return errs
	})
	k.Columns = columns(nameCol, numCol("Drivers"), ageCol)
	k.Row = row(func(n *storagev1.CSINode, now time.Time) []any {
		return []any{n.Name, int64(len(n.Spec.Drivers)), age(n, now)}
	})
	return k
}

func volumeAttachmentKind() *api.Kind {
	k := newKind(names{
		gv: storagev1.SchemeGroupVersion, kind: "VolumeAttachment", conditional: true, plural: "volumeattachments", singular: "volumeattachment", global: true,
	}, func(l *storagev1.VolumeAttachmentList) *[]storagev1.VolumeAttachment { return &l.Items })
	k.ReturnsDeleted = true
	hasStatus(k, func(o *storagev1.VolumeAttachment) *storagev1.VolumeAttachmentStatus { return &o.Status }, halves[*storagev1.VolumeAttachment]{
		spec: func(a *storagev1.VolumeAttachment) any { return a.Spec },
		keep: func(obj, old *storagev1.VolumeAttachment) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *storagev1.VolumeAttachment) {
			obj.Status = storagev1.VolumeAttachmentStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	keepsMetadata(k)
	prepare(k, func(a *storagev1.VolumeAttachment) { a.Generation = 0 })
	check(k, func(a *storagev1.VolumeAttachment) field.ErrorList {
		return validateVolumeAttachment(&a.Spec, field.NewPath("spec"))
	})
	checkStatus(k, func(obj, _ *storagev1.VolumeAttachment) field.ErrorList {
		return validateAttachmentStatus(&obj.Status, field.NewPath("status"))
	})
	checkUpdate(k, func(obj, old *storagev1.VolumeAttachment) field.ErrorList {
		return sameOr(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	attacher := col("Attacher")
	attacher.Format = "name"
	k.Columns = columns(nameCol, attacher, col("PV"), col("Node"), boolCol("Attached"), ageCol)
	k.Row = row(func(a *storagev1.VolumeAttachment, now time.Time) []any {
		return []any{a.Name, a.Spec.Attacher, val(a.Spec.Source.PersistentVolumeName), a.Spec.NodeName,
			a.Status.Attached, age(a, now)}
	})
	return k
}
