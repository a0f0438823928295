package horizontalpodautoscaler

import (
	"errors"
	"fmt"
	"math"
	"time"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/saturate"
)

// Sample is one measured value of a metric. Value is in thousandths of the metric's unit, as
// resource.Quantity.MilliValue returns it.
type Sample struct {
	Value  int64
	At     time.Time
	Window time.Duration // measurement interval that ends at At; 0 means an instantaneous value
}

// Samples holds the values of a metric by pod name.
type Samples map[string]Sample

// tolerance is the deviation from the target within which the replicas are not changed: down if the
// current value is below the target, and up if it is above. Both are differences of the ratio of
// current to target value from 1.
type tolerance struct{ down, up float64 }

func (t tolerance) isWithinTolerance(ratio float64) bool { return 1-t.down <= ratio && ratio <= 1+t.up }

// roundUpReplicas rounds f up to a number of replicas, within the range of an int32. It returns 0
// for NaN.
func roundUpReplicas(f float64) int32 {
	switch f = math.Ceil(f); {
	case !(f > 0): // also NaN
		return 0
	case f >= math.MaxInt32:
		return math.MaxInt32
	}
	return int32(f)
}

// errNoSamples is returned if no pod of the target has a usable sample.
var errNoSamples = errors.New("no metrics of the target's pods: they may not be ready, or none are collected yet")

// groupedPods holds the pods of the scaled object, divided by whether their samples can be used.
type groupedPods struct {
	ready   []*corev1.Pod // pods with a usable sample
	unready []*corev1.Pod // pods that are starting or pending: their samples are not used
	missing []*corev1.Pod // pods without a sample
}

// groupPods divides pods by whether their samples of a resource can be used. Terminating and failed
// pods are in none of the lists, because their load moves to other pods.
func groupPods(
	pods []*corev1.Pod, samples Samples, resource corev1.ResourceName, now time.Time, o Options,
) groupedPods {
	var s groupedPods
	for _, p := range pods {
		sample, measured := samples[p.Name]
		switch {
		case p.DeletionTimestamp != nil || p.Status.Phase == corev1.PodFailed:
		case p.Status.Phase == corev1.PodPending:
			s.unready = append(s.unready, p)
		case !measured:
			s.missing = append(s.missing, p)
		case resource == corev1.ResourceCPU && isPodStarting(p, sample, now, o):
			s.unready = append(s.unready, p)
		default:
			s.ready = append(s.ready, p)
		}
	}
	return s
}

// isPodStarting reports whether the CPU usage s of pod p may still be caused by the start of p.
// During o.CPUInitialization this is so until p has been ready for a whole measurement interval.
// Later it is so only for an unready pod that became unready within o.InitialReadiness after its
// start.
func isPodStarting(p *corev1.Pod, s Sample, now time.Time, o Options) bool {
	ready := api.PodCondition(p, corev1.PodReady)
	if ready == nil || p.Status.StartTime == nil {
		return true
	}
	start, changed := p.Status.StartTime.Time, ready.LastTransitionTime.Time
	if start.Add(o.CPUInitialization).After(now) {
		return ready.Status == corev1.ConditionFalse || s.At.Before(changed.Add(s.Window))
	}
	return ready.Status == corev1.ConditionFalse && start.Add(o.InitialReadiness).After(changed)
}

// usage is the current value of a metric for a set of pods. ratio is the current value divided by
// the target.
type usage struct {
	ratio   float64
	average int64 // average value per pod, in thousandths
	percent int32 // percentage of the requests; only for a target utilization
}

// load is the state of one metric that has a target per pod. desiredReplicas computes the replicas
// that the metric requires.
type load struct {
	current int32
	groupedPods
	samples   Samples
	tolerance tolerance
	// measure returns the usage of a set of pods. use holds the pods' values by pod name.
	measure func(use map[string]int64) (usage, error)
	// full returns the value that is assumed for a pod without a sample if the other pods require a
	// scale-down.
	full func(p *corev1.Pod) int64
}

// desiredReplicas returns the number of replicas that brings the metric to its target, and the
// usage of the pods with samples. A pod without a sample counts as unused if the other pods require
// a scale-up. It counts as fully used if they require a scale-down. Missing samples therefore never
// enlarge a change and never reverse it.
func (l load) desiredReplicas() (int32, usage, error) {
	use := map[string]int64{}
	for _, p := range l.ready {
		use[p.Name] = l.samples[p.Name].Value
	}
	if len(use) == 0 {
		return 0, usage{}, errNoSamples
	}
	known, err := l.measure(use)
	if err != nil {
		return 0, usage{}, err
	}
	growing := known.ratio > 1 && len(l.unready) > 0
	if !growing && len(l.missing) == 0 {
		if l.tolerance.isWithinTolerance(known.ratio) {
			return l.current, known, nil
		}
		return roundUpReplicas(known.ratio * float64(len(l.ready))), known, nil
	}
	for _, p := range l.missing {
		switch {
		case known.ratio < 1:
			use[p.Name] = l.full(p)
		case known.ratio > 1:
			use[p.Name] = 0
		}
	}
	if growing {
		for _, p := range l.unready {
			use[p.Name] = 0
		}
	}
	careful, err := l.measure(use)
	if err != nil {
		return 0, usage{}, err
	}
	turned := (known.ratio < 1 && careful.ratio > 1) || (known.ratio > 1 && careful.ratio < 1)
	if turned || l.tolerance.isWithinTolerance(careful.ratio) {
		return l.current, known, nil
	}
	n := roundUpReplicas(careful.ratio * float64(len(use)))
	if (careful.ratio < 1 && n > l.current) || (careful.ratio > 1 && n < l.current) {
		return l.current, known, nil
	}
	return n, known, nil
}

