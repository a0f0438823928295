package plugins_test

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins/interpodaffinity"
	"keelson.dev/keelson/controlplane/scheduler/plugins/podtopologyspread"
)

func labelled(kv ...string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Labels = map[string]string{}
		for i := 0; i < len(kv); i += 2 {
			p.Labels[kv[i]] = kv[i+1]
		}
	}
}

func app(name string) *metav1.LabelSelector {
	return &metav1.LabelSelector{MatchLabels: map[string]string{"app": name}}
}

func avoids(name, key string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Affinity = &v1.Affinity{PodAntiAffinity: &v1.PodAntiAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{LabelSelector: app(name),
				TopologyKey: key}}}}
	}
}

func joins(name, key string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Affinity = &v1.Affinity{PodAffinity: &v1.PodAffinity{
			RequiredDuringSchedulingIgnoredDuringExecution: []v1.PodAffinityTerm{{LabelSelector: app(name),
				TopologyKey: key}}}}
	}
}

func spreads(name, key string, skew int32, change ...func(*v1.TopologySpreadConstraint)) func(*v1.Pod) {
	c := v1.TopologySpreadConstraint{MaxSkew: skew, TopologyKey: key, WhenUnsatisfiable: v1.DoNotSchedule,
		LabelSelector: app(name)}
	for _, f := range change {
		f(&c)
	}
	return func(p *v1.Pod) { p.Spec.TopologySpreadConstraints = append(p.Spec.TopologySpreadConstraints, c) }
}

func minDomains(n int32) func(*v1.TopologySpreadConstraint) {
	return func(c *v1.TopologySpreadConstraint) { c.MinDomains = &n }
}

func soft(c *v1.TopologySpreadConstraint) { c.WhenUnsatisfiable = v1.ScheduleAnyway }

// F84, F85, F87: where other pods let a pod go, and in which words they do not.
func TestPlacementByOtherPods(t *testing.T) {
	const host, zone = v1.LabelHostname, "zone"
	web := labelled("app", "web")
	type nodes = []*framework.NodeInfo
	in := func(name, z string, pods ...*v1.Pod) *framework.NodeInfo {
		return with(node(name, label(zone, z)), pods...)
	}
	for _, tt := range []struct {
		name  string
		pod   *v1.Pod
		nodes nodes
		want  string
	}{
		{"one per host", pod(web, avoids("web", host)), nodes{with(node("a"), pod(web)), node("b")}, "b"},
		{"one per host, all taken", pod(web, avoids("web", host)),
			nodes{with(node("a"), pod(web)), with(node("b"), pod(web)), node("c", cordoned)},
			"0/3 nodes are available: 1 node(s) were unschedulable, 2 node(s) didn't match pod anti-affinity rules."},
		{"existing pods refuse", pod(web), nodes{with(node("a"), pod(avoids("web", host)))},
			"0/1 nodes are available: 1 node(s) didn't satisfy existing pods anti-affinity rules."},
		{"a node without the key has no domain", pod(web, avoids("web", zone)), nodes{with(node("a"), pod(web))}, "a"},
		{"beside others", pod(joins("web", zone)), nodes{in("a", "x"), in("b", "y", pod(web)), node("c")}, "b"},
		{"beside nobody", pod(joins("web", zone)), nodes{in("a", "x"), node("c")},
			"0/2 nodes are available: 2 node(s) didn't match pod affinity rules."},
		{"the first of its group", pod(web, joins("web", zone)), nodes{node("c"), in("a", "x")}, "a"},
		{"a group elsewhere", pod(web, joins("web", zone)), nodes{in("a", "x"), in("b", "y", pod(web)), in("c", "y")},
			"c"},
		{"another namespace does not count", pod(web, avoids("web", host)),
			nodes{with(node("a"), pod(web, func(p *v1.Pod) { p.Namespace = "other" }))}, "a"},
		{"skew", pod(web, spreads("web", zone, 1)), nodes{in("a", "x", pod(web)), in("b", "y")}, "b"},
		{"skew too large", pod(web, spreads("web", zone, 1), asks(v1.ResourceCPU, "1")),
			nodes{in("a", "x", pod(web)), in("b", "y", pod(asks(v1.ResourceCPU, "4"))), node("c")},
			"0/3 nodes are available: 1 Insufficient cpu, 1 node(s) didn't match pod topology spread constraints, 1 " +
				"node(s) didn't match pod topology spread constraints (missing required label)."},
		{"a terminating pod does not count", pod(web, spreads("web", host, 1)),
			nodes{with(node("a"), pod(web, func(p *v1.Pod) {
				p.DeletionTimestamp = &metav1.Time{}
			})), node("b", cordoned)}, "a"},
		{"too few domains", pod(web, spreads("web", zone, 1, minDomains(2))), nodes{in("a", "x", pod(web))},
			"0/1 nodes are available: 1 node(s) didn't match pod topology spread constraints."},
		{"both constraints", pod(web, spreads("web", zone, 1), spreads("web", host, 1)),
			nodes{in("a", "x", pod(web)), in("b", "x"), in("c", "y", pod(web)), in("d", "y", pod(web))}, "b"},
		{"rather where fewer are", pod(web, spreads("web", zone, 1, soft)),
			nodes{in("a", "x", pod(web)), in("b", "y")}, "b"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			res, err := schedule(profile(t, newStorage().handle()), tt.pod, tt.nodes...)
			got := res.Node
			if err != nil {
				got = err.Error()
			}
			if got != tt.want {
				t.Errorf("got  %s\nwant %s", got, tt.want)
			}
		})
	}
}

