package kinds_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	batchv1 "k8s.io/api/batch/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	resourcev1 "k8s.io/api/resource/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// Values that Kubernetes accepts although they mean little are accepted, and an empty completion mode is refused. F38
func TestVerdictsOfKubernetes(t *testing.T) {
	kindstest.CheckRefused[*appsv1.StatefulSet](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {" + kindstest.LastingTemplate +
			", revisionHistoryLimit: -1, serviceName: web}}", Want: ""})
	if errs := kinds.All().ByType(&appsv1.StatefulSet{}).Validation.Create(
		&appsv1.StatefulSet{Spec: appsv1.StatefulSetSpec{ServiceName: "A.b"}}); len(errs) == 0 ||
		errs[0].Field != "spec.serviceName" {
		t.Errorf("a StatefulSet with a service name that is no DNS label: %v", errs)
	}
	kindstest.CheckRefused[*discoveryv1.EndpointSlice](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, addressType: IPv4, endpoints: [{addresses: [10.0.0.1]}], " +
			"ports: [{port: 0}, {name: b, port: 70000}]}", Want: ""})
	kindstest.CheckRefused[*resourcev1.ResourceSlice](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {driver: x.io, nodeName: w1, pool: {name: w1, " +
			"resourceSliceCount: 1}, devices: [{name: d, capacity: {x.io/a/b: {value: 1}}}]}}", Want: ""})
	const modes = `Unsupported value: "": supported values: "NonIndexed", "Indexed"`
	kindstest.CheckRefused[*batchv1.CronJob](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {schedule: '@daily', jobTemplate: {spec: " +
			"{completionMode: '', " + kindstest.EndingTemplate + "}}}}",
			Want: "spec.jobTemplate.spec.completionMode: " + modes})
	kindstest.CheckRejected[*batchv1.Job](t, "{metadata: {name: a}, spec: {"+kindstest.EndingTemplate+"}}",
		[]kindstest.InvalidPatch{{Patch: "spec: {completionMode: ''}", Want: "spec.completionMode: " + modes}})
	kindstest.CheckRefused[*autoscalingv2.HorizontalPodAutoscaler](t,
		kindstest.BadObject{Text: "{metadata: {name: a}, spec: {minReplicas: 0, maxReplicas: 2, " +
			"scaleTargetRef: {apiVersion: apps/v1, kind: Deployment, name: d}, " +
			"metrics: [{type: External, external: {metric: {name: a}, target: {type: Value, value: 1}}}]}}", Want: ""})
}

// A StatefulSet that was stored with a service name that is no DNS label can still be changed. F38
func TestStoredServiceNameStaysValid(t *testing.T) {
	kindstest.CheckChanges(t, "{metadata: {name: a}, spec: {"+kindstest.LastingTemplate+", serviceName: A.b}}",
		kindstest.Change[*appsv1.StatefulSet]{Change: func(s *appsv1.StatefulSet) {
			s.Spec.Replicas = new(int32(3))
		}, Generation: 2})
}
