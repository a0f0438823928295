package plugins_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/scheduler/config"
	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

// build lays out the one profile of a file.
func build(t testing.TB, h *framework.Handle, profile string) (framework.Layout, error) {
	t.Helper()
	c, err := config.Parse([]byte("apiVersion: kubescheduler.config.k8s.io/v1\nkind: " +
		"KubeSchedulerConfiguration\nprofiles: [" + profile + "]"))
	if err != nil {
		t.Fatal(err)
	}
	return plugins.Build(h, plugins.NewShared(), c.Profiles[0])
}

func configured(t testing.TB, profile string) *framework.Profile {
	t.Helper()
	h := newStorage().handle()
	l, err := build(t, h, profile)
	if err != nil {
		t.Fatal(err)
	}
	p, err := framework.NewProfileOf(l)
	if err != nil {
		t.Fatal(err)
	}
	h.Fits = p.Fits
	return p
}

func names(list []framework.WeightedPlugin) string {
	var out []string
	for _, w := range list {
		name := w.Plugin.Name()
		if w.Weight > 1 {
			name += strings.Repeat("*", int(w.Weight))
		}
		out = append(out, name)
	}
	return strings.Join(out, " ")
}

// What a profile says of plugins has the precedence that Kubernetes documents: single points before
// multiPoint, and that before the defaults.
func TestBuildMerges(t *testing.T) {
	const scores = "TaintToleration*** NodeAffinity** NodeResourcesFit PodTopologySpread** InterPodAffinity** " +
		"DynamicResources** NodeResourcesBalancedAllocation ImageLocality"
	for _, tt := range []struct {
		plugins string
		at      framework.Point
		want    string
	}{
		{"", framework.AtScore, scores},
		{"score: {disabled: [{name: '*'}]}", framework.AtScore, ""},
		{"score: {disabled: [{name: '*'}], enabled: [{name: ImageLocality, weight: 2}, {name: NodeResourcesFit}]}",
			framework.AtScore, "ImageLocality** NodeResourcesFit"},
		// other points stay
		{"score: {disabled: [{name: '*'}]}", framework.AtPostFilter, "DynamicResources** DefaultPreemption"},
		{"score: {enabled: [{name: ImageLocality, weight: 4}]}", framework.AtScore,
			"ImageLocality**** " + strings.TrimSuffix(scores, " ImageLocality")},
		{"score: {disabled: [{name: ImageLocality}, {name: NodeAffinity}]}", framework.AtScore,
			"TaintToleration*** NodeResourcesFit PodTopologySpread** InterPodAffinity** DynamicResources** " +
				"NodeResourcesBalancedAllocation"},
		{"multiPoint: {enabled: [{name: NodeResourcesFit, weight: 5}]}", framework.AtScore,
			strings.Replace(scores, "Fit", "Fit*****", 1)},
		{"multiPoint: {enabled: [{name: NodeResourcesFit, weight: 5}]}, score: {enabled: [{name: NodeResourcesFit, " +
			"weight: 2}]}", framework.AtScore,
			"NodeResourcesFit** " + strings.Replace(scores, "NodeResourcesFit ", "", 1)},
		{"multiPoint: {disabled: [{name: TaintToleration}]}", framework.AtScore,
			strings.Replace(scores, "TaintToleration*** ", "", 1)},
		{"multiPoint: {disabled: [{name: TaintToleration}]}, filter: {enabled: [{name: TaintToleration}]}",
			framework.AtFilter,
			"NodeUnschedulable NodeName NodeDeclaredFeatures NodeAffinity** NodePorts NodeResourcesFit " +
				"VolumeRestrictions NodeVolumeLimits " +
				"VolumeBinding VolumeZone PodTopologySpread** InterPodAffinity** DynamicResources** TaintToleration"},
		{"multiPoint: {disabled: [{name: '*'}], enabled: [{name: PrioritySort}, {name: DefaultBinder}, {name: " +
			"NodeResourcesFit}]}", framework.AtFilter, "NodeResourcesFit"},
		{"multiPoint: {disabled: [{name: NodeAffinity}], enabled: [{name: NodeAffinity}]}", framework.AtScore,
			strings.Replace(scores, "NodeAffinity** ", "", 1) + " NodeAffinity"},
		{"postFilter: {disabled: [{name: DefaultPreemption}, {name: DynamicResources}]}", framework.AtPostFilter, ""},
	} {
		l, err := build(t, &framework.Handle{}, "{plugins: {"+tt.plugins+"}}")
		if err != nil {
			t.Errorf("%s: %v", tt.plugins, err)
			continue
		}
		if got := names(l[tt.at]); got != tt.want {
			t.Errorf("%s: at %s\n%s\nwant\n%s", tt.plugins, tt.at, got, tt.want)
		}
	}
}

