package why

import (
	"fmt"
	"slices"
	"strings"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
)

// Scaled is the object that a HorizontalPodAutoscaler scales (spec.scaleTargetRef), as far as it
// could be read.
type Scaled struct {
	Kind   string   // for commands, such as "deployment"; empty if not supported
	Found  bool     // whether the object exists
	Others []string // names of all objects of the same kind in the namespace
}

// explainAutoscaler returns the Findings about a HorizontalPodAutoscaler. It returns one Finding if
// the object is being deleted, if its latest generation was not processed, or if AbleToScale or
// ScalingActive is False. Otherwise it returns Findings for failed metrics, for stabilization
// windows and for limits of the number of replicas. It returns nil if there is no such problem.
func (w scalingExplainer) explainAutoscaler(h *autoscalingv2.HorizontalPodAutoscaler) []Finding {
	if f := explainDeletion(h, "horizontalpodautoscaler"); f != nil {
		return []Finding{*f}
	}
	if h.Status.ObservedGeneration == nil || *h.Status.ObservedGeneration < h.Generation {
		return []Finding{{Object: autoscalerName(h), What: "its last change is not taken up yet",
			Because: "the leader judges every autoscaler each 15 seconds, and this one not yet",
			Mend:    []string{"kctl cluster status"}}}
	}
	able, active := hpaCondition(h, autoscalingv2.AbleToScale), hpaCondition(h, autoscalingv2.ScalingActive)
	switch {
	case able.Status == corev1.ConditionFalse:
		return []Finding{w.explainUnscalable(h, able)}
	case active.Status == corev1.ConditionFalse:
		return []Finding{w.explainUnmeasured(h, active)}
	}
	var out []Finding
	for _, f := range []*Finding{w.explainPartialMetrics(h), w.explainStabilization(h, able),
		explainReplicaLimit(h, hpaCondition(h, autoscalingv2.ScalingLimited))} {
		if f != nil {
			out = append(out, *f)
		}
	}
	return out
}

func autoscalerName(h *autoscalingv2.HorizontalPodAutoscaler) string {
	return objectName("horizontalpodautoscaler", h)
}

func hpaCondition(
	h *autoscalingv2.HorizontalPodAutoscaler, t autoscalingv2.HorizontalPodAutoscalerConditionType,
) autoscalingv2.HorizontalPodAutoscalerCondition {
	for _, c := range h.Status.Conditions {
		if c.Type == t {
			return c
		}
	}
	return autoscalingv2.HorizontalPodAutoscalerCondition{}
}

func autoscalerWell(h *autoscalingv2.HorizontalPodAutoscaler) string {
	return fmt.Sprintf("%d replicas, which is what its metrics call for, within %d and %d", h.Status.CurrentReplicas,
		minReplicasOf(h), h.Spec.MaxReplicas)
}

func minReplicasOf(h *autoscalingv2.HorizontalPodAutoscaler) int32 {
	return ptr.Deref(h.Spec.MinReplicas, 1)
}

// scaleTarget returns the scaled object of h as a command argument, such as "deployment/web".
func scaleTarget(h *autoscalingv2.HorizontalPodAutoscaler) string {
	return strings.ToLower(h.Spec.ScaleTargetRef.Kind) + "/" + h.Spec.ScaleTargetRef.Name
}

// explainUnscalable returns the Finding for a HorizontalPodAutoscaler that cannot read or scale its
// target. c is the condition AbleToScale, with status False.
func (w scalingExplainer) explainUnscalable(
	h *autoscalingv2.HorizontalPodAutoscaler, c autoscalingv2.HorizontalPodAutoscalerCondition,
) Finding {
	f := Finding{Object: autoscalerName(h), What: "cannot scale " + singleLine(scaleTarget(h)),
		Since: timeOrNil(c.LastTransitionTime), Because: singleLine(c.Message),
		Mend: []string{kctlCommand(h, "get %s", scaleTarget(h)),
			kctlCommand(h, "edit hpa %s   # spec.scaleTargetRef", h.Name)}}
	if t := w.world.Scale.Scaled; t != nil && t.Kind != "" && !t.Found {
		f.What = "has no target"
		f.Because = fmt.Sprintf("there is no %s %s in the namespace", t.Kind, singleLine(h.Spec.ScaleTargetRef.Name))
		if near := nearestWord(h.Spec.ScaleTargetRef.Name, slices.Clone(t.Others)); near != "" {
			f.Because += fmt.Sprintf("; there is one named %s", near)
			f.Mend = []string{kctlCommand(h, `patch hpa %s --type=merge -p '{"spec":{"scaleTargetRef":{"name":"%s"}}}'`,
				h.Name, near)}
		} else {
			f.Mend[0] = kctlCommand(h, "get %ss", t.Kind)
		}
	}
	return f
}

