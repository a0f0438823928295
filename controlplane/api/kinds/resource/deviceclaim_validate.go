package resource

import (
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// requestNames maps the name of each request of a claim to the names of its alternatives.
type requestNames map[string][]string

func newRequestNames(c *resourcev1.DeviceClaim) requestNames {
	out := requestNames{}
	for _, r := range c.Requests {
		out[r.Name] = nil
		for _, s := range r.FirstAvailable {
			out[r.Name] = append(out[r.Name], s.Name)
		}
	}
	return out
}

// hasRequest reports whether a claim has the request or alternative with a name of the form
// "request" or "request/alternative".
func (n requestNames) hasRequest(name string) bool {
	request, sub, alternative := strings.Cut(name, "/")
	subs, ok := n[request]
	return ok && (!alternative || slices.Contains(subs, sub))
}

// claimCheck is the state of the validation of one claim.
type claimCheck struct {
	names requestNames
	texts expressions.Collector
	// constrained maps the name of a request to the attributes that constraints on the request use.
	// The key "" is for constraints on all requests.
	constrained map[string][]string
}

func validateClaim(s *resourcev1.ResourceClaimSpec, fldPath *field.Path, o *expressions.Options) field.ErrorList {
	d := &s.Devices
	c := &claimCheck{names: newRequestNames(d), constrained: map[string][]string{}}
	for _, k := range d.Constraints {
		attribute := string(ptr.Deref(k.MatchAttribute, ""))
		if k.MatchAttribute == nil {
			attribute = string(ptr.Deref(k.DistinctAttribute, ""))
		}
		for _, r := range k.Requests {
			c.constrained[r] = append(c.constrained[r], attribute)
		}
		if len(k.Requests) == 0 {
			c.constrained[""] = append(c.constrained[""], attribute)
		}
	}
	errs := fieldrules.ValidateItems(d.Requests, resourcev1.DeviceRequestsMaxSize, fldPath.Child("requests"),
		func(r resourcev1.DeviceRequest) string { return r.Name }, c.validateRequest)
	errs = append(errs, fieldrules.ValidateItems(d.Constraints, resourcev1.DeviceConstraintsMaxSize,
		fldPath.Child("constraints"),
		nil, c.validateConstraint)...)
	errs = append(errs, fieldrules.ValidateItems(d.Config, resourcev1.DeviceConfigMaxSize, fldPath.Child("config"), nil,
		func(k resourcev1.DeviceClaimConfiguration, fldPath *field.Path) field.ErrorList {
			errs := fieldrules.ValidateItems(k.Requests, resourcev1.DeviceRequestsMaxSize, fldPath.Child("requests"),
				fieldrules.SelfKey, c.validateReference)
			return append(errs, validateDeviceConfig(&k.DeviceConfiguration, fldPath)...)
		})...)
	return append(errs, o.CompileAll(&c.texts)...)
}

func (c *claimCheck) validateRequest(r resourcev1.DeviceRequest, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDNSLabel(r.Name, fldPath.Child("name"))
	switch {
	case r.Exactly == nil && len(r.FirstAvailable) == 0:
		errs = append(errs, field.Required(fldPath, "exactly one of `exactly` or `firstAvailable` is required"))
	case r.Exactly != nil && len(r.FirstAvailable) > 0:
		errs = append(errs, field.Invalid(fldPath, nil,
			"exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set"))
	case r.Exactly != nil:
		e := r.Exactly
		errs = append(errs, c.validateAlternative(deviceAlternative{r.Name, e.DeviceClassName, e.Selectors,
			e.DerivedAttributes, e.AllocationMode, e.Count,
			e.Tolerations}, fldPath.Child("exactly"))...)
	default:
		errs = append(errs, fieldrules.ValidateItems(r.FirstAvailable, resourcev1.FirstAvailableDeviceRequestMaxSize,
			fldPath.Child("firstAvailable"),
			func(s resourcev1.DeviceSubRequest) string { return s.Name },
			func(s resourcev1.DeviceSubRequest, fldPath *field.Path) field.ErrorList {
				return append(fieldrules.ValidateDNSLabel(s.Name, fldPath.Child("name")),
					c.validateAlternative(deviceAlternative{r.Name + "/" + s.Name, s.DeviceClassName, s.Selectors,
						s.DerivedAttributes, s.AllocationMode, s.Count, s.Tolerations}, fldPath)...)
			})...)
	}
	return errs
}

// deviceAlternative contains the fields that a device request and its alternatives have in common.
type deviceAlternative struct {
	request     string
	class       string
	selectors   []resourcev1.DeviceSelector
	derived     []resourcev1.DeviceDerivedAttribute
	mode        resourcev1.DeviceAllocationMode
	count       int64
	tolerations []resourcev1.DeviceToleration
}

func (c *claimCheck) validateAlternative(w deviceAlternative, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if class := fldPath.Child("deviceClassName"); w.class == "" {
		errs = append(errs, field.Required(class, ""))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(class, w.class, validation.IsDNS1123Subdomain(w.class))...)
	}
	errs = append(errs, validateDeviceSelectors(w.selectors, fldPath.Child("selectors"), &c.texts)...)
	errs = append(errs, fieldrules.ValidateItems(w.derived, resourcev1.DeviceDerivedAttributesMaxSize,
		fldPath.Child("derivedAttributes"),
		func(d resourcev1.DeviceDerivedAttribute) string { return string(d.Name) },
		func(d resourcev1.DeviceDerivedAttribute, fldPath *field.Path) field.ErrorList {
			return c.validateDerivedAttribute(d, w.request, fldPath)
		})...)
	count := fldPath.Child("count")
	switch w.mode {
	case resourcev1.DeviceAllocationModeAll:
		if w.count != 0 {
			errs = append(errs, field.Invalid(count, w.count, "must not be specified when allocationMode is 'All'"))
		}
	case resourcev1.DeviceAllocationModeExactCount:
		if w.count <= 0 {
			errs = append(errs, field.Invalid(count, w.count, "must be greater than zero"))
		}
	default:
		errs = append(errs, fieldrules.ValidateSupported(w.mode, fldPath.Child("allocationMode"),
			resourcev1.DeviceAllocationModeAll,
			resourcev1.DeviceAllocationModeExactCount)...)
	}
	return append(errs, fieldrules.ValidateItems(w.tolerations, resourcev1.DeviceTolerationsMaxLength,
		fldPath.Child("tolerations"),
		nil, validateDeviceToleration)...)
}