// Each error about an invalid configuration names the field.
func TestBuildRefuses(t *testing.T) {
	for text, want := range map[string]string{
		"score: {enabled: [{name: " +
			"Foo}]}": `profiles[0].plugins.score.enabled[0].name: plugin "Foo" does not exist: want some ` +
			`of DefaultBinder, `,
		"score: {disabled: [{name: " +
			"Foo}]}": `profiles[0].plugins.score.disabled[0].name: plugin "Foo" does not exist`,
		"score: {enabled: [{name: " +
			"NodePorts}]}": "profiles[0].plugins.score.enabled[0].name: NodePorts does not implement score",
		"score: {enabled: [{name: ImageLocality, weight: -1}]}": "score.enabled[0].weight: " +
			"-1: want 1 or more",
		"filter: {enabled: [{name: NodeAffinity, weight: 3}]}": "filter.enabled[0].weight: " +
			"NodeAffinity does not score there",
		"multiPoint: {enabled: [{name: NodePorts, weight: 3}]}": "multiPoint.enabled[0].weight: " +
			"NodePorts does not score there",
		"filter: {enabled: [{name: NodePorts}, {name: NodePorts}]}": "filter.enabled[1].name: " +
			"NodePorts is listed twice",
		"podGroupPostFilter: {enabled: [{name: " +
			"DefaultPreemption}]}": "profiles[0].plugins.podGroupPostFilter: plugins for the placement of pod groups " +
			"are not supported",
		"multiPoint: {disabled: [{name: '*'}], enabled: [{name: Nonexistent}]}": "multiPoint.enabled[0].name",
	} {
		if _, err := build(t, &framework.Handle{}, "{plugins: {"+text+"}}"); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("%s\nerror %v\nwant %s", text, err, want)
		}
	}
	for text, want := range map[string]string{"queueSort: {disabled: [{name: '*'}]}": "no plugin sorts the queue",
		"bind: {disabled: [{name: DefaultBinder}]}": "no plugin binds"} {
		l, err := build(t, &framework.Handle{}, "{plugins: {"+text+"}}")
		if err != nil {
			t.Fatal(err)
		}
		if _, err := framework.NewProfileOf(l); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Arguments of plugins have their effect: with each of them the pod goes elsewhere than without, or
// says something else.
func TestArgumentsHaveEffect(t *testing.T) {
	web := labelled("app", "web")
	zone := func(name, z string, pods ...*v1.Pod) *framework.NodeInfo {
		return with(node(name, label(v1.LabelTopologyZone, z)), pods...)
	}
	full := pod(asks(v1.ResourceCPU, "2"), asks(v1.ResourceMemory, "4Gi"))
	weighty := func(p *v1.Pod) {
		joins("web", v1.LabelTopologyZone)(p)
	}
	for _, tt := range []struct {
		name, args    string
		pod           *v1.Pod
		nodes         []*framework.NodeInfo
		before, after string // the node chosen, or why none was
	}{
		{"NodeResourcesFit", "scoringStrategy: {type: MostAllocated}",
			pod(asks(v1.ResourceCPU, "1"), asks(v1.ResourceMemory, "2Gi")),
			[]*framework.NodeInfo{node("empty"), with(node("half"), full)}, "empty", "half"},
		{"NodeResourcesFit", "scoringStrategy: {type: RequestedToCapacityRatio, requestedToCapacityRatio: {shape: " +
			"[{utilization: 0, score: 0}, {utilization: 100, score: 10}]}}",
			pod(asks(v1.ResourceCPU, "1"), asks(v1.ResourceMemory, "2Gi")),
			[]*framework.NodeInfo{node("empty"), with(node("half"), full)}, "empty", "half"},
		{"NodeResourcesFit", "ignoredResources: [example.com/gpu]", pod(asks("example.com/gpu", "1")),
			[]*framework.NodeInfo{node("a")}, "Insufficient example.com/gpu", "a"},
		{"NodeResourcesFit", "ignoredResourceGroups: [example.com]", pod(asks("example.com/gpu", "1")),
			[]*framework.NodeInfo{node("a")}, "Insufficient example.com/gpu", "a"},
		{"NodeAffinity", "addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: " +
			"[{matchExpressions: [{key: disk, operator: Exists}]}]}}",
			pod(), []*framework.NodeInfo{node("a")}, "a", "node(s) didn't match scheduler-enforced node affinity"},
		{"NodeAffinity", "addedAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: " +
			"[{matchExpressions: [{key: disk, operator: Exists}]}]}}",
			pod(selects("kind", "x")), []*framework.NodeInfo{node("a", label("kind", "x")),
				with(node("b", label("kind", "x"), label("disk", "")), full)}, "a", "b"},
		{"NodeAffinity", "addedAffinity: {preferredDuringSchedulingIgnoredDuringExecution: [{weight: 9, preference: " +
			"{matchExpressions: [{key: disk, operator: Exists}]}}]}",
			pod(), []*framework.NodeInfo{node("a"), with(node("b", label("disk", "")), full)}, "a", "b"},
		{"InterPodAffinity", "hardPodAffinityWeight: 0", pod(web),
			[]*framework.NodeInfo{zone("a", "x"), zone("b", "y", pod(weighty, asks(v1.ResourceCPU, "1")))}, "b", "a"},
		{"InterPodAffinity", "ignorePreferredTermsOfExistingPods: true", pod(web),
			[]*framework.NodeInfo{zone("a", "x"), zone("b", "y", pod(weighty, asks(v1.ResourceCPU, "1")))}, "b", "a"},
		{"PodTopologySpread", "defaultingType: List, defaultConstraints: [{maxSkew: 1, topologyKey: zone, " +
			"whenUnsatisfiable: DoNotSchedule}]",
			pod(web), []*framework.NodeInfo{node("a")}, "a",
			"node(s) didn't match pod topology spread constraints (missing required label)"},
		{"PodTopologySpread", "defaultingType: List", pod(web), []*framework.NodeInfo{
			zone("a", "x", pod(web, asks(v1.ResourceCPU, "0"), asks(v1.ResourceMemory, "0"))),
			zone("b", "y", pod(asks(v1.ResourceCPU, "1"), asks(v1.ResourceMemory, "2Gi")))}, "b", "a"},
		{"NodeResourcesBalancedAllocation", "resources: [{name: cpu}, {name: example.com/gpu}]",
			pod(asks(v1.ResourceCPU, "100m"), asks(v1.ResourceMemory, "200Mi"), asks("example.com/gpu", "1")),
			[]*framework.NodeInfo{
				node("a", allocatable("example.com/gpu", "1")),
				with(node("b", allocatable("example.com/gpu", "8")),
					pod(asks(v1.ResourceCPU, "1"), asks(v1.ResourceMemory, "2Gi")))}, "a", "b"},
	} {
		services := framework.NewServices()
		services.Set("default", "web", map[string]string{"app": "web"})
		snap := framework.NewSnapshot(tt.nodes...)
		snap.Workloads.Services = services.Of
		for args, want := range map[string]string{"": tt.before,
			"pluginConfig: [{name: " + tt.name + ", args: {" + tt.args + "}}]": tt.after} {
			res, err := configured(t, "{"+args+"}").Schedule(t.Context(),
				framework.NewCycle(framework.NewPodInfo(tt.pod), snap), framework.Options{})
			if err == nil && res.Node != want || err != nil && !strings.Contains(err.Error(), want) {
				t.Errorf("%s {%s}: chose %q, %v, want %s", tt.name, args, res.Node, err, want)
			}
		}
	}
}

// A pod's own constraints, and pods of nothing, are untouched by listed defaults; those listed are
// found per owner.
func TestListedSpread(t *testing.T) {
	const args = "{pluginConfig: [{name: PodTopologySpread, args: {defaultingType: List, defaultConstraints: " +
		"[{maxSkew: 1, topologyKey: zone, whenUnsatisfiable: DoNotSchedule}]}}]}"
	yes := true
	web := labelled("app", "web")
	owned := func(p *v1.Pod) {
		p.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: "rs",
			Controller: &yes}}
	}
	snap := framework.NewSnapshot(with(node("a", label("zone", "x")), pod(web)),
		with(node("b", label("zone", "y")), pod(asks(v1.ResourceCPU, "3"))))
	snap.Workloads.Owner = func(string, *metav1.OwnerReference) labels.Selector {
		return labels.SelectorFromSet(labels.Set{"app": "web"})
	}
	p := configured(t, args)
	for _, tt := range []struct {
		pod  *v1.Pod
		want string
	}{
		{pod(web), "a"}, {pod(web, owned), "b"}, {pod(web, owned, spreads("web", "zone", 9)), "a"},
	} {
		res, err := p.Schedule(t.Context(), framework.NewCycle(framework.NewPodInfo(tt.pod), snap), framework.Options{})
		if err != nil || res.Node != tt.want {
			t.Errorf("%v %d constraints: chose %q, %v, want %s", tt.pod.OwnerReferences,
				len(tt.pod.Spec.TopologySpreadConstraints), res.Node, err, tt.want)
		}
	}
	if !p.Queueing.Requeues["PodTopologySpread"].MayHelp(framework.PodRemoved, pod(web, owned), pod(web)) {
		t.Error("the end of a pod of the same owner does not wake one that waits")
	}
}

