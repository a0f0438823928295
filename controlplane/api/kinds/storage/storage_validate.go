package storage

import (
	"fmt"
	"math"
	"slices"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// The documented limits of drivers and classes; lengths are in bytes.
const (
	maxCSINodeID        = 256 // limit of CSI for the length of NodeGetInfoResponse.node_id
	maxClassParameters  = 512 // maximum number of parameters
	MaxParametersSize   = 256 << 10
	MaxAttachmentSize   = 256 << 10
	maxVolumeError      = 1024
	minNodeUpdatePeriod = 10 // minimum interval in seconds
)

// validateParameters validates the parameters that a class passes to its driver.
func validateParameters(p map[string]string, fldPath *field.Path) field.ErrorList {
	if len(p) > maxClassParameters {
		return field.ErrorList{field.TooLong(fldPath, "", maxClassParameters)}
	}
	var errs field.ErrorList
	size := 0
	for _, k := range fieldrules.SortedKeys(p) {
		if k == "" {
			errs = append(errs, field.Invalid(fldPath, k, "field can not be empty."))
		}
		size += len(k) + len(p[k])
	}
	if size > MaxParametersSize {
		errs = append(errs, field.TooLong(fldPath, "", MaxParametersSize))
	}
	return errs
}

// validateTopologies validates the topologies in which a class creates volumes. As in Kubernetes,
// it returns an error for equal terms and for a term without expressions.
func validateTopologies(terms []corev1.TopologySelectorTerm, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, t := range terms {
		here := fldPath.Index(i).Child("matchLabelExpressions")
		keys := map[string]bool{}
		for j, e := range t.MatchLabelExpressions {
			expr := here.Index(j)
			if len(e.Values) == 0 {
				errs = append(errs, field.Required(expr.Child("values"), ""))
			}
			values := map[string]bool{}
			for n, v := range e.Values {
				if values[v] {
					errs = append(errs, field.Duplicate(expr.Child("values").Index(n), v))
				}
				values[v] = true
			}
			errs = append(errs, fieldrules.InvalidErrors(expr.Child("key"), e.Key,
				validation.IsQualifiedName(e.Key))...)
			if keys[e.Key] {
				errs = append(errs, field.Duplicate(expr.Child("key"), e.Key))
			}
			keys[e.Key] = true
		}
		same := func(before corev1.TopologySelectorTerm) bool { return isSameTopology(before, t) }
		if len(t.MatchLabelExpressions) == 0 || slices.ContainsFunc(terms[:i], same) {
			errs = append(errs, field.Duplicate(here, ""))
		}
	}
	return errs
}

// isSameTopology reports whether two terms have the same keys with the same values, in any order.
func isSameTopology(a, b corev1.TopologySelectorTerm) bool {
	set := func(t corev1.TopologySelectorTerm) map[string]map[string]bool {
		out := map[string]map[string]bool{}
		for _, e := range t.MatchLabelExpressions {
			out[e.Key] = map[string]bool{}
			for _, v := range e.Values {
				out[e.Key][v] = true
			}
		}
		return out
	}
	return fieldrules.SemanticEqual(set(a), set(b))
}

func validateCSIDriver(s *storagev1.CSIDriverSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, m := range s.VolumeLifecycleModes {
		errs = append(errs, fieldrules.ValidateOneOf(m, spec.Child("volumeLifecycleModes"),
			storagev1.VolumeLifecyclePersistent, storagev1.VolumeLifecycleEphemeral)...)
	}
	errs = append(errs, fieldrules.ValidateOneOf(ptr.Deref(s.FSGroupPolicy, ""), spec.Child("fsGroupPolicy"),
		storagev1.ReadWriteOnceWithFSTypeFSGroupPolicy, storagev1.FileFSGroupPolicy, storagev1.NoneFSGroupPolicy)...)
	audiences := map[string]bool{}
	for i, t := range s.TokenRequests {
		fldPath := spec.Child("tokenRequests").Index(i)
		if audiences[t.Audience] {
			errs = append(errs, field.Duplicate(fldPath.Child("audience"), t.Audience))
			continue
		}
		audiences[t.Audience] = true
		switch fldPath, e := fldPath.Child("expirationSeconds"), t.ExpirationSeconds; {
		case e == nil:
		case *e < podspec.MinTokenSeconds:
			errs = append(errs, field.Invalid(fldPath, *e, "may not specify a duration less than 10 minutes"))
		case *e > podspec.MaxTokenSeconds:
			errs = append(errs, field.Invalid(fldPath, *e, "may not specify a duration larger than 2^32 seconds"))
		}
	}
	if p := s.NodeAllocatableUpdatePeriodSeconds; p != nil && *p < minNodeUpdatePeriod {
		errs = append(errs, field.Invalid(spec.Child("nodeAllocatableUpdatePeriodSeconds"), *p,
			fmt.Sprintf("must be greater than or equal to %d seconds", minNodeUpdatePeriod)))
	}
	if t := s.ServiceAccountTokenInSecrets; t != nil && len(s.TokenRequests) == 0 {
		errs = append(errs, field.Invalid(spec.Child("serviceAccountTokenInSecrets"), *t,
			"serviceAccountTokenInSecrets is set but no tokenRequests are specified"))
	}
	return errs
}

func validateCSINodeDrivers(drivers []storagev1.CSINodeDriver, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[string]bool{}
	for i, d := range drivers {
		here := fldPath.Index(i)
		errs = append(errs, fieldrules.ValidateDriverName(d.Name, here.Child("name"))...)
		if d.NodeID == "" {
			errs = append(errs, field.Required(here.Child("nodeID"), ""))
		}
		if len(d.NodeID) > maxCSINodeID {
			errs = append(errs, field.Invalid(here.Child("nodeID"), d.NodeID,
				fmt.Sprintf("must be %d characters or less", maxCSINodeID)))
		}
		if d.Allocatable != nil && d.Allocatable.Count != nil {
			errs = append(errs, fieldrules.ValidateNonNegative(*d.Allocatable.Count,
				here.Child("allocatable", "count"))...)
		}
		if seen[d.Name] {
			errs = append(errs, field.Duplicate(here.Child("name"), d.Name))
		}
		seen[d.Name] = true
		keys := map[string]bool{}
		for _, key := range d.TopologyKeys {
			if key == "" {
				errs = append(errs, field.Required(here, ""))
				continue
			}
			if keys[key] {
				errs = append(errs, field.Duplicate(here, key))
			}
			keys[key] = true
			errs = append(errs, fieldrules.InvalidErrors(here, key, validation.IsQualifiedName(key))...)
		}
	}
	return errs
}

func validateVolumeAttachment(s *storagev1.VolumeAttachmentSpec, spec *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDriverName(s.Attacher, spec.Child("attacher"))
	source := spec.Child("source")
	const one = "must specify exactly one of inlineVolumeSpec and persistentVolumeName"
	switch name := s.Source.PersistentVolumeName; {
	case s.Source.InlineVolumeSpec == nil && name == nil:
		errs = append(errs, field.Required(source, one))
	case s.Source.InlineVolumeSpec != nil && name != nil:
		errs = append(errs, field.Forbidden(source, one))
	case name == nil:
		errs = append(errs, validateInlineVolume(s.Source.InlineVolumeSpec, source.Child("inlineVolumeSpec"))...)
	case *name == "":
		errs = append(errs, field.Required(source.Child("persistentVolumeName"),
			"must specify non empty persistentVolumeName"))
	default:
		errs = append(errs, fieldrules.InvalidErrors(source.Child("persistentVolumeName"), *name,
			apivalidation.NameIsDNSSubdomain(*name, false))...)
	}
	return append(errs, fieldrules.InvalidErrors(spec.Child("nodeName"), s.NodeName,
		apivalidation.NameIsDNSSubdomain(s.NodeName, false))...)
}

// validateInlineVolume validates the spec of a volume without a PersistentVolume object. It must be
// a CSI volume without a claim.
func validateInlineVolume(spec *corev1.PersistentVolumeSpec, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ForbidSetFields(fldPath, "may not be specified in the context of inline volumes",
		map[string]bool{
			"claimRef": spec.ClaimRef != nil, "capacity": len(spec.Capacity) > 0,
			"storageClassName":              spec.StorageClassName != "",
			"persistentVolumeReclaimPolicy": spec.PersistentVolumeReclaimPolicy != "",
			"nodeAffinity":                  spec.NodeAffinity != nil,
		})
	if spec.CSI == nil {
		errs = append(errs, field.Required(fldPath.Child("csi"),
			"has to be specified in the context of inline volumes"))
	} else {
		errs = append(errs, fieldrules.ValidateDriverName(spec.CSI.Driver, fldPath.Child("csi", "driver"))...)
		if spec.CSI.VolumeHandle == "" {
			errs = append(errs, field.Required(fldPath.Child("csi", "volumeHandle"), ""))
		}
	}
	errs = append(errs, podspec.ValidateAccessModes(spec.AccessModes, fldPath.Child("accessModes"),
		"at least 1 access mode is required")...)
	return append(errs, podspec.ValidateVolumeMode(spec.VolumeMode, fldPath.Child("volumeMode"))...)
}

func validateAttachmentStatus(s *storagev1.VolumeAttachmentStatus, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	size := 0
	for k, v := range s.AttachmentMetadata {
		size += len(k) + len(v)
	}
	if size > MaxAttachmentSize {
		errs = append(errs, field.TooLong(fldPath.Child("attachmentMetadata"), "", MaxAttachmentSize))
	}
	for _, e := range []struct {
		at  *field.Path
		err *storagev1.VolumeError
	}{{fldPath.Child("attachError"), s.AttachError}, {fldPath.Child("detachError"), s.DetachError}} {
		if e.err == nil {
			continue
		}
		if len(e.err.Message) > maxVolumeError {
			errs = append(errs, field.TooLong(e.at.Child("message"), "", maxVolumeError))
		}
		if c := e.err.ErrorCode; c != nil && *c < 0 {
			errs = append(errs, field.Invalid(e.at.Child("errorCode"), *c,
				validation.InclusiveRangeError(0, math.MaxInt32)))
		}
	}
	return errs
}
