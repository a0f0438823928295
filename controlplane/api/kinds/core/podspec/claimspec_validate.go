package podspec

import (
	"slices"

	corev1 "k8s.io/api/core/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

var knownAccessModes = []corev1.PersistentVolumeAccessMode{
	corev1.ReadOnlyMany, corev1.ReadWriteMany, corev1.ReadWriteOnce, corev1.ReadWriteOncePod,
}

// ValidateAccessModes validates the access modes of a volume or claim. emptyDetail is the detail of
// the error for an empty list.
func ValidateAccessModes(
	modes []corev1.PersistentVolumeAccessMode, fldPath *field.Path, emptyDetail string,
) field.ErrorList {
	var errs field.ErrorList
	if len(modes) == 0 {
		errs = append(errs, field.Required(fldPath, emptyDetail))
	}
	once, others := false, false
	for _, m := range modes {
		errs = append(errs, fieldrules.ValidateSupported(m, fldPath, knownAccessModes...)...)
		if m == corev1.ReadWriteOncePod {
			once = true
		} else if slices.Contains(knownAccessModes, m) {
			others = true
		}
	}
	if once && others {
		errs = append(errs, field.Forbidden(fldPath, "may not use ReadWriteOncePod with other access modes"))
	}
	return errs
}

// ValidateVolumeMode returns an error if a volume mode is set and is not Block or Filesystem.
func ValidateVolumeMode(mode *corev1.PersistentVolumeMode, fldPath *field.Path) field.ErrorList {
	if mode == nil {
		return nil
	}
	return fieldrules.ValidateSupported(*mode, fldPath, corev1.PersistentVolumeBlock, corev1.PersistentVolumeFilesystem)
}

// DefaultClaim sets the defaults of a PersistentVolumeClaim.
func DefaultClaim(c *corev1.PersistentVolumeClaim) {
	DefaultOwnedClaim(c)
	if c.Spec.DataSource == nil || isKnownSource(c.Spec.DataSource) {
		syncDataSources(&c.Spec)
	}
}

// isKnownSource reports whether dataSource is a PersistentVolumeClaim or a VolumeSnapshot. Before
// dataSourceRef existed, these were the only valid kinds.
func isKnownSource(s *corev1.TypedLocalObjectReference) bool {
	switch s.Kind {
	case "PersistentVolumeClaim":
		return ptr.Deref(s.APIGroup, "") == ""
	case "VolumeSnapshot":
		return ptr.Deref(s.APIGroup, "") == "snapshot.storage.k8s.io"
	}
	return false
}

// DropForeignSource removes a dataSourceRef with a namespace, as Kubernetes does while the feature
// gate CrossNamespaceVolumeDataSource is off. It keeps the field if the stored claim has a
// dataSourceRef. The whole field is removed: without the namespace, it would refer to an object of
// the claim's own namespace. stored is nil on create.
func DropForeignSource(spec, stored *corev1.PersistentVolumeClaimSpec) {
	if ref := spec.DataSourceRef; ref != nil && ptr.Deref(ref.Namespace, "") != "" &&
		(stored == nil || stored.DataSourceRef == nil) {
		spec.DataSourceRef = nil
	}
}

// DropUnknownSource removes a dataSource that is not a PersistentVolumeClaim or a VolumeSnapshot
// from a claim without dataSourceRef, as Kubernetes does. It keeps the field if the stored claim
// has a dataSource. previous is the stored claim, nil on create.
func DropUnknownSource(spec, previous *corev1.PersistentVolumeClaimSpec) {
	stored := previous != nil && (previous.DataSource != nil || previous.DataSourceRef != nil)
	if spec.DataSource != nil && spec.DataSourceRef == nil && !isKnownSource(spec.DataSource) && !stored {
		spec.DataSource = nil
	}
	syncDataSources(spec)
}

// DefaultOwnedClaim sets those defaults that managedFields attributes to the client. As in
// Kubernetes, a client that sets only dataSource does not own dataSourceRef.
func DefaultOwnedClaim(c *corev1.PersistentVolumeClaim) {
	builder.SetDefault(&c.Status.Phase, corev1.ClaimPending)
	builder.SetDefaultPtr(&c.Spec.VolumeMode, corev1.PersistentVolumeFilesystem)
	RoundResources(c.Spec.Resources.Requests)
	RoundResources(c.Spec.Resources.Limits)
}

// syncDataSources copies dataSource to dataSourceRef or vice versa if only one of them is set, as
// in Kubernetes: provisioners read dataSource, populators read dataSourceRef. A reference to
// another namespace is not copied, because dataSource cannot contain it.
func syncDataSources(s *corev1.PersistentVolumeClaimSpec) {
	switch from, ref := s.DataSource, s.DataSourceRef; {
	case from != nil && ref == nil:
		s.DataSourceRef = &corev1.TypedObjectReference{APIGroup: from.APIGroup, Kind: from.Kind, Name: from.Name}
	case from == nil && ref != nil && ptr.Deref(ref.Namespace, "") == "":
		s.DataSource = &corev1.TypedLocalObjectReference{APIGroup: ref.APIGroup, Kind: ref.Kind, Name: ref.Name}
	}
}

// ValidateClaimSpec returns the errors in the spec of a PersistentVolumeClaim.
func ValidateClaimSpec(s *corev1.PersistentVolumeClaimSpec, spec *field.Path) field.ErrorList {
	errs := ValidateAccessModes(s.AccessModes, spec.Child("accessModes"), "at least 1 access mode is required")
	if s.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(s.Selector,
			metavalidation.LabelSelectorValidationOptions{}, spec.Child("selector"))...)
	}
	fldPath := spec.Child("resources").Key(string(corev1.ResourceStorage))
	if size, ok := s.Resources.Requests[corev1.ResourceStorage]; !ok {
		errs = append(errs, field.Required(fldPath, ""))
	} else if size.Sign() <= 0 {
		errs = append(errs, field.Invalid(fldPath, size.String(), "must be greater than zero"))
	}
	if c := ptr.Deref(s.StorageClassName, ""); c != "" {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("storageClassName"), c,
			apivalidation.NameIsDNSSubdomain(c, false))...)
	}
	errs = append(errs, ValidateVolumeMode(s.VolumeMode, spec.Child("volumeMode"))...)
	if c := ptr.Deref(s.VolumeAttributesClassName, ""); c != "" {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("volumeAttributesClassName"), c,
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
	elsewhere := ptr.Deref(ref.Namespace, "")
	if elsewhere != "" {
		errs = append(errs, fieldrules.InvalidErrors(spec.Child("dataSourceRef", "namespace"), elsewhere,
			apivalidation.ValidateNamespaceName(elsewhere, false))...)
	}
	// As in Kubernetes, each error has the path of the field with the wrong value.
	switch {
	case source == nil:
	case elsewhere != "":
		errs = append(errs, field.Invalid(spec, spec.Child("dataSource"),
			"may not be specified when dataSourceRef.namespace is specified"))
	case !fieldrules.SemanticEqual(source.APIGroup, ref.APIGroup) || source.Kind != ref.Kind || source.Name != ref.Name:
		errs = append(errs, field.Invalid(spec, spec.Child("dataSource"), "must match dataSourceRef"))
	}
	return errs
}

func validateDataSource(group *string, kind, name string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), ""))
	}
	if kind == "" {
		errs = append(errs, field.Required(fldPath.Child("kind"), ""))
	}
	if g := ptr.Deref(group, ""); g != "" {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("apiGroup"), g,
			utilvalidation.IsDNS1123Subdomain(g))...)
	} else if kind != "PersistentVolumeClaim" {
		errs = append(errs, field.Invalid(fldPath, kind,
			"must be 'PersistentVolumeClaim' when referencing the default apiGroup"))
	}
	return errs
}
