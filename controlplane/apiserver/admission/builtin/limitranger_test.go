package builtin

import (
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission/admissiontest"
)

func list(text string) corev1.ResourceList {
	out := corev1.ResourceList{}
	for _, pair := range strings.Fields(text) {
		name, value, _ := strings.Cut(pair, "=")
		out[corev1.ResourceName(name)] = resource.MustParse(value)
	}
	return out
}

func container(name, requests, limits string) corev1.Container {
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Requests: list(requests),
		Limits: list(limits)}}
}

func podOf(containers ...corev1.Container) *corev1.Pod {
	return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"},
		Spec: corev1.PodSpec{Containers: containers}}
}

func claimOf(size string) *corev1.PersistentVolumeClaim {
	return &corev1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "c"},
		Spec: corev1.PersistentVolumeClaimSpec{Resources: corev1.VolumeResourceRequirements{Requests: list(size)}}}
}

func limitRange(name string, items ...corev1.LimitRangeItem) *corev1.LimitRange {
	return &corev1.LimitRange{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name},
		Spec: corev1.LimitRangeSpec{Limits: items}}
}

// The errors for violated limits are those of Kubernetes.
func TestLimits(t *testing.T) {
	all := kinds.All()
	perContainer := func(l corev1.LimitRangeItem) corev1.LimitRangeItem { l.Type = corev1.LimitTypeContainer; return l }
	perPod := func(l corev1.LimitRangeItem) corev1.LimitRangeItem { l.Type = corev1.LimitTypePod; return l }
	perClaim := func(l corev1.LimitRangeItem) corev1.LimitRangeItem {
		l.Type = corev1.LimitTypePersistentVolumeClaim
		return l
	}
	const pod, claim = `pods "p" is forbidden: `, `persistentvolumeclaims "c" is forbidden: `
	sidecar := podOf(container("a", "cpu=1", "cpu=1"))
	always := corev1.ContainerRestartPolicyAlways
	sidecar.Spec.InitContainers = []corev1.Container{container("s", "cpu=1", "cpu=1")}
	sidecar.Spec.InitContainers[0].RestartPolicy = &always
	once := podOf(container("a", "cpu=1", "cpu=1"))
	once.Spec.InitContainers = []corev1.Container{container("i", "cpu=1", "cpu=1")}
	heavy := podOf(container("a", "cpu=1", "cpu=1"))
	heavy.Spec.Overhead = list("cpu=1")
	level := podOf(container("a", "", ""))
	level.Spec.Resources = &corev1.ResourceRequirements{Requests: list("cpu=3"), Limits: list("cpu=3")}
	for _, c := range []struct {
		what  string
		limit corev1.LimitRangeItem
		o     api.Object
		want  string
	}{
		{"at the least", perContainer(corev1.LimitRangeItem{Min: list("cpu=1")}),
			podOf(container("a", "cpu=1", "")), ""},
		{"less", perContainer(corev1.LimitRangeItem{Min: list("cpu=1")}), podOf(container("a", "cpu=500m", "")),
			pod + "minimum cpu usage per Container is 1, but request is 500m"},
		{"no request", perContainer(corev1.LimitRangeItem{Min: list("cpu=1")}), podOf(container("a", "", "")),
			pod + "minimum cpu usage per Container is 1. No request is specified"},
		{"a low limit", perContainer(corev1.LimitRangeItem{Min: list("memory=1Gi")}),
			podOf(container("a", "memory=1Gi", "memory=1Mi")),
			pod + "minimum memory usage per Container is 1Gi, but limit is 1Mi"},
		{"at the most", perContainer(corev1.LimitRangeItem{Max: list("cpu=1")}),
			podOf(container("a", "", "cpu=1")), ""},
		{"no limit", perContainer(corev1.LimitRangeItem{Max: list("cpu=1")}), podOf(container("a", "cpu=1", "")),
			pod + "maximum cpu usage per Container is 1. No limit is specified"},
		{"more", perContainer(corev1.LimitRangeItem{Max: list("cpu=1")}), podOf(container("a", "", "cpu=2")),
			pod + "maximum cpu usage per Container is 1, but limit is 2"},
		{"a high request", perContainer(corev1.LimitRangeItem{Max: list("cpu=1")}),
			podOf(container("a", "cpu=2", "cpu=1")),
			pod + "maximum cpu usage per Container is 1, but request is 2"},
		{"in ratio", perContainer(corev1.LimitRangeItem{MaxLimitRequestRatio: list("cpu=2")}),
			podOf(container("a", "cpu=1", "cpu=2")), ""},
		{"out of ratio", perContainer(corev1.LimitRangeItem{MaxLimitRequestRatio: list("cpu=2")}),
			podOf(container("a", "cpu=1", "cpu=3")),
			pod + "cpu max limit to request ratio per Container is 2, but provided ratio is 3.000000"},
		{"no ratio", perContainer(corev1.LimitRangeItem{MaxLimitRequestRatio: list("cpu=2")}),
			podOf(container("a", "", "cpu=3")),
			pod + "cpu max limit to request ratio per Container is 2, but no request is specified or request is 0"},
		{"no limit to compare", perContainer(corev1.LimitRangeItem{MaxLimitRequestRatio: list("cpu=2")}),
			podOf(container("a", "cpu=1", "")),
			pod + "cpu max limit to request ratio per Container is 2, but no limit is specified or limit is 0"},
		{"init containers too", perContainer(corev1.LimitRangeItem{Max: list("cpu=500m")}), once,
			pod + "maximum cpu usage per Container is 500m, but limit is 1"},
		{"several", perContainer(corev1.LimitRangeItem{Min: list("cpu=1"), Max: list("memory=1Gi")}),
			podOf(container("a", "", "")),
			pod + "[minimum cpu usage per Container is 1. No request is specified, maximum memory " +
				"usage per Container is 1Gi. No limit is specified]"},
		{"a pod's sum", perPod(corev1.LimitRangeItem{Max: list("cpu=2")}),
			podOf(container("a", "cpu=1", "cpu=1"), container("b", "cpu=1", "cpu=2")),
			pod + "maximum cpu usage per Pod is 2, but limit is 3"},
		{"an init container runs alone", perPod(corev1.LimitRangeItem{Max: list("cpu=1")}), once, ""},
		{"a sidecar runs on", perPod(corev1.LimitRangeItem{Max: list("cpu=1")}), sidecar,
			pod + "maximum cpu usage per Pod is 1, but limit is 2"},
		{"overhead is no part of it", perPod(corev1.LimitRangeItem{Max: list("cpu=1")}), heavy, ""},
		{"nor does it reach the least", perPod(corev1.LimitRangeItem{Min: list("cpu=2")}), heavy,
			pod + "minimum cpu usage per Pod is 2, but request is 1"},
		{"pod-level resources", perPod(corev1.LimitRangeItem{Max: list("cpu=2")}), level,
			pod + "maximum cpu usage per Pod is 2, but limit is 3"},
		{"a claim", perClaim(corev1.LimitRangeItem{Min: list("storage=1Gi"), Max: list("storage=2Gi")}),
			claimOf("storage=2Gi"), ""},
		{"a small claim", perClaim(corev1.LimitRangeItem{Min: list("storage=1Gi")}), claimOf("storage=1Mi"),
			claim + "minimum storage usage per PersistentVolumeClaim is 1Gi, but request is 1Mi"},
		{"a large claim", perClaim(corev1.LimitRangeItem{Max: list("storage=1Gi")}), claimOf("storage=2Gi"),
			claim + "maximum storage usage per PersistentVolumeClaim is 1Gi, but request is 2Gi"},
		{"a claim of nothing", perClaim(corev1.LimitRangeItem{Max: list("storage=1Gi")}), claimOf(""),
			claim + "maximum storage usage per PersistentVolumeClaim is 1Gi. No request is specified"},
		{"of containers, not claims", perContainer(corev1.LimitRangeItem{Max: list("storage=1Gi")}),
			claimOf("storage=2Gi"), ""},
	} {
		w := admissiontest.World{"limitranges": {limitRange("l", c.limit)}}
		err := newLimitRanger(Config{Kinds: all, ListHeld: w.ListHeld}).enforceLimits(t.Context(),
			admissiontest.CreateAttempt(all, c.o))
		if got := admissiontest.ErrorText(err); got != c.want {
			t.Errorf("%s: %s\nwant %s", c.what, got, c.want)
		}
	}
}

