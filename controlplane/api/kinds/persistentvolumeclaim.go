package kinds

import (
	"maps"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/fields"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/saturate"
)

func persistentVolumeClaimKind() *api.Kind {
	k := newKind(names{
		gv: corev1.SchemeGroupVersion, kind: "PersistentVolumeClaim", plural: "persistentvolumeclaims",
		singular: "persistentvolumeclaim", short: []string{"pvc"},
	}, func(l *corev1.PersistentVolumeClaimList) *[]corev1.PersistentVolumeClaim { return &l.Items })
	k.ReturnsDeleted = true
	k.Default = defaults(defaultClaim)
	k.OwnedDefault = defaults(defaultOwnedClaim)
	hasStatus(k, func(o *corev1.PersistentVolumeClaim) *corev1.PersistentVolumeClaimStatus { return &o.Status }, halves[*corev1.PersistentVolumeClaim]{
		spec: func(c *corev1.PersistentVolumeClaim) any { return c.Spec },
		keep: func(obj, old *corev1.PersistentVolumeClaim) { obj.Spec = *old.Spec.DeepCopy() },
		status: func(obj, old *corev1.PersistentVolumeClaim) {
			obj.Status = corev1.PersistentVolumeClaimStatus{Phase: corev1.ClaimPending}
			if old != nil {
				obj.Status = *old.Status.DeepCopy()
			}
		},
	})
	prepare(k, func(c *corev1.PersistentVolumeClaim) {
		c.Generation = 0
		dropForeignSource(&c.Spec, nil)
		dropUnknownSource(&c.Spec, nil)
	})
	prepareUpdate(k, func(obj, old *corev1.PersistentVolumeClaim) {
		dropForeignSource(&obj.Spec, &old.Spec)
		dropUnknownSource(&obj.Spec, &old.Spec)
	})
	check(k, func(c *corev1.PersistentVolumeClaim) field.ErrorList {
		return validateClaimSpec(&c.Spec, field.NewPath("spec"))
	})
	checkUpdate(k, validateClaimUpdate)
	checkStatus(k, func(obj, _ *corev1.PersistentVolumeClaim) field.ErrorList { return validateClaimGrowth(&obj.Status) })
	k.Columns = columns(nameCol, col("Status"), col("Volume"), col("Capacity"), col("Access Modes"),
		col("StorageClass"), col("VolumeAttributesClass"), ageCol, wide("VolumeMode"))
	k.Row = row(claimRow)
	k.Fields = fieldsOf(func(c *corev1.PersistentVolumeClaim) fields.Set {
		return fields.Set{"status.phase": string(c.Status.Phase), "spec.volumeName": c.Spec.VolumeName}
	})
	return k
}

func defaultClaim(c *corev1.PersistentVolumeClaim) {
	defaultOwnedClaim(c)
	if c.Spec.DataSource == nil || isKnownSource(c.Spec.DataSource) {
		oneSource(&c.Spec)
	}
}

// isKnownSource reports whether dataSource names a claim or a snapshot, which it could name before dataSourceRef existed.
func isKnownSource(s *corev1.TypedLocalObjectReference) bool {
	switch s.Kind {
	case "PersistentVolumeClaim":
		return val(s.APIGroup) == ""
	case "VolumeSnapshot":
		return val(s.APIGroup) == "snapshot.storage.k8s.io"
	}
	return false
}

// dropForeignSource drops a dataSourceRef with a namespace, as Kubernetes does while CrossNamespaceVolumeDataSource is off.
// A claim that is stored with a dataSourceRef keeps it. The whole field is dropped: without the namespace, it would name an
// object of the claim's namespace.
func dropForeignSource(s, old *corev1.PersistentVolumeClaimSpec) {
	if ref := s.DataSourceRef; ref != nil && val(ref.Namespace) != "" && (old == nil || old.DataSourceRef == nil) {
		s.DataSourceRef = nil
	}
}

// dropUnknownSource drops a dataSource of another kind from a claim without dataSourceRef, as Kubernetes does. A claim that
// is stored with a dataSource keeps it.
func dropUnknownSource(s, old *corev1.PersistentVolumeClaimSpec) {
	stored := old != nil && (old.DataSource != nil || old.DataSourceRef != nil)
	if s.DataSource != nil && s.DataSourceRef == nil && !isKnownSource(s.DataSource) && !stored {
		s.DataSource = nil
	}
	oneSource(s)
}

