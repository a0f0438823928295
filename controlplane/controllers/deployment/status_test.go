package deployment

import (
	"fmt"
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func conditions(s appsv1.DeploymentStatus) string {
	var parts []string
	for _, c := range s.Conditions {
		parts = append(parts, fmt.Sprintf("%s=%s %s: %s", c.Type, c.Status, c.Reason, c.Message))
	}
	return strings.Join(parts, "\n")
}

// kubectl rollout status and its users match these texts.
func TestConditions(t *testing.T) {
	const (
		available   = "Available=True MinimumReplicasAvailable: Deployment has minimum availability."
		unavailable = "Available=False MinimumReplicasUnavailable: Deployment does not have minimum availability."
	)
	progress := func(reason string, status corev1.ConditionStatus, age time.Duration) appsv1.DeploymentCondition {
		at := metav1.NewTime(epoch.Add(-age))
		return appsv1.DeploymentCondition{Type: appsv1.DeploymentProgressing, Status: status, Reason: reason,
			Message: "before", LastUpdateTime: at, LastTransitionTime: at}
	}
	for _, c := range []struct {
		name   string
		before appsv1.DeploymentStatus
		sets   func(d *appsv1.Deployment) []*appsv1.ReplicaSet
		change func(d *appsv1.Deployment)
		did    *Progress
		want   string
		again  time.Duration
	}{
		{name: "created", did: &Progress{Reason: reasonCreated, Message: `Created new replica set "v1"`},
			sets:  func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 0, 0)} },
			want:  unavailable + "\n" + `Progressing=True NewReplicaSetCreated: Created new replica set "v1"`,
			again: 600 * time.Second},
		{name: "moving",
			before: appsv1.DeploymentStatus{Conditions: []appsv1.DeploymentCondition{progress(reasonCreated,
				corev1.ConditionTrue, time.Minute)}},
			sets:  func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 1)} },
			want:  unavailable + "\n" + `Progressing=True ReplicaSetUpdated: ReplicaSet "v1" is progressing.`,
			again: 600 * time.Second},
		{name: "done",
			before: appsv1.DeploymentStatus{Conditions: []appsv1.DeploymentCondition{progress(reasonUpdated,
				corev1.ConditionTrue, time.Minute)}},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 3)} },
			want: available + "\n" + `Progressing=True NewReplicaSetAvailable: ReplicaSet "v1" has ` +
				`successfully progressed.`},
		{name: "standing still, in time", before: appsv1.DeploymentStatus{Replicas: 3, UpdatedReplicas: 3,
			UnavailableReplicas: 3,
			Conditions: []appsv1.DeploymentCondition{progress(reasonUpdated, corev1.ConditionTrue,
				time.Minute)}},
			sets:  func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 0)} },
			want:  "Progressing=True ReplicaSetUpdated: before\n" + unavailable,
			again: 540 * time.Second},
		{name: "standing still for too long", before: appsv1.DeploymentStatus{Replicas: 3, UpdatedReplicas: 3,
			UnavailableReplicas: 3,
			Conditions: []appsv1.DeploymentCondition{progress(reasonUpdated, corev1.ConditionTrue,
				601*time.Second)}},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 0)} },
			want: unavailable + "\n" + `Progressing=False ProgressDeadlineExceeded: ReplicaSet "v1" has timed ` +
				`out progressing.`},
		{name: "a pod lost after the rollout is no rollout",
			before: appsv1.DeploymentStatus{Replicas: 3, UpdatedReplicas: 3, AvailableReplicas: 3, ReadyReplicas: 3,
				Conditions: []appsv1.DeploymentCondition{progress(reasonAvailable, corev1.ConditionTrue, time.Hour)}},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 2)} },
			want: "Progressing=True NewReplicaSetAvailable: before\n" + unavailable},
		{name: "paused", change: func(d *appsv1.Deployment) { d.Spec.Paused = true },
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 3)} },
			want: available + "\nProgressing=Unknown DeploymentPaused: Deployment is paused"},
		{name: "resumed",
			before: appsv1.DeploymentStatus{Conditions: []appsv1.DeploymentCondition{progress(reasonPaused,
				corev1.ConditionUnknown, time.Hour)}},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 3)} },
			want: available + "\nProgressing=Unknown DeploymentResumed: Deployment is resumed"},
		{name: "a replica set that cannot create", did: &Progress{Reason: reasonCreated, Message: "m"},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet {
				rs := set(d, 1, 3, 0, 0)
				rs.Status.Conditions = []appsv1.ReplicaSetCondition{{Type: appsv1.ReplicaSetReplicaFailure,
					Status: corev1.ConditionTrue, Reason: "FailedCreate", Message: "quota"}}
				return []*appsv1.ReplicaSet{rs}
			},
			want:  unavailable + "\nReplicaFailure=True FailedCreate: quota\nProgressing=True NewReplicaSetCreated: m",
			again: 600 * time.Second},
		{name: "no deadline, no condition", change: func(d *appsv1.Deployment) { d.Spec.ProgressDeadlineSeconds = nil },
			before: appsv1.DeploymentStatus{Conditions: []appsv1.DeploymentCondition{progress(reasonUpdated,
				corev1.ConditionTrue, time.Hour)}},
			sets: func(d *appsv1.Deployment) []*appsv1.ReplicaSet { return []*appsv1.ReplicaSet{set(d, 1, 3, 3, 3)} },
			want: available},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := deploy(3, 1, "1", "0")
			d.Status = c.before
			if c.change != nil {
				c.change(d)
			}
			s, again := Status(d, c.sets(d), c.did, epoch)
			if got := conditions(s); got != c.want {
				t.Errorf("got\n%s\nwant\n%s", got, c.want)
			}
			if again != c.again {
				t.Errorf("again in %v, want %v", again, c.again)
			}
			// Judged once more at the same instant, nothing changes: no write begets a write.
			d.Status = s
			if twice, _ := Status(d, c.sets(d), nil, epoch); conditions(twice) != c.want &&
				c.before.Conditions == nil && c.did == nil {
				t.Errorf("then\n%s", conditions(twice))
			}
		})
	}
}

// F60
func TestStatusNumbers(t *testing.T) {
	d := deploy(5, 2, "1", "1")
	d.Generation = 4
	s, _ := Status(d, []*appsv1.ReplicaSet{set(d, 1, 3, 4, 3), set(d, 2, 3, 2, 1)}, nil, epoch)
	got := fmt.Sprint(s.ObservedGeneration, s.Replicas, s.UpdatedReplicas, s.ReadyReplicas, s.AvailableReplicas,
		s.UnavailableReplicas)
	if got != "4 6 2 4 4 2" {
		t.Errorf("observed, replicas, updated, ready, available, unavailable: %s", got)
	}
}

// Terminating pods are reported once every ReplicaSet reports its own.
func TestTerminating(t *testing.T) {
	d := deploy(3, 2, "1", "1")
	a, b := set(d, 1, 3, 4, 3), set(d, 2, 3, 2, 1)
	two, one := int32(2), int32(1)
	a.Status.TerminatingReplicas = &two
	if s, _ := Status(d, []*appsv1.ReplicaSet{a, b}, nil, epoch); s.TerminatingReplicas != nil {
		t.Errorf("%d are told of", *s.TerminatingReplicas)
	}
	b.Status.TerminatingReplicas = &one
	if s, _ := Status(d, []*appsv1.ReplicaSet{a, b}, nil, epoch); s.TerminatingReplicas == nil ||
		*s.TerminatingReplicas != 3 {
		t.Errorf("%v are told of", s.TerminatingReplicas)
	}
}