// explainUnmeasured returns the Finding for a HorizontalPodAutoscaler that is not active: its
// target has 0 replicas, its selector is invalid, or no metric is available. c is the condition
// ScalingActive, with status False.
func (w scalingExplainer) explainUnmeasured(
	h *autoscalingv2.HorizontalPodAutoscaler, c autoscalingv2.HorizontalPodAutoscalerCondition,
) Finding {
	f := Finding{Object: autoscalerName(h), What: "does not scale", Since: timeOrNil(c.LastTransitionTime),
		Because: singleLine(c.Message)}
	switch c.Reason {
	case "ScalingDisabled":
		f.What = "is switched off"
		f.Because = singleLine(scaleTarget(h)) +
			" is scaled to 0, which an autoscaler takes for a wish and leaves as it is"
		f.Mend = []string{kctlCommand(h, "scale %s --replicas=%d", scaleTarget(h), max(1, minReplicasOf(h)))}
	case "InvalidSelector", "AmbiguousSelector":
		f.Mend = []string{kctlCommand(h, "get hpa"),
			kctlCommand(h, "get %s -o yaml   # the pods that it selects must be its own", scaleTarget(h))}
	default:
		f.What = "does not know the load"
		f.Details, f.Mend = w.missingMetrics(h)
	}
	return f
}

// missingMetrics returns texts about the metrics of h: their sources, and the pods without usage or
// request. mend are commands that help to find or repair the missing metrics.
func (w scalingExplainer) missingMetrics(h *autoscalingv2.HorizontalPodAutoscaler) (details, mend []string) {
	add := func(detail string, commands ...string) {
		details = append(details, detail)
		for _, m := range commands {
			if !slices.Contains(mend, m) {
				mend = append(mend, m)
			}
		}
	}
	for i := range h.Spec.Metrics {
		switch m := &h.Spec.Metrics[i]; m.Type {
		case autoscalingv2.ResourceMetricSourceType, autoscalingv2.ContainerResourceMetricSourceType:
			w.missingResource(h, m, add)
		case autoscalingv2.PodsMetricSourceType:
			add(fmt.Sprintf("pods metric %s comes from custom.metrics.k8s.io, which an adapter in the cluster serves",
				singleLine(m.Pods.Metric.Name)), customAPI)
		case autoscalingv2.ObjectMetricSourceType:
			o := m.Object.DescribedObject
			add(fmt.Sprintf("metric %s of %s %s comes from custom.metrics.k8s.io, which an adapter in the cluster "+
				"serves", singleLine(m.Object.Metric.Name), singleLine(o.Kind), singleLine(o.Name)), customAPI)
		case autoscalingv2.ExternalMetricSourceType:
			add(fmt.Sprintf("metric %s comes from external.metrics.k8s.io, which an adapter in the cluster serves",
				singleLine(m.External.Metric.Name)), "kctl get apiservice v1beta1.external.metrics.k8s.io")
		}
	}
	return boundList(details), mend
}

const customAPI = "kctl get apiservice v1beta2.custom.metrics.k8s.io v1beta1.custom.metrics.k8s.io"

// missingResource calls add for each problem of the resource metric m of h. A problem is a pod
// without a request for the resource, or a pod without a usage sample. The arguments of add are a
// text and commands that repair the problem.
func (w scalingExplainer) missingResource(
	h *autoscalingv2.HorizontalPodAutoscaler, m *autoscalingv2.MetricSpec, add func(string, ...string),
) {
	resource, container, goal := corev1.ResourceName(""), "", autoscalingv2.MetricTarget{}
	if m.Resource != nil {
		resource, goal = m.Resource.Name, m.Resource.Target
	} else if m.ContainerResource != nil {
		resource, container, goal = m.ContainerResource.Name, m.ContainerResource.Container, m.ContainerResource.Target
	}
	source := fmt.Sprintf("use of %s comes from metrics.k8s.io, which is answered by a metrics-server where one is "+
		"installed and by this cluster's nodes otherwise", resource)
	if !w.world.hasList(Pods) {
		add(source, kctlCommand(h, "top pods"))
		return
	}
	if len(w.world.Pods) == 0 {
		add("its target has no pods", kctlCommand(h, "get %s", scaleTarget(h)))
		return
	}
	var unmeasured []string
	wrong := 0
	for i := range w.world.Pods {
		p := &w.world.Pods[i]
		if p.DeletionTimestamp != nil || api.IsPodTerminal(p) {
			continue
		}
		if c, none := withoutRequest(p, container, resource); c != "" && (none || goal.AverageUtilization != nil) {
			mend := kctlCommand(h, "set resources %s --requests=%s=%s   # or as much as it needs: a utilization is a "+
				"part of the request", scaleTarget(h), string(resource), exampleAmount(resource))
			if none {
				mend = kctlCommand(h, "edit hpa %s   # the container's name", h.Name)
			}
			if wrong++; wrong <= maxDetails {
				add(fmt.Sprintf("pod %s: %s", p.Name, c), mend)
			}
		}
		if w.world.hasList(PodMetrics) && w.world.Scale.NotServed == "" &&
			!slices.Contains(w.world.Scale.Measured, p.Name) {
			unmeasured = append(unmeasured, fmt.Sprintf("pod %s (%s) has no sample", p.Name, p.Status.Phase))
		}
	}
	if w.world.Scale.NotServed != "" {
		unmeasured = []string{"it does not answer: " + singleLine(w.world.Scale.NotServed)}
	}
	if len(unmeasured) > 0 || !w.world.hasList(PodMetrics) {
		add(source)
	}
	for _, text := range boundList(unmeasured) {
		add(text, kctlCommand(h, "top pods"), "kctl get apiservice v1beta1.metrics.k8s.io")
	}
	if wrong+len(unmeasured) == 0 && w.world.hasList(PodMetrics) {
		add("every pod has a sample now: the next look, within 15 seconds, should find them",
			kctlCommand(h, "why hpa %s", h.Name))
	}
}