// averageOf returns a measure function of load for a target average per pod.
func averageOf(target int64) func(map[string]int64) (usage, error) {
	return func(use map[string]int64) (usage, error) {
		if target <= 0 {
			return usage{}, errTarget
		}
		mean := sumValues(use) / float64(len(use))
		return usage{ratio: mean / float64(target), average: truncateToInt64(mean)}, nil
	}
}

var errTarget = errors.New("the target must be greater than zero")

// utilizationOf returns a measure function of load for a target in percent of the pods' requests.
func utilizationOf(percent int32, requests map[string]int64) func(map[string]int64) (usage, error) {
	return func(use map[string]int64) (usage, error) {
		if percent <= 0 {
			return usage{}, errTarget
		}
		requested := map[string]int64{}
		for name := range use {
			requested[name] = requests[name]
		}
		all := sumValues(requested)
		if all <= 0 {
			return usage{}, errors.New("the measured pods have no request of this resource")
		}
		used := sumValues(use)
		now := int32(min(math.MaxInt32, max(0, used*100/all)))
		return usage{ratio: float64(now) / float64(percent), average: truncateToInt64(used / float64(len(use))),
			percent: now}, nil
	}
}

func sumValues(values map[string]int64) float64 {
	var s float64
	for _, v := range values {
		s += float64(v)
	}
	return s
}

// truncateToInt64 returns f without its fraction, limited to ±1<<62.
func truncateToInt64(f float64) int64 {
	const edge = 1 << 62
	return int64(min(edge, max(-edge, f)))
}

// requestsOf returns the request of each pod for a resource, in thousandths. If container is not
// "", only the request of that container counts. It returns an error if a request is missing,
// because the utilization is then undefined.
func requestsOf(pods []*corev1.Pod, container string, resource corev1.ResourceName) (map[string]int64, error) {
	out := make(map[string]int64, len(pods))
	for _, p := range pods {
		if r := p.Spec.Resources; container == "" && r != nil {
			if q, ok := r.Requests[resource]; ok {
				out[p.Name] = saturate.MilliValue(&q)
				continue
			}
		}
		found := false
		for _, c := range runningContainers(p) {
			if container != "" && c.Name != container {
				continue
			}
			found = true
			q, ok := c.Resources.Requests[resource]
			if !ok {
				return nil, fmt.Errorf("missing request for %s in container %s of Pod %s", resource, c.Name, p.Name)
			}
			out[p.Name] = saturate.Add(out[p.Name], saturate.MilliValue(&q))
		}
		if !found {
			return nil, fmt.Errorf("container %s is not in Pod %s", container, p.Name)
		}
	}
	return out, nil
}

// runningContainers returns the containers that run as long as pod p: its containers and its
// sidecars.
func runningContainers(p *corev1.Pod) []*corev1.Container {
	var out []*corev1.Container
	for i := range p.Spec.InitContainers {
		if r := p.Spec.InitContainers[i].RestartPolicy; r != nil && *r == corev1.ContainerRestartPolicyAlways {
			out = append(out, &p.Spec.InitContainers[i])
		}
	}
	for i := range p.Spec.Containers {
		out = append(out, &p.Spec.Containers[i])
	}
	return out
}

// replicasByValue returns the number of replicas for a metric with one value for all pods and a
// target for that value. The value is assumed to decrease as replicas are added.
func replicasByValue(value, target int64, current int32, pods []*corev1.Pod, t tolerance) (int32, error) {
	if target <= 0 {
		return 0, errTarget
	}
	ratio := float64(value) / float64(target)
	if current == 0 {
		return roundUpReplicas(ratio), nil
	}
	if t.isWithinTolerance(ratio) {
		return current, nil
	}
	if len(pods) == 0 {
		return 0, errors.New("the target's selector selects no pods")
	}
	ready := 0
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning && api.IsPodReady(p) {
			ready++
		}
	}
	return roundUpReplicas(ratio * float64(ready)), nil
}

// replicasByAverage returns the number of replicas for a metric with one value for all pods and a
// target per replica. average is the current value per replica.
func replicasByAverage(value, target int64, replicas int32, t tolerance) (n int32, average int64, err error) {
	if target <= 0 {
		return 0, 0, errTarget
	}
	n = replicas
	if replicas == 0 || !t.isWithinTolerance(float64(value)/(float64(target)*float64(replicas))) {
		n = roundUpReplicas(float64(value) / float64(target))
	}
	if replicas > 0 {
		average = truncateToInt64(math.Ceil(float64(value) / float64(replicas)))
	}
	return n, average, nil
}
