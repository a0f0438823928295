package resource

import (
	"encoding/json"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/validate/content"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// validateQualifiedName validates the name of an attribute or a capacity: an identifier, optionally
// with the domain of a driver as prefix.
func validateQualifiedName(name resourcev1.QualifiedName, fldPath *field.Path) field.ErrorList {
	domain, id, ok := strings.Cut(string(name), "/")
	switch {
	case !ok:
		return validateDeviceID(string(name), fldPath)
	case strings.Contains(id, "/"): // Kubernetes checks only the length of such a name
		if most := resourcev1.DeviceMaxDomainLength + 1 + resourcev1.DeviceMaxIDLength; len(name) > most {
			return field.ErrorList{field.TooLong(fldPath, "", most)}
		}
		return nil
	}
	var errs field.ErrorList
	if domain == "" {
		errs = append(errs, field.Invalid(fldPath, "", "the domain must not be empty"))
	} else {
		errs = append(errs, fieldrules.ValidateDriverName(domain, fldPath)...)
	}
	if id == "" {
		return append(errs, field.Invalid(fldPath, "", "the name must not be empty"))
	}
	return append(errs, validateDeviceID(id, fldPath)...)
}

func validateDeviceID(id string, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(id) > resourcev1.DeviceMaxIDLength {
		errs = append(errs, field.TooLong(fldPath, "", resourcev1.DeviceMaxIDLength))
	}
	return append(errs, fieldrules.InvalidErrors(fldPath, id, content.IsCIdentifier(id))...)
}

func validateFullyQualifiedName(name resourcev1.FullyQualifiedName, fldPath *field.Path) field.ErrorList {
	errs := validateQualifiedName(resourcev1.QualifiedName(name), fldPath)
	if !strings.Contains(string(name), "/") {
		errs = append(errs, field.Invalid(fldPath, name,
			"a fully qualified name must be a domain and a name separated by a slash"))
	}
	return errs
}

func validatePoolName(name string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	var errs field.ErrorList
	if len(name) > resourcev1.PoolNameMaxLength {
		errs = append(errs, field.TooLong(fldPath, "", resourcev1.PoolNameMaxLength))
	}
	for _, part := range strings.Split(name, "/") {
		errs = append(errs, fieldrules.InvalidErrors(fldPath, part, validation.IsDNS1123Subdomain(part))...)
	}
	return errs
}

func validateDeviceConfig(c *resourcev1.DeviceConfiguration, fldPath *field.Path) field.ErrorList {
	if c.Opaque == nil {
		return field.ErrorList{field.Required(fldPath.Child("opaque"), "")}
	}
	errs := fieldrules.ValidateDriverName(c.Opaque.Driver, fldPath.Child("opaque", "driver"))
	return append(errs, validateRawObject(c.Opaque.Parameters, resourcev1.OpaqueParametersMaxLength,
		fldPath.Child("opaque", "parameters"))...)
}

// validateRawObject validates opaque driver data. It must be a JSON object of at most limit bytes.
func validateRawObject(extension runtime.RawExtension, limit int, fldPath *field.Path) field.ErrorList {
	if len(extension.Raw) == 0 {
		return field.ErrorList{field.Required(fldPath, "")}
	}
	if len(extension.Raw) > limit {
		return field.ErrorList{field.TooLong(fldPath, "", limit)}
	}
	var v any
	if err := json.Unmarshal(extension.Raw, &v); err != nil {
		return field.ErrorList{field.Invalid(fldPath, fieldrules.OmittedValue,
			"error parsing data as JSON: "+err.Error())}
	}
	switch v.(type) {
	case nil:
		return field.ErrorList{field.Required(fldPath, "")}
	case map[string]any:
		return nil
	}
	return field.ErrorList{field.Invalid(fldPath, fieldrules.OmittedValue, "must be a valid JSON object")}
}

// validateBindingConditions validates two lists of condition types of a device. The required
// conditions must be true before a pod with the device is bound. A failing condition makes the
// binding fail.
func validateBindingConditions(required, failing []string, fldPath *field.Path) field.ErrorList {
	waits, fails := fldPath.Child("bindingConditions"), fldPath.Child("bindingFailureConditions")
	label := func(name string, fldPath *field.Path) field.ErrorList {
		return fieldrules.InvalidErrors(fldPath, name, validation.IsQualifiedName(name))
	}
	errs := fieldrules.ValidateItems(required, resourcev1.BindingConditionsMaxSize, waits, fieldrules.SelfKey, label)
	errs = append(errs, fieldrules.ValidateItems(failing, resourcev1.BindingFailureConditionsMaxSize, fails,
		fieldrules.SelfKey,
		label)...)
	known := map[string]bool{}
	for _, w := range required {
		known[w] = true
	}
	for i, f := range failing {
		if known[f] {
			errs = append(errs, field.Invalid(fails.Index(i), f,
				"bindingFailureConditions must not overlap with bindingConditions"))
		}
	}
	if len(required) == 0 && len(failing) > 0 {
		errs = append(errs, field.Invalid(waits, required,
			"bindingConditions are required to use bindingFailureConditions"))
	}
	if len(failing) == 0 && len(required) > 0 {
		errs = append(errs, field.Invalid(fails, failing,
			"bindingFailureConditions are required to use bindingConditions"))
	}
	return errs
}

func validateSkippedOperations(list []resourcev1.SkipNodeOperation, fldPath *field.Path) field.ErrorList {
	has := map[resourcev1.SkipNodeOperation]bool{}
	errs := fieldrules.ValidateItems(list, -1, fldPath, func(o resourcev1.SkipNodeOperation) string {
		return string(o)
	},
		func(o resourcev1.SkipNodeOperation, fldPath *field.Path) field.ErrorList {
			has[o] = true
			return fieldrules.ValidateSupported(o, fldPath, resourcev1.SkipNodeOperationAll,
				resourcev1.SkipNodeOperationNodePrepareResources,
				resourcev1.SkipNodeOperationNodeUnprepareResources)
		})
	if has[resourcev1.SkipNodeOperationNodePrepareResources] &&
		!has[resourcev1.SkipNodeOperationNodeUnprepareResources] && !has[resourcev1.SkipNodeOperationAll] {
		errs = append(errs, field.Invalid(fldPath, list,
			"NodePrepareResources cannot be skipped unless NodeUnprepareResources is also skipped"))
	}
	return errs
}