// exampleAmount returns an example amount of a resource for a command.
func exampleAmount(resource corev1.ResourceName) string {
	if resource == corev1.ResourceMemory {
		return "64Mi"
	}
	return "100m"
}

// withoutRequest returns a text about the first container of p without a request for a resource. It
// returns "" if all containers have a request, or if the whole pod has one. If container is not
// empty, only the container of that name is checked. missing is true if p has no such container;
// the text then reports that.
func withoutRequest(p *corev1.Pod, container string, resource corev1.ResourceName) (text string, missing bool) {
	if r := p.Spec.Resources; r != nil && container == "" {
		if _, ok := r.Requests[resource]; ok {
			return "", false
		}
	}
	found := container == ""
	for i := range p.Spec.Containers {
		c := &p.Spec.Containers[i]
		if container != "" && c.Name != container {
			continue
		}
		found = true
		if _, ok := c.Resources.Requests[resource]; !ok {
			return fmt.Sprintf("container %s asks for no %s", c.Name, resource), false
		}
	}
	if !found {
		return "it has no container " + singleLine(container), true
	}
	return "", false
}

// explainPartialMetrics returns a Finding if a recent event reports that a metric of h failed,
// while other metrics still determine the number of replicas. It returns nil otherwise.
func (w scalingExplainer) explainPartialMetrics(h *autoscalingv2.HorizontalPodAutoscaler) *Finding {
	e := w.world.newestEvent(h.UID, "FailedGetResourceMetric", "FailedGetContainerResourceMetric",
		"FailedGetPodsMetric", "FailedGetObjectMetric",
		"FailedGetExternalMetric", "InvalidMetricSourceType")
	if e == nil || w.world.Now.Sub(lastSeen(e)) > metricFailureLifetime {
		return nil
	}
	f := &Finding{Object: autoscalerName(h), What: "goes by some of its metrics only, and scales up alone",
		Because: singleLine(e.Message)}
	f.Details, f.Mend = w.missingMetrics(h)
	return f
}

// metricFailureLifetime is how long after its last failure event a metric still counts as failed.
// It is longer than the evaluation interval of 15 seconds, because repeated events are recorded
// less often.
const metricFailureLifetime = time.Minute

// explainStabilization returns a Finding if a stabilization window keeps the number of replicas of
// h, and nil otherwise. The condition AbleToScale, which the caller passes, then has the reason
// ScaleDownStabilized or ScaleUpStabilized.
func (w scalingExplainer) explainStabilization(
	h *autoscalingv2.HorizontalPodAutoscaler, able autoscalingv2.HorizontalPodAutoscalerCondition,
) *Finding {
	way, window, wanted := "scaleDown", int32(300), "fewer"
	switch able.Reason {
	case "ScaleDownStabilized":
	case "ScaleUpStabilized":
		way, window, wanted = "scaleUp", 0, "more"
	default:
		return nil
	}
	if r := rulesFor(h, way); r != nil && r.StabilizationWindowSeconds != nil {
		window = *r.StabilizationWindowSeconds
	}
	other := map[string]string{"fewer": "more", "more": "fewer"}[wanted]
	return &Finding{Object: autoscalerName(h),
		What: fmt.Sprintf("keeps %d replicas, though its metrics call for %s", h.Status.DesiredReplicas, wanted),
		Because: fmt.Sprintf("within the stabilization window of %d s they called for %s: it waits until they have "+
			"called for %s throughout it", window, other, wanted),
		Mend: []string{kctlCommand(h,
			`patch hpa %s --type=merge -p '{"spec":{"behavior":{"%s":{"stabilizationWindowSeconds":%d}}}}'   # `+
				`a shorter window`,
			h.Name, way, min(60, window/2))}}
}

