package autoscaling

import (
	"fmt"
	"slices"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/api/validation/path"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilvalidation "k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	maxPolicyPeriod        = 1800
	maxStabilizationWindow = 3600
)

func validateAutoscalerSpec(s *autoscalingv2.HorizontalPodAutoscalerSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	least := ptr.Deref(s.MinReplicas, 0)
	if least < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("minReplicas"), least, "must be greater than or equal to 0"))
	}
	switch {
	case s.MaxReplicas == 0:
		errs = append(errs, field.Required(fldPath.Child("maxReplicas"), "must be set and greater than 0"))
	case s.MaxReplicas < 0:
		errs = append(errs, field.Invalid(fldPath.Child("maxReplicas"), s.MaxReplicas,
			"must be greater than or equal to 1"))
	}
	if s.MinReplicas != nil && s.MaxReplicas < least {
		errs = append(errs, field.Invalid(fldPath.Child("maxReplicas"), s.MaxReplicas,
			"must be greater than or equal to `minReplicas`"))
	}
	errs = append(errs, validateScaleRef(s.ScaleTargetRef, fldPath.Child("scaleTargetRef"))...)
	// ReplicationController is the only scalable kind of the core group.
	if gv, err := schema.ParseGroupVersion(s.ScaleTargetRef.APIVersion); err == nil && gv.Group == "" &&
		s.ScaleTargetRef.Kind != "ReplicationController" {
		errs = append(errs, field.Invalid(fldPath.Child("scaleTargetRef", "apiVersion"), s.ScaleTargetRef.APIVersion,
			"apiVersion must specify API group"))
	}
	for i := range s.Metrics {
		errs = append(errs, validateMetric(&s.Metrics[i], fldPath.Child("metrics").Index(i))...)
	}
	if s.MinReplicas != nil && least == 0 && !MeasuresWithoutPods(s) {
		errs = append(errs, field.Forbidden(fldPath.Child("metrics"),
			"must specify at least one Object or External metric to support scaling to zero replicas"))
	}
	if b := s.Behavior; b != nil {
		errs = append(errs, validateScalingRules(b.ScaleUp, fldPath.Child("behavior", "scaleUp"))...)
		errs = append(errs, validateScalingRules(b.ScaleDown, fldPath.Child("behavior", "scaleDown"))...)
	}
	return errs
}

// MeasuresWithoutPods reports whether an autoscaler has a metric with a value that does not come
// from the pods of its target. Only such an autoscaler can scale its target to zero and back.
func MeasuresWithoutPods(spec *autoscalingv2.HorizontalPodAutoscalerSpec) bool {
	return slices.ContainsFunc(spec.Metrics, func(m autoscalingv2.MetricSpec) bool {
		return m.Type == autoscalingv2.ObjectMetricSourceType || m.Type == autoscalingv2.ExternalMetricSourceType
	})
}

func validateAutoscalerStatus(current, desired int32) field.ErrorList {
	fldPath := field.NewPath("status")
	return append(fieldrules.ValidateNonNegative(current, fldPath.Child("currentReplicas")),
		fieldrules.ValidateNonNegative(desired, fldPath.Child("desiredReplicas"))...)
}

// validateSegment validates a required name that is used as a URL path segment. emptyDetail is the
// detail of the error for an empty name.
func validateSegment(name, emptyDetail string, fldPath *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(fldPath, emptyDetail)}
	}
	return fieldrules.InvalidErrors(fldPath, name, path.IsValidPathSegmentName(name))
}

func validateScaleRef(r autoscalingv2.CrossVersionObjectReference, fldPath *field.Path) field.ErrorList {
	errs := append(validateSegment(r.Kind, "", fldPath.Child("kind")),
		validateSegment(r.Name, "", fldPath.Child("name"))...)
	if _, err := schema.ParseGroupVersion(r.APIVersion); err != nil {
		errs = append(errs, field.Invalid(fldPath.Child("apiVersion"), r.APIVersion, err.Error()))
	}
	return errs
}

