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

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

const (
	maxPolicyPeriod        = 1800
	maxStabilizationWindow = 3600
)

func validateAutoscalerSpec(s *autoscalingv2.HorizontalPodAutoscalerSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	least := fieldrules.Deref(s.MinReplicas)
	if least < 0 {
		errs = append(errs, field.Invalid(at.Child("minReplicas"), least, "must be greater than or equal to 0"))
	}
	switch {
	case s.MaxReplicas == 0:
		errs = append(errs, field.Required(at.Child("maxReplicas"), "must be set and greater than 0"))
	case s.MaxReplicas < 0:
		errs = append(errs, field.Invalid(at.Child("maxReplicas"), s.MaxReplicas, "must be greater than or equal to 1"))
	}
	if s.MinReplicas != nil && s.MaxReplicas < least {
		errs = append(errs, field.Invalid(at.Child("maxReplicas"), s.MaxReplicas, "must be greater than or equal to `minReplicas`"))
	}
	errs = append(errs, validateScaleRef(s.ScaleTargetRef, at.Child("scaleTargetRef"))...)
	// ReplicationController is the only scalable kind of the core group.
	if gv, err := schema.ParseGroupVersion(s.ScaleTargetRef.APIVersion); err == nil && gv.Group == "" && s.ScaleTargetRef.Kind != "ReplicationController" {
		errs = append(errs, field.Invalid(at.Child("scaleTargetRef", "apiVersion"), s.ScaleTargetRef.APIVersion, "apiVersion must specify API group"))
	}
	for i := range s.Metrics {
		errs = append(errs, validateMetric(&s.Metrics[i], at.Child("metrics").Index(i))...)
	}
	if s.MinReplicas != nil && least == 0 && !MeasuresWithoutPods(s) {
		errs = append(errs, field.Forbidden(at.Child("metrics"),
			"must specify at least one Object or External metric to support scaling to zero replicas"))
	}
	if b := s.Behavior; b != nil {
		errs = append(errs, validateScalingRules(b.ScaleUp, at.Child("behavior", "scaleUp"))...)
		errs = append(errs, validateScalingRules(b.ScaleDown, at.Child("behavior", "scaleDown"))...)
	}
	return errs
}

// MeasuresWithoutPods reports whether an autoscaler has a metric with a value that does not come
// from the pods of its target. Only such an autoscaler can scale its target to zero and back.
func MeasuresWithoutPods(s *autoscalingv2.HorizontalPodAutoscalerSpec) bool {
	return slices.ContainsFunc(s.Metrics, func(m autoscalingv2.MetricSpec) bool {
		return m.Type == autoscalingv2.ObjectMetricSourceType || m.Type == autoscalingv2.ExternalMetricSourceType
	})
}

func validateAutoscalerStatus(current, desired int32) field.ErrorList {
	at := field.NewPath("status")
	return append(fieldrules.NonNegative(current, at.Child("currentReplicas")),
		fieldrules.NonNegative(desired, at.Child("desiredReplicas"))...)
}

// validateSegment validates a required name that is used as a URL path segment. absent is the
// error's detail if it is empty.
func validateSegment(name, absent string, at *field.Path) field.ErrorList {
	if name == "" {
		return field.ErrorList{field.Required(at, absent)}
	}
	return fieldrules.Invalid(at, name, path.IsValidPathSegmentName(name))
}

func validateScaleRef(r autoscalingv2.CrossVersionObjectReference, at *field.Path) field.ErrorList {
	errs := append(validateSegment(r.Kind, "", at.Child("kind")), validateSegment(r.Name, "", at.Child("name"))...)
	if _, err := schema.ParseGroupVersion(r.APIVersion); err != nil {
		errs = append(errs, field.Invalid(at.Child("apiVersion"), r.APIVersion, err.Error()))
	}
	return errs
}

