package resource

import (
	"slices"
	"strings"

	resourcev1 "k8s.io/api/resource/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// requestNames maps each request of a claim to its alternatives.
type requestNames map[string][]string

func namesOfRequests(c *resourcev1.DeviceClaim) requestNames {
	out := requestNames{}
	for _, r := range c.Requests {
		out[r.Name] = nil
		for _, s := range r.FirstAvailable {
			out[r.Name] = append(out[r.Name], s.Name)
		}
	}
	return out
}

// has reports whether a name, as "request" or "request/alternative", exists.
func (n requestNames) has(name string) bool {
	request, sub, alternative := strings.Cut(name, "/")
	subs, ok := n[request]
	return ok && (!alternative || slices.Contains(subs, sub))
}

// claimCheck is the state of the validation of one claim.
type claimCheck struct {
	names requestNames
	texts expressions.Collector
	// constrained maps requests to the attributes that constraints on them use; the key "" is for
	// constraints on all requests.
	constrained map[string][]string
}

func validateClaim(s *resourcev1.ResourceClaimSpec, at *field.Path, o *expressions.Options) field.ErrorList {
	d := &s.Devices
	c := &claimCheck{names: namesOfRequests(d), constrained: map[string][]string{}}
	for _, k := range d.Constraints {
		attribute := string(fieldrules.Deref(k.MatchAttribute))
		if k.MatchAttribute == nil {
			attribute = string(fieldrules.Deref(k.DistinctAttribute))
		}
		for _, r := range k.Requests {
			c.constrained[r] = append(c.constrained[r], attribute)
		}
		if len(k.Requests) == 0 {
			c.constrained[""] = append(c.constrained[""], attribute)
		}
	}
	errs := fieldrules.Items(d.Requests, resourcev1.DeviceRequestsMaxSize, at.Child("requests"),
		func(r resourcev1.DeviceRequest) string { return r.Name }, c.request)
	errs = append(errs, fieldrules.Items(d.Constraints, resourcev1.DeviceConstraintsMaxSize, at.Child("constraints"),
		nil, c.constraint)...)
	errs = append(errs, fieldrules.Items(d.Config, resourcev1.DeviceConfigMaxSize, at.Child("config"), nil,
		func(k resourcev1.DeviceClaimConfiguration, at *field.Path) field.ErrorList {
			errs := fieldrules.Items(k.Requests, resourcev1.DeviceRequestsMaxSize, at.Child("requests"),
				fieldrules.Itself, c.reference)
			return append(errs, validateDeviceConfig(&k.DeviceConfiguration, at)...)
		})...)
	return append(errs, o.Compiled(&c.texts)...)
}

func (c *claimCheck) request(r resourcev1.DeviceRequest, at *field.Path) field.ErrorList {
	errs := fieldrules.DNSLabel(r.Name, at.Child("name"))
	switch {
	case r.Exactly == nil && len(r.FirstAvailable) == 0:
		errs = append(errs, field.Required(at, "exactly one of `exactly` or `firstAvailable` is required"))
	case r.Exactly != nil && len(r.FirstAvailable) > 0:
		errs = append(errs, field.Invalid(at, nil, "exactly one of `exactly` or `firstAvailable` is required, but multiple fields are set"))
	case r.Exactly != nil:
		e := r.Exactly
		errs = append(errs, c.wanted(wantedDevice{r.Name, e.DeviceClassName, e.Selectors, e.DerivedAttributes, e.AllocationMode, e.Count,
			e.Tolerations}, at.Child("exactly"))...)
	default:
		errs = append(errs, fieldrules.Items(r.FirstAvailable, resourcev1.FirstAvailableDeviceRequestMaxSize,
			at.Child("firstAvailable"),
			func(s resourcev1.DeviceSubRequest) string { return s.Name },
			func(s resourcev1.DeviceSubRequest, at *field.Path) field.ErrorList {
				return append(fieldrules.DNSLabel(s.Name, at.Child("name")),
					c.wanted(wantedDevice{r.Name + "/" + s.Name, s.DeviceClassName, s.Selectors,
						s.DerivedAttributes, s.AllocationMode, s.Count, s.Tolerations}, at)...)
			})...)
	}
	return errs
}

// wantedDevice has the common fields of a request and of its alternatives.
type wantedDevice struct {
	request     string
	class       string
	selectors   []resourcev1.DeviceSelector
	derived     []resourcev1.DeviceDerivedAttribute
	mode        resourcev1.DeviceAllocationMode
	count       int64
	tolerations []resourcev1.DeviceToleration
}

func (c *claimCheck) wanted(w wantedDevice, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if class := at.Child("deviceClassName"); w.class == "" {
		errs = append(errs, field.Required(class, ""))
	} else {
		errs = append(errs, fieldrules.Invalid(class, w.class, validation.IsDNS1123Subdomain(w.class))...)
	}
	errs = append(errs, validateDeviceSelectors(w.selectors, at.Child("selectors"), &c.texts)...)
	errs = append(errs, fieldrules.Items(w.derived, resourcev1.DeviceDerivedAttributesMaxSize,
		at.Child("derivedAttributes"),
		func(d resourcev1.DeviceDerivedAttribute) string { return string(d.Name) },
		func(d resourcev1.DeviceDerivedAttribute, at *field.Path) field.ErrorList {
			return c.derived(d, w.request, at)
		})...)
	count := at.Child("count")
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
		errs = append(errs, fieldrules.Supported(w.mode, at.Child("allocationMode"), resourcev1.DeviceAllocationModeAll,
			resourcev1.DeviceAllocationModeExactCount)...)
	}
	return append(errs, fieldrules.Items(w.tolerations, resourcev1.DeviceTolerationsMaxLength, at.Child("tolerations"),
		nil, validateDeviceToleration)...)
}

