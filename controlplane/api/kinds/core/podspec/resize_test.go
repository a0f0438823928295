package podspec_test

import (
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const resizedPod = `
metadata: {name: web, generation: 4, resourceVersion: "7"}
spec:
  initContainers:
  - {name: once, image: i, resources: {requests: {cpu: 10m}}}
  - {name: side, image: i, restartPolicy: Always, resources: {requests: {cpu: 10m, memory: 10Mi}}}
  containers:
  - {name: a, image: i, resources: {requests: {cpu: 100m, memory: 64Mi}, limits: {cpu: 200m, memory: 128Mi}}}
  - {name: b, image: i, resources: {requests: {cpu: 100m}}, resizePolicy: [{resourceName: cpu, restartPolicy: NotRequired}]}
`

// resizeOf updates a pod through the subresource "resize" as the request pipeline does, and returns
// the result and all errors.
func resizeOf(old *corev1.Pod, change func(*corev1.Pod)) (*corev1.Pod, []string) {
	k := kinds.All().ByType(old)
	obj := old.DeepCopyObject().(*corev1.Pod)
	change(obj)
	k.Writes.Default(obj)
	k.Subresources["resize"].PrepareUpdate(obj, api.Object(old))
	var out []string
	for _, e := range k.Subresources["resize"].ValidateUpdate(obj, old) {
		out = append(out, e.Error())
	}
	return obj, out
}

func setResource(l *corev1.ResourceList, name corev1.ResourceName, q string) {
	if *l == nil {
		*l = corev1.ResourceList{}
	}
	(*l)[name] = resource.MustParse(q)
}

// Of a pod that runs only CPU and memory of its containers change, within its class; whatever else is wished for is
// refused in the words of Kubernetes, or is none of the facet's and stays.
func TestResizeValidation(t *testing.T) {
	type change = func(*corev1.Pod)
	request := func(i int, name corev1.ResourceName, q string) change {
		return func(p *corev1.Pod) { setResource(&p.Spec.Containers[i].Resources.Requests, name, q) }
	}
	limit := func(i int, name corev1.ResourceName, q string) change {
		return func(p *corev1.Pod) { setResource(&p.Spec.Containers[i].Resources.Limits, name, q) }
	}
	const onlyThese = "spec: Forbidden: only cpu and memory resources are mutable"
	for _, c := range []struct {
		name       string
		generation int64
		change     change
		wrong      []string
	}{
		{"nothing", 4, func(*corev1.Pod) {}, nil},
		{"what is another facet's", 4, func(p *corev1.Pod) {
			p.Labels, p.Spec.Containers[0].Image, p.Spec.NodeName, p.Status.Phase = map[string]string{"a": "b"}, "j",
				"w9", corev1.PodFailed
		}, nil},
		{"a request grows", 5, request(0, "cpu", "150m"), nil},
		{"a limit shrinks", 5, limit(0, "memory", "64Mi"), nil},
		{"a request is added", 5, request(1, "memory", "1Gi"), nil},
		{"a limit is added", 5, limit(1, "cpu", "1"), nil},
		{"a sidecar", 5, func(p *corev1.Pod) {
			setResource(&p.Spec.InitContainers[1].Resources.Requests, "cpu", "20m")
		}, nil},
		{"a request above its limit", 5, request(0, "cpu", "300m"),
			[]string{`spec.containers[0].resources.requests: Invalid value: "300m": must be less than or equal to ` +
				`cpu limit of 200m`}},
		{"an init container", 5, func(p *corev1.Pod) {
			setResource(&p.Spec.InitContainers[0].Resources.Requests, "cpu", "20m")
		},
			nil},
		{"a request is removed", 5, func(p *corev1.Pod) {
			delete(p.Spec.Containers[0].Resources.Requests, "memory")
			delete(p.Spec.Containers[0].Resources.Limits, "memory")
		},
			[]string{"spec.containers[0].resources.requests: Forbidden: resource requests cannot be removed",
				"spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed"}},
		{"a limit is removed", 5, func(p *corev1.Pod) { delete(p.Spec.Containers[0].Resources.Limits, "cpu") },
			[]string{"spec.containers[0].resources.limits: Forbidden: resource limits cannot be removed"}},
		{"ephemeral storage", 5, request(0, "ephemeral-storage", "1Gi"), []string{onlyThese}},
		{"a device", 5, func(p *corev1.Pod) {
			request(0, "a.b/c", "1")(p)
			limit(0, "a.b/c", "1")(p)
		}, []string{onlyThese}},
		{"ephemeral storage of a sidecar", 5, func(p *corev1.Pod) {
			setResource(&p.Spec.InitContainers[1].Resources.Requests, "ephemeral-storage", "1Gi")
		},
			[]string{"spec.initContainers[1]: Forbidden: only cpu and memory resources for init or sidecar " +
				"containers are mutable"}},
		{"the policy", 5, func(p *corev1.Pod) {
			p.Spec.Containers[1].ResizePolicy[0].RestartPolicy = corev1.RestartContainer
		}, []string{onlyThese}},
		{"the policy is dropped", 5, func(p *corev1.Pod) {
			p.Spec.Containers[1].ResizePolicy = nil
		}, []string{onlyThese}},
		{"another order", 5, func(p *corev1.Pod) { slices.Reverse(p.Spec.Containers) },
			[]string{"spec.containers[0].name: Forbidden: containers may not be renamed or reordered on resize",
				"spec.containers[1].name: Forbidden: containers may not be renamed or reordered on resize"}},
		{"one less", 5, func(p *corev1.Pod) { p.Spec.Containers = p.Spec.Containers[:1] },
			[]string{"spec.containers: Forbidden: containers may not be added or removed on resize"}},
		{"one more", 5, func(p *corev1.Pod) {
			p.Spec.InitContainers = append(p.Spec.InitContainers, corev1.Container{Name: "c", Image: "i"})
		}, []string{"spec.initContainers: Forbidden: initContainers may not be added or removed on resize"}},
	} {
		old := kindstest.Load[*corev1.Pod](t, resizedPod)
		old.Status.QOSClass = corev1.PodQOSBurstable
		got, wrong := resizeOf(old, c.change)
		if !slices.Equal(wrong, c.wrong) || got.Generation != c.generation {
			t.Errorf("%s: generation %d, %q", c.name, got.Generation, wrong)
		}
		if got.Labels["a"] != "" || got.Spec.NodeName != "" || got.Status.Phase != old.Status.Phase ||
			got.ResourceVersion != "7" {
			t.Errorf("%s: wrote what is not the facet's: %v", c.name, got)
		}
	}
}

// The class of a pod is for life; mirror pods, pods of Windows and pods on nodes that tell nothing are not resized.
func TestPodsThatAreNotResized(t *testing.T) {
	grow := func(p *corev1.Pod) { setResource(&p.Spec.Containers[0].Resources.Requests, "cpu", "20m") }
	running := corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	const podOf = "{metadata: {name: a}, spec: {containers: [{name: c, image: i"
	for _, c := range []struct {
		name, pod string
		stored    func(*corev1.Pod)
		change    func(*corev1.Pod)
		wrong     []string
	}{
		{"BestEffort asks for something", podOf + "}]}}", nil, grow,
			[]string{`spec: Invalid value: "BestEffort": Pod QOS Class may not change as a result of resizing`}},
		{"Guaranteed asks for less than its limit", podOf + ", resources: {limits: {cpu: 1, memory: 1Gi}}}]}}", nil,
			grow,
			[]string{`spec: Invalid value: "Guaranteed": Pod QOS Class may not change as a result of resizing`}},
		{"Guaranteed grows", podOf + ", resources: {limits: {cpu: 1, memory: 1Gi}}}]}}", nil, func(p *corev1.Pod) {
			setResource(&p.Spec.Containers[0].Resources.Requests, "cpu", "2")
			setResource(&p.Spec.Containers[0].Resources.Limits, "cpu", "2")
		}, nil},
		{"a mirror pod", podOf + ", resources: {requests: {cpu: 1}}}]}}", func(p *corev1.Pod) {
			p.Annotations, p.Spec.NodeName = map[string]string{corev1.MirrorPodAnnotationKey: "x"}, "w1"
		}, grow, []string{"[]: Forbidden: static pods cannot be resized"}},
		{"of Windows", podOf + ", resources: {requests: {cpu: 1}}}]}}", func(p *corev1.Pod) {
			p.Spec.OS = &corev1.PodOS{Name: corev1.Windows}
		}, grow,
			[]string{"[]: Forbidden: windows pods cannot be resized"}},
		{"on a node that tells nothing", podOf + ", resources: {requests: {cpu: 1}}}]}}", func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: running}}
		}, grow, []string{"spec: Forbidden: Pod running on node without support for resize"}},
		{"on a node that tells", podOf + ", resources: {requests: {cpu: 1}}}]}}", func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "c", State: running,
				Resources: &corev1.ResourceRequirements{}}}
		}, grow, nil},
	} {
		old := kindstest.Load[*corev1.Pod](t, c.pod)
		kinds.All().ByType(old).Writes.Default(old)
		if c.stored != nil {
			c.stored(old)
		}
		if _, wrong := resizeOf(old, c.change); !slices.Equal(wrong, c.wrong) {
			t.Errorf("%s: %q", c.name, wrong)
		}
	}
}

