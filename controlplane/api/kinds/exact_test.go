package kinds

import (
	"slices"
	"strings"
	"testing"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// A lease may lose its holder: client-go's election does that when it is cancelled.
func TestLeaseWithoutHolder(t *testing.T) {
	held := load[*coordinationv1.Lease](t, "{metadata: {name: a, resourceVersion: '1'}, spec: {holderIdentity: me, leaseDurationSeconds: 15}}")
	for name, holder := range map[string]*string{"nobody": nil, "an empty name": ptr("")} {
		got, wrong := update(t, held, "", func(l *coordinationv1.Lease) {
			l.Spec.HolderIdentity, l.Spec.LeaseDurationSeconds = holder, ptr(int32(1))
		})
		has(t, name, All().ByType(got).Validate(got))
		if wrong != nil {
			t.Errorf("%s: %q", name, wrong)
		}
	}
}

func TestSysctlNames(t *testing.T) {
	pod := func(name string) string {
		return "{metadata: {name: a}, spec: {securityContext: {sysctls: [{name: '" + name + "', value: '1'}]}, containers: [{name: c, image: i}]}}"
	}
	for _, good := range []string{"net.ipv4.tcp_syncookies", "kernel.shm_rmid_forced", "net/ipv4/ping_group_range", "net.ipv4.conf.eth0-1.arp_filter", "a"} {
		has(t, good, judge[*corev1.Pod](t, pod(good)))
	}
	for _, bad := range []string{"net..ipv4", ".net", "net.", "Net.ipv4", "../../etc/passwd", "net.ipv4; reboot", "_a", strings.Repeat("a", 254)} {
		has(t, bad, judge[*corev1.Pod](t, pod(bad)), "spec.securityContext.sysctls[0].name: Invalid value: \""+bad+"\": must have at most 253 characters and match regex")
	}
	has(t, "none", judge[*corev1.Pod](t, pod("")), "spec.securityContext.sysctls[0].name: Required value")
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
	gated := load[*corev1.Pod](t, text)
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
		{"selector changed", func(p *corev1.Pod) { p.Spec.NodeSelector["disk"] = "hdd" }, []string{"spec.nodeSelector"}},
		{"selector removed", func(p *corev1.Pod) { p.Spec.NodeSelector = nil }, []string{"spec.nodeSelector"}},
		{"requirement added", func(p *corev1.Pod) { terms(p)[0].MatchExpressions = append(terms(p)[0].MatchExpressions, exists) }, nil},
		{"fields added", func(p *corev1.Pod) { terms(p)[0].MatchFields = []corev1.NodeSelectorRequirement{exists} }, nil},
		{"requirement put first", func(p *corev1.Pod) {
			terms(p)[0].MatchExpressions = slices.Insert(terms(p)[0].MatchExpressions, 0, exists)
		}, []string{at + "[0]"}},
		{"requirement removed", func(p *corev1.Pod) { terms(p)[0].MatchExpressions = nil }, []string{at + "[0]"}},
		{"empty term filled", func(p *corev1.Pod) { terms(p)[1].MatchExpressions = []corev1.NodeSelectorRequirement{exists} }, []string{at + "[1]"}},
		{"term added", func(p *corev1.Pod) {
			r := p.Spec.Affinity.NodeAffinity.RequiredDuringSchedulingIgnoredDuringExecution
			r.NodeSelectorTerms = append(r.NodeSelectorTerms, corev1.NodeSelectorTerm{})
		}, []string{at}},
		{"affinity removed", func(p *corev1.Pod) { p.Spec.Affinity = nil }, []string{at}},
		{"preference", func(p *corev1.Pod) {
			p.Spec.Affinity.NodeAffinity.PreferredDuringSchedulingIgnoredDuringExecution = []corev1.PreferredSchedulingTerm{{Weight: 1}}
		}, nil},
		{"pod affinity", func(p *corev1.Pod) { p.Spec.Affinity.PodAffinity = &corev1.PodAffinity{} }, []string{"spec"}},
		{"and a command", func(p *corev1.Pod) {
			p.Spec.NodeSelector["zone"], p.Spec.Containers[0].Command = "a", []string{"sh"}
		}, []string{"spec"}},
	} {
		if got, wrong := update(t, gated, "", c.change); !slices.Equal(wrong, c.wrong) || got.Generation != 2 {
			t.Errorf("%s: errors at %q, generation %d; want %q", c.name, wrong, got.Generation, c.wrong)
		}
	}
	bare := load[*corev1.Pod](t, "{metadata: {name: a}, spec: {schedulingGates: [{name: g}], containers: [{name: c, image: i}]}}")
	if _, wrong := update(t, bare, "", func(p *corev1.Pod) {
		p.Spec.NodeSelector, p.Spec.Affinity = gated.Spec.NodeSelector, gated.Spec.Affinity
	}); wrong != nil {
		t.Errorf("where there was none: %q", wrong)
	}
	free := gated.DeepCopy()
	free.Spec.SchedulingGates = nil
	if _, wrong := update(t, free, "", func(p *corev1.Pod) { p.Spec.NodeSelector["zone"] = "a" }); !slices.Equal(wrong, []string{"spec"}) {
		t.Errorf("without gates: %q", wrong)
	}
}

func TestHealthCheckNodePort(t *testing.T) {
	lb := func(rest string) string {
		return "{metadata: {name: a}, spec: {type: LoadBalancer, ports: [{port: 80, nodePort: 30001}], " + rest + "}}"
	}
	local := "externalTrafficPolicy: Local, "
	for _, c := range []struct{ name, text, want string }{
		{"good", lb(local + "healthCheckNodePort: 30002"), ""},
		{"policy", lb("healthCheckNodePort: 30002"), "spec.healthCheckNodePort: Invalid value: 30002: may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'"},
		{"any port", lb(local + "healthCheckNodePort: 80"), ""}, // the allocator has the range
		{"no port", lb(local + "healthCheckNodePort: 70000"), "spec.healthCheckNodePort: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		{"own port", lb(local + "healthCheckNodePort: 30001"), "spec.healthCheckNodePort: Invalid value: 30001: provided port is already allocated"},
	} {
		want := []string{c.want}
		if c.want == "" {
			want = nil
		}
		has(t, c.name, judge[*corev1.Service](t, c.text), want...)
	}
	s := load[*corev1.Service](t, lb(local+"healthCheckNodePort: 30002"))
	held := core.ServiceReservations(s)
	if !slices.ContainsFunc(held, func(r api.Reservation) bool {
		return r == api.Reservation{Space: core.SpaceNodePorts, Value: "TCP-30002", Field: "spec.healthCheckNodePort"}
	}) {
		t.Errorf("it reserves %v", held)
	}
	if _, wrong := update(t, s, "", func(s *corev1.Service) { s.Spec.HealthCheckNodePort = 30003 }); !slices.Equal(wrong, []string{"spec.healthCheckNodePort"}) {
		t.Errorf("changed: %q", wrong)
	}
	if got, wrong := update(t, s, "", func(s *corev1.Service) { s.Spec.ExternalTrafficPolicy = "Cluster" }); wrong != nil || got.Spec.HealthCheckNodePort != 0 {
		t.Errorf("no longer needed: %q, port %d", wrong, got.Spec.HealthCheckNodePort)
	}
}
