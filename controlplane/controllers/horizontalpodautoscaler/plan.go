// Package horizontalpodautoscaler scales workloads by their load. It computes the number of
// replicas that brings the metrics to their targets, and limits it by the stabilization windows,
// policies and bounds of the autoscaler.
package horizontalpodautoscaler

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/kinds/autoscaling"
)

// Options are settings of the controller that apply to all autoscalers.
type Options struct {
	// largest deviation of the ratio of current to target value from 1 at which the number of
	// replicas is not changed
	Tolerance float64
	// time after the start of a pod during which its CPU usage may be caused by the start
	CPUInitialization time.Duration
	// a pod that became unready within this time after its start counts as never ready
	InitialReadiness       time.Duration
	DownscaleStabilization time.Duration // scale-down window for autoscalers that specify none
}

// Defaults are the default options of Kubernetes.
var Defaults = Options{Tolerance: 0.1, CPUInitialization: 5 * time.Minute, InitialReadiness: 30 * time.Second,
	DownscaleStabilization: 5 * time.Minute}

// Target is the scale subresource of the object that an autoscaler scales.
type Target struct {
	Spec, Status int32
	Selector     string
}

// Reading is the current value of one metric of an autoscaler, or the error of reading it.
type Reading struct {
	Samples Samples // values by pod, for metrics of type Resource, ContainerResource and Pods
	Value   int64   // value in thousandths, for metrics of type Object and External
	Err     error
}

// Snapshot is the input of PlanAutoscaler: the state of an autoscaler and of the object that it
// scales.
type Snapshot struct {
	Autoscaler *autoscalingv2.HorizontalPodAutoscaler
	Target     Target
	TargetErr  error         // error of reading the scale; Target is then invalid
	Pods       []*corev1.Pod // pods that the target's selector matches
	PodsErr    error         // error of parsing the selector
	Shared     []string      // names of other autoscalers that scale some of the same pods
	Readings   []Reading     // one for each element of spec.metrics; unused unless UsesMetrics returns true
	History    History
	Options    Options
	Now        time.Time
}

// Event is an event of the autoscaler.
type Event struct{ Type, Reason, Message string }

// Step is the result of PlanAutoscaler: the new status, the new replicas, and events to record.
type Step struct {
	Rescale  bool
	Replicas int32  // number of replicas to write to the scale subresource if Rescale is true
	Reason   string // reason of the change, for the event
	Status   autoscalingv2.HorizontalPodAutoscalerStatus
	Events   []Event
	History  History
	// Failure is the error that prevents the autoscaler from scaling, or nil.
	Failure error
}

// replicaBounds returns the minimum and maximum number of replicas in the spec of h.
func replicaBounds(h *autoscalingv2.HorizontalPodAutoscaler) (least, most int32) {
	least = 1
	if h.Spec.MinReplicas != nil {
		least = *h.Spec.MinReplicas
	}
	return least, h.Spec.MaxReplicas
}

// UsesMetrics reports whether the metrics of h decide the number of replicas. It returns false
// while t is scaled to zero by a user, and while the current number is outside the bounds of h.
func UsesMetrics(h *autoscalingv2.HorizontalPodAutoscaler, t Target) bool {
	least, most := replicaBounds(h)
	return !switchedOff(h, t) && t.Spec >= least && t.Spec <= most
}

// switchedOff reports whether a user has scaled t to zero, which disables the autoscaler. If the
// autoscaler itself scaled t to zero, it may scale t up again.
func switchedOff(h *autoscalingv2.HorizontalPodAutoscaler, t Target) bool {
	if t.Spec != 0 {
		return false
	}
	least, _ := replicaBounds(h)
	own := slices.ContainsFunc(h.Status.Conditions, func(c autoscalingv2.HorizontalPodAutoscalerCondition) bool {
		return c.Type == autoscalingv2.ScaledToZero && c.Status == corev1.ConditionTrue
	})
	return !own || least == 0 && !autoscaling.MeasuresWithoutPods(&h.Spec)
}

