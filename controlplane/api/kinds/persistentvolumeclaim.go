package kinds

import (
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func persistentVolumeClaimKind() *api.Kind {
	k := newKind[corev1.PersistentVolumeClaim, corev1.PersistentVolumeClaimList](names{
		gv: corev1.SchemeGroupVersion, kind: "PersistentVolumeClaim", plural: "persistentvolumeclaims",
		singular: "persistentvolumeclaim", short: []string{"pvc"},
	})
	k.ReturnsDeleted = true
	k.Default = defaults(func(c *corev1.PersistentVolumeClaim) {
		setDefault(&c.Status.Phase, corev1.ClaimPending)
		setDefaultPtr(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
		roundResources(c.Spec.Resources.Requests)
		roundResources(c.Spec.Resources.Limits)
	})
	hasStatus(k, halves[*corev1.PersistentVolumeClaim]{
		spec: func(c *corev1.PersistentVolumeClaim) any { return c.Spec },
		keep: func(obj, old *corev1.PersistentVolumeClaim) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *corev1.PersistentVolumeClaim) {
			obj.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	prepare(k, func(c *corev1.PersistentVolumeClaim) { c.Generation = 0 })
	check(k, func(c *corev1.PersistentVolumeClaim) field.ErrorList {
		return validateClaimSpec(&c.Spec, field.NewPath("spec"))
	})
	checkUpdate(k, validateClaimUpdate)
	k.Columns = columns(nameCol, col("Status"), col("Volume"), col("Capacity"), col("Access Modes"),
		col("StorageClass"), col("VolumeAttributesClass"), ageCol, wide("VolumeMode"))
	k.Row = row(claimRow)
	k.Fields = fieldsOf(func(c *corev1.PersistentVolumeClaim) fields.Set {
		return fields.Set{"status.phase": string(c.Status.Phase), "spec.volumeName": c.Spec.VolumeName}
	})
	return k
}

func validateClaimSpec(s *corev1.PersistentVolumeClaimSpec, spec *field.Path) field.ErrorList {
	errs := validateAccessModes(s.AccessModes, spec.Child("accessModes"))
	if s.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(s.Selector, metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
	}
	at := spec.Child("resources").Key(string(corev1.ResourceStorage))
	if size, ok := s.Resources.Requests[corev1.ResourceStorage]; !ok {
		errs = append(errs, field.Required(at, ""))
	} else if size.Sign() <= 0 {
		errs = append(errs, field.Invalid(at, size.String(), "must be greater than zero"))
	}
	if c := val(s.StorageClassName); c != "" {
		errs = append(errs, invalid(spec.Child("storageClassName"), c, validation.NameIsDNSSubdomain(c, false))...)
	}
	errs = append(errs, validateVolumeMode(s.VolumeMode, spec.Child("volumeMode"))...)
	if d := s.DataSource; d != nil && (d.Name == "" || d.Kind == "") {
		errs = append(errs, field.Required(spec.Child("dataSource"), "must name a kind and an object"))
	}
	return errs
}

// validateClaimUpdate lets a claim be bound, grow, and get the default class; nothing else.
func validateClaimUpdate(obj, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec := field.NewPath("spec")
	now, was := obj.Spec.DeepCopy(), old.Spec.DeepCopy()
	if was.VolumeName == "" {
		now.VolumeName = ""
	}
	if was.StorageClassName == nil {
		now.StorageClassName = nil
	}
	now.VolumeAttributesClassName = was.VolumeAttributesClassName
	newSize, oldSize := now.Resources.Requests[corev1.ResourceStorage], was.Resources.Requests[corev1.ResourceStorage]
	var errs field.ErrorList
	if newSize.Cmp(oldSize) < 0 {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"), "field can not be less than status.capacity"))
	}
	if newSize.Cmp(oldSize) > 0 && old.Status.Phase != corev1.ClaimBound {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"), "is forbidden to grow before the claim is bound"))
	}
	if now.Resources.Requests != nil && was.Resources.Requests != nil {
		now.Resources.Requests[corev1.ResourceStorage] = oldSize
	}
	if !semanticEqual(now, was) {
		errs = append(errs, field.Forbidden(spec,
			"spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"))
	}
	return errs
}

func claimRow(c *corev1.PersistentVolumeClaim, now time.Time) []any {
	phase := string(c.Status.Phase)
	if c.DeletionTimestamp != nil {
		phase = "Terminating"
	}
	capacity, modes := "", ""
	if c.Spec.VolumeName != "" {
		capacity, modes = quantity(c.Status.Capacity, corev1.ResourceStorage), accessModes(c.Status.AccessModes)
	}
	return []any{c.Name, phase, c.Spec.VolumeName, capacity, modes, ClaimClass(c),
		orUnset(c.Spec.VolumeAttributesClassName), age(c, now), orUnset(c.Spec.VolumeMode)}
}

// ClaimClass is the name of the claim's storage class, "" for none.
func ClaimClass(c *corev1.PersistentVolumeClaim) string {
	if class, ok := c.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return class
	}
	return val(c.Spec.StorageClassName)
}
