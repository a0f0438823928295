package pod

import (
	"hash/fnv"
	"slices"
	"strconv"
	"time"

	v1 "k8s.io/api/core/v1"
)

// The delays between retries. Restart delays double as in Kubernetes, but from one second to one
// minute, so that a crash loop ends soon after its cause is fixed.
const (
	restartMin   = time.Second
	restartMax   = time.Minute
	restartReset = 10 * time.Minute // a run this long resets the delay
	imageMin     = 2 * time.Second
	imageMax     = 2 * time.Minute
	retryMin     = 500 * time.Millisecond
	retryMax     = 30 * time.Second
	// pullErrorShown is how long a container shows ErrImagePull before ImagePullBackOff.
	pullErrorShown = time.Second
	// MaxRestartDelayAnnotation is a pod annotation with its maximum restart delay ("10s").
	MaxRestartDelayAnnotation = "keelson.dev/max-restart-delay"
)

// grow doubles from first up to limit; count is the number of failures in a row, from 1.
func grow(first, limit time.Duration, count int) time.Duration {
	d := first
	for i := 1; i < count && d < limit; i++ {
		d *= 2
	}
	return min(d, limit)
}

// noDelay is the Delay of an instance that did not follow a counted restart.
const noDelay = -time.Nanosecond

// restartDelay returns how long to wait after instance c ended: nothing the first time, then 1 s,
// then twice the delay of c. If the spec changed or c ran long enough, the delay is 0. The delay is
// stored with the instance, so it survives a restart of the agent.
func restartDelay(pod *v1.Pod, c Container, changed bool) time.Duration {
	limit := restartMax
	if d, err := time.ParseDuration(pod.Annotations[MaxRestartDelayAnnotation]); err == nil && d > 0 {
		limit = d
	}
	switch {
	case changed, c.ran() >= restartReset, c.Delay < 0:
		return 0
	case c.Delay == 0:
		return min(restartMin, limit)
	default:
		return min(2*c.Delay, limit)
	}
}

// restarts reports whether an ended instance is restarted. killed is why the worker stopped it; ""
// if it exited by itself.
func restarts(pod *v1.Pod, spec *v1.Container, c Container, killed string) bool {
	if sidecar(pod, spec) {
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
		in := slices.Contains(r.ExitCodes.Values, c.ExitCode)
		if in == (r.ExitCodes.Operator == v1.ContainerRestartRuleOnExitCodesOpIn) {
			return true
		}
	}
	failed := c.ExitCode != 0 || killed != ""
	switch policy {
	case v1.RestartPolicyNever:
		return false
	case v1.RestartPolicyOnFailure:
		return failed
	default:
		return !isInit(pod, spec.Name) || failed
	}
}

// sidecar reports whether spec is a restartable init container.
func sidecar(pod *v1.Pod, spec *v1.Container) bool {
	return spec.RestartPolicy != nil && *spec.RestartPolicy == v1.ContainerRestartPolicyAlways && isInit(pod, spec.Name)
}

func isInit(pod *v1.Pod, name string) bool {
	return slices.ContainsFunc(pod.Spec.InitContainers, func(c v1.Container) bool { return c.Name == name })
}

func containerSpec(pod *v1.Pod, name string) *v1.Container {
	for _, list := range [][]v1.Container{pod.Spec.InitContainers, pod.Spec.Containers} {
		for i := range list {
			if list[i].Name == name {
				return &list[i]
			}
		}
	}
	return nil
}

// specHash hashes the container's name and its image, the only field that an update restarts it
// for.
func specHash(c *v1.Container) string {
	h := fnv.New64a()
	h.Write([]byte(c.Name + "\x00" + c.Image))
	return strconv.FormatUint(h.Sum64(), 16)
}

// deadline returns when activeDeadlineSeconds ends the pod; zero = never.
func deadline(pod *v1.Pod, started time.Time) time.Time {
	if pod.Spec.ActiveDeadlineSeconds == nil || started.IsZero() {
		return time.Time{}
	}
	return started.Add(time.Duration(*pod.Spec.ActiveDeadlineSeconds) * time.Second)
}

// DeletionStop returns the Stop of a deleted pod, with its grace period.
func DeletionStop(pod *v1.Pod) *Stop {
	grace := int64(v1.DefaultTerminationGracePeriodSeconds)
	if pod.Spec.TerminationGracePeriodSeconds != nil {
		grace = *pod.Spec.TerminationGracePeriodSeconds
	}
	if pod.DeletionGracePeriodSeconds != nil {
		grace = *pod.DeletionGracePeriodSeconds
	}
	return &Stop{Delete: true, Grace: time.Duration(max(grace, 0)) * time.Second}
}
