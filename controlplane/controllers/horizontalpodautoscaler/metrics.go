package horizontalpodautoscaler

import (
	"fmt"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/internal/saturate"
)

// proposal is the number of replicas that one metric of an autoscaler requires, or an error.
type proposal struct {
	replicas int32
	name     string // description of the metric for messages
	status   autoscalingv2.MetricStatus
	err      error
}

// failureReason returns the reason of the event and of the condition that report an unusable metric
// of this type.
func failureReason(t autoscalingv2.MetricSourceType) string {
	switch t {
	case autoscalingv2.ResourceMetricSourceType, autoscalingv2.ContainerResourceMetricSourceType,
		autoscalingv2.PodsMetricSourceType,
		autoscalingv2.ObjectMetricSourceType, autoscalingv2.ExternalMetricSourceType:
		return "FailedGet" + string(t) + "Metric"
	}
	return "InvalidMetricSourceType"
}

// proposeReplicas returns the number of replicas that metric m requires for its current values r.
func (s Snapshot) proposeReplicas(m *autoscalingv2.MetricSpec, r Reading) proposal {
	p := proposal{status: autoscalingv2.MetricStatus{Type: m.Type}}
	if r.Err != nil {
		p.err = r.Err
		return p
	}
	switch {
	case m.Type == autoscalingv2.ResourceMetricSourceType && m.Resource != nil:
		now := &autoscalingv2.ResourceMetricStatus{Name: m.Resource.Name}
		p.status.Resource, p.name = now, string(m.Resource.Name)+" resource"
		s.proposeResource(&p, m.Resource.Name, "", m.Resource.Target, r, &now.Current)
	case m.Type == autoscalingv2.ContainerResourceMetricSourceType && m.ContainerResource != nil:
		of := m.ContainerResource
		now := &autoscalingv2.ContainerResourceMetricStatus{Name: of.Name, Container: of.Container}
		p.status.ContainerResource, p.name = now, fmt.Sprintf("%s resource of container %s", of.Name, of.Container)
		s.proposeResource(&p, of.Name, of.Container, of.Target, r, &now.Current)
	case m.Type == autoscalingv2.PodsMetricSourceType && m.Pods != nil:
		now := &autoscalingv2.PodsMetricStatus{Metric: m.Pods.Metric}
		p.status.Pods, p.name = now, "pods metric "+m.Pods.Metric.Name
		s.proposeAverage(&p, "", m.Pods.Target, r, &now.Current)
	case m.Type == autoscalingv2.ObjectMetricSourceType && m.Object != nil:
		now := &autoscalingv2.ObjectMetricStatus{Metric: m.Object.Metric, DescribedObject: m.Object.DescribedObject}
		p.status.Object, p.name = now, m.Object.DescribedObject.Kind+" metric "+m.Object.Metric.Name
		s.proposeValue(&p, m.Object.Target, r, &now.Current)
	case m.Type == autoscalingv2.ExternalMetricSourceType && m.External != nil:
		now := &autoscalingv2.ExternalMetricStatus{Metric: m.External.Metric}
		p.status.External, p.name = now, "external metric "+m.External.Metric.Name
		s.proposeValue(&p, m.External.Target, r, &now.Current)
	default:
		p.err = fmt.Errorf("metric source type %q is unknown or its part is missing", m.Type)
	}
	return p
}

// proposeResource stores in p the number of replicas that a resource metric requires, and in
// current the metric's current value. If container is not "", only the usage of that container of
// each pod counts.
func (s Snapshot) proposeResource(p *proposal, name corev1.ResourceName, container string,
	t autoscalingv2.MetricTarget, r Reading,
	current *autoscalingv2.MetricValueStatus) {
	if t.AverageUtilization == nil {
		s.proposeAverage(p, name, t, r, current)
		return
	}
	requests, err := requestsOf(s.Pods, container, name)
	if err != nil {
		p.err = err
		return
	}
	p.name += " utilization (percentage of request)"
	l := s.resourceLoad(name, r)
	l.measure = utilizationOf(*t.AverageUtilization, requests)
	l.full = func(pod *corev1.Pod) int64 {
		return truncateToInt64(float64(requests[pod.Name]) * float64(max(100, *t.AverageUtilization)) / 100)
	}
	var u usage
	p.replicas, u, p.err = l.desiredReplicas()
	current.AverageUtilization, current.AverageValue = &u.percent, milliQuantity(u.average)
}

// proposeAverage stores in p the number of replicas that a metric with a target average per pod
// requires, and in current the current average.
func (s Snapshot) proposeAverage(p *proposal, name corev1.ResourceName, t autoscalingv2.MetricTarget, r Reading,
	current *autoscalingv2.MetricValueStatus) {
	if t.AverageValue == nil {
		p.err = fmt.Errorf("the target of %s has no averageValue", p.name)
		return
	}
	target := saturate.MilliValue(t.AverageValue)
	l := s.resourceLoad(name, r)
	l.measure = averageOf(target)
	l.full = func(*corev1.Pod) int64 { return target }
	var u usage
	p.replicas, u, p.err = l.desiredReplicas()
	current.AverageValue = milliQuantity(u.average)
}

// proposeValue stores in p the number of replicas that an Object or External metric requires, and
// in current the metric's current value.
func (s Snapshot) proposeValue(
	p *proposal, t autoscalingv2.MetricTarget, r Reading, current *autoscalingv2.MetricValueStatus,
) {
	tolerance := toleranceOf(s.Autoscaler.Spec.Behavior, s.Options)
	switch {
	case t.AverageValue != nil && (t.Value == nil || t.Type != autoscalingv2.ValueMetricType):
		var average int64
		p.replicas, average, p.err = replicasByAverage(r.Value, saturate.MilliValue(t.AverageValue), s.Target.Status,
			tolerance)
		current.AverageValue = milliQuantity(average)
	case t.Value != nil:
		p.replicas, p.err = replicasByValue(r.Value, saturate.MilliValue(t.Value), s.Target.Spec, s.Pods, tolerance)
		current.Value = milliQuantity(r.Value)
	default:
		p.err = fmt.Errorf("the target of %s has neither value nor averageValue", p.name)
	}
}

func (s Snapshot) resourceLoad(name corev1.ResourceName, r Reading) load {
	return load{current: s.Target.Spec, samples: r.Samples,
		groupedPods: groupPods(s.Pods, r.Samples, name, s.Now, s.Options),
		tolerance:   toleranceOf(s.Autoscaler.Spec.Behavior, s.Options)}
}

func milliQuantity(v int64) *resource.Quantity {
	return resource.NewMilliQuantity(v, resource.DecimalSI)
}
