package resource

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// semanticVersion matches a version number in the format of Semantic Versioning 2.0.0.
var semanticVersion = regexp.MustCompile(`^(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)` +
	`(-(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*)(\.(0|[1-9]\d*|\d*[a-zA-Z-][0-9a-zA-Z-]*))*)?(\+[0-9a-zA-Z-]+(\.[0-9a-zA-Z-]+)*)?$`)

func validateAttribute(a *resourcev1.DeviceAttribute, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	set := 0
	text := func(v string, fldPath *field.Path, version bool) {
		if version && !semanticVersion.MatchString(v) {
			errs = append(errs, field.Invalid(fldPath, v, "must be a string compatible with semver.org spec 2.0.0"))
		}
		if len(v) > resourcev1.DeviceAttributeMaxValueLength {
			errs = append(errs, field.TooLong(fldPath, "", resourcev1.DeviceAttributeMaxValueLength))
		}
	}
	list := func(there bool, n int, name string, v any) {
		if !there {
			return
		}
		set++
		if n == 0 {
			errs = append(errs, field.Invalid(fldPath.Child(name), v, "must not be empty if specified"))
		}
	}
	for _, there := range []bool{a.BoolValue != nil, a.IntValue != nil, a.StringValue != nil, a.VersionValue != nil} {
		if there {
			set++
		}
	}
	if a.StringValue != nil {
		text(*a.StringValue, fldPath.Child("string"), false)
	}
	if a.VersionValue != nil {
		text(*a.VersionValue, fldPath.Child("version"), true)
	}
	list(a.BoolValues != nil, len(a.BoolValues), "bools", a.BoolValues)
	list(a.IntValues != nil, len(a.IntValues), "ints", a.IntValues)
	list(a.StringValues != nil, len(a.StringValues), "strings", a.StringValues)
	list(a.VersionValues != nil, len(a.VersionValues), "versions", a.VersionValues)
	for i, v := range a.StringValues {
		text(v, fldPath.Child("strings").Index(i), false)
	}
	for i, v := range a.VersionValues {
		text(v, fldPath.Child("versions").Index(i), true)
	}
	switch {
	case set == 0:
		errs = append(errs, field.Invalid(fldPath, "", "exactly one value must be specified"))
	case set > 1:
		errs = append(errs, field.Invalid(fldPath, *a, "exactly one value must be specified"))
	}
	return errs
}

// maxPolicyValues is the maximum number of valid values in a request policy.
const maxPolicyValues = 10

// validateRequestPolicy validates the policy for requests of a device's capacity.
func validateRequestPolicy(
	capacity resource.Quantity, p *resourcev1.CapacityRequestPolicy, fldPath *field.Path,
) field.ErrorList {
	switch {
	case len(p.ValidValues) > 0 && p.ValidRange != nil:
		return field.ErrorList{field.Forbidden(fldPath,
			`exactly one policy can be specified, cannot specify "validValues" and "validRange" at the same time`)}
	case len(p.ValidValues) > 0 && p.Default == nil:
		return field.ErrorList{field.Required(fldPath.Child("default"), "required when validValues is defined")}
	case len(p.ValidValues) > 0:
		return validatePolicyValues(capacity, *p.Default, p.ValidValues, fldPath.Child("validValues"))
	case p.ValidRange != nil && p.Default == nil:
		return field.ErrorList{field.Required(fldPath.Child("default"), "required when validRange is defined")}
	case p.ValidRange != nil:
		return validatePolicyRange(capacity, *p.Default, p.ValidRange, fldPath.Child("validRange"))
	}
	return nil
}

func validatePolicyValues(
	capacity, preset resource.Quantity, values []resource.Quantity, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	for i := 1; i < len(values); i++ {
		if values[i-1].Cmp(values[i]) > 0 {
			errs = append(errs, field.Invalid(fldPath.Index(i), values[i].String(),
				"values must be sorted in ascending order"))
		}
	}
	errs = append(errs, fieldrules.ValidateItems(values, maxPolicyValues, fldPath,
		func(q resource.Quantity) string { return q.AsDec().String() },
		func(q resource.Quantity, fldPath *field.Path) field.ErrorList {
			if q.Cmp(capacity) > 0 {
				return field.ErrorList{field.Invalid(fldPath, q.String(),
					"option is larger than capacity value: "+capacity.String())}
			}
			return nil
		})...)
	if !slices.ContainsFunc(values, func(q resource.Quantity) bool { return q.Cmp(preset) == 0 }) {
		errs = append(errs, field.Invalid(fldPath, preset.String(),
			"default value is not valid according to the requestPolicy"))
	}
	return errs
}

