package admission

import (
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"

	"keelson.dev/keelson/agent/pod/lifecycle"
)

// Ceiling is the highest Pod Security level at which this node runs pods, whichever component has
// bound the pod. It applies in addition to the API's admission. A nil Ceiling admits every pod.
type Ceiling struct {
	level  psa.LevelVersion
	checks policy.Evaluator
}

// ParseCeiling parses LEVEL or LEVEL:VERSION ("baseline", "restricted:v1.30"). It returns nil for
// "privileged".
func ParseCeiling(text string) (*Ceiling, error) {
	name, version, versioned := strings.Cut(text, ":")
	level, err := psa.ParseLevel(name)
	if err != nil {
		return nil, fmt.Errorf("level %q: %w", name, err)
	}
	c := &Ceiling{level: psa.LevelVersion{Level: level, Version: psa.LatestVersion()}}
	if versioned {
		if c.level.Version, err = psa.ParseVersion(version); err != nil {
			return nil, fmt.Errorf("version %q: %w", version, err)
		}
	}
	if level == psa.LevelPrivileged {
		return nil, nil
	}
	if c.checks, err = policy.NewEvaluator(policy.DefaultChecks(), nil); err != nil {
		return nil, fmt.Errorf("pod security standards: %w", err)
	}
	return c, nil
}

// CheckPod returns the rejection of a pod that violates the node's highest Pod Security level, or
// nil. Ephemeral containers do not count: CheckEphemeral checks each of them before it starts.
// Pure.
func (c *Ceiling) CheckPod(pod *v1.Pod) *lifecycle.Stop {
	if c == nil {
		return nil
	}
	if err := c.checkSpec(pod, nil); err != nil {
		return NewRejection(pod, "PodSecurity", "%v", err)
	}
	return nil
}

// CheckEphemeral returns an error if the pod with its ephemeral container of that name violates the
// node's highest Pod Security level. Other ephemeral containers of the pod do not count. Pure.
func (c *Ceiling) CheckEphemeral(pod *v1.Pod, name string) error {
	if c == nil {
		return nil
	}
	return c.checkSpec(pod, slices.DeleteFunc(slices.Clone(pod.Spec.EphemeralContainers),
		func(e v1.EphemeralContainer) bool { return e.Name != name }))
}

// checkSpec returns an error if the pod, with these ephemeral containers in place of its own,
// violates the level.
func (c *Ceiling) checkSpec(pod *v1.Pod, ephemeral []v1.EphemeralContainer) error {
	spec := pod.Spec
	spec.EphemeralContainers = ephemeral
	got := policy.AggregateCheckResults(c.checks.EvaluatePod(c.level, &pod.ObjectMeta, &spec))
	if got.Allowed {
		return nil
	}
	return fmt.Errorf("violates PodSecurity %q, the highest level that this node allows (--pod-security): %s",
		c.level, got.ForbiddenDetail())
}

// NewRejection returns the Stop of a pod that the node rejects.
func NewRejection(pod *v1.Pod, reason, format string, args ...any) *lifecycle.Stop {
	return &lifecycle.Stop{Reason: reason, Message: "Pod was rejected: " + fmt.Sprintf(format, args...),
		Grace: lifecycle.GracePeriod(pod), Rejected: true}
}

// RejectUnsupported rejects a pod that uses a field which this agent does not implement, or returns
// nil. The API rejects such pods too, but the agent may be older than the API. Pure.
func RejectUnsupported(pod *v1.Pod) *lifecycle.Stop {
	spec, at := &pod.Spec, field.NewPath("spec")
	unable := func(at *field.Path, what string) *lifecycle.Stop {
		return NewRejection(pod, "UnsupportedField", "%s: this node %s", at, what)
	}
	// The order, the reasons and the messages are those of the kubelet.
	switch system, labeled := pod.Labels[v1.LabelOSStable]; {
	case labeled && system != string(v1.Linux):
		return NewRejection(pod, "PodOSSelectorNodeLabelDoesNotMatch",
			"Failed to admit pod as the `kubernetes.io/os` label doesn't match node label")
	case spec.OS != nil && spec.OS.Name != v1.Linux:
		return NewRejection(pod, "PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS")
	case spec.HostUsers != nil && !*spec.HostUsers:
		return unable(at.Child("hostUsers"), "does not support user namespaces for pods")
	}
	for _, list := range []struct {
		name       string
		containers []v1.Container
	}{{"initContainers", spec.InitContainers}, {"containers", spec.Containers}} {
		for i := range list.containers {
			for j := range list.containers[i].Env {
				if from := list.containers[i].Env[j].ValueFrom; from != nil && from.FileKeyRef != nil {
					return unable(at.Child(list.name).Index(i).Child("env").Index(j).Child("valueFrom", "fileKeyRef"),
						"does not support variables from files")
				}
			}
		}
	}
	for i := range spec.Volumes {
		p := spec.Volumes[i].Projected
		for j := 0; p != nil && j < len(p.Sources); j++ {
			s, from := &p.Sources[j], at.Child("volumes").Index(i).Child("projected", "sources").Index(j)
			switch {
			case s.ClusterTrustBundle != nil:
				return unable(from.Child("clusterTrustBundle"), "does not support cluster trust bundles")
			case s.PodCertificate != nil:
				return unable(from.Child("podCertificate"), "does not support pod certificates")
			}
		}
	}
	return nil
}