// derived validates a derived attribute. A constraint on the request must use it.
func (c *claimCheck) derived(d resourcev1.DeviceDerivedAttribute, request string, at *field.Path) field.ErrorList {
	name := at.Child("name")
	if d.Name == "" {
		return field.ErrorList{field.Required(name, "")}
	}
	errs := fullyQualified(d.Name, name)
	whole, _, _ := strings.Cut(request, "/")
	used := false
	for _, of := range []string{"", request, whole} {
		used = used || slices.Contains(c.constrained[of], string(d.Name))
	}
	if !used {
		errs = append(errs, field.Invalid(name, d.Name,
			"must be referenced by at least one matchAttribute or distinctAttribute constraint targeting this request"))
	}
	return append(errs, deviceExpression(d.Expression, expressions.DerivedValue, at.Child("expression"), &c.texts)...)
}

func validateDeviceSelectors(list []resourcev1.DeviceSelector, at *field.Path,
	texts *expressions.Collector) field.ErrorList {
	return fieldrules.Items(list, resourcev1.DeviceSelectorsMaxSize, at, nil,
		func(s resourcev1.DeviceSelector, at *field.Path) field.ErrorList {
			if s.CEL == nil {
				return field.ErrorList{field.Required(at.Child("cel"), "")}
			}
			return deviceExpression(s.CEL.Expression, expressions.DeviceSelector, at.Child("cel", "expression"), texts)
		})
}

func deviceExpression(text string, use expressions.Use, at *field.Path, texts *expressions.Collector) field.ErrorList {
	switch {
	case strings.TrimSpace(text) == "":
		return field.ErrorList{field.Required(at, "")}
	case len(text) > resourcev1.CELSelectorExpressionMaxLength:
		return field.ErrorList{field.TooLong(at, "", resourcev1.CELSelectorExpressionMaxLength)}
	}
	texts.Add(use, text, at)
	return nil
}

// reference validates the name of a request of the same claim, or of one of its alternatives.
func (c *claimCheck) reference(name string, at *field.Path) field.ErrorList {
	return c.names.reference(name, at)
}

func (n requestNames) reference(name string, at *field.Path) field.ErrorList {
	missing := field.Invalid(at, name, "must be the name of a request in the claim or the name of a request and a subrequest separated by '/'")
	parts := strings.Split(name, "/")
	if len(parts) > 2 {
		return field.ErrorList{missing}
	}
	var errs field.ErrorList
	for _, p := range parts {
		errs = append(errs, fieldrules.DNSLabel(p, at)...)
	}
	if !n.has(name) {
		errs = append(errs, missing)
	}
	return errs
}

func (c *claimCheck) constraint(k resourcev1.DeviceConstraint, at *field.Path) field.ErrorList {
	errs := fieldrules.Items(k.Requests, resourcev1.DeviceRequestsMaxSize, at.Child("requests"), fieldrules.Itself,
		c.reference)
	switch {
	case k.MatchAttribute != nil && k.DistinctAttribute != nil:
		errs = append(errs, field.Invalid(at, "{`matchAttribute`, `distinctAttribute`}", `exactly one of "matchAttribute" or "distinctAttribute" is required, but multiple fields are set`))
	case k.MatchAttribute != nil:
		errs = append(errs, fullyQualified(*k.MatchAttribute, at.Child("matchAttribute"))...)
	case k.DistinctAttribute != nil:
		errs = append(errs, fullyQualified(*k.DistinctAttribute, at.Child("distinctAttribute"))...)
	default:
		errs = append(errs, field.Required(at, `exactly one of "matchAttribute" or "distinctAttribute" is required`))
	}
	return errs
}

func validateDeviceClass(s *resourcev1.DeviceClassSpec, spec *field.Path, o *expressions.Options) field.ErrorList {
	var texts expressions.Collector
	errs := validateDeviceSelectors(s.Selectors, spec.Child("selectors"), &texts)
	errs = append(errs, fieldrules.Items(s.Config, resourcev1.DeviceConfigMaxSize, spec.Child("config"), nil,
		func(c resourcev1.DeviceClassConfiguration, at *field.Path) field.ErrorList {
			return validateDeviceConfig(&c.DeviceConfiguration, at)
		})...)
	if n := s.ExtendedResourceName; n != nil && !podspec.IsExtendedResource(*n) {
		errs = append(errs, field.Invalid(spec.Child("extendedResourceName"), *n, "must be a valid extended resource name"))
	}
	return append(errs, o.Compiled(&texts)...)
}

func validateDeviceToleration(t resourcev1.DeviceToleration, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if t.Key != "" {
		errs = append(errs, metavalidation.ValidateLabelName(t.Key, at.Child("key"))...)
	}
	switch t.Operator {
	case resourcev1.DeviceTolerationOpExists:
		if t.Value != "" {
			errs = append(errs, field.Invalid(at.Child("value"), t.Value, "must be empty for operator `Exists`"))
		}
	case resourcev1.DeviceTolerationOpEqual:
		errs = append(errs, fieldrules.Invalid(at.Child("value"), t.Value, validation.IsValidLabelValue(t.Value))...)
	default:
		errs = append(errs, fieldrules.Supported(t.Operator, at.Child("operator"), resourcev1.DeviceTolerationOpEqual,
			resourcev1.DeviceTolerationOpExists)...)
	}
	if t.Effect != "" {
		errs = append(errs, fieldrules.Supported(t.Effect, at.Child("effect"), deviceEffects...)...)
	}
	return errs
}

var deviceEffects = []resourcev1.DeviceTaintEffect{resourcev1.DeviceTaintEffectNoExecute, resourcev1.DeviceTaintEffectNoSchedule, resourcev1.DeviceTaintEffectNone}
