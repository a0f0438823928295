package core

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/fields"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/internal/saturate"
)

// PersistentVolumeClaimKind returns the definition of the kind PersistentVolumeClaim.
func PersistentVolumeClaimKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: corev1.SchemeGroupVersion, Kind: "PersistentVolumeClaim", Plural: "persistentvolumeclaims",
		Singular: "persistentvolumeclaim", Short: []string{"pvc"},
	}, func(l *corev1.PersistentVolumeClaimList) *[]corev1.PersistentVolumeClaim { return &l.Items })
	k.Deletion.ReturnsDeleted = true
	k.Writes.Default = builder.Default(podspec.DefaultClaim)
	k.Writes.OwnedDefault = builder.Default(podspec.DefaultOwnedClaim)
	builder.SeparateStatus(k, func(o *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaimStatus {
		return &o.Status
	}, builder.Accessors[*corev1.PersistentVolumeClaim]{
		Spec:     func(c *corev1.PersistentVolumeClaim) any { return c.Spec },
		CopySpec: func(obj, old *corev1.PersistentVolumeClaim) { obj.Spec = *old.Spec.DeepCopy() },
		Status: func(obj, old *corev1.PersistentVolumeClaim) {
			obj.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	builder.PrepareCreate(k, func(c *corev1.PersistentVolumeClaim) {
		c.Generation = 0
		podspec.DropForeignSource(&c.Spec, nil)
		podspec.DropUnknownSource(&c.Spec, nil)
	})
	builder.PrepareUpdate(k, func(obj, old *corev1.PersistentVolumeClaim) {
		podspec.DropForeignSource(&obj.Spec, &old.Spec)
		podspec.DropUnknownSource(&obj.Spec, &old.Spec)
	})
	builder.AddValidation(k, func(c *corev1.PersistentVolumeClaim) field.ErrorList {
		return podspec.ValidateClaimSpec(&c.Spec, field.NewPath("spec"))
	})
	builder.AddUpdateValidation(k, ValidateClaimUpdate)
	builder.AddStatusValidation(k, func(obj, _ *corev1.PersistentVolumeClaim) field.ErrorList {
		return validateClaimGrowth(&obj.Status)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Status"),
		builder.StringColumn("Volume"),
		builder.StringColumn("Capacity"), builder.StringColumn("Access Modes"),
		builder.StringColumn("StorageClass"), builder.StringColumn("VolumeAttributesClass"), builder.AgeColumn,
		builder.WideColumn("VolumeMode"))
	k.Lists.Row = builder.Row(claimRow)
	k.Lists.Fields = builder.Fields(func(c *corev1.PersistentVolumeClaim) fields.Set {
		return fields.Set{"status.phase": string(c.Status.Phase), "spec.volumeName": c.Spec.VolumeName}
	})
	return k
}

// ValidateClaimUpdate returns errors for changes of a claim's immutable fields. Allowed changes are
// binding the claim, setting a missing class, and increasing the size of a bound claim. After a
// failed expansion, the requested size may be lowered, but must stay above the current capacity.
func ValidateClaimUpdate(obj, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec := field.NewPath("spec")
	updated, previous := obj.Spec.DeepCopy(), old.Spec.DeepCopy()
	if previous.VolumeName == "" {
		updated.VolumeName = ""
	}
	const annotation = corev1.BetaStorageClassAnnotation
	class, annotated := old.Annotations[annotation]
	given := previous.StorageClassName == nil && updated.StorageClassName != nil &&
		(!annotated || *updated.StorageClassName == class)
	if given {
		updated.StorageClassName = nil
	}
	var errs field.ErrorList
	if kept, ok := obj.Annotations[annotation]; kept != class && !(given && annotated && !ok) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations", annotation), kept,
			validation.FieldImmutableErrorMsg))
	}
	if obj.Status.Phase == corev1.ClaimBound {
		updated.VolumeAttributesClassName = previous.VolumeAttributesClassName
	}
	newSize, oldSize := updated.Resources.Requests[corev1.ResourceStorage],
		previous.Resources.Requests[corev1.ResourceStorage]
	if updated.Resources.Requests != nil && obj.Status.Phase == corev1.ClaimBound {
		updated.Resources.Requests[corev1.ResourceStorage] = oldSize
	}
	if !fieldrules.SemanticEqual(updated, previous) {
		errs = append(errs, field.Forbidden(spec,
			"spec is immutable after creation except resources.requests and volumeAttributesClassName "+
				"for bound claims"))
	}
	if newSize.Cmp(oldSize) < 0 && newSize.Cmp(old.Status.Capacity[corev1.ResourceStorage]) <= 0 {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"),
			"field can not be less than status.capacity: volumes do not shrink; "+
				"ask for more than the claim has, or make a smaller claim and copy the data"))
	}
	errs = append(errs, fieldrules.ValidateUnchanged(obj.Spec.VolumeMode, old.Spec.VolumeMode,
		field.NewPath("volumeMode"))...)
	return append(errs, validateAttributesUpdate(obj, old, spec.Child("volumeAttributesClassName"))...)
}

