package pod

import (
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"
	psa "k8s.io/pod-security-admission/api"
	"k8s.io/pod-security-admission/policy"
)

// Ceiling is the Pod Security level above which a node runs no pod, whoever has
// bound it: the node's own word beside that of the API's admission. nil lets everything pass.
type Ceiling struct {
	level  psa.LevelVersion
	checks policy.Evaluator
}

// ParseCeiling reads LEVEL or LEVEL:VERSION ("baseline", "restricted:v1.30"). "privileged" is no ceiling.
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

// Check refuses a pod above the ceiling; nil lets it pass. Pure.
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

// Incapable refuses a pod that asks for what this agent would leave out: the API
// refuses such pods too, and an agent may be older than the API. nil lets it pass. Pure.
func Incapable(pod *v1.Pod) *Stop {
	spec, at := &pod.Spec, field.NewPath("spec")
	unable := func(at *field.Path, what string) *Stop {
		return refusal(pod, "UnsupportedField", "%s: this node %s", at, what)
	}
	// The order, the reasons and the messages are those of a kubelet.
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
