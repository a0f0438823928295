package lifecycle

import (
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"
)

// The delays between retries. Restart delays double as in Kubernetes, but from one second to one
// minute, so that a crash loop ends soon after its cause is fixed.
const (
	RestartMin   = time.Second
	RestartMax   = time.Minute
	restartReset = 10 * time.Minute // a run this long resets the delay
	ImageMin     = 2 * time.Second
	ImageMax     = 2 * time.Minute
	RetryMin     = 500 * time.Millisecond
	RetryMax     = 30 * time.Second
	// pullErrorShown is how long a container shows ErrImagePull before ImagePullBackOff.
	pullErrorShown = time.Second
	// MaxRestartDelayAnnotation is a pod annotation with its maximum restart delay ("10s").
	MaxRestartDelayAnnotation = "keelson.dev/max-restart-delay"
)

// ExponentialDelay returns the delay after count failures in a row: first for count 1, doubled for
// each further failure, and at most limit.
func ExponentialDelay(first, limit time.Duration, count int) time.Duration {
	d := first
	for i := 1; i < count && d < limit; i++ {
		d *= 2
	}
	return min(d, limit)
}

// NoDelay is the Container.Delay of a first instance, and of an instance after the restart delay
// was reset. The next restart has no delay.
const NoDelay = -time.Nanosecond

// restartDelay returns how long to wait after instance ended before the container is restarted. The
// delay is 0 for the first restart, then 1 s, then twice the previous delay. It is 0 again if
// instance ran for at least restartReset, or if changed is true: see isReplaced. The delay is
// stored with the new instance, so it survives a restart of the agent.
func restartDelay(pod *v1.Pod, instance Container, changed bool) time.Duration {
	limit := RestartMax
	if d, err := time.ParseDuration(pod.Annotations[MaxRestartDelayAnnotation]); err == nil && d > 0 {
		limit = d
	}
	switch {
	case changed, instance.runDuration() >= restartReset, instance.Delay < 0:
		return 0
	case instance.Delay == 0:
		return min(RestartMin, limit)
	default:
		return min(2*instance.Delay, limit)
	}
}

// shouldRestart reports whether the restart policy and rules restart an ended instance. An
// ephemeral container is never restarted. killed is the reason for which the worker stopped the
// instance; "" if the instance exited by itself.
func shouldRestart(pod *v1.Pod, spec *v1.Container, instance Container, killed string) bool {
	switch {
	case IsEphemeralContainer(pod, spec.Name):
		return false
	case IsSidecar(pod, spec):
		return true
	}
	policy := pod.Spec.RestartPolicy
	if spec.RestartPolicy != nil {
		policy = v1.RestartPolicy(*spec.RestartPolicy)
	}
	for _, r := range spec.RestartPolicyRules {
		if r.ExitCodes == nil || r.Action != v1.ContainerRestartRuleActionRestart {
			continue
		}
		in := slices.Contains(r.ExitCodes.Values, instance.ExitCode)
		if in == (r.ExitCodes.Operator == v1.ContainerRestartRuleOnExitCodesOpIn) {
			return true
		}
	}
	failed := instance.ExitCode != 0 || killed != ""
	switch policy {
	case v1.RestartPolicyNever:
		return false
	case v1.RestartPolicyOnFailure:
		return failed
	default:
		return !IsInitContainer(pod, spec.Name) || failed
	}
}

// IsSidecar reports whether spec is a restartable init container.
func IsSidecar(pod *v1.Pod, spec *v1.Container) bool {
	return spec.RestartPolicy != nil && *spec.RestartPolicy == v1.ContainerRestartPolicyAlways &&
		IsInitContainer(pod, spec.Name)
}

// IsInitContainer reports whether the pod has an init container of that name.
func IsInitContainer(pod *v1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c v1.Container) bool { return c.Name == name })
}

// FindContainerSpec returns the spec of the pod's container, init container or ephemeral container
// of that name, or nil. The spec of an ephemeral container has the form of a container.
func FindContainerSpec(pod *v1.Pod, name string) *v1.Container {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	for i := range pod.Spec.EphemeralContainers {
		if spec := EphemeralSpec(pod, i); spec.Name == name {
			return spec
		}
	}
	return nil
}

// SpecHash returns a hash of the container's name and image. A running container is restarted if
// this hash changes. All other changes of the spec do not restart it.
func SpecHash(spec *v1.Container) string {
	h := fnv.New64a()
	h.Write([]byte(spec.Name + "\x00" + spec.Image))
	return strconv.FormatUint(h.Sum64(), 16)
}

// activeDeadline returns when the pod fails because of its activeDeadlineSeconds; zero = never.
func activeDeadline(pod *v1.Pod, started time.Time) time.Time {
	if pod.Spec.ActiveDeadlineSeconds == nil || started.IsZero() {
		return time.Time{}
	}
	return started.Add(time.Duration(*pod.Spec.ActiveDeadlineSeconds) * time.Second)
}

// DeletionStop returns the Stop of a pod that is being deleted, with the grace period of the
// deletion.
func DeletionStop(pod *v1.Pod) *Stop {
	grace := ptr.Deref(pod.Spec.TerminationGracePeriodSeconds, int64(v1.DefaultTerminationGracePeriodSeconds))
	if pod.DeletionGracePeriodSeconds != nil {
		grace = *pod.DeletionGracePeriodSeconds
	}
	return &Stop{Delete: true, Grace: time.Duration(max(grace, 0)) * time.Second}
}

// MinStop is the minimum time to stop a container after its preStop hook has used up the grace
// period.
const MinStop = 2 * time.Second
