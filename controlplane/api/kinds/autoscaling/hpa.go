// Package autoscaling describes the kinds of the API group autoscaling.
package autoscaling

import (
	"context"
	"fmt"
	"strings"
	"time"

	autoscalingv1 "k8s.io/api/autoscaling/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
)

func autoscalerNames(gv schema.GroupVersion) builder.Names {
	return builder.Names{
		GroupVersion: gv, Kind: "HorizontalPodAutoscaler", Plural: "horizontalpodautoscalers",
		Singular: "horizontalpodautoscaler",
		Short:    []string{"hpa"}, InAllCategory: true,
	}
}

// AutoscalerKinds returns the definitions of the kind HorizontalPodAutoscaler in v2 and v1. Objects
// are stored as v2. In v1, annotations contain the fields that v1 lacks.
func AutoscalerKinds() []*api.Kind {
	k := builder.New(autoscalerNames(autoscalingv2.SchemeGroupVersion),
		func(l *autoscalingv2.HorizontalPodAutoscalerList) *[]autoscalingv2.HorizontalPodAutoscaler {
			return &l.Items
		})
	k.Writes.Default = builder.Default(defaultAutoscaler)
	builder.SeparateSpecAndStatus(k,
		func(h *autoscalingv2.HorizontalPodAutoscaler) *autoscalingv2.HorizontalPodAutoscalerSpec {
			return &h.Spec
		},
		func(h *autoscalingv2.HorizontalPodAutoscaler) *autoscalingv2.HorizontalPodAutoscalerStatus {
			return &h.Status
		})
	builder.AddValidation(k, func(h *autoscalingv2.HorizontalPodAutoscaler) field.ErrorList {
		return validateAutoscalerSpec(&h.Spec, field.NewPath("spec"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		s := &obj.(*autoscalingv2.HorizontalPodAutoscaler).Status
		return append(validateMeta(obj, old), validateAutoscalerStatus(s.CurrentReplicas, s.DesiredReplicas)...)
	}
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Reference"),
		builder.StringColumn("Targets"),
		builder.StringColumn("MinPods"), builder.StringColumn("MaxPods"), builder.StringColumn("Replicas"),
		builder.AgeColumn)
	k.Lists.Row = builder.Row(autoscalerRow)
	return []*api.Kind{k, firstAutoscalerKind(k)}
}

// firstAutoscalerKind returns the definition of the v1 kind. Objects of the v1 kind are converted
// from and to v2. hub is the v2 kind.
func firstAutoscalerKind(hub *api.Kind) *api.Kind {
	type v1 = *autoscalingv1.HorizontalPodAutoscaler
	k := builder.New(autoscalerNames(autoscalingv1.SchemeGroupVersion),
		func(l *autoscalingv1.HorizontalPodAutoscalerList) *[]autoscalingv1.HorizontalPodAutoscaler {
			return &l.Items
		})
	k.Storage = hub.Storage
	k.Writes.Default = builder.Default(func(h v1) { builder.SetDefaultPtr(&h.Spec.MinReplicas, 1) })
	k.Storage.Known = append(k.Storage.Known, api.Version{
		GVK: k.GVK, New: k.Type.New, Shallow: k.Type.Ops.Shallow, Default: k.Writes.Default,
		ToHub: func(o api.Object) (api.Object, error) { return autoscalerFromV1(o.(v1)) },
	})
	k.Conversion = &api.Conversion{
		From: api.ConvertEach(func(o api.Object) (api.Object, error) {
			return autoscalerToV1(o.(*autoscalingv2.HorizontalPodAutoscaler))
		}),
		To: func(_ context.Context, o api.Object) (api.Object, error) { return autoscalerFromV1(o.(v1)) },
	}
	builder.SeparateStatus(k, func(h v1) *autoscalingv1.HorizontalPodAutoscalerStatus { return &h.Status },
		builder.Accessors[v1]{
			Spec: func(h v1) any { return [2]any{h.Spec, selectKeys(h.Annotations, autoscalerSpecNotes)} },
			CopySpec: func(obj, old v1) {
				obj.Spec = *old.Spec.DeepCopy()
				obj.Annotations = replaceKeys(obj.Annotations, old.Annotations, autoscalerSpecNotes)
			},
			Status: func(obj, old v1) {
				if old == nil {
					obj.Status = autoscalingv1.HorizontalPodAutoscalerStatus{}
					obj.Annotations = replaceKeys(obj.Annotations, nil, autoscalerStatusNotes)
					return
				}
				obj.Status = *old.Status.DeepCopy()
				obj.Annotations = replaceKeys(obj.Annotations, old.Annotations, autoscalerStatusNotes)
			},
		})
	builder.AddValidation(k, func(h v1) field.ErrorList {
		whole, err := autoscalerFromV1(h)
		if err != nil {
			return field.ErrorList{field.Invalid(field.NewPath("metadata", "annotations"),
				field.OmitValueType{}, err.Error())}
		}
		return validateAutoscalerSpec(&whole.Spec, field.NewPath("spec"))
	})
	validateMeta := k.Subresources["status"].ValidateUpdate
	k.Subresources["status"].ValidateUpdate = func(obj, old api.Object) field.ErrorList {
		s := &obj.(v1).Status
		errs := append(validateMeta(obj, old), validateAutoscalerStatus(s.CurrentReplicas, s.DesiredReplicas)...)
		if _, err := autoscalerFromV1(obj.(v1)); err != nil {
			errs = append(errs, field.Invalid(field.NewPath("metadata", "annotations"),
				field.OmitValueType{}, err.Error()))
		}
		return errs
	}
	k.Lists.Columns = hub.Lists.Columns
	k.Lists.Row = builder.Row(func(h v1, now time.Time) []any {
		whole, err := autoscalerFromV1(h)
		if err != nil {
			whole = &autoscalingv2.HorizontalPodAutoscaler{ObjectMeta: h.ObjectMeta}
		}
		return autoscalerRow(whole, now)
	})
	return k
}

const defaultCPUUtilization = 80

func defaultAutoscaler(h *autoscalingv2.HorizontalPodAutoscaler) {
	builder.SetDefaultPtr(&h.Spec.MinReplicas, 1)
	if len(h.Spec.Metrics) == 0 {
		h.Spec.Metrics = []autoscalingv2.MetricSpec{cpuMetric(defaultCPUUtilization)}
	}
	b := h.Spec.Behavior
	if b == nil {
		return
	}
	builder.SetDefaultPtr(&b.ScaleUp, autoscalingv2.HPAScalingRules{})
	builder.SetDefaultPtr(&b.ScaleUp.StabilizationWindowSeconds, 0)
	builder.SetDefaultPtr(&b.ScaleDown, autoscalingv2.HPAScalingRules{})
	for _, r := range []*autoscalingv2.HPAScalingRules{b.ScaleUp, b.ScaleDown} {
		builder.SetDefaultPtr(&r.SelectPolicy, autoscalingv2.MaxChangePolicySelect)
		if r.Policies != nil {
			continue
		}
		r.Policies = []autoscalingv2.HPAScalingPolicy{{Type: autoscalingv2.PercentScalingPolicy, Value: 100,
			PeriodSeconds: 15}}
		if r == b.ScaleUp {
			r.Policies = append([]autoscalingv2.HPAScalingPolicy{{Type: autoscalingv2.PodsScalingPolicy, Value: 4,
				PeriodSeconds: 15}}, r.Policies...)
		}
	}
}

// cpuMetric returns the v2 metric for the only metric field of v1: the average CPU utilization.
func cpuMetric(percent int32) autoscalingv2.MetricSpec {
	return autoscalingv2.MetricSpec{
		Type: autoscalingv2.ResourceMetricSourceType,
		Resource: &autoscalingv2.ResourceMetricSource{
			Name:   corev1.ResourceCPU,
			Target: autoscalingv2.MetricTarget{Type: autoscalingv2.UtilizationMetricType, AverageUtilization: &percent},
		},
	}
}

func autoscalerRow(h *autoscalingv2.HorizontalPodAutoscaler, now time.Time) []any {
	least := builder.Unset
	if h.Spec.MinReplicas != nil {
		least = fmt.Sprint(*h.Spec.MinReplicas)
	}
	return []any{h.Name, h.Spec.ScaleTargetRef.Kind + "/" + h.Spec.ScaleTargetRef.Name,
		showMetrics(h.Spec.Metrics, h.Status.CurrentMetrics), least, int64(h.Spec.MaxReplicas),
		int64(h.Status.CurrentReplicas), builder.Age(h, now)}
}

// shownMetrics is the maximum number of metrics in a table row.
const shownMetrics = 2

func showMetrics(specs []autoscalingv2.MetricSpec, statuses []autoscalingv2.MetricStatus) string {
	if len(specs) == 0 {
		return builder.None
	}
	var list []string
	for i := range specs {
		var now autoscalingv2.MetricStatus
		if i < len(statuses) {
			now = statuses[i]
		}
		list = append(list, showMetric(&specs[i], &now))
	}
	if more := len(list) - shownMetrics; more > 0 {
		return fmt.Sprintf("%s + %d more...", strings.Join(list[:shownMetrics], ", "), more)
	}
	return strings.Join(list, ", ")
}

// showMetric returns the cell text of one metric: "current value/target value".
func showMetric(m *autoscalingv2.MetricSpec, status *autoscalingv2.MetricStatus) string {
	var current *autoscalingv2.MetricValueStatus
	switch {
	case m.Type == autoscalingv2.ExternalMetricSourceType && m.External != nil:
		if status.External != nil {
			current = &status.External.Current
		}
		return showValue(&m.External.Target, current)
	case m.Type == autoscalingv2.ObjectMetricSourceType && m.Object != nil:
		if status.Object != nil {
			current = &status.Object.Current
		}
		return showValue(&m.Object.Target, current)
	case m.Type == autoscalingv2.PodsMetricSourceType && m.Pods != nil:
		measured := builder.Unknown
		if status.Pods != nil {
			measured = showQuantity(status.Pods.Current.AverageValue)
		}
		return measured + "/" + showQuantity(m.Pods.Target.AverageValue)
	case m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil:
		if status.Resource != nil {
			current = &status.Resource.Current
		}
		return showShare(m.Resource.Name, &m.Resource.Target, current)
	case m.Type == autoscalingv2.ContainerResourceMetricSourceType && m.ContainerResource != nil:
		if status.ContainerResource != nil {
			current = &status.ContainerResource.Current
		}
		return showShare(m.ContainerResource.Name, &m.ContainerResource.Target, current)
	}
	return "<unknown type>"
}

func showValue(t *autoscalingv2.MetricTarget, current *autoscalingv2.MetricValueStatus) string {
	measured := builder.Unknown
	if t.AverageValue != nil {
		if current != nil && current.AverageValue != nil {
			measured = current.AverageValue.String()
		}
		return measured + "/" + t.AverageValue.String() + " (avg)"
	}
	if current != nil {
		measured = showQuantity(current.Value)
	}
	return measured + "/" + showQuantity(t.Value)
}

func showShare(name corev1.ResourceName, t *autoscalingv2.MetricTarget,
	current *autoscalingv2.MetricValueStatus) string {
	measured, wanted := builder.Unknown, "<auto>"
	switch {
	case t.AverageValue != nil:
		if current != nil {
			measured = showQuantity(current.AverageValue)
		}
		wanted = t.AverageValue.String()
	default:
		if current != nil && current.AverageUtilization != nil {
			measured = fmt.Sprintf("%d%%", *current.AverageUtilization)
		}
		if t.AverageUtilization != nil {
			wanted = fmt.Sprintf("%d%%", *t.AverageUtilization)
		}
	}
	return fmt.Sprintf("%s: %s/%s", name, measured, wanted)
}

// showQuantity formats a quantity. As in Kubernetes, nil is formatted as "<nil>".
func showQuantity(q *resource.Quantity) string {
	if q == nil {
		return "<nil>"
	}
	return q.String()
}