// PlanAutoscaler returns the new number of replicas, the new status and the events of an
// autoscaler.
func PlanAutoscaler(s Snapshot) Step {
	step := Step{Status: *s.Autoscaler.Status.DeepCopy(), History: s.History}
	step.Status.ObservedGeneration = new(s.Autoscaler.Generation)
	if s.TargetErr != nil {
		s.setCondition(&step, autoscalingv2.AbleToScale, false, "FailedGetScale",
			fmt.Sprintf("the scale of the target cannot be read: %v", s.TargetErr))
		step.addWarning("FailedGetScale", "%v", s.TargetErr)
		step.Failure = s.TargetErr
		return step
	}
	s.setCondition(&step, autoscalingv2.AbleToScale, true, "SucceededGetScale", "the scale of the target was read")
	step.Status.CurrentReplicas = s.Target.Spec
	least, most := replicaBounds(s.Autoscaler)
	current := s.Target.Spec
	desired := current
	switch {
	case switchedOff(s.Autoscaler, s.Target):
		s.setCondition(&step, autoscalingv2.ScalingActive, false, "ScalingDisabled",
			"scaling is disabled since the replica count of the target is zero")
		step.Status.CurrentMetrics = nil
	case current > most:
		desired, step.Reason = most, "Current number of replicas above Spec.MaxReplicas"
		step.Status.CurrentMetrics = nil
	case current < least:
		desired, step.Reason = least, "Current number of replicas below Spec.MinReplicas"
		step.Status.CurrentMetrics = nil
	default:
		wanted, name, err := s.evaluateMetrics(&step)
		if err != nil {
			step.addWarning("FailedComputeMetricsReplicas", "%v", err)
			step.Failure = err
			return step
		}
		desired = s.limitReplicas(&step, wanted)
		step.Reason = "All metrics below target"
		if desired > current {
			step.Reason = name + " above target"
		}
	}
	step.Rescale, step.Replicas, step.Status.DesiredReplicas = desired != current, desired, desired
	if !step.Rescale {
		step.Reason = ""
	}
	return step
}

// Rescaled returns a copy of step that reports the result of writing step.Replicas to the scale
// subresource, in its status, events and history. err is the error of that write, or nil.
func (s Snapshot) Rescaled(step Step, err error) Step {
	step.Events = slices.Clip(step.Events)
	if err != nil {
		step.addWarning("FailedRescale", "New size: %d; reason: %s; error: %v", step.Replicas, step.Reason, err)
		s.setCondition(&step, autoscalingv2.AbleToScale, false, "FailedUpdateScale",
			fmt.Sprintf("the scale of the target cannot be written: %v", err))
		step.Status.DesiredReplicas = s.Autoscaler.Status.DesiredReplicas
		step.Failure = err
		return step
	}
	step.Events = append(step.Events, Event{corev1.EventTypeNormal, "SuccessfulRescale",
		fmt.Sprintf("New size: %d; reason: %s", step.Replicas, step.Reason)})
	s.setCondition(&step, autoscalingv2.AbleToScale, true, "SucceededRescale",
		fmt.Sprintf("the target was scaled to %d", step.Replicas))
	if s.Target.Spec > 0 && step.Replicas == 0 {
		s.setCondition(&step, autoscalingv2.ScaledToZero, true, "ScaledToZero",
			"the HPA controller scaled the workload to zero")
	} else {
		s.setCondition(&step, autoscalingv2.ScaledToZero, false, "NotScaledToZero",
			"the HPA controller did not scale the workload to zero")
	}
	at := metav1.NewTime(s.Now)
	step.Status.LastScaleTime = &at
	if by := step.Replicas - s.Target.Spec; by > 0 {
		step.History.Added = appendEntry(step.History.Added, HistoryEntry{s.Now, by})
	} else {
		step.History.Removed = appendEntry(step.History.Removed, HistoryEntry{s.Now, -by})
	}
	return step
}

// evaluateMetrics returns the largest number of replicas that a metric requires, and the name of
// that metric. It adds the values of all metrics to the status in step. A metric that cannot be
// read is ignored if other metrics require a scale-up. Otherwise it is an error, because the metric
// might require more replicas.
func (s Snapshot) evaluateMetrics(step *Step) (wanted int32, name string, err error) {
	if err := s.checkSelector(step); err != nil {
		return 0, "", err
	}
	specs := s.Autoscaler.Spec.Metrics
	statuses := make([]autoscalingv2.MetricStatus, len(specs))
	var failed int
	var first error
	var reason string
	for i := range specs {
		statuses[i].Type = specs[i].Type
		p := s.proposeReplicas(&specs[i], s.metricReading(i))
		if p.err != nil {
			why := failureReason(specs[i].Type)
			step.addWarning(why, "%v", p.err)
			if failed++; failed == 1 {
				first, reason = p.err, why
			}
			continue
		}
		statuses[i] = p.status
		if name == "" || p.replicas > wanted {
			wanted, name = p.replicas, p.name
		}
	}
	step.Status.CurrentMetrics = statuses
	if len(specs) == 0 {
		first, reason = errors.New("spec.metrics is empty: name a metric"), "InvalidMetricSourceType"
	}
	if failed == len(specs) || failed > 0 && wanted < s.Target.Spec {
		s.setCondition(step, autoscalingv2.ScalingActive, false, reason,
			fmt.Sprintf("the number of replicas cannot be calculated: %v", first))
		return 0, "", fmt.Errorf("%d of %d metrics cannot be used, the first: %w", failed, len(specs), first)
	}
	s.setCondition(step, autoscalingv2.ScalingActive, true, "ValidMetricFound",
		"the number of replicas was calculated from "+name)
	return wanted, name, nil
}

