package job

import (
	"slices"
	"strconv"
	"strings"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

var kind = batchv1.SchemeGroupVersion.WithKind("Job")

func ownerRef(j *batchv1.Job) metav1.OwnerReference { return *metav1.NewControllerRef(j, kind) }

func isIndexed(j *batchv1.Job) bool {
	return j.Spec.CompletionMode != nil && *j.Spec.CompletionMode == batchv1.IndexedCompletion
}

func perIndex(j *batchv1.Job) bool { return isIndexed(j) && j.Spec.BackoffLimitPerIndex != nil }

func isSuspended(j *batchv1.Job) bool { return j.Spec.Suspend != nil && *j.Spec.Suspend }

// completionsWanted returns how many pods of Job j must succeed. It returns -1 if j has no such
// number: it then completes when any pod has succeeded and all pods have ended.
func completionsWanted(j *batchv1.Job) int { return valueOr(j.Spec.Completions, -1) }

func maxParallelism(j *batchv1.Job) int { return valueOr(j.Spec.Parallelism, 1) }

func valueOr(p *int32, otherwise int) int {
	if p == nil {
		return otherwise
	}
	return int(*p)
}

// waitsForEnd reports whether a terminating pod of Job j counts as failed, and is replaced, only
// after it has ended (podReplacementPolicy).
func waitsForEnd(j *batchv1.Job) bool {
	p := j.Spec.PodReplacementPolicy
	return p != nil && *p == batchv1.Failed || p == nil && j.Spec.PodFailurePolicy != nil
}

// isTracked reports whether pod p has the finalizer that keeps it until it is counted.
func isTracked(p *corev1.Pod) bool {
	return slices.Contains(p.Finalizers, batchv1.JobTrackingFinalizer)
}

// indexOf returns the completion index of a pod, or -1.
func indexOf(p *corev1.Pod) int {
	n, err := strconv.Atoi(p.Annotations[batchv1.JobCompletionIndexAnnotation])
	if err != nil || n < 0 {
		return -1
	}
	return n
}

// failuresOf returns how many pods of the completion index of p had failed before p was created.
// ignored are the failures that the pod failure policy ignores.
func failuresOf(p *corev1.Pod) (counted, ignored int) {
	counted, _ = strconv.Atoi(p.Annotations[batchv1.JobIndexFailureCountAnnotation])
	ignored, _ = strconv.Atoi(p.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation])
	return counted, ignored
}

// Creation is a pod that must be created for a Job.
type Creation struct {
	Index           int // completion index; -1 if the Job is not indexed
	Failed, Ignored int // counted and ignored failures of the index so far
}

// indexVariable is the environment variable that holds the index of a pod of an indexed job.
const indexVariable = "JOB_COMPLETION_INDEX"

func newPod(j *batchv1.Job, c Creation) *corev1.Pod {
	p := engine.PodFrom(j, ownerRef(j), &j.Spec.Template)
	p.Finalizers = append(p.Finalizers, batchv1.JobTrackingFinalizer)
	if c.Index < 0 {
		return p
	}
	index := strconv.Itoa(c.Index)
	p.Labels, p.Annotations = setEntry(p.Labels, batchv1.JobCompletionIndexAnnotation, index),
		setEntry(p.Annotations, batchv1.JobCompletionIndexAnnotation, index)
	if perIndex(j) {
		p.Annotations[batchv1.JobIndexFailureCountAnnotation] = strconv.Itoa(c.Failed)
		if c.Ignored > 0 {
			p.Annotations[batchv1.JobIndexIgnoredFailureCountAnnotation] = strconv.Itoa(c.Ignored)
		}
	}
	p.GenerateName = podPrefix(j.Name, index)
	p.Spec.Hostname = j.Name + "-" + index
	env := corev1.EnvVar{Name: indexVariable, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{
		FieldPath: "metadata.labels['" + batchv1.JobCompletionIndexAnnotation + "']"}}}
	for _, list := range [][]corev1.Container{p.Spec.InitContainers, p.Spec.Containers} {
		for i := range list {
			if !slices.ContainsFunc(list[i].Env, func(e corev1.EnvVar) bool { return e.Name == indexVariable }) {
				list[i].Env = append(list[i].Env, env)
			}
		}
	}
	return p
}

// podPrefix returns the prefix of the names of pods for a completion index. It shortens the name of
// the Job, so that the API server does not cut off the index.
func podPrefix(job, index string) string {
	const most = 58 // the API server appends five characters
	prefix := job + "-" + index + "-"
	if len(prefix) > most {
		prefix = strings.TrimRight(job[:most-len(index)-2], "-.") + "-" + index + "-"
	}
	return prefix
}

func setEntry(m map[string]string, k, v string) map[string]string {
	if m == nil {
		m = map[string]string{}
	}
	m[k] = v
	return m
}

// hasPodStopped reports whether no container of pod p runs any more: p is terminal, its node has
// confirmed its deletion, or p never had a node.
func hasPodStopped(p *corev1.Pod) bool {
	return api.IsPodTerminal(p) || p.DeletionTimestamp != nil && p.DeletionGracePeriodSeconds != nil &&
		*p.DeletionGracePeriodSeconds == 0
}

// podEndTime returns the best known time at which a pod ended.
func podEndTime(p *corev1.Pod) time.Time {
	var at time.Time
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		if t := c.State.Terminated; t != nil && t.FinishedAt.After(at) {
			at = t.FinishedAt.Time
		}
	}
	if !at.IsZero() {
		return at
	}
	if c := api.PodCondition(p, corev1.PodReady); c != nil && !c.LastTransitionTime.IsZero() {
		return c.LastTransitionTime.Time
	}
	if p.DeletionTimestamp != nil {
		return p.DeletionTimestamp.Time
	}
	return p.CreationTimestamp.Time
}

// containerRestarts returns the total restart count of a pod's containers.
func containerRestarts(p *corev1.Pod) int {
	n := 0
	for _, c := range slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses) {
		n += int(c.RestartCount)
	}
	return n
}
