package resource

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	resourcev1 "k8s.io/api/resource/v1"
	apivalidation "k8s.io/apimachinery/pkg/api/validation"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// nodes selects the nodes that can access devices. Exactly one field may be set.
type nodes struct {
	name     *string
	selector *corev1.NodeSelector
	all      *bool
}

// judge validates the fields that are set, and returns errors and the names of the set fields.
// empty is the error for an empty node name.
func (n nodes) judge(at *field.Path, empty string) (field.ErrorList, []string) {
	var errs field.ErrorList
	var ways []string
	if n.name != nil {
		if *n.name == "" {
			errs = append(errs, field.Invalid(at.Child("nodeName"), "", empty))
		} else {
			ways = append(ways, "`nodeName`")
			errs = append(errs, fieldrules.Invalid(at.Child("nodeName"), *n.name,
				apivalidation.NameIsDNSSubdomain(*n.name, false))...)
		}
	}
	if n.selector != nil {
		ways = append(ways, "`nodeSelector`")
		errs = append(errs, podspec.ValidateNodeSelector(n.selector, at.Child("nodeSelector"))...)
	}
	more, set := isTrueIfSet(n.all, at.Child("allNodes"))
	if errs = append(errs, more...); set {
		ways = append(ways, "`allNodes`")
	}
	return errs, ways
}

func isTrueIfSet(b *bool, at *field.Path) (field.ErrorList, bool) {
	if b == nil || *b {
		return nil, b != nil
	}
	return field.ErrorList{field.Invalid(at, false, "must be either unset or set to true")}, false
}

func validateSlice(s *resourcev1.ResourceSliceSpec, spec *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDriverName(s.Driver, spec.Child("driver"))
	errs = append(errs, poolName(s.Pool.Name, spec.Child("pool", "name"))...)
	if n := s.Pool.ResourceSliceCount; n <= 0 {
		errs = append(errs, field.Invalid(spec.Child("pool", "resourceSliceCount"), n, "must be greater than zero"))
	}
	if n := s.Pool.Generation; n < 0 {
		errs = append(errs, field.Invalid(spec.Child("pool", "generation"), n, "must be greater than or equal to zero"))
	}
	more, ways := nodes{s.NodeName, s.NodeSelector, s.AllNodes}.judge(spec, "must be either unset or set to a non-empty string")
	errs = append(errs, more...)
	if t := s.NodeSelector; t != nil && len(t.NodeSelectorTerms) != 1 {
		errs = append(errs, field.Invalid(spec.Child("nodeSelector", "nodeSelectorTerms"), t.NodeSelectorTerms, "must have exactly one node selector term"))
	}
	more, each1 := isTrueIfSet(s.PerDeviceNodeSelection, spec.Child("perDeviceNodeSelection"))
	if errs = append(errs, more...); each1 {
		ways = append(ways, "`perDeviceNodeSelection`")
	}
	const one = "exactly one of `nodeName`, `nodeSelector`, `allNodes`, `perDeviceNodeSelection` is required"
	switch {
	case len(ways) == 0:
		errs = append(errs, field.Required(spec, one))
	case len(ways) > 1:
		errs = append(errs, field.Invalid(spec, "{"+strings.Join(ways, ", ")+"}", one+", but multiple fields are set"))
	}
	if s.SharedCounters != nil && s.Devices != nil {
		errs = append(errs, field.Invalid(spec, "", "only one of `sharedCounters` or `devices` is allowed"))
	}
	errs = append(errs, fieldrules.Items(s.Devices, maxDevices(s.Devices), spec.Child("devices"),
		func(d resourcev1.Device) string { return d.Name },
		func(d resourcev1.Device, at *field.Path) field.ErrorList { return validateDevice(&d, each1, at) })...)
	errs = append(errs, fieldrules.Items(s.SharedCounters, resourcev1.ResourceSliceMaxCounterSets,
		spec.Child("sharedCounters"),
		func(c resourcev1.CounterSet) string { return c.Name },
		func(c resourcev1.CounterSet, at *field.Path) field.ErrorList {
			return validateCounters(c.Name, "name", c.Counters, resourcev1.ResourceSliceMaxCountersPerCounterSet, at)
		})...)
	if s.PartitionTypeAttribute != nil {
		errs = append(errs, validatePartitionType(s, spec)...)
	}
	return append(errs, skippedOperations(s.SkipNodeOperations, spec.Child("skipNodeOperations"))...)
}

// maxDevices returns the maximum number of devices in a slice, which is lower if any of them uses
// advanced features.
func maxDevices(list []resourcev1.Device) int {
	for _, d := range list {
		large := len(d.Taints) > 0 || len(d.ConsumesCounters) > 0
		for _, a := range d.Attributes {
			large = large || a.BoolValues != nil || a.IntValues != nil || a.StringValues != nil || a.VersionValues != nil
		}
		if large {
			return resourcev1.ResourceSliceMaxDevicesWithAdvancedFeatures
		}
	}
	return resourcev1.ResourceSliceMaxDevices
}

func validateCounters(name, called string, counters map[string]resourcev1.Counter, limit int, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at.Child(called), ""))
	} else {
		errs = append(errs, fieldrules.DNSLabel(name, at.Child(called))...)
	}
	here := at.Child("counters")
	switch {
	case len(counters) == 0:
		return append(errs, field.Required(here, ""))
	case len(counters) > limit:
		return append(errs, field.TooMany(here, len(counters), limit))
	}
	for _, c := range fieldrules.SortedKeys(counters) {
		errs = append(errs, fieldrules.DNSLabel(c, here)...)
	}
	return errs
}