// defaultOwnedClaim fills the defaults that belong to the client. As in Kubernetes, a client that sets dataSource alone
// does not own dataSourceRef.
func defaultOwnedClaim(c *corev1.PersistentVolumeClaim) {
	setDefault(&c.Status.Phase, corev1.ClaimPending)
	setDefaultPtr(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	roundResources(c.Spec.Resources.Requests)
	roundResources(c.Spec.Resources.Limits)
}

// oneSource has both fields say what the volume is to be filled from where one does, as in Kubernetes: provisioners read the
// one, populators the other. What is in another namespace has no form in the older field.
func oneSource(s *corev1.PersistentVolumeClaimSpec) {
	switch from, ref := s.DataSource, s.DataSourceRef; {
	case from != nil && ref == nil:
		s.DataSourceRef = &corev1.TypedObjectReference{APIGroup: from.APIGroup, Kind: from.Kind, Name: from.Name}
	case from == nil && ref != nil && val(ref.Namespace) == "":
		s.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

func validateClaimSpec(s *corev1.PersistentVolumeClaimSpec, spec *field.Path) field.ErrorList {
	errs := validateAccessModes(s.AccessModes, spec.Child("accessModes"), "at least 1 access mode is required")
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
	if c := val(s.VolumeAttributesClassName); c != "" {
		errs = append(errs, invalid(spec.Child("volumeAttributesClassName"), c, validation.NameIsDNSSubdomain(c, false))...)
	}
	return append(errs, validateDataSources(s, spec)...)
}

// validateDataSources judges what the volume is to be filled from, which two fields say.
func validateDataSources(s *corev1.PersistentVolumeClaimSpec, spec *field.Path) field.ErrorList {
	source, ref := s.DataSource, s.DataSourceRef
	var errs field.ErrorList
	if source != nil {
		errs = append(errs, validateDataSource(source.APIGroup, source.Kind, source.Name, spec.Child("dataSource"))...)
	}
	if ref == nil {
		return errs
	}
	errs = append(errs, validateDataSource(ref.APIGroup, ref.Kind, ref.Name, spec.Child("dataSourceRef"))...)
	elsewhere := val(ref.Namespace)
	if elsewhere != "" {
		errs = append(errs, invalid(spec.Child("dataSourceRef", "namespace"), elsewhere, validation.ValidateNamespaceName(elsewhere, false))...)
	}
	// Kubernetes shows the path of the field where the wrong value would stand.
	switch {
	case source == nil:
	case elsewhere != "":
		errs = append(errs, field.Invalid(spec, spec.Child("dataSource"), "may not be specified when dataSourceRef.namespace is specified"))
	case !semanticEqual(source.APIGroup, ref.APIGroup) || source.Kind != ref.Kind || source.Name != ref.Name:
		errs = append(errs, field.Invalid(spec, spec.Child("dataSource"), "must match dataSourceRef"))
	}
	return errs
}

func validateDataSource(group *string, kind, name string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at.Child("name"), ""))
	}
	if kind == "" {
		errs = append(errs, field.Required(at.Child("kind"), ""))
	}
	if g := val(group); g != "" {
		errs = append(errs, invalid(at.Child("apiGroup"), g, utilvalidation.IsDNS1123Subdomain(g))...)
	} else if kind != "PersistentVolumeClaim" {
		errs = append(errs, field.Invalid(at, kind, "must be 'PersistentVolumeClaim' when referencing the default apiGroup"))
	}
	return errs
}