func rulesFor(h *autoscalingv2.HorizontalPodAutoscaler, way string) *autoscalingv2.HPAScalingRules {
	switch b := h.Spec.Behavior; {
	case b == nil:
		return nil
	case way == "scaleUp":
		return b.ScaleUp
	default:
		return b.ScaleDown
	}
}

// explainReplicaLimit returns a Finding if minReplicas, maxReplicas or a scaling policy of h
// prevents the number of replicas that its metrics require. c is the condition ScalingLimited. It
// returns nil unless the condition is True.
func explainReplicaLimit(
	h *autoscalingv2.HorizontalPodAutoscaler, c autoscalingv2.HorizontalPodAutoscalerCondition,
) *Finding {
	if c.Status != corev1.ConditionTrue {
		return nil
	}
	f := &Finding{Object: autoscalerName(h), Since: timeOrNil(c.LastTransitionTime), Because: singleLine(c.Message)}
	switch c.Reason {
	case "TooManyReplicas":
		f.What, f.Because = fmt.Sprintf("has its most replicas, %d", h.Spec.MaxReplicas), "its metrics call for more"
		f.Mend = []string{kctlCommand(h, `patch hpa %s --type=merge -p '{"spec":{"maxReplicas":%d}}'`, h.Name,
			2*h.Spec.MaxReplicas)}
	case "TooFewReplicas":
		f.What, f.Because = fmt.Sprintf("has its fewest replicas, %d", minReplicasOf(h)), "its metrics call for fewer"
		if minReplicasOf(h) > 1 {
			f.Mend = []string{kctlCommand(h, `patch hpa %s --type=merge -p '{"spec":{"minReplicas":%d}}'`, h.Name,
				minReplicasOf(h)/2)}
		}
	case "ScaleUpLimit":
		explainScalingPolicy(h, f, "scaleUp", "up", "more")
	case "ScaleDownLimit":
		explainScalingPolicy(h, f, "scaleDown", "down", "fewer")
	default:
		f.What = "is limited (" + singleLine(c.Reason) + ")"
		f.Mend = []string{kctlCommand(h, "describe hpa %s", h.Name)}
	}
	return f
}

// explainScalingPolicy fills Finding f for scaling policies of h that limit or disable scaling in
// one direction. field is the field of the policies, "scaleUp" or "scaleDown". direction ("up" or
// "down") and wanted ("more" or "fewer") are the words for the direction in the texts.
func explainScalingPolicy(h *autoscalingv2.HorizontalPodAutoscaler, f *Finding, field, direction, wanted string) {
	rules := rulesFor(h, field)
	f.What = fmt.Sprintf("scales %s no faster than its policies let it", direction)
	f.Because = fmt.Sprintf("its metrics call for %s, and spec.behavior.%s allows ", wanted, field)
	f.Mend = []string{kctlCommand(h, "edit hpa %s   # spec.behavior.%s.policies", h.Name, field)}
	if rules == nil || len(rules.Policies) == 0 {
		f.Because += map[string]string{"scaleUp": "the double or 4 pods more within 15 s, as nothing else is said",
			"scaleDown": "100% within 15 s, as nothing else is said"}[field]
		return
	}
	choose := ptr.Deref(rules.SelectPolicy, autoscalingv2.MaxChangePolicySelect)
	if choose == autoscalingv2.DisabledPolicySelect {
		f.What = fmt.Sprintf("does not scale %s", direction)
		f.Because = fmt.Sprintf("its metrics call for %s, and spec.behavior.%s.selectPolicy is Disabled", wanted, field)
		f.Mend = []string{kctlCommand(h,
			`patch hpa %s --type=merge -p '{"spec":{"behavior":{"%s":{"selectPolicy":"Max"}}}}'`, h.Name, field)}
		return
	}
	var parts []string
	for _, p := range rules.Policies {
		much := fmt.Sprintf("%d%%", p.Value)
		if p.Type == autoscalingv2.PodsScalingPolicy {
			much = countNoun(int(p.Value), "pod")
		}
		parts = append(parts, fmt.Sprintf("%s within %d s", much, p.PeriodSeconds))
	}
	most := "the greater of "
	if choose == autoscalingv2.MinChangePolicySelect {
		most = "the lesser of "
	}
	if len(parts) == 1 {
		most = ""
	}
	f.Because += most + strings.Join(boundList(parts), " and ")
}
