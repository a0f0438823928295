package job

import (
	"fmt"
	"slices"
	"strconv"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
)

// verdict is the result of applying the pod failure policy of a Job to a failed pod.
type verdict struct {
	action batchv1.PodFailurePolicyAction // action to take; Count if no rule matches
	why    string                         // description of the matching rule, or ""
}

// judgePodFailure returns the action of the first rule in the pod failure policy of Job j that
// matches failed pod p.
func judgePodFailure(j *batchv1.Job, p *corev1.Pod) verdict {
	if j.Spec.PodFailurePolicy == nil {
		return verdict{action: batchv1.PodFailurePolicyActionCount}
	}
	for i := range j.Spec.PodFailurePolicy.Rules {
		r := &j.Spec.PodFailurePolicy.Rules[i]
		var what string
		switch {
		case r.OnExitCodes != nil:
			what = byExitCode(r.OnExitCodes, p)
		default:
			what = byCondition(r.OnPodConditions, p)
		}
		if what != "" {
			return verdict{r.Action, fmt.Sprintf("%s matching %s rule at index %d", what, r.Action, i)}
		}
	}
	return verdict{action: batchv1.PodFailurePolicyActionCount}
}

func byExitCode(r *batchv1.PodFailurePolicyOnExitCodesRequirement, p *corev1.Pod) string {
	for _, list := range [][]corev1.ContainerStatus{p.Status.ContainerStatuses, p.Status.InitContainerStatuses} {
		for _, c := range list {
			t := c.State.Terminated
			if t == nil || t.ExitCode == 0 || r.ContainerName != nil && *r.ContainerName != c.Name {
				continue
			}
			if in := slices.Contains(r.Values, t.ExitCode); in ==
				(r.Operator == batchv1.PodFailurePolicyOnExitCodesOpIn) {
				return fmt.Sprintf("Container %s for pod %s/%s failed with exit code %d", c.Name, p.Namespace,
					p.Name, t.ExitCode)
			}
		}
	}
	return ""
}

func byCondition(patterns []batchv1.PodFailurePolicyOnPodConditionsPattern, p *corev1.Pod) string {
	for _, c := range p.Status.Conditions {
		for _, want := range patterns {
			if c.Type == want.Type && c.Status == want.Status {
				return fmt.Sprintf("Pod %s/%s has condition %s", p.Namespace, p.Name, c.Type)
			}
		}
	}
	return ""
}

// matchSuccessPolicy returns a description of the first rule in the success policy of Job j that is
// satisfied by done, the succeeded indexes. It returns "" if no rule is satisfied.
func matchSuccessPolicy(j *batchv1.Job, done indexes) string {
	if j.Spec.SuccessPolicy == nil {
		return ""
	}
	for i, r := range j.Spec.SuccessPolicy.Rules {
		of := done
		want := 0
		if r.SucceededIndexes != nil {
			named := parseIndexes(*r.SucceededIndexes, completionsWanted(j))
			of, want = intersectIndexes(done, named), named.countIndexes()
		}
		if r.SucceededCount != nil {
			want = int(*r.SucceededCount)
		}
		if of.countIndexes() >= want {
			return "Matched rules at index " + strconv.Itoa(i)
		}
	}
	return ""
}

// intersectIndexes returns the indexes that are in both sets.
func intersectIndexes(a, b indexes) indexes {
	var out indexes
	for _, s := range a {
		for _, t := range b {
			if from, to := max(s.from, t.from), min(s.to, t.to); from <= to {
				out = append(out, span{from, to})
			}
		}
	}
	return out
}