func validateScalingRules(r *autoscalingv2.HPAScalingRules, fldPath *field.Path) field.ErrorList {
	if r == nil {
		return nil
	}
	var errs field.ErrorList
	if w := r.StabilizationWindowSeconds; w != nil && *w < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("stabilizationWindowSeconds"), *w,
			"must be greater than or equal to zero"))
	} else if w != nil && *w > maxStabilizationWindow {
		errs = append(errs, field.Invalid(fldPath.Child("stabilizationWindowSeconds"), *w,
			fmt.Sprintf("must be less than or equal to %d", maxStabilizationWindow)))
	}
	if p := r.SelectPolicy; p != nil {
		errs = append(errs, validateSupported(*p, fldPath.Child("selectPolicy"),
			autoscalingv2.DisabledPolicySelect, autoscalingv2.MaxChangePolicySelect,
			autoscalingv2.MinChangePolicySelect)...)
	}
	if r.Tolerance != nil && r.Tolerance.Sign() < 0 {
		errs = append(errs, field.Invalid(fldPath.Child("tolerance"), r.Tolerance.String(),
			"must be greater than or equal to 0"))
	}
	fldPath = fldPath.Child("policies")
	if len(r.Policies) == 0 {
		errs = append(errs, field.Required(fldPath, "must specify at least one Policy"))
	}
	for i, p := range r.Policies {
		here := fldPath.Index(i)
		errs = append(errs, validateSupported(p.Type, here.Child("type"), autoscalingv2.PercentScalingPolicy,
			autoscalingv2.PodsScalingPolicy)...)
		if p.Value <= 0 {
			errs = append(errs, field.Invalid(here.Child("value"), p.Value, "must be greater than zero"))
		}
		switch {
		case p.PeriodSeconds <= 0:
			errs = append(errs, field.Invalid(here.Child("periodSeconds"), p.PeriodSeconds,
				"must be greater than zero"))
		case p.PeriodSeconds > maxPolicyPeriod:
			errs = append(errs, field.Invalid(here.Child("periodSeconds"), p.PeriodSeconds,
				fmt.Sprintf("must be less than or equal to %d", maxPolicyPeriod)))
		}
	}
	return errs
}

// validateSupported returns an error if a value is not one of the allowed values. An empty value is
// an error too, unless it is allowed.
func validateSupported[T ~string](value T, fldPath *field.Path, allowed ...T) field.ErrorList {
	if slices.Contains(allowed, value) {
		return nil
	}
	return field.ErrorList{field.NotSupported(fldPath, value, allowed)}
}

// validateMetric validates a metric of an autoscaler. Exactly one source must be set, the source of
// the metric's type.
func validateMetric(m *autoscalingv2.MetricSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if m.Type == "" {
		errs = append(errs, field.Required(fldPath.Child("type"), "must specify a metric source type"))
	}
	sources := []struct {
		name string
		kind autoscalingv2.MetricSourceType
		set  bool
		ok   func(at *field.Path) field.ErrorList
	}{
		{"object", autoscalingv2.ObjectMetricSourceType, m.Object != nil, func(fldPath *field.Path) field.ErrorList {
			return validateObjectMetric(m.Object, fldPath)
		}},
		{"external", autoscalingv2.ExternalMetricSourceType, m.External != nil,
			func(fldPath *field.Path) field.ErrorList { return validateExternalMetric(m.External, fldPath) }},
		{"pods", autoscalingv2.PodsMetricSourceType, m.Pods != nil, func(fldPath *field.Path) field.ErrorList {
			return validatePodsMetric(m.Pods, fldPath)
		}},
		{"resource", autoscalingv2.ResourceMetricSourceType, m.Resource != nil,
			func(fldPath *field.Path) field.ErrorList {
				return validateResourceMetric(string(m.Resource.Name), &m.Resource.Target, fldPath)
			}},
		{"containerResource", autoscalingv2.ContainerResourceMetricSourceType, m.ContainerResource != nil,
			func(fldPath *field.Path) field.ErrorList {
				return validateContainerMetric(m.ContainerResource, fldPath)
			}},
	}
	kinds := []autoscalingv2.MetricSourceType{
		autoscalingv2.ContainerResourceMetricSourceType, autoscalingv2.ExternalMetricSourceType,
		autoscalingv2.ObjectMetricSourceType,
		autoscalingv2.PodsMetricSourceType, autoscalingv2.ResourceMetricSourceType,
	}
	errs = append(errs, validateSupported(m.Type, fldPath.Child("type"), kinds...)...)
	given := 0
	for _, s := range sources {
		if s.set {
			if given++; given == 1 {
				errs = append(errs, s.ok(fldPath.Child(s.name))...)
			}
		}
	}
	for _, s := range sources {
		switch {
		case s.kind == m.Type && !s.set:
			errs = append(errs, field.Required(fldPath.Child(s.name),
				"must populate information for the given metric source"))
		case s.kind != m.Type && s.set && given > 1:
			errs = append(errs, field.Forbidden(fldPath.Child(s.name), "must populate the given metric source only"))
		}
	}
	return errs
}

