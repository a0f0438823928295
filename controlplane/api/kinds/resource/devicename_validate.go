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

// qualified validates the name of an attribute or a capacity: an identifier, optionally with a
// driver's domain.
func qualified(name resourcev1.QualifiedName, at *field.Path) field.ErrorList {
	domain, id, ok := strings.Cut(string(name), "/")
	switch {
	case !ok:
		return deviceID(string(name), at)
	case strings.Contains(id, "/"): // Kubernetes checks only the length of such a name
		if most := resourcev1.DeviceMaxDomainLength + 1 + resourcev1.DeviceMaxIDLength; len(name) > most {
			return field.ErrorList{field.TooLong(at, "", most)}
		}
		return nil
	}
	var errs field.ErrorList
	if domain == "" {
		errs = append(errs, field.Invalid(at, "", "the domain must not be empty"))
	} else {
		errs = append(errs, fieldrules.ValidateDriverName(domain, at)...)
	}
	if id == "" {
		return append(errs, field.Invalid(at, "", "the name must not be empty"))
	}
	return append(errs, deviceID(id, at)...)
}

func deviceID(id string, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if len(id) > resourcev1.DeviceMaxIDLength {
		errs = append(errs, field.TooLong(at, "", resourcev1.DeviceMaxIDLength))
	}
	return append(errs, fieldrules.Invalid(at, id, content.IsCIdentifier(id))...)
}

func fullyQualified(name resourcev1.FullyQualifiedName, at *field.Path) field.ErrorList {
	errs := qualified(resourcev1.QualifiedName(name), at)
	if !strings.Contains(string(name), "/") {
		errs = append(errs, field.Invalid(at, name, "a fully qualified name must be a domain and a name separated by a slash"))
	}
	return errs
}

func poolName(name string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, "")}
	}
	var errs field.ErrorList
	if len(name) > resourcev1.PoolNameMaxLength {
		errs = append(errs, field.TooLong(at, "", resourcev1.PoolNameMaxLength))
	}
	for _, part := range strings.Split(name, "/") {
		errs = append(errs, fieldrules.Invalid(at, part, validation.IsDNS1123Subdomain(part))...)
	}
	return errs
}

func validateDeviceConfig(c *resourcev1.DeviceConfiguration, at *field.Path) field.ErrorList {
	if c.Opaque == nil {
		return field.ErrorList{field.Required(at.Child("opaque"), "")}
	}
	errs := fieldrules.ValidateDriverName(c.Opaque.Driver, at.Child("opaque", "driver"))
	return append(errs, rawObject(c.Opaque.Parameters, resourcev1.OpaqueParametersMaxLength, at.Child("opaque", "parameters"))...)
}

// rawObject validates opaque driver data: it must be a JSON object of at most limit bytes.
func rawObject(e runtime.RawExtension, limit int, at *field.Path) field.ErrorList {
	if len(e.Raw) == 0 {
		return field.ErrorList{field.Required(at, "")}
	}
	if len(e.Raw) > limit {
		return field.ErrorList{field.TooLong(at, "", limit)}
	}
	var v any
	if err := json.Unmarshal(e.Raw, &v); err != nil {
		return field.ErrorList{field.Invalid(at, fieldrules.OmittedValue, "error parsing data as JSON: "+err.Error())}
	}
	switch v.(type) {
	case nil:
		return field.ErrorList{field.Required(at, "")}
	case map[string]any:
		return nil
	}
	return field.ErrorList{field.Invalid(at, fieldrules.OmittedValue, "must be a valid JSON object")}
}

// bindingConditions validates two lists of condition types: those that must be true before a pod
// with the device is bound (wait), and those that fail the binding (fail).
func bindingConditions(wait, fail []string, at *field.Path) field.ErrorList {
	waits, fails := at.Child("bindingConditions"), at.Child("bindingFailureConditions")
	label := func(name string, at *field.Path) field.ErrorList {
		return fieldrules.Invalid(at, name, validation.IsQualifiedName(name))
	}
	errs := fieldrules.Items(wait, resourcev1.BindingConditionsMaxSize, waits, fieldrules.Itself, label)
	errs = append(errs, fieldrules.Items(fail, resourcev1.BindingFailureConditionsMaxSize, fails, fieldrules.Itself,
		label)...)
	known := map[string]bool{}
	for _, w := range wait {
		known[w] = true
	}
	for i, f := range fail {
		if known[f] {
			errs = append(errs, field.Invalid(fails.Index(i), f, "bindingFailureConditions must not overlap with bindingConditions"))
		}
	}
	if len(wait) == 0 && len(fail) > 0 {
		errs = append(errs, field.Invalid(waits, wait, "bindingConditions are required to use bindingFailureConditions"))
	}
	if len(fail) == 0 && len(wait) > 0 {
		errs = append(errs, field.Invalid(fails, fail, "bindingFailureConditions are required to use bindingConditions"))
	}
	return errs
}

func skippedOperations(list []resourcev1.SkipNodeOperation, at *field.Path) field.ErrorList {
	has := map[resourcev1.SkipNodeOperation]bool{}
	errs := fieldrules.Items(list, -1, at, func(o resourcev1.SkipNodeOperation) string { return string(o) },
		func(o resourcev1.SkipNodeOperation, at *field.Path) field.ErrorList {
			has[o] = true
			return fieldrules.Supported(o, at, resourcev1.SkipNodeOperationAll,
				resourcev1.SkipNodeOperationNodePrepareResources,
				resourcev1.SkipNodeOperationNodeUnprepareResources)
		})
	if has[resourcev1.SkipNodeOperationNodePrepareResources] && !has[resourcev1.SkipNodeOperationNodeUnprepareResources] && !has[resourcev1.SkipNodeOperationAll] {
		errs = append(errs, field.Invalid(at, list, "NodePrepareResources cannot be skipped unless NodeUnprepareResources is also skipped"))
	}
	return errs
}
