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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// nodeFields contains the fields that select the nodes with access to devices. Exactly one of them
// may be set.
type nodeFields struct {
	name     *string
	selector *corev1.NodeSelector
	all      *bool
}

// validateNodes validates the fields that are set. It returns the errors and the names of these
// fields. emptyNameError is the error for an empty node name.
func (n nodeFields) validateNodes(fldPath *field.Path, emptyNameError string) (field.ErrorList, []string) {
	var errs field.ErrorList
	var ways []string
	if n.name != nil {
		if *n.name == "" {
			errs = append(errs, field.Invalid(fldPath.Child("nodeName"), "", emptyNameError))
		} else {
			ways = append(ways, "`nodeName`")
			errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("nodeName"), *n.name,
				apivalidation.NameIsDNSSubdomain(*n.name, false))...)
		}
	}
	if n.selector != nil {
		ways = append(ways, "`nodeSelector`")
		errs = append(errs, podspec.ValidateNodeSelector(n.selector, fldPath.Child("nodeSelector"))...)
	}
	more, set := validateTrueIfSet(n.all, fldPath.Child("allNodes"))
	if errs = append(errs, more...); set {
		ways = append(ways, "`allNodes`")
	}
	return errs, ways
}

func validateTrueIfSet(b *bool, fldPath *field.Path) (field.ErrorList, bool) {
	if b == nil || *b {
		return nil, b != nil
	}
	return field.ErrorList{field.Invalid(fldPath, false, "must be either unset or set to true")}, false
}

func validateSlice(s *resourcev1.ResourceSliceSpec, spec *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDriverName(s.Driver, spec.Child("driver"))
	errs = append(errs, validatePoolName(s.Pool.Name, spec.Child("pool", "name"))...)
	if n := s.Pool.ResourceSliceCount; n <= 0 {
		errs = append(errs, field.Invalid(spec.Child("pool", "resourceSliceCount"), n, "must be greater than zero"))
	}
	if n := s.Pool.Generation; n < 0 {
		errs = append(errs, field.Invalid(spec.Child("pool", "generation"), n, "must be greater than or equal to zero"))
	}
	more, ways := nodeFields{s.NodeName, s.NodeSelector, s.AllNodes}.validateNodes(spec,
		"must be either unset or set to a non-empty string")
	errs = append(errs, more...)
	if t := s.NodeSelector; t != nil && len(t.NodeSelectorTerms) != 1 {
		errs = append(errs, field.Invalid(spec.Child("nodeSelector", "nodeSelectorTerms"), t.NodeSelectorTerms,
			"must have exactly one node selector term"))
	}
	more, each1 := validateTrueIfSet(s.PerDeviceNodeSelection, spec.Child("perDeviceNodeSelection"))
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
	errs = append(errs, fieldrules.ValidateItems(s.Devices, maxDevices(s.Devices), spec.Child("devices"),
		func(d resourcev1.Device) string { return d.Name },
		func(d resourcev1.Device, fldPath *field.Path) field.ErrorList {
			return validateDevice(&d, each1, fldPath)
		})...)
	errs = append(errs, fieldrules.ValidateItems(s.SharedCounters, resourcev1.ResourceSliceMaxCounterSets,
		spec.Child("sharedCounters"),
		func(c resourcev1.CounterSet) string { return c.Name },
		func(c resourcev1.CounterSet, fldPath *field.Path) field.ErrorList {
			return validateCounters(c.Name, "name", c.Counters, resourcev1.ResourceSliceMaxCountersPerCounterSet,
				fldPath)
		})...)
	if s.PartitionTypeAttribute != nil {
		errs = append(errs, validatePartitionType(s, spec)...)
	}
	return append(errs, validateSkippedOperations(s.SkipNodeOperations, spec.Child("skipNodeOperations"))...)
}

// maxDevices returns the maximum number of devices in a slice. It is lower if any of the devices
// uses advanced features.
func maxDevices(list []resourcev1.Device) int {
	for _, d := range list {
		large := len(d.Taints) > 0 || len(d.ConsumesCounters) > 0
		for _, a := range d.Attributes {
			large = large || a.BoolValues != nil || a.IntValues != nil || a.StringValues != nil ||
				a.VersionValues != nil
		}
		if large {
			return resourcev1.ResourceSliceMaxDevicesWithAdvancedFeatures
		}
	}
	return resourcev1.ResourceSliceMaxDevices
}

func validateCounters(
	name, called string, counters map[string]resourcev1.Counter, limit int, fldPath *field.Path,
) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(fldPath.Child(called), ""))
	} else {
		errs = append(errs, fieldrules.ValidateDNSLabel(name, fldPath.Child(called))...)
	}
	here := fldPath.Child("counters")
	switch {
	case len(counters) == 0:
		return append(errs, field.Required(here, ""))
	case len(counters) > limit:
		return append(errs, field.TooMany(here, len(counters), limit))
	}
	for _, c := range fieldrules.SortedKeys(counters) {
		errs = append(errs, fieldrules.ValidateDNSLabel(c, here)...)
	}
	return errs
}