func (s Snapshot) metricReading(i int) Reading {
	if i < len(s.Readings) {
		return s.Readings[i]
	}
	return Reading{Err: errNoSamples}
}

// checkSelector returns an error if the pod selector of the scaled object is missing or invalid, or
// matches pods of other autoscalers. It adds the error to step.
func (s Snapshot) checkSelector(step *Step) error {
	var err error
	reason, event := "InvalidSelector", "InvalidSelector"
	switch {
	case s.Target.Selector == "":
		err, event = errors.New("the scale of the target has no selector (status.selector)"), "SelectorRequired"
	case s.PodsErr != nil:
		err = fmt.Errorf("the selector of the target's scale: %w", s.PodsErr)
	case len(s.Shared) > 0:
		reason, event = "AmbiguousSelector", "AmbiguousSelector"
		err = fmt.Errorf("pods of the target are also those of other autoscalers: %s", strings.Join(s.Shared, ", "))
	default:
		return nil
	}
	step.addWarning(event, "%v", err)
	s.setCondition(step, autoscalingv2.ScalingActive, false, reason, err.Error())
	return err
}

// limitReplicas returns the wanted number of replicas after the stabilization windows, the scaling
// policies, and the minimum and maximum are applied. It adds wanted to the history in step, and
// sets conditions AbleToScale and ScalingLimited there.
func (s Snapshot) limitReplicas(step *Step, wanted int32) int32 {
	current := s.Target.Spec
	least, most := replicaBounds(s.Autoscaler)
	down, up := rulesOf(s.Autoscaler.Spec.Behavior, s.Options)
	past := s.History.Wanted
	if len(past) == 0 { // after a change of the leader, the current number counts as the last recommendation
		past = appendEntry(nil, HistoryEntry{s.Now, current})
	}
	step.History.Wanted = appendEntry(past, HistoryEntry{s.Now, wanted})
	steady := stabilizeReplicas(wanted, current, past, down, up, s.Now)
	switch {
	case steady == wanted:
		s.setCondition(step, autoscalingv2.AbleToScale, true, "ReadyForNewScale",
			"no stabilization window limits the recommended size")
	case wanted < steady:
		s.setCondition(step, autoscalingv2.AbleToScale, true, "ScaleDownStabilized",
			"recent recommendations were higher than the current one, the highest of the window is taken")
	default:
		s.setCondition(step, autoscalingv2.AbleToScale, true, "ScaleUpStabilized",
			"recent recommendations were lower than the current one, the lowest of the window is taken")
	}
	limit := func(n int32, reason, message string) int32 {
		s.setCondition(step, autoscalingv2.ScalingLimited, true, reason, message)
		return n
	}
	if steady > current {
		high := up.scaleUpLimit(current, s.History, s.Now)
		switch {
		case steady > high && high < most:
			return limit(high, "ScaleUpLimit",
				"the desired replica count is increasing faster than the maximum scale rate")
		case steady > most:
			return limit(most, "TooManyReplicas", "the desired replica count is more than the maximum replica count")
		}
	}
	if steady < current {
		low := down.scaleDownLimit(current, s.History, s.Now)
		switch {
		case steady < low && low > least:
			return limit(low, "ScaleDownLimit",
				"the desired replica count is decreasing faster than the maximum scale rate")
		case steady < least:
			return limit(least, "TooFewReplicas", "the desired replica count is less than the minimum replica count")
		}
	}
	s.setCondition(step, autoscalingv2.ScalingLimited, false, "DesiredWithinRange",
		"the desired count is within the acceptable range")
	return steady
}

func (s *Step) addWarning(reason, format string, args ...any) {
	s.Events = append(s.Events, Event{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)})
}

// setCondition sets a condition in the status of step. The transition time changes only if the
// status of the condition changes.
func (s Snapshot) setCondition(
	step *Step, t autoscalingv2.HorizontalPodAutoscalerConditionType, is bool, reason, message string,
) {
	c := autoscalingv2.HorizontalPodAutoscalerCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason,
		Message:            message,
		LastTransitionTime: metav1.NewTime(s.Now), ObservedGeneration: new(s.Autoscaler.Generation)}
	if is {
		c.Status = corev1.ConditionTrue
	}
	i := slices.IndexFunc(step.Status.Conditions, func(have autoscalingv2.HorizontalPodAutoscalerCondition) bool {
		return have.Type == t
	})
	if i < 0 {
		step.Status.Conditions = append(step.Status.Conditions, c)
		return
	}
	if have := &step.Status.Conditions[i]; have.Status == c.Status {
		c.LastTransitionTime = have.LastTransitionTime
	}
	step.Status.Conditions[i] = c
}
