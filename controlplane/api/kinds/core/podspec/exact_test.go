package podspec_test

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestSysctlNames(t *testing.T) {
	pod := func(name string) string {
		return "{metadata: {name: a}, spec: {securityContext: {sysctls: [{name: '" + name +
			"', value: '1'}]}, containers: [{name: c, image: i}]}}"
	}
	for _, good := range []string{"net.ipv4.tcp_syncookies", "kernel.shm_rmid_forced", "net/ipv4/ping_group_range",
		"net.ipv4.conf.eth0-1.arp_filter", "a"} {
		kindstest.CheckErrors(t, good, kindstest.ValidationErrors[*corev1.Pod](t, pod(good)))
	}
	for _, bad := range []string{"net..ipv4", ".net", "net.", "Net.ipv4", "../../etc/passwd", "net.ipv4; reboot", "_a",
		strings.Repeat("a", 254)} {
		kindstest.CheckErrors(t, bad, kindstest.ValidationErrors[*corev1.Pod](t, pod(bad)),
			"spec.securityContext.sysctls[0].name: Invalid value: \""+bad+
				"\": must have at most 253 characters and match regex")
	}
	kindstest.CheckErrors(t, "none", kindstest.ValidationErrors[*corev1.Pod](t, pod("")),
		"spec.securityContext.sysctls[0].name: Required value")
}

// The placement of a pod that is held by gates may become narrower, and nothing else.
func TestGatedPodPlacement(t *testing.T) {
	const text = `
metadata: {name: a, generation: 1}
spec:
  schedulingGates: [{name: g}]
  nodeSelector: {disk: ssd}
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [{matchExpressions: [{key: a, operator: Exists}]}, {}]}}}
  containers: [{name: c, image: i}]
`
	gated := kindstest.Load[*corev1.Pod](t, text)
	terms := func(p *corev1.Pod) []corev1.NodeSelectorTerm {
		return p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution.NodeSelectorTerms
	}
	exists := corev1.NodeSelectorRequirement{Key: "b", Operator: corev1.NodeSelectorOpExists}
	const at = "spec.affinity.nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution.nodeSelectorTerms"
	for _, c := range []struct {
		name   string
		change func(*corev1.Pod)
		wrong  []string
	}{
		{"selector added", func(p *corev1.Pod) { p.Spec.NodeSelector["zone"] = "a" }, nil},
		{"selector changed", func(p *corev1.Pod) {
			p.Spec.NodeSelector["disk"] = "hdd"
		}, []string{"spec.nodeSelector"}},
		{"selector removed", func(p *corev1.Pod) { p.Spec.NodeSelector = nil }, []string{"spec.nodeSelector"}},
		{"requirement added", func(p *corev1.Pod) {
			terms(p)[0].MatchExpressions = append(terms(p)[0].MatchExpressions, exists)
		}, nil},
		{"fields added", func(p *corev1.Pod) {
			terms(p)[0].MatchFields = []corev1.NodeSelectorRequirement{exists}
		}, nil},
		{"requirement put first", func(p *corev1.Pod) {
			terms(p)[0].MatchExpressions = slices.Insert(terms(p)[0].MatchExpressions, 0, exists)
		}, []string{at + "[0]"}},
		{"requirement removed", func(p *corev1.Pod) { terms(p)[0].MatchExpressions = nil }, []string{at + "[0]"}},
		{"empty term filled", func(p *corev1.Pod) {
			terms(p)[1].MatchExpressions = []corev1.NodeSelectorRequirement{exists}
		}, []string{at + "[1]"}},
		{"term added", func(p *corev1.Pod) {
			r := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
			r.NodeSelectorTerms = append(r.NodeSelectorTerms, corev1.NodeSelectorTerm{})
		}, []string{at}},
		{"affinity removed", func(p *corev1.Pod) { p.Spec.Affinity = nil }, []string{at}},
		{"preference", func(p *corev1.Pod) {
			p.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution =
				[]corev1.PreferredSchedulingTerm{{Weight: 1}}
		}, nil},
		{"pod affinity", func(p *corev1.Pod) { p.Spec.Affinity.PodAffinity = &corev1.PodAffinity{} }, []string{"spec"}},
		{"and a command", func(p *corev1.Pod) {
			p.Spec.NodeSelector["zone"], p.Spec.Containers[0].Command = "a", []string{"sh"}
		}, []string{"spec"}},
	} {
		if got, wrong := kindstest.RunUpdate(t, gated, "", c.change); !slices.Equal(wrong, c.wrong) ||
			got.Generation != 2 {
			t.Errorf("%s: errors at %q, generation %d; want %q", c.name, wrong, got.Generation, c.wrong)
		}
	}
	bare := kindstest.Load[*corev1.Pod](t,
		"{metadata: {name: a}, spec: {schedulingGates: [{name: g}], containers: [{name: c, image: i}]}}")
	if _, wrong := kindstest.RunUpdate(t, bare, "", func(p *corev1.Pod) {
		p.Spec.NodeSelector, p.Spec.Affinity = gated.Spec.NodeSelector, gated.Spec.Affinity
	}); wrong != nil {
		t.Errorf("where there was none: %q", wrong)
	}
	free := gated.DeepCopy()
	free.Spec.SchedulingGates = nil
	if _, wrong := kindstest.RunUpdate(t, free, "", func(p *corev1.Pod) {
		p.Spec.NodeSelector["zone"] = "a"
	}); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("without gates: %q", wrong)
	}
}
