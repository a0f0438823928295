package kinds

import (
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourcev1 "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Values that Kubernetes accepts although they mean little are accepted, and an empty completion mode is refused. F38
func TestVerdictsOfKubernetes(t *testing.T) {
	refuses[*appsv1.StatefulSet](t, bad{"{metadata: {name: a}, spec: {" + lasting + ", revisionHistoryLimit: -1, serviceName: web}}", ""})
	if errs := All().ByType(&appsv1.StatefulSet{}).ValidateCreate(
		&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{ServiceName: "A.b"}}); len(errs) == 0 || errs[0].Field != "spec.serviceName" {
		t.Errorf("a StatefulSet with a service name that is no DNS label: %v", errs)
	}
	refuses[*discoveryv1.EndpointSlice](t,
		bad{"{metadata: {name: a}, addressType: IPv4, endpoints: [{addresses: [10.0.0.1]}], ports: [{port: 0}, {name: b, port: 70000}]}", ""})
	refuses[*resourcev1.ResourceSlice](t, bad{"{metadata: {name: a}, spec: {driver: x.io, nodeName: w1, pool: {name: w1, resourceSliceCount: 1}, " +
		"devices: [{name: d, capacity: {x.io/a/b: {value: 1}}}]}}", ""})
	const modes = `Unsupported value: "": supported values: "NonIndexed", "Indexed"`
	refuses[*batchv1.CronJob](t, bad{"{metadata: {name: a}, spec: {schedule: '@daily', jobTemplate: {spec: {completionMode: '', " + ending + "}}}}",
		"spec.jobTemplate.spec.completionMode: " + modes})
	rejects[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+ending+"}}", []wrong{{"spec: {completionMode: ''}", "spec.completionMode: " + modes}})
	refuses[*autoscalingv2.HorizontalPodAutoscaler](t, bad{"{metadata: {name: a}, spec: {minReplicas: 0, maxReplicas: 2, " +
		"scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: d}, " +
		"metrics: [{type: External, external: {metric: {name: a}, target: {type: Value, value: 1}}}]}}", ""})
}

// A StatefulSet that was stored with a service name that is no DNS label can still be changed. F38
func TestStoredServiceNameStaysValid(t *testing.T) {
	changes(t, "{metadata: {name: a}, spec: {"+lasting+", serviceName: A.b}}",
		changed[*appsv1.StatefulSet]{change: func(s *appsv1.StatefulSet) { s.Spec.Replicas = ptr(int32(3)) }, generation: 2})
}

// A PersistentVolume has the time of its first phase, and a status without the time keeps it. F110
func TestPhaseTimeOfNewVolumes(t *testing.T) {
	k := All().ByType(&corev1.PersistentVolume{})
	created := metav1.NewTime(time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC))
	v := &corev1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: "a", CreationTimestamp: created}}
	k.PrepareCreate(v)
	if at := v.Status.LastPhaseTransitionTime; at == nil || !at.Equal(&created) {
		t.Errorf("lastPhaseTransitionTime of a new volume is %v, want %v", at, created)
	}
	next := v.DeepCopy()
	next.Status.LastPhaseTransitionTime = nil
	k.Subresources["status"].PrepareUpdate(next, v)
	if at := next.Status.LastPhaseTransitionTime; at == nil || !at.Equal(&created) {
		t.Errorf("lastPhaseTransitionTime after an update of the status is %v, want %v", at, created)
	}
}