func validatePolicyRange(
	capacity, preset resource.Quantity, r *resourcev1.CapacityRequestPolicyRange, fldPath *field.Path,
) field.ErrorList {
	if r.Min == nil {
		return field.ErrorList{field.Required(fldPath.Child("min"), "required when validRange is defined")}
	}
	var errs field.ErrorList
	wrong := func(name string, q resource.Quantity, why string) {
		errs = append(errs, field.Invalid(fldPath.Child(name), q.String(), why))
	}
	if r.Min.Sign() < 0 {
		wrong("min", *r.Min, "must be greater than or equal to zero")
	}
	if r.Min.Cmp(capacity) > 0 {
		wrong("min", *r.Min, "min is larger than capacity value: "+capacity.String())
	}
	if preset.Cmp(*r.Min) < 0 {
		wrong("min", preset, "default is less than min: "+r.Min.String())
	}
	if r.Max != nil {
		if r.Min.Cmp(*r.Max) > 0 {
			wrong("max", *r.Min, "min is larger than max: "+r.Max.String())
		}
		if r.Max.Cmp(capacity) > 0 {
			wrong("max", *r.Max, "max is larger than capacity value: "+capacity.String())
		}
		if preset.Cmp(*r.Max) > 0 {
			wrong("max", preset, "default is more than max: "+r.Max.String())
		}
	}
	if r.Step == nil {
		return errs
	}
	if r.Step.Sign() <= 0 {
		return append(errs, field.Invalid(fldPath.Child("step"), r.Step.String(), "must be greater than zero"))
	}
	first := r.Min.DeepCopy()
	if first.Add(*r.Step); first.Cmp(capacity) > 0 {
		wrong("step", *r.Step, fmt.Sprintf("one step %s is larger than capacity value: %s", first.String(),
			capacity.String()))
	}
	// Steps are counted in thousandths, which must be exact and must not overflow.
	exact := true
	for _, q := range []struct {
		name string
		q    *resource.Quantity
	}{{"default", &preset}, {"min", r.Min}, {"max", r.Max}, {"step", r.Step}} {
		if q.q != nil && q.q.Cmp(*resource.NewMilliQuantity(q.q.MilliValue(), q.q.Format)) != 0 {
			wrong(q.name, *q.q, "value cannot be represented as a milli value")
			exact = false
		}
	}
	if !exact {
		return errs
	}
	onStep := func(q resource.Quantity) {
		if (q.MilliValue()-r.Min.MilliValue())%r.Step.MilliValue() != 0 {
			wrong("step", q, fmt.Sprintf("value is not a multiple of a given step (%s) from (%s)", r.Step.String(),
				r.Min.String()))
		}
	}
	onStep(preset)
	if r.Max != nil {
		onStep(*r.Max)
	}
	return errs
}

// validateNodeResources validates the resources of the node, such as memory, that a device uses
// when it is allocated.
func validateNodeResources(d *resourcev1.Device, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	for _, name := range fieldrules.SortedKeys(d.NodeAllocatableResources) {
		n, here := d.NodeAllocatableResources[name], fldPath.Key(string(name))
		if name != corev1.ResourceCPU && name != corev1.ResourceMemory && name != corev1.ResourceEphemeralStorage &&
			!strings.HasPrefix(string(name), corev1.ResourceHugePagesPrefix) {
			errs = append(errs, field.Invalid(here, name, "must be a node allocatable resource name"))
		}
		if n.Mapping == nil && n.Overhead == nil {
			errs = append(errs, field.Required(here, "at least one of mapping or overhead must be set"))
		}
		if n.Mapping != nil {
			errs = append(errs, validateNodeMapping(n.Mapping, d.Capacity, here.Child("mapping"))...)
		}
		o, over := n.Overhead, here.Child("overhead")
		switch {
		case o == nil:
		case o.PerPod == nil && o.PerContainer == nil:
			errs = append(errs, field.Invalid(over, "", "at least one of perPod or perContainer must be set"))
		default:
			for _, q := range []struct {
				name string
				q    *resource.Quantity
			}{{"perPod", o.PerPod}, {"perContainer", o.PerContainer}} {
				if q.q != nil && q.q.Sign() < 0 {
					errs = append(errs, field.Invalid(over.Child(q.name), q.q.String(), "must be non-negative"))
				}
			}
		}
	}
	return errs
}

func validateNodeMapping(
	m *resourcev1.NodeAllocatableMapping, capacity map[resourcev1.QualifiedName]resourcev1.DeviceCapacity,
	fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	key, multiplier := fldPath.Child("capacityKey"), fldPath.Child("capacityMultiplier")
	if m.CapacityKey != nil {
		if _, ok := capacity[*m.CapacityKey]; *m.CapacityKey == "" {
			errs = append(errs, field.Invalid(key, "", "capacityKey must not be an empty string"))
		} else if !ok {
			errs = append(errs, field.NotFound(key, *m.CapacityKey))
		}
		if m.CapacityMultiplier == nil {
			errs = append(errs, field.Required(multiplier, "capacityMultiplier is required when capacityKey is set"))
		}
	} else if m.CapacityMultiplier != nil {
		errs = append(errs, field.Required(key, "capacityKey is required when capacityMultiplier is set"))
	}
	if m.CapacityMultiplier != nil && m.CapacityMultiplier.Sign() <= 0 {
		errs = append(errs, field.Invalid(multiplier, m.CapacityMultiplier.String(), "must be positive"))
	}
	if m.DeviceMultiplier != nil && m.DeviceMultiplier.Sign() <= 0 {
		errs = append(errs, field.Invalid(fldPath.Child("deviceMultiplier"), m.DeviceMultiplier.String(),
			"must be positive"))
	}
	return errs
}
