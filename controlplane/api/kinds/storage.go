package kinds

import (
	"slices"
	"strconv"
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
	k := newKind[storagev1.StorageClass, storagev1.StorageClassList](names{
		gv: storagev1.SchemeGroupVersion, kind: "StorageClass", plural: "storageclasses", singular: "storageclass",
		short: []string{"sc"}, global: true,
	})
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
		errs = append(errs, oneOf(val(c.ReclaimPolicy), field.NewPath("reclaimPolicy"),
			corev1.PersistentVolumeReclaimDelete, corev1.PersistentVolumeReclaimRetain)...)
		errs = append(errs, oneOf(val(c.VolumeBindingMode), field.NewPath("volumeBindingMode"),
			storagev1.VolumeBindingImmediate, storagev1.VolumeBindingWaitForFirstConsumer)...)
		return errs
	})
	checkUpdate(k, func(obj, old *storagev1.StorageClass) field.ErrorList {
		var errs field.ErrorList
		if !semanticEqual(obj.Parameters, old.Parameters) {
			errs = append(errs, field.Forbidden(field.NewPath("parameters"), "updates to parameters are forbidden."))
		}
		if obj.Provisioner != old.Provisioner {
			errs = append(errs, field.Forbidden(field.NewPath("provisioner"), "updates to provisioner are forbidden."))
		}
		if val(obj.ReclaimPolicy) != val(old.ReclaimPolicy) {
			errs = append(errs, field.Forbidden(field.NewPath("reclaimPolicy"), "updates to reclaimPolicy are forbidden."))
		}
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
	k := newKind[storagev1.CSIDriver, storagev1.CSIDriverList](names{
		gv: storagev1.SchemeGroupVersion, kind: "CSIDriver", plural: "csidrivers", singular: "csidriver", global: true,
	})
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
	check(k, func(d *storagev1.CSIDriver) field.ErrorList {
		errs := validateDriverName(d.Name, field.NewPath("name"))
		for _, m := range d.Spec.VolumeLifecycleModes {
			errs = append(errs, oneOf(m, field.NewPath("spec", "volumeLifecycleModes"),
				storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
		}
		return append(errs, oneOf(val(d.Spec.FSGroupPolicy), field.NewPath("spec", "fsGroupPolicy"),
			storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	})
	checkUpdate(k, func(obj, old *storagev1.CSIDriver) field.ErrorList {
		return sameOr(obj.Spec.VolumeLifecycleModes, old.Spec.VolumeLifecycleModes, field.NewPath("spec", "volumeLifecycleModes"))
	})
	k.Columns = columns(nameCol, col("AttachRequired"), col("PodInfoOnMount"), col("StorageCapacity"),
		col("TokenRequests"), col("RequiresRepublish"), col("Modes"), ageCol)
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
	k := newKind[storagev1.CSINode, storagev1.CSINodeList](names{
		gv: storagev1.SchemeGroupVersion, kind: "CSINode", plural: "csinodes", singular: "csinode", global: true,
	})
	k.ReturnsDeleted = true
	check(k, func(n *storagev1.CSINode) field.ErrorList {
		var errs field.ErrorList
		drivers := field.NewPath("spec", "drivers")
		seen := map[string]bool{}
		for i, d := range n.Spec.Drivers {
			at := drivers.Index(i)
			errs = append(errs, validateDriverName(d.Name, at.Child("name"))...)
			if seen[d.Name] {
				errs = append(errs, field.Duplicate(at.Child("name"), d.Name))
			}
			seen[d.Name] = true
			if d.NodeID == "" {
				errs = append(errs, field.Required(at.Child("nodeID"), ""))
			}
			if slices.Contains(d.TopologyKeys, "") {
				errs = append(errs, field.Required(at.Child("topologyKeys"), ""))
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
	k := newKind[storagev1.VolumeAttachment, storagev1.VolumeAttachmentList](names{
		gv: storagev1.SchemeGroupVersion, kind: "VolumeAttachment", plural: "volumeattachments", singular: "volumeattachment", global: true,
	})
	k.ReturnsDeleted = true
	hasStatus(k, halves[*storagev1.VolumeAttachment]{
		spec: func(a *storagev1.VolumeAttachment) any { return a.Spec },
		keep: func(obj, old *storagev1.VolumeAttachment) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *storagev1.VolumeAttachment) {
			obj.Status = storagev1.VolumeAttachmentStatus{}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	prepare(k, func(a *storagev1.VolumeAttachment) { a.Generation = 0 })
	check(k, func(a *storagev1.VolumeAttachment) field.ErrorList {
		spec := field.NewPath("spec")
		errs := validateDriverName(a.Spec.Attacher, spec.Child("attacher"))
		if val(a.Spec.Source.PersistentVolumeName) == "" && a.Spec.Source.InlineVolumeSpec == nil {
			errs = append(errs, field.Required(spec.Child("source"), "must specify exactly one of inlineVolumeSpec and persistentVolumeName"))
		}
		if a.Spec.NodeName == "" {
			errs = append(errs, field.Required(spec.Child("nodeName"), ""))
		}
		return errs
	})
	checkUpdate(k, func(obj, old *storagev1.VolumeAttachment) field.ErrorList {
		return sameOr(obj.Spec, old.Spec, field.NewPath("spec"))
	})
	k.Columns = columns(nameCol, col("Attacher"), col("PV"), col("Node"), col("Attached"), ageCol)
	k.Row = row(func(a *storagev1.VolumeAttachment, now time.Time) []any {
		return []any{a.Name, a.Spec.Attacher, val(a.Spec.Source.PersistentVolumeName), a.Spec.NodeName,
			strconv.FormatBool(a.Status.Attached), age(a, now)}
	})
	return k
}

// maxDriverName is CSI's limit on GetPluginInfoResponse.name.
const maxDriverName = 63

func validateDriverName(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	if len(name) > maxDriverName {
		return field.ErrorList{field.TooLong(at, name, maxDriverName)}
	}
	return invalid(at, name, validation.IsDNS1123Subdomain(strings.ToLower(name)))
}