// validateDerivedAttribute validates a derived attribute of a request. A constraint on the request
// must use it.
func (c *claimCheck) validateDerivedAttribute(
	d resourcev1.DeviceDerivedAttribute, request string, fldPath *field.Path,
) field.ErrorList {
	name := fldPath.Child("name")
	if d.Name == "" {
		return field.ErrorList{field.Required(name, "")}
	}
	errs := validateFullyQualifiedName(d.Name, name)
	whole, _, _ := strings.Cut(request, "/")
	used := false
	for _, of := range []string{"", request, whole} {
		used = used || slices.Contains(c.constrained[of], string(d.Name))
	}
	if !used {
		errs = append(errs, field.Invalid(name, d.Name,
			"must be referenced by at least one matchAttribute or distinctAttribute constraint targeting this request"))
	}
	return append(errs, validateDeviceExpression(d.Expression, expressions.DerivedValue,
		fldPath.Child("expression"), &c.texts)...)
}

func validateDeviceSelectors(list []resourcev1.DeviceSelector, fldPath *field.Path,
	texts *expressions.Collector) field.ErrorList {
	return fieldrules.ValidateItems(list, resourcev1.DeviceSelectorsMaxSize, fldPath, nil,
		func(s resourcev1.DeviceSelector, fldPath *field.Path) field.ErrorList {
			if s.CEL == nil {
				return field.ErrorList{field.Required(fldPath.Child("cel"), "")}
			}
			return validateDeviceExpression(s.CEL.Expression, expressions.DeviceSelector,
				fldPath.Child("cel", "expression"), texts)
		})
}

func validateDeviceExpression(
	text string, use expressions.Use, fldPath *field.Path, texts *expressions.Collector,
) field.ErrorList {
	switch {
	case strings.TrimSpace(text) == "":
		return field.ErrorList{field.Required(fldPath, "")}
	case len(text) > resourcev1.CELSelectorExpressionMaxLength:
		return field.ErrorList{field.TooLong(fldPath, "", resourcev1.CELSelectorExpressionMaxLength)}
	}
	texts.Add(use, text, fldPath)
	return nil
}

