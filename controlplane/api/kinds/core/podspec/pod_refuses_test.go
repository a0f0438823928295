package podspec_test

import (
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/core/podspec"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// F38: rules that combine fields of a pod.
func TestPodFieldsTogether(t *testing.T) {
	pod := func(spec, container string) string {
		return "{metadata: {name: a}, spec: {" + spec + "containers: [{name: c, image: i" + container + "}]}}"
	}
	sleep := func(seconds string) string { return ", lifecycle: {preStop: {sleep: {seconds: " + seconds + "}}}" }
	const hook = "spec.containers[0].lifecycle.preStop.sleep: Invalid value: "
	const volume = "spec.volumes[0].projected"
	projected := func(sources string) string {
		return "volumes: [{name: v, projected: {sources: [" + sources + "]}}], "
	}
	kindstest.CheckRefused[*corev1.Pod](t,
		kindstest.BadObject{Text: pod("", sleep("0")), Want: ""},
		kindstest.BadObject{Text: pod("", sleep("30")), Want: ""},
		kindstest.BadObject{Text: pod("", sleep("60")),
			Want: hook + "60: must be non-negative and less than terminationGracePeriodSeconds (30)"},
		kindstest.BadObject{Text: pod("", sleep("-1")),
			Want: hook + "-1: must be non-negative and less than terminationGracePeriodSeconds (30)"},
		kindstest.BadObject{Text: pod("terminationGracePeriodSeconds: 90, ", sleep("60")), Want: ""},
		kindstest.BadObject{Text: pod("hostNetwork: true, securityContext: {sysctls: [{name: "+
			"net.ipv4.ip_local_port_range, value: '1 2'}]}, ", ""),
			Want: kindstest.InvalidText("spec.securityContext.sysctls[0].name", "net.ipv4.ip_local_port_range",
				"may not be specified when 'hostNetwork' is true")},
		kindstest.BadObject{Text: pod("hostIPC: true, securityContext: {sysctls: [{name: kernel/shm_rmid_forced, "+
			"value: '1'}, {name: net.core.somaxconn, value: '1'}]}, ", ""),
			Want: kindstest.InvalidText("spec.securityContext.sysctls[0].name", "kernel/shm_rmid_forced",
				"may not be specified when 'hostIPC' is true")},
		kindstest.BadObject{Text: pod("securityContext: {sysctls: [{name: kernel.shm_rmid_forced, value: '1'}]}, ", ""),
			Want: ""},
		kindstest.BadObject{Text: pod(projected("{secret: {name: s, items: [{key: k, path: same}]}}, {configMap: "+
			"{name: m, items: [{key: k, path: other}]}}"), ""), Want: ""},
		kindstest.BadObject{Text: pod(projected("{secret: {name: s, items: [{key: k, path: same}]}}, {configMap: "+
			"{name: m, items: [{key: k, path: same}]}}"), ""),
			Want: kindstest.InvalidText(volume, "m", "conflicting duplicate paths")},
		kindstest.BadObject{Text: pod(projected("{secret: {name: s}}, {secret: {name: s}}"), ""), Want: ""},
		kindstest.BadObject{Text: pod(projected("{secret: {name: s, items: [{key: k, path: f}]}}, {downwardAPI: "+
			"{items: [{path: f, fieldRef: {fieldPath: metadata.name}}]}}"), ""),
			Want: kindstest.InvalidText(volume, "f", "conflicting duplicate paths")},
	)
	deployment := func(container string) string {
		return "{metadata: {name: a}, spec: {selector: {matchLabels: {a: b}}, template: {metadata: {labels: " +
			"{a: b}}, spec: {terminationGracePeriodSeconds: -1, containers: [{name: c, image: i" + container + "}]}}}}"
	}
	kindstest.CheckRefused[*appsv1.Deployment](t,
		kindstest.BadObject{Text: deployment(""), Want: ""},
		kindstest.BadObject{Text: deployment(sleep("1")),
			Want: "spec.template.spec.containers[0].lifecycle.preStop.sleep: " +
				"Invalid value: 1: must be non-negative and less than terminationGracePeriodSeconds (-1)"},
	)
}

// F38: a negative grace period is accepted and becomes one second.
func TestNegativeGracePeriod(t *testing.T) {
	pod := kindstest.Load[*corev1.Pod](t, "{metadata: {name: a}, spec: {nodeName: n, terminationGracePeriodSeconds: "+
		"-1, containers: [{name: c, image: i}]}}")
	if got := podspec.PodGracePeriod(pod, nil); got != 1 {
		t.Errorf("a stored pod has a grace period of %d s", got)
	}
	if got := podspec.PodGracePeriod(pod, new(int64(-5))); got != 1 {
		t.Errorf("a deletion with -5 s has a grace period of %d s", got)
	}
	k := kinds.All().ByType(pod)
	k.Writes.PrepareCreate(pod)
	if got := *pod.Spec.TerminationGracePeriodSeconds; got != 1 {
		t.Errorf("a new pod has terminationGracePeriodSeconds %d", got)
	}
	if errs := k.ValidateObject(pod, nil); len(errs) > 0 {
		t.Error(errs)
	}
}