func validateObjectMetric(m *autoscalingv2.ObjectMetricSource, fldPath *field.Path) field.ErrorList {
	errs := validateScaleRef(m.DescribedObject, fldPath.Child("describedObject"))
	errs = append(errs, validateMetricName(m.Metric, fldPath.Child("metric"))...)
	errs = append(errs, validateTarget(&m.Target, fldPath.Child("target"))...)
	if m.Target.Value == nil && m.Target.AverageValue == nil {
		errs = append(errs, field.Required(fldPath.Child("target", "averageValue"),
			"must set either a target value or averageValue"))
	}
	return errs
}

func validateExternalMetric(m *autoscalingv2.ExternalMetricSource, fldPath *field.Path) field.ErrorList {
	errs := validateMetricName(m.Metric, fldPath.Child("metric"))
	errs = append(errs, validateTarget(&m.Target, fldPath.Child("target"))...)
	switch {
	case m.Target.Value == nil && m.Target.AverageValue == nil:
		errs = append(errs, field.Required(fldPath.Child("target", "averageValue"),
			"must set either a target value for metric or a per-pod target"))
	case m.Target.Value != nil && m.Target.AverageValue != nil:
		errs = append(errs, field.Forbidden(fldPath.Child("target", "value"),
			"may not set both a target value for metric and a per-pod target"))
	}
	return errs
}

func validatePodsMetric(m *autoscalingv2.PodsMetricSource, fldPath *field.Path) field.ErrorList {
	errs := validateMetricName(m.Metric, fldPath.Child("metric"))
	errs = append(errs, validateTarget(&m.Target, fldPath.Child("target"))...)
	if m.Target.AverageValue == nil {
		errs = append(errs, field.Required(fldPath.Child("target", "averageValue"),
			"must specify a positive target averageValue"))
	}
	return errs
}

func validateResourceMetric(name string, t *autoscalingv2.MetricTarget, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), "must specify a resource name"))
	}
	return append(errs, validateShare(t, fldPath.Child("target"))...)
}

func validateContainerMetric(m *autoscalingv2.ContainerResourceMetricSource, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if m.Name == "" {
		errs = append(errs, field.Required(fldPath.Child("name"), "must specify a resource name"))
	} else {
		errs = append(errs, podspec.ValidateContainerResourceName(m.Name, fldPath.Child("name"))...)
	}
	if m.Container == "" {
		errs = append(errs, field.Required(fldPath.Child("container"), "must specify a container"))
	} else {
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("container"), m.Container,
			utilvalidation.IsDNS1123Label(m.Container))...)
	}
	return append(errs, validateShare(&m.Target, fldPath.Child("target"))...)
}

// validateShare validates a metric target that is either a utilization, in percent of the requests,
// or an average value.
func validateShare(target *autoscalingv2.MetricTarget, fldPath *field.Path) field.ErrorList {
	errs := validateTarget(target, fldPath)
	switch {
	case target.AverageUtilization == nil && target.AverageValue == nil:
		errs = append(errs, field.Required(fldPath.Child("averageUtilization"),
			"must set either a target raw value or a target utilization"))
	case target.AverageUtilization != nil && target.AverageValue != nil:
		errs = append(errs, field.Forbidden(fldPath.Child("averageValue"),
			"may not set both a target raw value and a target utilization"))
	}
	return errs
}

func validateTarget(t *autoscalingv2.MetricTarget, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if t.Type == "" {
		errs = append(errs, field.Required(fldPath.Child("type"), "must specify a metric target type"))
	}
	switch t.Type {
	case autoscalingv2.UtilizationMetricType, autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType:
	default:
		errs = append(errs, field.Invalid(fldPath.Child("type"), t.Type,
			"must be either Utilization, Value, or AverageValue"))
	}
	positive := func(name string, q *resource.Quantity) {
		if q != nil && q.Sign() <= 0 {
			errs = append(errs, field.Invalid(fldPath.Child(name), q.String(), "must be positive"))
		}
	}
	positive("value", t.Value)
	positive("averageValue", t.AverageValue)
	if u := t.AverageUtilization; u != nil && *u < 1 {
		errs = append(errs, field.Invalid(fldPath.Child("averageUtilization"), *u, "must be greater than 0"))
	}
	return errs
}

func validateMetricName(m autoscalingv2.MetricIdentifier, fldPath *field.Path) field.ErrorList {
	errs := validateSegment(m.Name, "must specify a metric name", fldPath.Child("name"))
	if m.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(m.Selector,
			metavalidation.LabelSelectorValidationOptions{}, fldPath.Child("selector"))...)
	}
	return errs
}
