package why

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

func number(n int32) *int32 { return &n }

func deployment(change ...func(*appsv1.Deployment)) *appsv1.Deployment {
	d := &appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Name: "web", Namespace: "default", UID: "d", Generation: 2}}
	d.Spec.Replicas = number(3)
	d.Status = appsv1.DeploymentStatus{ObservedGeneration: 2, Replicas: 3, ReadyReplicas: 3, UpdatedReplicas: 3}
	for _, c := range change {
		c(d)
	}
	return d
}

func lacking(
	t appsv1.DeploymentConditionType, status corev1.ConditionStatus, reason, message string,
) func(*appsv1.Deployment) {
	return func(d *appsv1.Deployment) {
		d.Status.ReadyReplicas = 1
		d.Status.Conditions = append(d.Status.Conditions,
			appsv1.DeploymentCondition{Type: t, Status: status, Reason: reason, Message: message,
				LastTransitionTime: ago(12 * time.Minute)})
	}
}

func of(kind, uid string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		alone(p)
		yes := true
		p.OwnerReferences = []metav1.OwnerReference{{Kind: kind, Name: "db", UID: types.UID(uid), Controller: &yes}}
	}
}

func TestWorkloads(t *testing.T) {
	yes := true
	rs := appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{Name: "web-abc", Namespace: "default", UID: "rs",
		OwnerReferences: []metav1.OwnerReference{{Kind: "Deployment", Name: "web", UID: "d", Controller: &yes}}}}
	broken := waits("ErrImagePull", "image registry.local/web:1: manifest not found")
	w := World{ReplicaSets: []appsv1.ReplicaSet{rs}, Nodes: []corev1.Node{node("w1")},
		Pods: []corev1.Pod{*pod("web-abc-1", on("w1"), broken), *pod("web-abc-2", on("w1"), broken),
			*pod("web-abc-3", on("w1"), ready(corev1.ConditionTrue)),
			*pod("stranger", of("StatefulSet", "s"), on("w1"), broken)}}
	set := func(change func(*appsv1.StatefulSet)) *appsv1.StatefulSet {
		s := &appsv1.StatefulSet{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default", UID: "s"}}
		s.Spec.Replicas, s.Spec.UpdateStrategy.Type = number(3), appsv1.RollingUpdateStatefulSetStrategyType
		s.Status = appsv1.StatefulSetStatus{ReadyReplicas: 3, UpdatedReplicas: 3}
		change(s)
		return s
	}
	old := func(s *appsv1.StatefulSet) {
		s.Status.CurrentRevision, s.Status.UpdateRevision, s.Status.UpdatedReplicas = "db-1", "db-2", 1
		s.Spec.UpdateStrategy.RollingUpdate = &appsv1.RollingUpdateStatefulSetStrategy{Partition: number(2)}
	}
	daemons := &appsv1.DaemonSet{ObjectMeta: metav1.ObjectMeta{Name: "log", Namespace: "default", UID: "s",
		Generation: 1},
		Status: appsv1.DaemonSetStatus{ObservedGeneration: 1}}
	job := func(t batchv1.JobConditionType, reason, message string) *batchv1.Job {
		return &batchv1.Job{ObjectMeta: metav1.ObjectMeta{Name: "db", Namespace: "default", UID: "s"},
			Status: batchv1.JobStatus{
				Conditions: []batchv1.JobCondition{{Type: t, Status: corev1.ConditionTrue, Reason: reason,
					Message:            message,
					LastTransitionTime: ago(time.Minute)}}}}
	}
	transcript(t, "workloads", []subject{
		{"a rollout that does not come on, and its pods", w,
			deployment(lacking(appsv1.DeploymentProgressing, corev1.ConditionFalse,
				"ProgressDeadlineExceeded", `ReplicaSet "web-abc" has timed out progressing.`))},
		{"a quota", World{}, deployment(lacking(appsv1.DeploymentReplicaFailure, corev1.ConditionTrue, "FailedCreate",
			`pods "web-abc-x" is forbidden: exceeded quota: team, requested: cpu=1, used: cpu=2, limited: cpu=2`))},
		{"a quota that wants requests", World{},
			deployment(lacking(appsv1.DeploymentReplicaFailure, corev1.ConditionTrue, "FailedCreate",
				`pods "web-abc-x" is forbidden: failed quota: team: must specify cpu for: main`))},
		{"pod security", World{}, deployment(lacking(appsv1.DeploymentReplicaFailure, corev1.ConditionTrue,
			"FailedCreate",
			`pods "web-abc-x" is forbidden: violates PodSecurity "restricted:latest": runAsNonRoot != true`))},
		{"paused", World{}, deployment(func(d *appsv1.Deployment) { d.Spec.Paused = true })},
		{"no controller has seen it", World{}, deployment(func(d *appsv1.Deployment) { d.Generation = 3 })},
		{"pods that may not be read", World{Unread: []string{Pods}}, deployment(func(d *appsv1.Deployment) {
			d.Status.ReadyReplicas = 1
		})},
		{"all is well", World{}, deployment()},
		{"a pod of a StatefulSet", World{Nodes: w.Nodes,
			Pods: []corev1.Pod{*pod("db-0", of("StatefulSet", "s"), on("w1"), broken)}},
			set(func(s *appsv1.StatefulSet) { s.Status.ReadyReplicas = 0 })},
		{"a partition", World{}, set(old)},
		{"OnDelete", World{}, set(func(s *appsv1.StatefulSet) {
			old(s)
			s.Spec.UpdateStrategy = appsv1.StatefulSetUpdateStrategy{Type: appsv1.OnDeleteStatefulSetStrategyType}
		})},
		{"a DaemonSet without nodes", World{}, daemons},
		{"a Job that has failed", World{Pods: []corev1.Pod{*pod("db-x", of("Job", "s"), on("w1"), func(p *corev1.Pod) {
			p.Status.Phase = corev1.PodFailed
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main", State: corev1.ContainerState{
				Terminated: &corev1.ContainerStateTerminated{ExitCode: 3, Reason: "Error"}}}}
		})}}, job(batchv1.JobFailed, "BackoffLimitExceeded", "Job has reached the specified backoff limit")},
		{"a Job that is suspended", World{}, job(batchv1.JobSuspended, "JobSuspended", "Job suspended")},
		{"a Job that is complete", World{}, job(batchv1.JobComplete, "CompletionsReached", "")},
	})
}