// Every point that a file may name is one that plugins are laid out at.
func TestEveryPointIsNamed(t *testing.T) {
	l, err := build(t, &framework.Handle{}, "{}")
	if err != nil {
		t.Fatal(err)
	}
	got := slices.Sorted(maps.Keys(l))
	if want := slices.Sorted(slices.Values(framework.Points())); !slices.Equal(got, want) {
		t.Errorf("points %v, want %v", got, want)
	}
}

// F88: the default plugins are those of kube-scheduler, under its names.
func TestDefaultPluginsOfKubernetes(t *testing.T) {
	want := strings.Fields("DefaultBinder DefaultPreemption DynamicResources GangScheduling ImageLocality " +
		"InterPodAffinity NodeAffinity NodeDeclaredFeatures NodeName NodePorts NodeResourcesBalancedAllocation " +
		"NodeResourcesFit NodeUnschedulable NodeVolumeLimits PodTopologySpread PrioritySort SchedulingGates " +
		"TaintToleration VolumeBinding VolumeRestrictions VolumeZone")
	h := newStorage().handle()
	var got []string
	for _, w := range plugins.Default(h) {
		got = append(got, w.Plugin.Name())
		if name := w.Plugin.Name(); name != "PrioritySort" && name != "DefaultBinder" { // these are required
			if _, err := build(t, h, "{plugins: {multiPoint: {disabled: [{name: "+name+"}]}}}"); err != nil {
				t.Errorf("%s cannot be disabled: %v", name, err)
			}
		}
	}
	if slices.Sort(got); !slices.Equal(got, want) {
		t.Errorf("default plugins %v, want %v", got, want)
	}
}
