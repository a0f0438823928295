package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// What the rules of a kind cost one create of a pod: they are part of every write's 3 ms.
func BenchmarkPodRules(b *testing.B) {
	k := kinds.All().ByType((*corev1.Pod)(nil))
	var pod corev1.Pod
	if err := yaml.Unmarshal([]byte(`
metadata: {name: a, namespace: default, labels: {app: a}}
spec:
  volumes: [{name: v, configMap: {name: c}}]
  containers:
  - {name: c, image: i, ports: [{containerPort: 80, name: http}], volumeMounts: [{name: v, mountPath: /v}],
     resources: {limits: {cpu: 1, memory: 1Gi}}, readinessProbe: {httpGet: {port: http}}}
`), &pod); err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		p := pod.DeepCopy()
		k.Writes.PrepareCreate(p)
		k.Writes.Default(p)
		if errs := k.Validation.Object(p); len(errs) > 0 {
			b.Fatal(errs)
		}
	}
}

func BenchmarkPodRow(b *testing.B) {
	k := kinds.All().ByType((*corev1.Pod)(nil))
	state := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	p := &corev1.Pod{Status: corev1.PodStatus{ContainerStatuses: []corev1.ContainerStatus{{Ready: true, State: state}}}}
	b.ReportAllocs()
	for b.Loop() {
		k.Lists.Row(p, kindstest.Now)
	}
}
