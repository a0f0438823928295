// Package horizontalpodautoscaler scales workloads to their load: from what metrics say, a number of replicas that would
// bring them to their targets, then what the windows and policies of the autoscaler leave of it.
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

	"keelson.dev/keelson/controlplane/api/kinds"
)

// Options are what holds for all autoscalers.
type Options struct {
	Tolerance              float64       // how far a ratio may be from 1 before it changes anything
	CPUInitialization      time.Duration // how long after its start a pod's use of CPU may be that of its start
	InitialReadiness       time.Duration // within this after its start, a pod that is not ready was never ready
	DownscaleStabilization time.Duration // the window of scaling down where an autoscaler has none
}

// Defaults are those of Kubernetes.
var Defaults = Options{Tolerance: 0.1, CPUInitialization: 5 * time.Minute, InitialReadiness: 30 * time.Second,
	DownscaleStabilization: 5 * time.Minute}

// Target is what the scale of the target says.
type Target struct {
	Spec, Status int32
	Selector     string
}

// Reading is what was read of one of the metrics of an autoscaler.
type Reading struct {
	Samples Samples // of pods: Resource, ContainerResource, Pods
	Value   int64   // of Object and External, in thousandths
	Err     error
}

// Snapshot is all that a plan judges by.
type Snapshot struct {
	Autoscaler *autoscalingv2.HorizontalPodAutoscaler
	Target     Target
	TargetErr  error         // why the target cannot be read; then Target says nothing
	Pods       []*corev1.Pod // what the target's selector selects
	PodsErr    error         // why the selector selects nothing: it is wrong
	Shared     []string      // other autoscalers whose targets select some of the same pods
	Readings   []Reading     // one of each of spec.metrics; unused unless Measures
	History    History
	Options    Options
	Now        time.Time
}

// Event is one to record on the autoscaler.
type Event struct{ Type, Reason, Message string }

// Step is what to do now.
type Step struct {
	Rescale  bool
	Replicas int32  // what to write to the scale, if Rescale
	Reason   string // why, for people
	Status   autoscalingv2.HorizontalPodAutoscalerStatus
	Events   []Event
	History  History
	// Failure is what keeps the autoscaler from judging, nil if nothing does.
	Failure error
}

// bounds are the fewest and most replicas.
func bounds(h *autoscalingv2.HorizontalPodAutoscaler) (least, most int32) {
	least = 1
	if h.Spec.MinReplicas != nil {
		least = *h.Spec.MinReplicas
	}
	return least, h.Spec.MaxReplicas
}

// Measures says whether the metrics decide. They do not where the number of replicas is outside the bounds, or where the
// target is switched off.
func Measures(h *autoscalingv2.HorizontalPodAutoscaler, t Target) bool {
	least, most := bounds(h)
	return !switchedOff(h, t) && t.Spec >= least && t.Spec <= most
}

// switchedOff reports whether somebody else scaled the target to zero. What the autoscaler itself scaled to zero, it
// scales up again.
func switchedOff(h *autoscalingv2.HorizontalPodAutoscaler, t Target) bool {
	if t.Spec != 0 {
		return false
	}
	least, _ := bounds(h)
	own := slices.ContainsFunc(h.Status.Conditions, func(c autoscalingv2.HorizontalPodAutoscalerCondition) bool {
		return c.Type == autoscalingv2.ScaledToZero && c.Status == corev1.ConditionTrue
	})
	return !own || least == 0 && !kinds.MeasuresWithoutPods(&h.Spec)
}