// Containers get default requests and limits, and the annotation lists them.
func TestLimitDefaults(t *testing.T) {
	all := kinds.All()
	w := admissiontest.World{"limitranges": {limitRange("l", corev1.LimitRangeItem{Type: corev1.LimitTypeContainer,
		Default: list("cpu=2 memory=2Gi"), DefaultRequest: list("cpu=1 memory=1Gi")})}}
	p := podOf(container("bare", "", ""), container("half", "cpu=100m", "memory=3Gi"),
		container("full", "cpu=1 memory=1Mi", "cpu=1 memory=1Mi"))
	p.Spec.InitContainers = []corev1.Container{container("init", "cpu=1 memory=1", "cpu=1")}
	if err := newLimitRanger(Config{Kinds: all, ListHeld: w.ListHeld}).setDefaultResources(t.Context(),
		admissiontest.CreateAttempt(all, p)); err != nil {
		t.Fatal(err)
	}
	const want = "LimitRanger plugin set: cpu, memory request for container bare; cpu, memory limit for " +
		"container bare; " +
		"memory request for container half; cpu limit for container half; memory limit for init container init"
	if got := p.Annotations["kubernetes.io/limit-ranger"]; got != want {
		t.Errorf("annotation %q\nwant %q", got, want)
	}
	half := p.Spec.Containers[1].Resources
	if half.Requests.Memory().String() != "1Gi" || half.Limits.Cpu().String() != "2" ||
		half.Requests.Cpu().String() != "100m" ||
		half.Limits.Memory().String() != "3Gi" {
		t.Errorf("half has %v", half)
	}
}