func validateScalingRules(r *autoscalingv2.HPAScalingRules, at *field.Path) field.ErrorList {
	if r == nil {
		return nil
	}
	var errs field.ErrorList
	if w := r.StabilizationWindowSeconds; w != nil && *w < 0 {
		errs = append(errs, field.Invalid(at.Child("stabilizationWindowSeconds"), *w, "must be greater than or equal to zero"))
	} else if w != nil && *w > maxStabilizationWindow {
		errs = append(errs, field.Invalid(at.Child("stabilizationWindowSeconds"), *w, fmt.Sprintf("must be less than or equal to %d", maxStabilizationWindow)))
	}
	if p := r.SelectPolicy; p != nil {
		errs = append(errs, supported(*p, at.Child("selectPolicy"),
			autoscalingv2.DisabledPolicySelect, autoscalingv2.MaxChangePolicySelect, autoscalingv2.MinChangePolicySelect)...)
	}
	if r.Tolerance != nil && r.Tolerance.Sign() < 0 {
		errs = append(errs, field.Invalid(at.Child("tolerance"), r.Tolerance.String(), "must be greater than or equal to 0"))
	}
	at = at.Child("policies")
	if len(r.Policies) == 0 {
		errs = append(errs, field.Required(at, "must specify at least one Policy"))
	}
	for i, p := range r.Policies {
		here := at.Index(i)
		errs = append(errs, supported(p.Type, here.Child("type"), autoscalingv2.PercentScalingPolicy, autoscalingv2.PodsScalingPolicy)...)
		if p.Value <= 0 {
			errs = append(errs, field.Invalid(here.Child("value"), p.Value, "must be greater than zero"))
		}
		switch {
		case p.PeriodSeconds <= 0:
			errs = append(errs, field.Invalid(here.Child("periodSeconds"), p.PeriodSeconds, "must be greater than zero"))
		case p.PeriodSeconds > maxPolicyPeriod:
			errs = append(errs, field.Invalid(here.Child("periodSeconds"), p.PeriodSeconds, fmt.Sprintf("must be less than or equal to %d", maxPolicyPeriod)))
		}
	}
	return errs
}

// supported returns an error for a value that is not allowed, including an empty value.
func supported[T ~string](v T, at *field.Path, allowed ...T) field.ErrorList {
	if slices.Contains(allowed, v) {
		return nil
	}
	return field.ErrorList{field.NotSupported(at, v, allowed)}
}

// validateMetric validates a metric, which must have exactly the source that its type names.
func validateMetric(m *autoscalingv2.MetricSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if m.Type == "" {
		errs = append(errs, field.Required(at.Child("type"), "must specify a metric source type"))
	}
	sources := []struct {
		name string
		kind autoscalingv2.MetricSourceType
		set  bool
		ok   func(at *field.Path) field.ErrorList
	}{
		{"object", autoscalingv2.ObjectMetricSourceType, m.Object != nil, func(at *field.Path) field.ErrorList { return validateObjectMetric(m.Object, at) }},
		{"external", autoscalingv2.ExternalMetricSourceType, m.External != nil, func(at *field.Path) field.ErrorList { return validateExternalMetric(m.External, at) }},
		{"pods", autoscalingv2.PodsMetricSourceType, m.Pods != nil, func(at *field.Path) field.ErrorList { return validatePodsMetric(m.Pods, at) }},
		{"resource", autoscalingv2.ResourceMetricSourceType, m.Resource != nil, func(at *field.Path) field.ErrorList {
			return validateResourceMetric(string(m.Resource.Name), &m.Resource.Target, at)
		}},
		{"containerResource", autoscalingv2.ContainerResourceMetricSourceType, m.ContainerResource != nil, func(at *field.Path) field.ErrorList {
			return validateContainerMetric(m.ContainerResource, at)
		}},
	}
	kinds := []autoscalingv2.MetricSourceType{
		autoscalingv2.ContainerResourceMetricSourceType, autoscalingv2.ExternalMetricSourceType, autoscalingv2.ObjectMetricSourceType,
		autoscalingv2.PodsMetricSourceType, autoscalingv2.ResourceMetricSourceType,
	}
	errs = append(errs, supported(m.Type, at.Child("type"), kinds...)...)
	given := 0
	for _, s := range sources {
		if s.set {
			if given++; given == 1 {
				errs = append(errs, s.ok(at.Child(s.name))...)
			}
		}
	}
	for _, s := range sources {
		switch {
		case s.kind == m.Type && !s.set:
			errs = append(errs, field.Required(at.Child(s.name), "must populate information for the given metric source"))
		case s.kind != m.Type && s.set && given > 1:
			errs = append(errs, field.Forbidden(at.Child(s.name), "must populate the given metric source only"))
		}
	}
	return errs
}