// validateReference validates a name that refers to a request of the same claim, or to one of its
// alternatives.
func (c *claimCheck) validateReference(name string, fldPath *field.Path) field.ErrorList {
	return c.names.validateRequestName(name, fldPath)
}

func (n requestNames) validateRequestName(name string, fldPath *field.Path) field.ErrorList {
	missing := field.Invalid(fldPath, name,
		"must be the name of a request in the claim or the name of a request and a subrequest separated by '/'")
	parts := strings.Split(name, "/")
	if len(parts) > 2 {
		return field.ErrorList{missing}
	}
	var errs field.ErrorList
	for _, p := range parts {
		errs = append(errs, fieldrules.ValidateDNSLabel(p, fldPath)...)
	}
	if !n.hasRequest(name) {
		errs = append(errs, missing)
	}
	return errs
}

func (c *claimCheck) validateConstraint(k resourcev1.DeviceConstraint, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateItems(k.Requests, resourcev1.DeviceRequestsMaxSize, fldPath.Child("requests"),
		fieldrules.SelfKey,
		c.validateReference)
	switch {
	case k.MatchAttribute != nil && k.DistinctAttribute != nil:
		errs = append(errs, field.Invalid(fldPath, "{`matchAttribute`, `distinctAttribute`}",
			`exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set`))
	case k.MatchAttribute != nil:
		errs = append(errs, validateFullyQualifiedName(*k.MatchAttribute, fldPath.Child("matchAttribute"))...)
	case k.DistinctAttribute != nil:
		errs = append(errs, validateFullyQualifiedName(*k.DistinctAttribute, fldPath.Child("distinctAttribute"))...)
	default:
		errs = append(errs, field.Required(fldPath,
			`exactly one of "matchAttribute" or "distinctAttribute" is required`))
	}
	return errs
}

func validateDeviceClass(s *resourcev1.DeviceClassSpec, spec *field.Path, o *expressions.Options) field.ErrorList {
	var texts expressions.Collector
	errs := validateDeviceSelectors(s.Selectors, spec.Child("selectors"), &texts)
	errs = append(errs, fieldrules.ValidateItems(s.Config, resourcev1.DeviceConfigMaxSize, spec.Child("config"), nil,
		func(c resourcev1.DeviceClassConfiguration, fldPath *field.Path) field.ErrorList {
			return validateDeviceConfig(&c.DeviceConfiguration, fldPath)
		})...)
	if n := s.ExtendedResourceName; n != nil && !podspec.IsExtendedResource(*n) {
		errs = append(errs, field.Invalid(spec.Child("extendedResourceName"), *n,
			"must be a valid extended resource name"))
	}
	return append(errs, o.CompileAll(&texts)...)
}

func validateDeviceToleration(t resourcev1.DeviceToleration, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if t.Key != "" {
		errs = append(errs, metavalidation.ValidateLabelName(t.Key, fldPath.Child("key"))...)
	}
	switch t.Operator {
	case resourcev1.DeviceTolerationOpExists:
		if t.Value != "" {
			errs = append(errs, field.Invalid(fldPath.Child("value"), t.Value, "must be empty for operator `Exists`"))
		}
	case resourcev1.DeviceTolerationOpEqual:
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("value"), t.Value,
			validation.IsValidLabelValue(t.Value))...)
	default:
		errs = append(errs, fieldrules.ValidateSupported(t.Operator, fldPath.Child("operator"),
			resourcev1.DeviceTolerationOpEqual,
			resourcev1.DeviceTolerationOpExists)...)
	}
	if t.Effect != "" {
		errs = append(errs, fieldrules.ValidateSupported(t.Effect, fldPath.Child("effect"), deviceEffects...)...)
	}
	return errs
}

var deviceEffects = []resourcev1.DeviceTaintEffect{resourcev1.DeviceTaintEffectNoExecute,
	resourcev1.DeviceTaintEffectNoSchedule, resourcev1.DeviceTaintEffectNone}
