package pod

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
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

// Check returns the rejection of a pod that violates the level, or nil. Pure.
func (c *Ceiling) Check(pod *v1.Pod) *Stop {
	if c == nil {
		return nil
	}
	got := policy.AggregateCheckResults(c.checks.EvaluatePod(c.level, &pod.ObjectMeta, &pod.Spec))
	if got.Allowed {
		return nil
	}
	return refusal(pod, "PodSecurity", "violates PodSecurity %q, the most that this node allows (--pod-security): %s",
		c.level, got.ForbiddenDetail())
}

func refusal(pod *v1.Pod, reason, format string, args ...any) *Stop {
	return &Stop{Reason: reason, Message: "Pod was rejected: " + fmt.Sprintf(format, args...),
		Grace: grace(pod), Refused: true}
}

// Incapable rejects a pod that uses a field which this agent does not implement, or returns nil.
// The API rejects such pods too, but the agent may be older than the API. Pure.
func Incapable(pod *v1.Pod) *Stop {
	spec, at := &pod.Spec, field.NewPath("spec")
	unable := func(at *field.Path, what string) *Stop {
		return refusal(pod, "UnsupportedField", "%s: this node %s", at, what)
	}
	// The order, the reasons and the messages are those of the kubelet.
	switch system, labeled := pod.Labels[v1.LabelOSStable]; {
	case labeled && system != string(v1.Linux):
		return refusal(pod, "PodOSSelectorNodeLabelDoesNotMatch",
			"Failed to admit pod as the `kubernetes.io/os` label doesn't match node label")
	case spec.OS != nil && spec.OS.Name != v1.Linux:
		return refusal(pod, "PodOSNotSupported", "Failed to admit pod as the OS field doesn't match node OS")
	case spec.HostUsers != nil && !*spec.HostUsers:
		return unable(at.Child("hostUsers"), "gives pods no user namespace of their own")
	}
	for _, list := range []struct {
		name       string
		containers []v1.Container
	}{{"initContainers", spec.InitContainers}, {"containers", spec.Containers}} {
		for i := range list.containers {
			for j := range list.containers[i].Env {
				if from := list.containers[i].Env[j].ValueFrom; from != nil && from.FileKeyRef != nil {
					return unable(at.Child(list.name).Index(i).Child("env").Index(j).Child("valueFrom", "fileKeyRef"),
						"reads no variables from files")
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
				return unable(from.Child("clusterTrustBundle"), "projects no trust bundles")
			case s.PodCertificate != nil:
				return unable(from.Child("podCertificate"), "asks for no certificates of pods")
			}
		}
	}
	return nil
}