// validateAttributesUpdate returns an error if the update removes the VolumeAttributesClass of a
// claim after a class was applied to the claim's volume. Replacing the class is allowed.
func validateAttributesUpdate(obj, old *corev1.PersistentVolumeClaim, fldPath *field.Path) field.ErrorList {
	updated := obj.Spec.VolumeAttributesClassName
	switch {
	case fieldrules.SemanticEqual(updated, old.Spec.VolumeAttributesClassName) ||
		old.Status.CurrentVolumeAttributesClassName == nil:
		return nil
	case updated == nil:
		return field.ErrorList{field.Forbidden(fldPath,
			"update to nil is forbidden when status.currentVolumeAttributesClassName is not nil")}
	case *updated == "":
		return field.ErrorList{field.Forbidden(fldPath,
			"update to empty string is forbidden when status.currentVolumeAttributesClassName is not nil")}
	}
	return nil
}

// resizeStates are the valid states of a claim's expansion.
var resizeStates = []corev1.ClaimResourceStatus{
	corev1.PersistentVolumeClaimControllerResizeInProgress, corev1.PersistentVolumeClaimControllerResizeInfeasible,
	corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeInProgress,
	corev1.PersistentVolumeClaimNodeResizeInfeasible,
}

// validateClaimGrowth validates the capacity and the expansion status in the status of a claim.
func validateClaimGrowth(s *corev1.PersistentVolumeClaimStatus) field.ErrorList {
	fldPath := field.NewPath("status")
	var errs field.ErrorList
	usable := func(list corev1.ResourceList, name corev1.ResourceName, fldPath *field.Path) {
		if q := list[name]; q.Sign() < 0 {
			errs = append(errs, field.Invalid(fldPath.Key(string(name)), saturate.Value(&q),
				"must be a valid resource quantity"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Capacity)) {
		usable(s.Capacity, name, fldPath.Child("capacity"))
	}
	states := fldPath.Child("allocatedResourceStatuses")
	for _, name := range slices.Sorted(maps.Keys(s.AllocatedResourceStatuses)) {
		errs = append(errs, validateClaimResource(string(name), states)...)
		if !slices.Contains(resizeStates, s.AllocatedResourceStatuses[name]) {
			errs = append(errs, field.NotSupported(states, name, slices.Sorted(slices.Values(resizeStates))))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.AllocatedResources)) {
		if wrong := validateClaimResource(string(name), fldPath.Child("allocatedResources")); len(wrong) > 0 {
			errs = append(errs, wrong...)
			continue
		}
		usable(s.AllocatedResources, name, fldPath.Child("allocatedResources"))
	}
	return errs
}

// validateClaimResource validates a resource name in a claim's status: storage, or a name with a
// domain other than that of Kubernetes.
func validateClaimResource(name string, fldPath *field.Path) field.ErrorList {
	if wrong := utilvalidation.IsQualifiedName(name); len(wrong) > 0 {
		return fieldrules.InvalidErrors(fldPath, name, wrong)
	}
	if native := !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix); native {
		return fieldrules.ValidateOneOf(corev1.ResourceName(name), fldPath, corev1.ResourceStorage)
	}
	return nil
}

func claimRow(c *corev1.PersistentVolumeClaim, now time.Time) []any {
	phase := string(c.Status.Phase)
	if c.DeletionTimestamp != nil {
		phase = "Terminating"
	}
	capacity, modes := "", ""
	if c.Spec.VolumeName != "" {
		capacity, modes = quantityText(c.Status.Capacity, corev1.ResourceStorage), accessModes(c.Status.AccessModes)
	}
	return []any{c.Name, phase, c.Spec.VolumeName, capacity, modes, ClaimClass(c),
		valueOrUnset(c.Spec.VolumeAttributesClassName), builder.Age(c, now), valueOrUnset(c.Spec.VolumeMode)}
}

// ClaimClass returns the name of the claim's storage class. It returns "" if the claim has none.
func ClaimClass(claim *corev1.PersistentVolumeClaim) string {
	if class, ok := claim.Annotations[corev1.BetaStorageClassAnnotation]; ok {
		return class
	}
	return ptr.Deref(claim.Spec.StorageClassName, "")
}