// Plan decides the next step.
func Plan(s Snapshot) Step {
	step := Step{Status: *s.Autoscaler.Status.DeepCopy(), History: s.History}
	step.Status.ObservedGeneration = new(s.Autoscaler.Generation)
	if s.TargetErr != nil {
		s.condition(&step, autoscalingv2.AbleToScale, false, "FailedGetScale",
			fmt.Sprintf("the scale of the target cannot be read: %v", s.TargetErr))
		step.warn("FailedGetScale", "%v", s.TargetErr)
		step.Failure = s.TargetErr
		return step
	}
	s.condition(&step, autoscalingv2.AbleToScale, true, "SucceededGetScale", "the scale of the target was read")
	step.Status.CurrentReplicas = s.Target.Spec
	least, most := bounds(s.Autoscaler)
	current := s.Target.Spec
	desired := current
	switch {
	case switchedOff(s.Autoscaler, s.Target):
		s.condition(&step, autoscalingv2.ScalingActive, false, "ScalingDisabled",
			"scaling is disabled since the replica count of the target is zero")
		step.Status.CurrentMetrics = nil
	case current > most:
		desired, step.Reason = most, "Current number of replicas above Spec.MaxReplicas"
		step.Status.CurrentMetrics = nil
	case current < least:
		desired, step.Reason = least, "Current number of replicas below Spec.MinReplicas"
		step.Status.CurrentMetrics = nil
	default:
		wanted, name, err := s.measure(&step)
		if err != nil {
			step.warn("FailedComputeMetricsReplicas", "%v", err)
			step.Failure = err
			return step
		}
		desired = s.restrain(&step, wanted)
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

// Rescaled is the step after its number was written, or could not be.
func (s Snapshot) Rescaled(step Step, err error) Step {
	step.Events = slices.Clip(step.Events)
	if err != nil {
		step.warn("FailedRescale", "New size: %d; reason: %s; error: %v", step.Replicas, step.Reason, err)
		s.condition(&step, autoscalingv2.AbleToScale, false, "FailedUpdateScale",
			fmt.Sprintf("the scale of the target cannot be written: %v", err))
		step.Status.DesiredReplicas = s.Autoscaler.Status.DesiredReplicas
		step.Failure = err
		return step
	}
	step.Events = append(step.Events, Event{corev1.EventTypeNormal, "SuccessfulRescale",
		fmt.Sprintf("New size: %d; reason: %s", step.Replicas, step.Reason)})
	s.condition(&step, autoscalingv2.AbleToScale, true, "SucceededRescale",
		fmt.Sprintf("the target was scaled to %d", step.Replicas))
	if s.Target.Spec > 0 && step.Replicas == 0 {
		s.condition(&step, autoscalingv2.ScaledToZero, true, "ScaledToZero", "the HPA controller scaled the workload to zero")
	} else {
		s.condition(&step, autoscalingv2.ScaledToZero, false, "NotScaledToZero", "the HPA controller did not scale the workload to zero")
	}
	at := metav1.NewTime(s.Now)
	step.Status.LastScaleTime = &at
	if by := step.Replicas - s.Target.Spec; by > 0 {
		step.History.Added = with(step.History.Added, Moment{s.Now, by})
	} else {
		step.History.Removed = with(step.History.Removed, Moment{s.Now, -by})
	}
	return step
}

// measure is the largest number that a metric calls for, and which does. A metric that cannot be read is left out where
// the others call for more; it keeps the target from being scaled down, for it might have called for more.
func (s Snapshot) measure(step *Step) (wanted int32, name string, err error) {
	if err := s.selectable(step); err != nil {
		return 0, "", err
	}
	specs := s.Autoscaler.Spec.Metrics
	statuses := make([]autoscalingv2.MetricStatus, len(specs))
	var failed int
	var first error
	var reason string
	for i := range specs {
		statuses[i].Type = specs[i].Type
		p := s.propose(&specs[i], s.reading(i))
		if p.err != nil {
			why := failureReason(specs[i].Type)
			step.warn(why, "%v", p.err)
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
		s.condition(step, autoscalingv2.ScalingActive, false, reason,
			fmt.Sprintf("the number of replicas cannot be calculated: %v", first))
		return 0, "", fmt.Errorf("%d of %d metrics cannot be used, the first: %w", failed, len(specs), first)
	}
	s.condition(step, autoscalingv2.ScalingActive, true, "ValidMetricFound", "the number of replicas was calculated from "+name)
	return wanted, name, nil
}

func (s Snapshot) reading(i int) Reading {
	if i < len(s.Readings) {
		return s.Readings[i]
	}
	return Reading{Err: errNoSamples}
}

// selectable says why the pods of the target cannot be told from others.
func (s Snapshot) selectable(step *Step) error {
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
	step.warn(event, "%v", err)
	s.condition(step, autoscalingv2.ScalingActive, false, reason, err.Error())
	return err
}

// restrain is what windows, policies and bounds leave of the wanted number.
func (s Snapshot) restrain(step *Step, wanted int32) int32 {
	current := s.Target.Spec
	least, most := bounds(s.Autoscaler)
	down, up := rulesOf(s.Autoscaler.Spec.Behavior, s.Options)
	past := s.History.Wanted
	if len(past) == 0 { // begun now: what is there is what was wanted
		past = with(nil, Moment{s.Now, current})
	}
	step.History.Wanted = with(past, Moment{s.Now, wanted})
	steady := stabilize(wanted, current, past, down, up, s.Now)
	switch {
	case steady == wanted:
		s.condition(step, autoscalingv2.AbleToScale, true, "ReadyForNewScale", "no window holds the recommended size back")
	case wanted < steady:
		s.condition(step, autoscalingv2.AbleToScale, true, "ScaleDownStabilized",
			"recent recommendations were higher than the current one, the highest of the window is taken")
	default:
		s.condition(step, autoscalingv2.AbleToScale, true, "ScaleUpStabilized",
			"recent recommendations were lower than the current one, the lowest of the window is taken")
	}
	limit := func(n int32, reason, message string) int32 {
		s.condition(step, autoscalingv2.ScalingLimited, true, reason, message)
		return n
	}
	if steady > current {
		high := up.ceiling(current, s.History, s.Now)
		switch {
		case steady > high && high < most:
			return limit(high, "ScaleUpLimit", "the desired replica count is increasing faster than the maximum scale rate")
		case steady > most:
			return limit(most, "TooManyReplicas", "the desired replica count is more than the maximum replica count")
		}
	}
	if steady < current {
		low := down.floor(current, s.History, s.Now)
		switch {
		case steady < low && low > least:
			return limit(low, "ScaleDownLimit", "the desired replica count is decreasing faster than the maximum scale rate")
		case steady < least:
			return limit(least, "TooFewReplicas", "the desired replica count is less than the minimum replica count")
		}
	}
	s.condition(step, autoscalingv2.ScalingLimited, false, "DesiredWithinRange", "the desired count is within the acceptable range")
	return steady
}

func (s *Step) warn(reason, format string, args ...any) {
	s.Events = append(s.Events, Event{corev1.EventTypeWarning, reason, fmt.Sprintf(format, args...)})
}

// condition sets a condition; its time moves only when its status does.
func (s Snapshot) condition(step *Step, t autoscalingv2.HorizontalPodAutoscalerConditionType, is bool, reason, message string) {
	c := autoscalingv2.HorizontalPodAutoscalerCondition{Type: t, Status: corev1.ConditionFalse, Reason: reason, Message: message,
		LastTransitionTime: metav1.NewTime(s.Now), ObservedGeneration: new(s.Autoscaler.Generation)}
	if is {
		c.Status = corev1.ConditionTrue
	}
	i := slices.IndexFunc(step.Status.Conditions, func(have autoscalingv2.HorizontalPodAutoscalerCondition) bool { return have.Type == t })
	if i < 0 {
		step.Status.Conditions = append(step.Status.Conditions, c)
		return
	}
	if have := &step.Status.Conditions[i]; have.Status == c.Status {
		c.LastTransitionTime = have.LastTransitionTime
	}
	step.Status.Conditions[i] = c
}