func validateObjectMetric(m *autoscalingv2.ObjectMetricSource, at *field.Path) field.ErrorList {
	errs := validateScaleRef(m.DescribedObject, at.Child("describedObject"))
	errs = append(errs, validateMetricName(m.Metric, at.Child("metric"))...)
	errs = append(errs, validateTarget(&m.Target, at.Child("target"))...)
	if m.Target.Value == nil && m.Target.AverageValue == nil {
		errs = append(errs, field.Required(at.Child("target", "averageValue"), "must set either a target value or averageValue"))
	}
	return errs
}

func validateExternalMetric(m *autoscalingv2.ExternalMetricSource, at *field.Path) field.ErrorList {
	errs := validateMetricName(m.Metric, at.Child("metric"))
	errs = append(errs, validateTarget(&m.Target, at.Child("target"))...)
	switch {
	case m.Target.Value == nil && m.Target.AverageValue == nil:
		errs = append(errs, field.Required(at.Child("target", "averageValue"), "must set either a target value for metric or a per-pod target"))
	case m.Target.Value != nil && m.Target.AverageValue != nil:
		errs = append(errs, field.Forbidden(at.Child("target", "value"), "may not set both a target value for metric and a per-pod target"))
	}
	return errs
}

func validatePodsMetric(m *autoscalingv2.PodsMetricSource, at *field.Path) field.ErrorList {
	errs := validateMetricName(m.Metric, at.Child("metric"))
	errs = append(errs, validateTarget(&m.Target, at.Child("target"))...)
	if m.Target.AverageValue == nil {
		errs = append(errs, field.Required(at.Child("target", "averageValue"), "must specify a positive target averageValue"))
	}
	return errs
}

func validateResourceMetric(name string, t *autoscalingv2.MetricTarget, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if name == "" {
		errs = append(errs, field.Required(at.Child("name"), "must specify a resource name"))
	}
	return append(errs, validateShare(t, at.Child("target"))...)
}

func validateContainerMetric(m *autoscalingv2.ContainerResourceMetricSource, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if m.Name == "" {
		errs = append(errs, field.Required(at.Child("name"), "must specify a resource name"))
	} else {
		errs = append(errs, podspec.ValidateContainerResourceName(m.Name, at.Child("name"))...)
	}
	if m.Container == "" {
		errs = append(errs, field.Required(at.Child("container"), "must specify a container"))
	} else {
		errs = append(errs, fieldrules.Invalid(at.Child("container"), m.Container,
			utilvalidation.IsDNS1123Label(m.Container))...)
	}
	return append(errs, validateShare(&m.Target, at.Child("target"))...)
}

// validateShare validates a target that is either a utilization of the requests or an average
// value.
func validateShare(t *autoscalingv2.MetricTarget, at *field.Path) field.ErrorList {
	errs := validateTarget(t, at)
	switch {
	case t.AverageUtilization == nil && t.AverageValue == nil:
		errs = append(errs, field.Required(at.Child("averageUtilization"), "must set either a target raw value or a target utilization"))
	case t.AverageUtilization != nil && t.AverageValue != nil:
		errs = append(errs, field.Forbidden(at.Child("averageValue"), "may not set both a target raw value and a target utilization"))
	}
	return errs
}

func validateTarget(t *autoscalingv2.MetricTarget, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	if t.Type == "" {
		errs = append(errs, field.Required(at.Child("type"), "must specify a metric target type"))
	}
	switch t.Type {
	case autoscalingv2.UtilizationMetricType, autoscalingv2.ValueMetricType, autoscalingv2.AverageValueMetricType:
	default:
		errs = append(errs, field.Invalid(at.Child("type"), t.Type, "must be either Utilization, Value, or AverageValue"))
	}
	positive := func(name string, q *resource.Quantity) {
		if q != nil && q.Sign() <= 0 {
			errs = append(errs, field.Invalid(at.Child(name), q.String(), "must be positive"))
		}
	}
	positive("value", t.Value)
	positive("averageValue", t.AverageValue)
	if u := t.AverageUtilization; u != nil && *u < 1 {
		errs = append(errs, field.Invalid(at.Child("averageUtilization"), *u, "must be greater than 0"))
	}
	return errs
}

func validateMetricName(m autoscalingv2.MetricIdentifier, at *field.Path) field.ErrorList {
	errs := validateSegment(m.Name, "must specify a metric name", at.Child("name"))
	if m.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabelSelector(m.Selector, metavalidation.LabelSelectorValidationOptions{}, at.Child("selector"))...)
	}
	return errs
}
