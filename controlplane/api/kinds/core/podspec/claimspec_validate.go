package podspec

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

var knownAccessModes = []corev1.PersistentVolumeAccessMode{
	corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod,
}

// ValidateAccessModes validates the access modes of a volume or claim. missing is the detail of the
// error if the list is empty.
func ValidateAccessModes(modes []corev1.PersistentVolumeAccessMode, at *field.Path, missing string) field.ErrorList {
	var errs field.ErrorList
	if len(modes) == 0 {
		errs = append(errs, field.Required(at, missing))
	}
	once, others := false, false
	for _, m := range modes {
		errs = append(errs, fieldrules.Supported(m, at, knownAccessModes...)...)
		if m == corev1.ReadWriteOncePod {
			once = true
		} else if slices.Contains(knownAccessModes, m) {
			others = true
		}
	}
	if once && others {
		errs = append(errs, field.Forbidden(at, "may not use ReadWriteOncePod with other access modes"))
	}
	return errs
}

// ValidateVolumeMode returns an error if a volume mode is set and is not Block or Filesystem.
func ValidateVolumeMode(m *corev1.PersistentVolumeMode, at *field.Path) field.ErrorList {
	if m == nil {
		return nil
	}
	return fieldrules.Supported(*m, at, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
}

// DefaultClaim sets the defaults of a PersistentVolumeClaim.
func DefaultClaim(c *corev1.PersistentVolumeClaim) {
	DefaultOwnedClaim(c)
	if c.Spec.DataSource == nil || isKnownSource(c.Spec.DataSource) {
		oneSource(&c.Spec)
	}
}

// isKnownSource reports whether dataSource names a claim or a snapshot. Before dataSourceRef
// existed, these were its only valid kinds.
func isKnownSource(s *corev1.TypedLocalObjectReference) bool {
	switch s.Kind {
	case "PersistentVolumeClaim":
		return fieldrules.Deref(s.APIGroup) == ""
	case "VolumeSnapshot":
		return fieldrules.Deref(s.APIGroup) == "snapshot.storage.k8s.io"
	}
	return false
}

// DropForeignSource drops a dataSourceRef with a namespace, as Kubernetes does while
// CrossNamespaceVolumeDataSource is off. A claim that is stored with a dataSourceRef keeps it. The
// whole field is dropped: without the namespace, it would name an object of the claim's namespace.
func DropForeignSource(s, old *corev1.PersistentVolumeClaimSpec) {
	if ref := s.DataSourceRef; ref != nil && fieldrules.Deref(ref.Namespace) != "" && (old == nil || old.DataSourceRef == nil) {
		s.DataSourceRef = nil
	}
}

// DropUnknownSource drops a dataSource of another kind than claim or snapshot from a claim without
// dataSourceRef, as Kubernetes does. A claim that is stored with a dataSource keeps it.
func DropUnknownSource(s, old *corev1.PersistentVolumeClaimSpec) {
	stored := old != nil && (old.DataSource != nil || old.DataSourceRef != nil)
	if s.DataSource != nil && s.DataSourceRef == nil && !isKnownSource(s.DataSource) && !stored {
		s.DataSource = nil
	}
	oneSource(s)
}

// DefaultOwnedClaim sets the defaults that are attributed to the client. As in Kubernetes, a client
// that sets only dataSource does not own dataSourceRef.
func DefaultOwnedClaim(c *corev1.PersistentVolumeClaim) {
	builder.SetDefault(&c.Status.Phase, corev1.ClaimPending)
	builder.SetDefaultPtr(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	RoundResources(c.Spec.Resources.Requests)
	RoundResources(c.Spec.Resources.Limits)
}

// oneSource copies dataSource to dataSourceRef or vice versa if only one of them is set, as in
// Kubernetes: provisioners read dataSource, populators dataSourceRef. A reference to another
// namespace cannot be expressed in dataSource.
func oneSource(s *corev1.PersistentVolumeClaimSpec) {
	switch from, ref := s.DataSource, s.DataSourceRef; {
	case from != nil && ref == nil:
		s.DataSourceRef = &corev1.TypedObjectReference{APIGroup: from.APIGroup, Kind: from.Kind, Name: from.Name}
	case from == nil && ref != nil && fieldrules.Deref(ref.Namespace) == "":
		s.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

// ValidateClaimSpec returns the errors in the spec of a PersistentVolumeClaim.
func ValidateClaimSpec(s *corev1.PersistentVolumeClaimSpec, spec *field.Path) field.ErrorList {
	errs := ValidateAccessModes(s.AccessModes, spec.Child("accessModes"), "at least 1 access mode is required")
	if s.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(s.Selector, metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
	}
	at := spec.Child("resources").Key(string(corev1.ResourceStorage))
	if size, ok := s.Resources.Requests[corev1.ResourceStorage]; !ok {
		errs = append(errs, field.Required(at, ""))
	} else if size.Sign() <= 0 {
		errs = append(errs, field.Invalid(at, size.String(), "must be greater than zero"))
	}
	if c := fieldrules.Deref(s.StorageClassName); c != "" {
		errs = append(errs, fieldrules.Invalid(spec.Child("storageClassName"), c,
			apivalidation.NameIsDNSSubdomain(c, false))...)
	}
	errs = append(errs, ValidateVolumeMode(s.VolumeMode, spec.Child("volumeMode"))...)
	if c := fieldrules.Deref(s.VolumeAttributesClassName); c != "" {
		errs = append(errs, fieldrules.Invalid(spec.Child("volumeAttributesClassName"), c,
			apivalidation.NameIsDNSSubdomain(c, false))...)
	}
	return append(errs, validateDataSources(s, spec)...)
}

// validateDataSources validates dataSource and dataSourceRef, and that they do not contradict each
// other.
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
	elsewhere := fieldrules.Deref(ref.Namespace)
	if elsewhere != "" {
		errs = append(errs, fieldrules.Invalid(spec.Child("dataSourceRef", "namespace"), elsewhere,
			apivalidation.ValidateNamespaceName(elsewhere, false))...)
	}
	// As in Kubernetes, errors have the path of the field with the wrong value.
	switch {
	case source == nil:
	case elsewhere != "":
		errs = append(errs, field.Invalid(spec, spec.Child("dataSource"), "may not be specified when dataSourceRef.namespace is specified"))
	case !fieldrules.SemanticEqual(source.APIGroup, ref.APIGroup) || source.Kind != ref.Kind || source.Name != ref.Name:
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
	if g := fieldrules.Deref(group); g != "" {
		errs = append(errs, fieldrules.Invalid(at.Child("apiGroup"), g, utilvalidation.IsDNS1123Subdomain(g))...)
	} else if kind != "PersistentVolumeClaim" {
		errs = append(errs, field.Invalid(at, kind, "must be 'PersistentVolumeClaim' when referencing the default apiGroup"))
	}
	return errs
}
