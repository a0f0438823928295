package podspec_test

import (
	"testing"

	corev1 "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

const statusOfPod = `{metadata: {name: a}, spec: {restartPolicy: OnFailure, resourceClaims: [{name: r, resourceClaimName: x}],
  initContainers: [{name: i, image: i}],
  containers: [{name: c, image: i, resources: {claims: [{name: r, request: q}], requests: {example.com/g: 1}, limits: {example.com/g: 1}}},
    {name: d, image: i, restartPolicy: Never, restartPolicyRules: [{action: Restart, exitCodes: {operator: In, values: [42]}}]}]},
  status: {phase: Running, podIP: 10.0.0.1, podIPs: [{ip: 10.0.0.1}], hostIP: 10.1.0.1, hostIPs: [{ip: 10.1.0.1}], observedGeneration: 3,
    conditions: [{type: Ready, status: "True", observedGeneration: 2}],
    initContainerStatuses: [{name: i, state: {terminated: {exitCode: 0}}}],
    containerStatuses: [{name: c, state: {terminated: {exitCode: 1}}}, {name: d, state: {terminated: {exitCode: 1}}}]}}`

// The status that a node reports keeps the end of containers that may not run again, and has addresses that agree. F56
func TestPodStatusRules(t *testing.T) {
	status := func(text string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			if err := yaml.Unmarshal([]byte("{"+text+"}"), &p.Status); err != nil {
				t.Fatal(err)
			}
		}
	}
	const again, health = ".state: Forbidden: may not be transitioned to non-terminated state",
		"status.containerStatuses[0].allocatedResourcesStatus[0]."
	allocated := func(name, health string) func(*corev1.Pod) {
		return status("containerStatuses: [{name: c, state: {terminated: {exitCode: 1}}, allocatedResourcesStatus: " +
			"[{name: '" + name +
			"', resources: [{resourceID: x, health: " + health + "}]}]}]")
	}
	for _, c := range []struct {
		change func(*corev1.Pod)
		want   string
	}{
		{func(*corev1.Pod) {}, ""},
		{status("containerStatuses: [{name: c, state: {terminated: null, running: {}}}]"), ""}, // it failed
		{status("initContainerStatuses: [{name: i, state: {terminated: null, waiting: {}}}]"),
			"status.initContainerStatuses[0]" + again},
		{status("containerStatuses: [{name: c, state: {terminated: {exitCode: 1}}}, {name: d, state: {terminated: " +
			"null, running: {}}}]"), "status.containerStatuses[1]" + again},
		{status("observedGeneration: -1"),
			"status.observedGeneration: Invalid value: -1: must be a non-negative integer"},
		{status("conditions: [{type: /b, observedGeneration: -1}]"),
			"status.conditions[0].observedGeneration: Invalid value: -1: must be a non-negative integer\n" +
				kindstest.InvalidText("status.conditions[0].Type", "/b", "prefix part must be non-empty")},
		{status("nominatedNodeName: A"), kindstest.InvalidText("status.nominatedNodeName", "A",
			kindstest.NotSubdomain)},
		{status("podIP: x"), kindstest.InvalidText("status.podIPs[0]", "x",
			"must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")},
		{status("podIPs: [{ip: 10.0.0.1}, {ip: 10.0.0.2}]"),
			`status.podIPs: Invalid value: [{"ip":"10.0.0.1"},{"ip":"10.0.0.2"}]: may specify no more than one IP ` +
				`for each IP family`},
		{status("podIPs: [{ip: 10.0.0.1}, {ip: 'fd00::1'}]"), ""},
		{status("hostIP: 10.1.0.2"), kindstest.InvalidText("status.hostIPs[0].ip", "10.1.0.1",
			"must be equal to `hostIP`")},
		{status("qosClass: Guaranteed"), kindstest.InvalidText("status.qosClass", "Guaranteed", "field is immutable")},
		{status("resourceClaimStatuses: [{name: r}, {name: r}]"),
			`status.resourceClaimStatuses[1].name: Duplicate value: "r"`},
		{status("containerStatuses: [{name: c, user: {linux: {uid: -1, gid: 1}}, state: {terminated: {exitCode: 1}}}]"),
			"status.containerStatuses[0].user.linux.uid: Invalid value: -1: must be between 0 and " +
				"4294967295, inclusive"},
		{allocated("example.com/g", "Healthy"), ""},
		{allocated("claim:r/q", "Healthy"), ""},
		{allocated("claim:r", "Healthy"), kindstest.InvalidText(health+"name", "claim:r", podspec.NotInClaimUses)},
		{allocated("cpu", "Ill"), kindstest.InvalidText(health+"name", "cpu", podspec.NotInRequests) + "\n" + health +
			`resources[0].health: Unsupported value: "Ill": supported values: "Healthy", "Unhealthy", "Unknown"`},
		{status("ephemeralContainerStatuses: [{name: e, allocatedResourcesStatus: [{name: cpu}]}]"),
			"status.ephemeralContainerStatuses[0].allocatedResourcesStatus: Forbidden: must not be specified in " +
				"container status"},
		{status("extendedResourceClaimStatus: {requestMappings: [{containerName: z, resourceName: a, " +
			"requestName: q}]}"),
			kindstest.InvalidText("status.extendedResourceClaimStatus.requestMappings[0].containerName", "z",
				"must match the name of an entry in "+
					"spec.initContainers.name or spec.containers.name") +
				"\nstatus.extendedResourceClaimStatus.resourceClaimName: Required value"},
	} {
		kindstest.CheckChanges(t, statusOfPod, kindstest.Change[*corev1.Pod]{Sub: "status", Change: c.change,
			Want: c.want, Generation: 1})
	}
	bound := kindstest.Load[*corev1.Pod](t,
		"{metadata: {name: a}, spec: {nodeName: n, containers: [{name: c, image: i}]}}")
	if _, wrong := kindstest.RunUpdate(t, bound, "status", func(p *corev1.Pod) {
		p.Status.NominatedNodeName = "m"
	}); len(wrong) != 1 || wrong[0] != "status.nominatedNodeName" {
		t.Errorf("a nominated node of a pod that has a node: %q", wrong)
	}
}