// What becomes of a container whose resources change is said once for each of CPU and memory, by containers that can be
// resized.
func TestResizePolicy(t *testing.T) {
	for _, c := range []struct {
		policies, restarts string
		wrong              []string
	}{
		{"[{resourceName: cpu, restartPolicy: NotRequired}, {resourceName: memory, restartPolicy: RestartContainer}]",
			"Always", nil},
		{"[{resourceName: memory, restartPolicy: RestartContainer}]", "OnFailure", nil},
		{"[{resourceName: memory, restartPolicy: NotRequired}]", "Never", nil},
		{"[{resourceName: memory, restartPolicy: RestartContainer}]", "Never",
			[]string{`spec.containers[0].resizePolicy: Invalid value: "RestartContainer": must be 'NotRequired' when ` +
				`pod ` + "`restartPolicy` is 'Never'"}},
		{"[{resourceName: cpu, restartPolicy: NotRequired}, {resourceName: cpu, restartPolicy: NotRequired}]", "Always",
			[]string{`spec.containers[0].resizePolicy[1]: Duplicate value: "cpu"`}},
		{"[{resourceName: ephemeral-storage, restartPolicy: NotRequired}]", "Always",
			[]string{`spec.containers[0].resizePolicy: Unsupported value: "ephemeral-storage": supported values: ` +
				`"cpu", "memory"`}},
		{"[{resourceName: cpu, restartPolicy: Maybe}]", "Always",
			[]string{`spec.containers[0].resizePolicy: Unsupported value: "Maybe": supported values: "NotRequired", ` +
				`"RestartContainer"`}},
		{"[{resourceName: cpu}]", "Always", []string{"spec.containers[0].resizePolicy: Required value"}},
		{"[{restartPolicy: NotRequired}]", "Always", []string{"spec.containers[0].resizePolicy: Required value"}},
	} {
		p := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {restartPolicy: "+c.restarts+
			", containers: [{name: c, image: i, resizePolicy: "+c.policies+"}]}}")
		k := kinds.All().ByType(p)
		k.Writes.Default(p)
		var wrong []string
		for _, e := range k.Validation.Object(p) {
			wrong = append(wrong, e.Error())
		}
		if !slices.Equal(wrong, c.wrong) {
			t.Errorf("%s of a pod that restarts %s: %q", c.policies, c.restarts, wrong)
		}
		if c.policies != "" && len(p.Spec.Containers[0].ResizePolicy) == 0 {
			t.Error("the policies are gone")
		}
	}
	p := kindstest.Load[*corev1.Pod](t,
		"{metadata: {name: a}, spec: {initContainers: [{name: i, image: i, resizePolicy: [{resourceName: cpu, "+
			"restartPolicy: NotRequired}, {resourceName: memory, restartPolicy: RestartContainer}]}], containers: "+
			"[{name: c, image: i}]}}")
	k := kinds.All().ByType(p)
	k.Writes.Default(p)
	if errs := k.Validation.Object(p); len(errs) != 1 ||
		errs[0].Field != "spec.initContainers[0].resizePolicy[1].restartPolicy" ||
		errs[0].Detail != "must not be set to 'RestartContainer' for non-sidecar initContainers" {
		t.Errorf("of an init container: %v", errs)
	}
}