// validateClaimUpdate lets a claim be bound, get the default class and, once it is bound, be of another size: a larger
// one, or one that is still larger than what it has, where growing did not succeed.
func validateClaimUpdate(obj, old *corev1.PersistentVolumeClaim) field.ErrorList {
	spec := field.NewPath("spec")
	now, was := obj.Spec.DeepCopy(), old.Spec.DeepCopy()
	if was.VolumeName == "" {
		now.VolumeName = ""
	}
	const annotation = corev1.BetaStorageClassAnnotation
	class, annotated := old.Annotations[annotation]
	given := was.StorageClassName == nil && now.StorageClassName != nil && (!annotated || *now.StorageClassName == class)
	if given {
		now.StorageClassName = nil
	}
	var errs field.ErrorList
	if kept, ok := obj.Annotations[annotation]; kept != class && !(given && annotated && !ok) {
		errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations", annotation), kept, validation.FieldImmutableErrorMsg))
	}
	if obj.Status.Phase == corev1.ClaimBound {
		now.VolumeAttributesClassName = was.VolumeAttributesClassName
	}
	newSize, oldSize := now.Resources.Requests[corev1.ResourceStorage], was.Resources.Requests[corev1.ResourceStorage]
	if now.Resources.Requests != nil && obj.Status.Phase == corev1.ClaimBound {
		now.Resources.Requests[corev1.ResourceStorage] = oldSize
	}
	if !semanticEqual(now, was) {
		errs = append(errs, field.Forbidden(spec,
			"spec is immutable after creation except resources.requests and volumeAttributesClassName for bound claims"))
	}
	if newSize.Cmp(oldSize) < 0 && newSize.Cmp(old.Status.Capacity[corev1.ResourceStorage]) <= 0 {
		errs = append(errs, field.Forbidden(spec.Child("resources", "requests", "storage"), "field can not be less than status.capacity: volumes do not shrink; "+
			"ask for more than the claim has, or make a smaller claim and copy the data"))
	}
	errs = append(errs, sameOr(obj.Spec.VolumeMode, old.Spec.VolumeMode, field.NewPath("volumeMode"))...)
	return append(errs, validateAttributesUpdate(obj, old, spec.Child("volumeAttributesClassName"))...)
}

// validateAttributesUpdate lets a claim name another class of attributes, and none only as long as its volume has none: one
// that has been applied can be replaced, and not taken away.
func validateAttributesUpdate(obj, old *corev1.PersistentVolumeClaim, at *field.Path) field.ErrorList {
	now := obj.Spec.VolumeAttributesClassName
	switch {
	case semanticEqual(now, old.Spec.VolumeAttributesClassName) || old.Status.CurrentVolumeAttributesClassName == nil:
		return nil
	case now == nil:
		return field.ErrorList{field.Forbidden(at, "update to nil is forbidden when status.currentVolumeAttributesClassName is not nil")}
	case *now == "":
		return field.ErrorList{field.Forbidden(at, "update to empty string is forbidden when status.currentVolumeAttributesClassName is not nil")}
	}
	return nil
}

// resizeStates are how far a claim has grown.
var resizeStates = []corev1.ClaimResourceStatus{
	corev1.PersistentVolumeClaimControllerResizeInProgress, corev1.PersistentVolumeClaimControllerResizeInfeasible,
	corev1.PersistentVolumeClaimNodeResizePending, corev1.PersistentVolumeClaimNodeResizeInProgress,
	corev1.PersistentVolumeClaimNodeResizeInfeasible,
}

// validateClaimGrowth judges what drivers and nodes say of a claim's size.
func validateClaimGrowth(s *corev1.PersistentVolumeClaimStatus) field.ErrorList {
	at := field.NewPath("status")
	var errs field.ErrorList
	usable := func(list corev1.ResourceList, name corev1.ResourceName, at *field.Path) {
		if q := list[name]; q.Sign() < 0 {
			errs = append(errs, field.Invalid(at.Key(string(name)), saturate.Value(&q), "must be a valid resource quantity"))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.Capacity)) {
		usable(s.Capacity, name, at.Child("capacity"))
	}
	states := at.Child("allocatedResourceStatuses")
	for _, name := range slices.Sorted(maps.Keys(s.AllocatedResourceStatuses)) {
		errs = append(errs, validateClaimResource(string(name), states)...)
		if !slices.Contains(resizeStates, s.AllocatedResourceStatuses[name]) {
			errs = append(errs, field.NotSupported(states, name, slices.Sorted(slices.Values(resizeStates))))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(s.AllocatedResources)) {
		if wrong := validateClaimResource(string(name), at.Child("allocatedResources")); len(wrong) > 0 {
			errs = append(errs, wrong...)
			continue
		}
		usable(s.AllocatedResources, name, at.Child("allocatedResources"))
	}
	return errs
}

// validateClaimResource judges the name of what a claim has: storage, or something of another domain.
func validateClaimResource(name string, at *field.Path) field.ErrorList {
	if wrong := utilvalidation.IsQualifiedName(name); len(wrong) > 0 {
		return invalid(at, name, wrong)
	}
	if native := !strings.Contains(name, "/") || strings.Contains(name, corev1.ResourceDefaultNamespacePrefix); native {
		return oneOf(corev1.ResourceName(name), at, corev1.ResourceStorage)
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
