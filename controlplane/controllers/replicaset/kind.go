package replicaset

import (
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// kind describes ReplicaSets or ReplicationControllers, so that both share one implementation.
// Decisions are made on objects in the form of a ReplicaSet.
type kind[T api.Object] struct {
	gvk        schema.GroupVersionKind
	resource   string
	controller string // name of the controller
	word       string // name of the kind in errors
	selector   func(T) labels.Selector
	set        func(T) *appsv1.ReplicaSet // converts an object to a ReplicaSet that shares memory with it
	withStatus func(T, appsv1.ReplicaSetStatus) T

	terminating bool // objects of the kind have the field status.terminatingReplicas
}

func (k kind[T]) controllerRef(o T) metav1.OwnerReference { return *metav1.NewControllerRef(o, k.gvk) }

var replicaSets = kind[*appsv1.ReplicaSet]{
	gvk: appsv1.SchemeGroupVersion.WithKind("ReplicaSet"), resource: "replicasets",
	controller: "replicaset-controller", word: "replica set", terminating: true,
	selector: func(rs *appsv1.ReplicaSet) labels.Selector { return engine.SelectorOf(rs.Spec.Selector) },
	set:      func(rs *appsv1.ReplicaSet) *appsv1.ReplicaSet { return rs },
	withStatus: func(rs *appsv1.ReplicaSet, s appsv1.ReplicaSetStatus) *appsv1.ReplicaSet {
		next := rs.DeepCopy()
		next.Status = s
		return next
	},
}

var replicationControllers = kind[*corev1.ReplicationController]{
	gvk: corev1.SchemeGroupVersion.WithKind("ReplicationController"), resource: "replicationcontrollers",
	controller: "replication-controller", word: "replication controller",
	selector: func(rc *corev1.ReplicationController) labels.Selector {
		return engine.SelectorOf(&metav1.LabelSelector{MatchLabels: rc.Spec.Selector})
	},
	set: fromReplicationController,
	withStatus: func(rc *corev1.ReplicationController, s appsv1.ReplicaSetStatus) *corev1.ReplicationController {
		next := rc.DeepCopy()
		next.Status = corev1.ReplicationControllerStatus{
			Replicas: s.Replicas, FullyLabeledReplicas: s.FullyLabeledReplicas, ReadyReplicas: s.ReadyReplicas,
			AvailableReplicas: s.AvailableReplicas, ObservedGeneration: s.ObservedGeneration,
		}
		for _, c := range s.Conditions {
			next.Status.Conditions = append(next.Status.Conditions, corev1.ReplicationControllerCondition{
				Type: corev1.ReplicationControllerConditionType(c.Type), Status: c.Status,
				LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
			})
		}
		return next
	},
}

func fromReplicationController(rc *corev1.ReplicationController) *appsv1.ReplicaSet {
	rs := &appsv1.ReplicaSet{
		ObjectMeta: rc.ObjectMeta,
		Spec: appsv1.ReplicaSetSpec{
			Replicas: rc.Spec.Replicas, MinReadySeconds: rc.Spec.MinReadySeconds,
			Selector: &metav1.LabelSelector{MatchLabels: rc.Spec.Selector},
		},
		Status: appsv1.ReplicaSetStatus{
			Replicas: rc.Status.Replicas, FullyLabeledReplicas: rc.Status.FullyLabeledReplicas,
			ReadyReplicas:     rc.Status.ReadyReplicas,
			AvailableReplicas: rc.Status.AvailableReplicas, ObservedGeneration: rc.Status.ObservedGeneration,
		},
	}
	if rc.Spec.Template != nil {
		rs.Spec.Template = *rc.Spec.Template
	}
	for _, c := range rc.Status.Conditions {
		rs.Status.Conditions = append(rs.Status.Conditions, appsv1.ReplicaSetCondition{
			Type: appsv1.ReplicaSetConditionType(c.Type), Status: c.Status,
			LastTransitionTime: c.LastTransitionTime, Reason: c.Reason, Message: c.Message,
		})
	}
	return rs
}