// Pods of a Service or of a controller with replicas are spread although they do not ask for it.
func TestSpreadByDefault(t *testing.T) {
	web := labelled("app", "web", "pod-template-hash", "1")
	yes := true
	owned := func(p *v1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs",
			Controller: &yes}}
	}
	zoned := func(name, z string, pods ...*v1.Pod) *framework.NodeInfo {
		return with(node(name, label(v1.LabelTopologyZone, z)), pods...)
	}
	// a has more room than b, so that only the default constraints draw a pod to b.
	snap := framework.NewSnapshot(zoned("a", "x", pod(web, asks(v1.ResourceCPU, "0"), asks(v1.ResourceMemory, "0"))),
		zoned("b", "y", pod(labelled("app", "other"), asks(v1.ResourceCPU, "1"), asks(v1.ResourceMemory, "2Gi"))))
	choose := func(p *v1.Pod) string {
		res, err := profile(t, newStorage().handle()).Schedule(t.Context(),
			framework.NewCycle(framework.NewPodInfo(p), snap), framework.Options{})
		if err != nil {
			t.Fatal(err)
		}
		return res.Node
	}
	if got := choose(pod(web, owned)); got != "a" {
		t.Errorf("without an owner or a Service the pod went to %s", got)
	}
	snap.Workloads.Owner = func(ns string, ref *metav1.OwnerReference) labels.Selector {
		if ns != "default" || ref.Name != "rs" {
			t.Errorf("asked for %s/%s", ns, ref.Name)
		}
		return labels.SelectorFromSet(labels.Set{"app": "web", "pod-template-hash": "1"})
	}
	if got := choose(pod(web, owned)); got != "b" {
		t.Errorf("a pod of a ReplicaSet went to %s", got)
	}
	snap.Workloads = framework.Workloads{Services: framework.NewServices().Of}
	if got := choose(pod(web)); got != "a" {
		t.Errorf("a pod of no Service went to %s", got)
	}
	services := framework.NewServices()
	services.Set("default", "web", map[string]string{"app": "web"})
	services.Set("other", "web", map[string]string{"app": "other"})
	snap.Workloads.Services = services.Of
	if got := choose(pod(web)); got != "b" {
		t.Errorf("a pod of a Service went to %s", got)
	}
	services.Set("default", "web", nil)
	if got := choose(pod(web)); got != "a" {
		t.Errorf("a pod of a Service that is gone went to %s", got)
	}
}

// A pod that waits because of other pods is woken by those that it is about, and by no others.
func TestPlacementHints(t *testing.T) {
	web, db := labelled("app", "web"), labelled("app", "db")
	p := func(change ...func(*v1.Pod)) *v1.Pod { return pod(change...) }
	update := func(old, now *v1.Pod) framework.PodUpdate { return framework.PodUpdate{Old: old, Now: now} }
	affinity, spread := interpodaffinity.Plugin{}, podtopologyspread.Plugin{}
	n := node("n", label("zone", "x")).Node
	for _, tt := range []struct {
		name   string
		plugin framework.Requeue
		waits  *v1.Pod
		event  framework.Event
		obj    any
		want   bool
	}{
		{"wanted came", affinity, p(joins("db", "zone")), framework.PodAdded, p(db), true},
		{"other came", affinity, p(joins("db", "zone")), framework.PodAdded, p(web), false},
		{"avoided came", affinity, p(avoids("db", "zone")), framework.PodAdded, p(db), false},
		{"avoided went", affinity, p(avoids("db", "zone")), framework.PodRemoved, p(db), true},
		{"other went", affinity, p(avoids("db", "zone")), framework.PodRemoved, p(web), false},
		{"avoiding went", affinity, p(web), framework.PodRemoved, p(avoids("web", "zone")), true},
		{"avoided in another namespace", affinity, p(avoids("db", "zone")), framework.PodRemoved,
			p(db, func(p *v1.Pod) { p.Namespace = "o" }), false},
		{"became wanted", affinity, p(joins("db", "zone")), framework.PodUpdated, update(p(web), p(db)), true},
		{"no more avoided", affinity, p(avoids("db", "zone")), framework.PodUpdated, update(p(db), p(web)), true},
		{"became avoided", affinity, p(avoids("db", "zone")), framework.PodUpdated, update(p(web), p(db)), false},
		{"node", affinity, p(avoids("db", "zone")), framework.NodeAdded, n, true},
		{"counted came", spread, p(web, spreads("web", "zone", 1)), framework.PodAdded, p(web), true},
		{"other came", spread, p(web, spreads("web", "zone", 1)), framework.PodAdded, p(db), false},
		{"counted went", spread, p(web, spreads("web", "zone", 1)), framework.PodRemoved, p(web), true},
		{"counted is no more", spread, p(web, spreads("web", "zone", 1)), framework.PodUpdated,
			update(p(web), p(db)), true},
		{"other changed", spread, p(web, spreads("web", "zone", 1)), framework.PodUpdated, update(p(db), p(db)), false},
		{"node with the key", spread, p(web, spreads("web", "zone", 1)), framework.NodeAdded, n, true},
		{"node without it", spread, p(web, spreads("web", "rack", 1)), framework.NodeAdded, n, false},
		{"claim", spread, p(web, spreads("web", "zone", 1)), framework.ClaimChanged,
			&v1.PersistentVolumeClaim{}, false},
	} {
		if got := tt.plugin.MayHelp(tt.event, tt.waits, tt.obj); got != tt.want {
			t.Errorf("%s, %s: %v, want %v", tt.plugin.Name(), tt.name, got, tt.want)
		}
	}
}