// A status of a client that does not know the observed generations and podIPs keeps them. F56
func TestPodStatusOfOldClients(t *testing.T) {
	old := kindstest.Load[*corev1.Pod](t, statusOfPod)
	got, wrong := kindstest.RunUpdate(t, old, "status", func(p *corev1.Pod) {
		p.Status.ObservedGeneration, p.Status.PodIPs, p.Status.PodIP = 0, nil, "10.0.0.9"
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionFalse}}
	})
	if wrong != nil || got.Status.ObservedGeneration != 3 || got.Status.Conditions[0].ObservedGeneration != 2 ||
		len(got.Status.PodIPs) != 1 || got.Status.PodIPs[0].IP != "10.0.0.9" {
		t.Errorf("%q, %+v", wrong, got.Status)
	}
}

// What KeepTerminated returns is a valid change. F56
func TestKeepTerminated(t *testing.T) {
	old := kindstest.Load[*corev1.Pod](t, statusOfPod)
	reported := old.Status.DeepCopy()
	for _, list := range [][]corev1.ContainerStatus{reported.ContainerStatuses, reported.InitContainerStatuses} {
		for i := range list {
			list[i].State = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
		}
	}
	want := reported.DeepCopy()
	want.InitContainerStatuses[0], want.ContainerStatuses[1] = old.Status.InitContainerStatuses[0],
		old.Status.ContainerStatuses[1]
	before := reported.DeepCopy()
	got := podspec.KeepTerminated(&old.Spec, &old.Status, reported)
	if !fieldrules.SemanticEqual(got, want) || !fieldrules.SemanticEqual(reported, before) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	if _, wrong := kindstest.RunUpdate(t, old, "status", func(p *corev1.Pod) { p.Status = *got }); wrong != nil {
		t.Errorf("refused: %q", wrong)
	}
}