func validateDevice(d *resourcev1.Device, perDevice bool, at *field.Path) field.ErrorList {
	errs := fieldrules.DNSLabel(d.Name, at.Child("name"))
	if n := len(d.Attributes) + len(d.Capacity); n > resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		return append(errs, field.Invalid(at, n, fmt.Sprintf("the total number of attributes and capacities must not exceed %d",
			resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice)))
	}
	values := 0
	for _, name := range fieldrules.SortedKeys(d.Attributes) {
		a := d.Attributes[name]
		values += max(1, len(a.BoolValues)+len(a.IntValues)+len(a.StringValues)+len(a.VersionValues))
		errs = append(errs, qualified(name, at.Child("attributes"))...)
		errs = append(errs, validateAttribute(&a, at.Child("attributes").Key(string(name)))...)
	}
	if values > resourcev1.ResourceSliceMaxAttributeValuesPerDevice {
		errs = append(errs, field.Invalid(at, values, fmt.Sprintf("the total number of attribute values must not exceed %d",
			resourcev1.ResourceSliceMaxAttributeValuesPerDevice)))
	}
	for _, name := range fieldrules.SortedKeys(d.Capacity) {
		c, here := d.Capacity[name], at.Child("capacity")
		errs = append(errs, qualified(name, here)...)
		switch policy := here.Key(string(name)).Child("requestPolicy"); {
		case c.RequestPolicy == nil:
		case !fieldrules.Deref(d.AllowMultipleAllocations):
			errs = append(errs, field.Forbidden(policy, "allowMultipleAllocations must be true"))
		default:
			errs = append(errs, validateRequestPolicy(c.Value, c.RequestPolicy, policy)...)
		}
	}
	errs = append(errs, fieldrules.Items(d.Taints, resourcev1.DeviceTaintsMaxLength, at.Child("taints"), nil,
		validateDeviceTaint)...)
	errs = append(errs, fieldrules.Items(d.ConsumesCounters,
		resourcev1.ResourceSliceMaxDeviceCounterConsumptionsPerDevice, at.Child("consumesCounters"),
		func(c resourcev1.DeviceCounterConsumption) string { return c.CounterSet },
		func(c resourcev1.DeviceCounterConsumption, at *field.Path) field.ErrorList {
			errs := validateCounters(c.CounterSet, "counterSet", c.Counters, resourcev1.ResourceSliceMaxCountersPerDeviceCounterConsumption, at)
			return append(errs, fieldrules.Items(c.CompatibilityGroups, resourcev1.DeviceCompatibilityGroupsMaxSize,
				at.Child("compatibilityGroups"), fieldrules.Itself, fieldrules.DNSLabel)...)
		})...)
	errs = append(errs, validateDeviceNodes(d, perDevice, at)...)
	errs = append(errs, bindingConditions(d.BindingConditions, d.BindingFailureConditions, at)...)
	return append(errs, validateNodeResources(d, at.Child("nodeAllocatableResources"))...)
}

// validateDeviceNodes validates a device's node selection. It is required if perDevice is set;
// otherwise the slice selects the nodes and the device may not.
func validateDeviceNodes(d *resourcev1.Device, perDevice bool, at *field.Path) field.ErrorList {
	n := nodes{d.NodeName, d.NodeSelector, d.AllNodes}
	if !perDevice {
		if n != (nodes{}) {
			return field.ErrorList{field.Invalid(at, nil, "`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true in the ResourceSlice spec")}
		}
		return nil
	}
	errs, ways := n.judge(at, "must not be empty")
	const one = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` is set to true in the ResourceSlice spec"
	switch {
	case len(ways) == 0:
		errs = append(errs, field.Required(at, one))
	case len(ways) > 1:
		errs = append(errs, field.Invalid(at, "{"+strings.Join(ways, ", ")+"}", one))
	}
	return errs
}

func validateDeviceTaint(t resourcev1.DeviceTaint, at *field.Path) field.ErrorList {
	errs := metavalidation.ValidateLabelName(t.Key, at.Child("key"))
	if t.Value != "" {
		errs = append(errs, fieldrules.Invalid(at.Child("value"), t.Value, validation.IsValidLabelValue(t.Value))...)
	}
	if t.Effect == "" {
		return append(errs, field.Required(at.Child("effect"), ""))
	}
	return append(errs, fieldrules.Supported(t.Effect, at.Child("effect"), deviceEffects...)...)
}

// validatePartitionType checks that all devices that consume counters have the attribute that
// specifies their partition type.
func validatePartitionType(s *resourcev1.ResourceSliceSpec, spec *field.Path) field.ErrorList {
	name, at := string(*s.PartitionTypeAttribute), spec.Child("partitionTypeAttribute")
	if errs := fullyQualified(*s.PartitionTypeAttribute, at); len(errs) > 0 {
		return errs
	}
	var errs field.ErrorList
	consumes := false
	bare, own := strings.CutPrefix(name, s.Driver+"/")
	for i, d := range s.Devices {
		if len(d.ConsumesCounters) == 0 {
			continue
		}
		consumes = true
		here := spec.Child("devices").Index(i).Child("attributes").Key(name)
		a, ok := d.Attributes[resourcev1.QualifiedName(name)]
		if !ok && own {
			a, ok = d.Attributes[resourcev1.QualifiedName(bare)]
		}
		if !ok {
			errs = append(errs, field.Required(here, "device consumes counters and `partitionTypeAttribute` names this attribute, so it must be set"))
		} else if a.StringValue == nil {
			errs = append(errs, field.Invalid(here, a, "must be a string value because `partitionTypeAttribute` names this attribute"))
		}
	}
	if !consumes {
		errs = append(errs, field.Invalid(at, name, "may only be set on a slice which declares devices that consume counters"))
	}
	return errs
}