func validateDevice(d *resourcev1.Device, perDevice bool, fldPath *field.Path) field.ErrorList {
	errs := fieldrules.ValidateDNSLabel(d.Name, fldPath.Child("name"))
	if n := len(d.Attributes) + len(d.Capacity); n > resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice {
		return append(errs, field.Invalid(fldPath, n,
			fmt.Sprintf("the total number of attributes and capacities must not exceed %d",
				resourcev1.ResourceSliceMaxAttributesAndCapacitiesPerDevice)))
	}
	values := 0
	for _, name := range fieldrules.SortedKeys(d.Attributes) {
		a := d.Attributes[name]
		values += max(1, len(a.BoolValues)+len(a.IntValues)+len(a.StringValues)+len(a.VersionValues))
		errs = append(errs, validateQualifiedName(name, fldPath.Child("attributes"))...)
		errs = append(errs, validateAttribute(&a, fldPath.Child("attributes").Key(string(name)))...)
	}
	if values > resourcev1.ResourceSliceMaxAttributeValuesPerDevice {
		errs = append(errs, field.Invalid(fldPath, values,
			fmt.Sprintf("the total number of attribute values must not exceed %d",
				resourcev1.ResourceSliceMaxAttributeValuesPerDevice)))
	}
	for _, name := range fieldrules.SortedKeys(d.Capacity) {
		c, here := d.Capacity[name], fldPath.Child("capacity")
		errs = append(errs, validateQualifiedName(name, here)...)
		switch policy := here.Key(string(name)).Child("requestPolicy"); {
		case c.RequestPolicy == nil:
		case !ptr.Deref(d.AllowMultipleAllocations, false):
			errs = append(errs, field.Forbidden(policy, "allowMultipleAllocations must be true"))
		default:
			errs = append(errs, validateRequestPolicy(c.Value, c.RequestPolicy, policy)...)
		}
	}
	errs = append(errs, fieldrules.ValidateItems(d.Taints, resourcev1.DeviceTaintsMaxLength,
		fldPath.Child("taints"), nil,
		validateDeviceTaint)...)
	errs = append(errs, fieldrules.ValidateItems(d.ConsumesCounters,
		resourcev1.ResourceSliceMaxDeviceCounterConsumptionsPerDevice, fldPath.Child("consumesCounters"),
		func(c resourcev1.DeviceCounterConsumption) string { return c.CounterSet },
		func(c resourcev1.DeviceCounterConsumption, fldPath *field.Path) field.ErrorList {
			errs := validateCounters(c.CounterSet, "counterSet", c.Counters,
				resourcev1.ResourceSliceMaxCountersPerDeviceCounterConsumption, fldPath)
			return append(errs, fieldrules.ValidateItems(c.CompatibilityGroups,
				resourcev1.DeviceCompatibilityGroupsMaxSize,
				fldPath.Child("compatibilityGroups"), fieldrules.SelfKey, fieldrules.ValidateDNSLabel)...)
		})...)
	errs = append(errs, validateDeviceNodes(d, perDevice, fldPath)...)
	errs = append(errs, validateBindingConditions(d.BindingConditions, d.BindingFailureConditions, fldPath)...)
	return append(errs, validateNodeResources(d, fldPath.Child("nodeAllocatableResources"))...)
}

// validateDeviceNodes validates a device's node selection. If perDevice is true, the device must
// have one. Otherwise the slice selects the nodes, and the device must not have one.
func validateDeviceNodes(device *resourcev1.Device, perDevice bool, fldPath *field.Path) field.ErrorList {
	n := nodeFields{device.NodeName, device.NodeSelector, device.AllNodes}
	if !perDevice {
		if n != (nodeFields{}) {
			return field.ErrorList{field.Invalid(fldPath, nil,
				"`nodeName`, `nodeSelector` and `allNodes` can only be set if `perDeviceNodeSelection` is set to true "+
					"in the ResourceSlice spec")}
		}
		return nil
	}
	errs, ways := n.validateNodes(fldPath, "must not be empty")
	const one = "exactly one of `nodeName`, `nodeSelector`, or `allNodes` is required when `perDeviceNodeSelection` " +
		"is set to true in the ResourceSlice spec"
	switch {
	case len(ways) == 0:
		errs = append(errs, field.Required(fldPath, one))
	case len(ways) > 1:
		errs = append(errs, field.Invalid(fldPath, "{"+strings.Join(ways, ", ")+"}", one))
	}
	return errs
}

func validateDeviceTaint(t resourcev1.DeviceTaint, fldPath *field.Path) field.ErrorList {
	errs := metavalidation.ValidateLabelName(t.Key, fldPath.Child("key"))
	if t.Value != "" {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("value"), t.Value,
			validation.IsValidLabelValue(t.Value))...)
	}
	if t.Effect == "" {
		return append(errs, field.Required(fldPath.Child("effect"), ""))
	}
	return append(errs, fieldrules.ValidateSupported(t.Effect, fldPath.Child("effect"), deviceEffects...)...)
}

// validatePartitionType validates partitionTypeAttribute of a ResourceSlice. Each device that
// consumes counters must have that attribute with a string value, and at least one device must
// consume counters.
func validatePartitionType(s *resourcev1.ResourceSliceSpec, spec *field.Path) field.ErrorList {
	name, fldPath := string(*s.PartitionTypeAttribute), spec.Child("partitionTypeAttribute")
	if errs := validateFullyQualifiedName(*s.PartitionTypeAttribute, fldPath); len(errs) > 0 {
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
			errs = append(errs, field.Required(here,
				"device consumes counters and `partitionTypeAttribute` names this attribute, so it must be set"))
		} else if a.StringValue == nil {
			errs = append(errs, field.Invalid(here, a,
				"must be a string value because `partitionTypeAttribute` names this attribute"))
		}
	}
	if !consumes {
		errs = append(errs, field.Invalid(fldPath, name,
			"may only be set on a slice which declares devices that consume counters"))
	}
	return errs
}
