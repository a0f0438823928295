package podspec_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// podWithResources returns a pod with resources of its own and containers, with its defaults.
func podWithResources(t *testing.T, resources, spec string) *corev1.Pod {
	t.Helper()
	if resources != "" {
		resources = "resources: " + resources + ", "
	}
	p := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {"+resources+spec+"}}")
	kinds.All().ByType(p).Writes.Default(p)
	return p
}

// listText returns a resource list as text, sorted by name.
func listText(l corev1.ResourceList) string {
	var parts []string
	for name, q := range l {
		parts = append(parts, fmt.Sprintf("%s=%s", name, q.String()))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// F129, F37: requests and limits of a pod are defaulted from its limits and from its containers.
func TestDefaultsOfPodResources(t *testing.T) {
	const plain = "containers: [{name: c, image: i}]"
	const sized = "containers: [{name: c, image: i, resources: {requests: {cpu: 100m}, limits: {memory: 10Mi}}}, " +
		"{name: d, image: i, resources: {requests: {cpu: 200m, ephemeral-storage: 1Gi}}}], " +
		"initContainers: [{name: s, image: i, restartPolicy: Always, resources: {requests: {cpu: 50m}}}]"
	const pages = "containers: [{name: c, image: i, resources: {requests: {cpu: 1}, limits: {hugepages-2Mi: 4Mi}}}, " +
		"{name: d, image: i, resources: {requests: {cpu: 1}, limits: {hugepages-2Mi: 2Mi}}}]"
	for _, c := range []struct {
		name, resources, spec string
		requests, limits      string
	}{
		{"no resources", "", sized, "", ""},
		{"empty resources", "{}", sized, "", ""},
		{"requests only", "{requests: {cpu: 1}}", sized, "cpu=1", ""},
		{"limits without containers' requests", "{limits: {cpu: 1, memory: 64Mi}}", plain,
			"cpu=1 memory=64Mi", "cpu=1 memory=64Mi"},
		{"limits with containers' requests", "{limits: {cpu: 2, memory: 64Mi}}", sized,
			"cpu=350m memory=10Mi", "cpu=2 memory=64Mi"},
		{"a request that is set", "{limits: {cpu: 2}, requests: {cpu: 1}}", sized, "cpu=1 memory=10Mi", "cpu=2"},
		{"an amount that is rounded", "{limits: {cpu: 0.0001}}", plain, "cpu=1m", "cpu=1m"},
		{"huge pages of containers", "{requests: {cpu: 3}}", pages, "cpu=3 hugepages-2Mi=6Mi", "hugepages-2Mi=6Mi"},
		{"huge pages of the pod", "{limits: {cpu: 3, hugepages-2Mi: 8Mi}}", pages,
			"cpu=2 hugepages-2Mi=8Mi", "cpu=3 hugepages-2Mi=8Mi"},
	} {
		p := podWithResources(t, c.resources, c.spec)
		r := p.Spec.Resources
		if r == nil {
			r = &corev1.ResourceRequirements{}
		}
		if got := listText(r.Requests); got != c.requests {
			t.Errorf("%s: requests %q, want %q", c.name, got, c.requests)
		}
		if got := listText(r.Limits); got != c.limits {
			t.Errorf("%s: limits %q, want %q", c.name, got, c.limits)
		}
		again := p.DeepCopy()
		kinds.All().ByType(p).Writes.Default(again)
		if listText(again.Spec.Containers[0].Resources.Requests) != listText(p.Spec.Containers[0].Resources.Requests) ||
			again.Spec.Resources != nil && listText(again.Spec.Resources.Requests) != listText(r.Requests) {
			t.Errorf("%s: defaults differ when they are set again", c.name)
		}
	}
}

// F129, F95: only the pod's own resources determine its QoS class, if it has any.
func TestClassOfPodResources(t *testing.T) {
	const all = "resources: {limits: {cpu: 1, memory: 1Gi}}"
	for _, c := range []struct {
		resources, container string
		want                 corev1.PodQOSClass
	}{
		{"", all, corev1.PodQOSGuaranteed},
		{"", "", corev1.PodQOSBestEffort},
		{"{limits: {cpu: 1, memory: 1Gi}}", "", corev1.PodQOSGuaranteed},
		{"{limits: {cpu: 1, memory: 1Gi}}", "resources: {requests: {cpu: 1}}", corev1.PodQOSGuaranteed},
		{"{limits: {cpu: 2, memory: 1Gi}}", "resources: {requests: {cpu: 1}}", corev1.PodQOSBurstable},
		{"{limits: {cpu: 1}}", "", corev1.PodQOSBurstable},
		{"{limits: {cpu: 2, memory: 2Gi}}", all, corev1.PodQOSBurstable},
		{"{requests: {cpu: 1, memory: 1Gi}}", all, corev1.PodQOSBurstable},
		{"{requests: {cpu: 0}}", "", corev1.PodQOSBestEffort},
	} {
		p := podWithResources(t, c.resources, "containers: [{name: c, image: i, "+c.container+"}]")
		if p.Status.QOSClass != c.want {
			t.Errorf("resources %s with container %q: class %s, want %s", c.resources, c.container,
				p.Status.QOSClass, c.want)
		}
	}
}

// F129, F38: the errors of Kubernetes for resources of a pod.
func TestValidationOfPodResources(t *testing.T) {
	const plain = "containers: [{name: c, image: i}]"
	const two = "containers: [{name: c, image: i, resources: {requests: {cpu: 1, memory: 1Gi}}}, " +
		"{name: d, image: i, resources: {requests: {cpu: 500m}, limits: {cpu: 3, memory: 2Gi}}}]"
	const pages = "containers: [{name: c, image: i, resources: {limits: {cpu: 1, hugepages-2Mi: 4Mi}}}, " +
		"{name: d, image: i, resources: {limits: {cpu: 1, hugepages-2Mi: 2Mi}}}]"
	for _, c := range []struct {
		name, resources, spec string
		want                  []string
	}{
		{"valid", "{requests: {cpu: 2, memory: 4Gi}, limits: {cpu: 3, memory: 4Gi}}", two, nil},
		{"another resource", "{limits: {cpu: 1, ephemeral-storage: 1Gi}}", plain,
			[]string{`spec.resources.limits[ephemeral-storage]: Unsupported value: "ephemeral-storage": supported ` +
				`values: "cpu", "hugepages-", "memory"`}},
		{"an extended resource", "{limits: {example.com/gpu: 1}}", plain,
			[]string{`spec.resources.limits[example.com/gpu]: Unsupported value: "example.com/gpu": supported ` +
				`values: "cpu", "hugepages-", "memory"`}},
		{"an unknown resource", "{requests: {cpus: 1}}", plain,
			[]string{`spec.resources.requests[cpus]: Invalid value: "cpus": must be a standard resource type or ` +
				`fully qualified`}},
		{"claims", "{claims: [{name: x}]}", plain,
			[]string{"spec.resources.claims: Forbidden: claims cannot be set for Resources at pod-level"}},
		{"a request above the limit", "{limits: {cpu: 1}, requests: {cpu: 2}}", plain,
			[]string{`spec.resources.requests: Invalid value: "2": must be less than or equal to cpu limit of 1`}},
		{"a negative limit", "{limits: {memory: -1}}", plain,
			[]string{`spec.resources.limits[memory]: Invalid value: "-1": must be greater than or equal to 0`,
				`spec.resources.requests[memory]: Invalid value: "-1": must be greater than or equal to 0`}},
		{"less than the containers request", "{requests: {cpu: 1, memory: 2Gi}}", two,
			[]string{`spec.resources.requests[cpu]: Invalid value: "1": must be greater than or equal to aggregate ` +
				`container requests of 1500m`, `spec.resources.requests[memory]: Invalid value: "2Gi": must be ` +
				`greater than or equal to aggregate container requests of 3Gi`}},
		{"a container's limit above the pod's", "{requests: {cpu: 2, memory: 3Gi}, limits: {cpu: 2, memory: 3Gi}}", two,
			[]string{`spec.resources.containers[1][cpu].limits: Invalid value: "3": must be less than or equal to pod ` +
				`limits of 2`}},
		{"fewer huge pages than the containers", "{limits: {cpu: 2, hugepages-2Mi: 4Mi}}", pages,
			[]string{`spec.resources.requests[hugepages-2Mi]: Invalid value: "4Mi": must be greater than or equal to ` +
				`aggregate container requests of 6Mi`, `spec.resources.limits[hugepages-2Mi]: Invalid value: "4Mi": ` +
				`must be greater than or equal to aggregate container limits of 6Mi`}},
		{"huge pages alone", "{limits: {hugepages-2Mi: 4Mi}}", plain,
			[]string{"spec.resources: Forbidden: HugePages require cpu or memory"}},
		{"of Windows", "{limits: {cpu: 1}}", plain + ", os: {name: windows}",
			[]string{"spec.resources: Forbidden: may not be set for a windows pod"}},
	} {
		p := podWithResources(t, c.resources, c.spec)
		var got []string
		for _, e := range kinds.All().ByType(p).Validation.Object(p) {
			got = append(got, e.Error())
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q\nwant %q", c.name, got, c.want)
		}
	}
}

// F129: CPU and memory of a pod may be resized; the other rules of a resize hold for it too.
func TestResizeOfPodResources(t *testing.T) {
	set := func(requests bool, name corev1.ResourceName, amount string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			if p.Spec.Resources == nil {
				p.Spec.Resources = &corev1.ResourceRequirements{}
			}
			list := &p.Spec.Resources.Limits
			if requests {
				list = &p.Spec.Resources.Requests
			}
			if *list == nil {
				*list = corev1.ResourceList{}
			}
			(*list)[name] = resource.MustParse(amount)
		}
	}
	const sized = "{requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 2}}"
	for _, c := range []struct {
		name, resources string
		change          func(*corev1.Pod)
		want            []string
	}{
		{"a larger request", sized, set(true, "cpu", "2"), nil},
		{"a larger limit", sized, set(false, "cpu", "4"), nil},
		{"an additional limit", sized, set(false, "memory", "2Gi"), nil},
		{"added to a pod without", "", set(true, "cpu", "1"), nil},
		{"unchanged", sized, func(*corev1.Pod) {}, nil},
		{"a request above the limit", sized, set(true, "cpu", "3"),
			[]string{`spec.resources.requests: Invalid value: "3": must be less than or equal to cpu limit of 2`}},
		{"less than the container requests", sized, set(true, "cpu", "400m"),
			[]string{`spec.resources.requests[cpu]: Invalid value: "400m": must be greater than or equal to aggregate ` +
				`container requests of 500m`}},
		{"another class", sized, func(p *corev1.Pod) {
			set(false, "memory", "1Gi")(p)
			set(false, "cpu", "1")(p)
		}, []string{`spec: Invalid value: "Burstable": Pod QOS Class may not change as a result of resizing`}},
		{"a removed limit", sized, func(p *corev1.Pod) { delete(p.Spec.Resources.Limits, "cpu") },
			[]string{"spec.resources.limits: Forbidden: resource limits cannot be removed"}},
		{"all removed", sized, func(p *corev1.Pod) { p.Spec.Resources = nil },
			[]string{"spec.resources.requests: Forbidden: resource requests cannot be removed",
				"spec.resources.limits: Forbidden: resource limits cannot be removed"}},
		{"huge pages", sized, set(false, "hugepages-2Mi", "2Mi"),
			[]string{"spec.resources: Forbidden: only cpu and memory resources are mutable"}},
	} {
		old := podWithResources(t, c.resources,
			"containers: [{name: c, image: i, resources: {requests: {cpu: 500m}, limits: {cpu: 600m}}}]")
		obj, got := resizeOf(old, c.change)
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %q\nwant %q", c.name, got, c.want)
		}
		if changed := c.name != "unchanged"; (obj.Generation > old.Generation) != changed {
			t.Errorf("%s: generation %d after %d", c.name, obj.Generation, old.Generation)
		}
	}
	p := podWithResources(t, sized, "containers: [{name: c, image: i}]")
	updated := p.DeepCopy()
	set(true, "cpu", "2")(updated)
	if errs := kinds.All().ByType(p).Validation.Update(updated, p); len(errs) != 1 ||
		!strings.HasSuffix(errs[0].Detail, "\nchanged: spec.resources") {
		t.Errorf("an update without the subresource: %v", errs)
	}
}
