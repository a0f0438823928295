package plugins_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"keelson.dev/keelson/controlplane/scheduler/framework"
	"keelson.dev/keelson/controlplane/scheduler/plugins"
)

type nodeOption func(*v1.Node)

func node(name string, opts ...nodeOption) *framework.NodeInfo {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{v1.LabelHostname: name}}}
	n.Status.Allocatable = v1.ResourceList{
		v1.ResourceCPU: resource.MustParse("4"), v1.ResourceMemory: resource.MustParse("8Gi"),
		v1.ResourceEphemeralStorage: resource.MustParse("10Gi"), v1.ResourcePods: resource.MustParse("110"),
	}
	for _, o := range opts {
		o(n)
	}
	info := &framework.NodeInfo{}
	info.SetNode(n)
	return info
}

func label(k, v string) nodeOption { return func(n *v1.Node) { n.Labels[k] = v } }
func allocatable(k v1.ResourceName, v string) nodeOption {
	return func(n *v1.Node) { n.Status.Allocatable[k] = resource.MustParse(v) }
}
func taint(k, v string, e v1.TaintEffect) nodeOption {
	return func(n *v1.Node) { n.Spec.Taints = append(n.Spec.Taints, v1.Taint{Key: k, Value: v, Effect: e}) }
}
func cordoned(n *v1.Node) { n.Spec.Unschedulable = true }
func declares(features ...string) nodeOption {
	return func(n *v1.Node) { n.Status.DeclaredFeatures = features }
}

func with(n *framework.NodeInfo, pods ...*v1.Pod) *framework.NodeInfo {
	for _, p := range pods {
		n.AddPod(framework.NewPodInfo(p))
	}
	return n
}

var uids int

func pod(change ...func(*v1.Pod)) *v1.Pod {
	uids++
	p := &v1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprint("p", uids),
			UID: types.UID(fmt.Sprint("u", uids))},
		Spec: v1.PodSpec{Containers: []v1.Container{{Name: "c"}}},
	}
	for _, c := range change {
		c(p)
	}
	return p
}

func asks(k v1.ResourceName, v string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		c := &p.Spec.Containers[0]
		if c.Resources.Requests == nil {
			c.Resources.Requests = v1.ResourceList{}
		}
		c.Resources.Requests[k] = resource.MustParse(v)
	}
}
func podLevelCPU(v string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Resources = &v1.ResourceRequirements{Requests: v1.ResourceList{v1.ResourceCPU: resource.MustParse(v)}}
	}
}
func overhead(k v1.ResourceName, v string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.Overhead = v1.ResourceList{k: resource.MustParse(v)} }
}
func hostPort(port int32, proto v1.Protocol, ip string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		p.Spec.Containers[0].Ports = append(p.Spec.Containers[0].Ports,
			v1.ContainerPort{HostPort: port, Protocol: proto, HostIP: ip})
	}
}
func tolerates(t v1.Toleration) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.Tolerations = append(p.Spec.Tolerations, t) }
}
func selects(k, v string) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.NodeSelector = map[string]string{k: v} }
}
func affinity(a v1.NodeAffinity) func(*v1.Pod) {
	return func(p *v1.Pod) { p.Spec.Affinity = &v1.Affinity{NodeAffinity: &a} }
}
func term(k string, op v1.NodeSelectorOperator, v ...string) v1.NodeSelectorTerm {
	return v1.NodeSelectorTerm{MatchExpressions: []v1.NodeSelectorRequirement{{Key: k, Operator: op, Values: v}}}
}
func claims(names ...string) func(*v1.Pod) {
	return func(p *v1.Pod) {
		for _, n := range names {
			p.Spec.Volumes = append(p.Spec.Volumes, v1.Volume{Name: n, VolumeSource: v1.VolumeSource{
				PersistentVolumeClaim: &v1.PersistentVolumeClaimVolumeSource{ClaimName: n}}})
		}
	}
}

// storage is a handful of storage objects.
type storage struct {
	claims  map[string]*v1.PersistentVolumeClaim
	volumes map[string]*v1.PersistentVolume
	classes map[string]*storagev1.StorageClass
}

func newStorage() *storage {
	return &storage{map[string]*v1.PersistentVolumeClaim{}, map[string]*v1.PersistentVolume{},
		map[string]*storagev1.StorageClass{}}
}

func (s *storage) handle() *framework.Handle {
	return &framework.Handle{Volumes: framework.Volumes{
		Claim: func(_, n string) (*v1.PersistentVolumeClaim, bool) { c, ok := s.claims[n]; return c, ok },
		PersistentVolume: func(n string) (*v1.PersistentVolume, bool) {
			v, ok := s.volumes[n]
			return v, ok
		},
		PersistentVolumes: func() []*v1.PersistentVolume {
			var out []*v1.PersistentVolume
			for _, v := range s.volumes {
				out = append(out, v)
			}
			return out
		},
		StorageClass: func(n string) (*storagev1.StorageClass, bool) { c, ok := s.classes[n]; return c, ok },
	}}
}

func (s *storage) class(name, provisioner string, mode storagev1.VolumeBindingMode) {
	s.classes[name] = &storagev1.StorageClass{ObjectMeta: metav1.ObjectMeta{Name: name}, Provisioner: provisioner,
		VolumeBindingMode: &mode}
}

func (s *storage) claim(name, class, volume string) *v1.PersistentVolumeClaim {
	c := &v1.PersistentVolumeClaim{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
		UID: types.UID("c-" + name)}}
	c.Spec.StorageClassName, c.Spec.VolumeName = &class, volume
	c.Spec.AccessModes = []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	c.Spec.Resources.Requests = v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	if volume != "" {
		c.Status.Phase = v1.ClaimBound
	}
	s.claims[name] = c
	return c
}

func (s *storage) volume(name, class, onNode string) *v1.PersistentVolume {
	v := &v1.PersistentVolume{ObjectMeta: metav1.ObjectMeta{Name: name}}
	v.Spec.StorageClassName = class
	v.Spec.AccessModes = []v1.PersistentVolumeAccessMode{v1.ReadWriteOnce}
	v.Spec.Capacity = v1.ResourceList{v1.ResourceStorage: resource.MustParse("1Gi")}
	v.Status.Phase = v1.VolumeAvailable
	if onNode != "" {
		v.Spec.NodeAffinity = &v1.VolumeNodeAffinity{
			Required: &v1.NodeSelector{NodeSelectorTerms: []v1.NodeSelectorTerm{term(v1.LabelHostname,
				v1.NodeSelectorOpIn, onNode)}}}
	}
	s.volumes[name] = v
	return v
}

func profile(t testing.TB, h *framework.Handle) *framework.Profile {
	t.Helper()
	p, err := framework.NewProfile(plugins.Default(h)...)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func schedule(p *framework.Profile, pd *v1.Pod, nodes ...*framework.NodeInfo) (framework.Result, error) {
	c := framework.NewCycle(framework.NewPodInfo(pd), framework.NewSnapshot(nodes...))
	return p.Schedule(context.Background(), c, framework.Options{})
}

const filtersGpu = v1.ResourceName("nvidia.com/gpu")

var filtersPrefer = v1.NodeAffinity{PreferredDuringSchedulingIgnoredDuringExecution: []v1.PreferredSchedulingTerm{
	{Weight: 10,
		Preference: term("zone", v1.NodeSelectorOpIn, "two")}}}

func filtersRequire(terms ...v1.NodeSelectorTerm) v1.NodeAffinity {
	return v1.NodeAffinity{RequiredDuringSchedulingIgnoredDuringExecution: &v1.NodeSelector{
		NodeSelectorTerms: terms}}
}

var filtersBusy = pod(asks(v1.ResourceCPU, "3500m"))

// filtersCases are the cases of TestFilters.
var filtersCases = []placing{
	{"fits anywhere", pod(), []*framework.NodeInfo{node("a")}, "a"},
	{"no nodes", pod(), nil, "no nodes available to schedule pods"},
	{"cpu", pod(asks(v1.ResourceCPU, "1")), []*framework.NodeInfo{with(node("a"), filtersBusy), node("b")}, "b"},
	{"cpu nowhere", pod(asks(v1.ResourceCPU, "5")), []*framework.NodeInfo{node("a"), node("b")},
		"0/2 nodes are available: 2 Insufficient cpu."},
	{"exactly full", pod(asks(v1.ResourceCPU, "500m")), []*framework.NodeInfo{with(node("a"), filtersBusy)}, "a"},
	{"a thousandth too much", pod(asks(v1.ResourceCPU, "501m")), []*framework.NodeInfo{with(node("a"), filtersBusy)},
		"0/1 nodes are available: 1 Insufficient cpu."},
	{"overhead", pod(asks(v1.ResourceCPU, "500m"), overhead(v1.ResourceCPU, "1m")),
		[]*framework.NodeInfo{with(node("a"), filtersBusy), node("b")}, "b"},
	{"overhead of a pod that asks for nothing", pod(overhead(v1.ResourceMemory, "9Gi")),
		[]*framework.NodeInfo{node("a")},
		"0/1 nodes are available: 1 Insufficient memory."},
	{"overhead of those that are there", pod(asks(v1.ResourceCPU, "2")),
		[]*framework.NodeInfo{with(node("a"), pod(asks(v1.ResourceCPU, "1"), overhead(v1.ResourceCPU, "1001m"))),
			node("b", cordoned)},
		"0/2 nodes are available: 1 Insufficient cpu, 1 node(s) were unschedulable."},
	{"overhead and balance", pod(), []*framework.NodeInfo{with(node("a"), pod(overhead(v1.ResourceCPU, "3"))),
		node("b")}, "b"},
	{"memory and disk", pod(asks(v1.ResourceMemory, "9Gi"), asks(v1.ResourceEphemeralStorage, "11Gi")),
		[]*framework.NodeInfo{node("a")},
		"0/1 nodes are available: 1 Insufficient ephemeral-storage, 1 Insufficient memory."},
	{"pods", pod(), []*framework.NodeInfo{with(node("a", allocatable(v1.ResourcePods, "1")), pod())},
		"0/1 nodes are available: 1 Too many pods."},
	{"extended", pod(asks(filtersGpu, "2")), []*framework.NodeInfo{node("a", allocatable(filtersGpu, "1")), node("b"),
		node("c", allocatable(filtersGpu, "2"))}, "c"},
	{"extended nowhere", pod(asks(filtersGpu, "2")), []*framework.NodeInfo{node("a", allocatable(filtersGpu, "1"))},
		"0/1 nodes are available: 1 Insufficient nvidia.com/gpu."},
	{"taint", pod(), []*framework.NodeInfo{node("a", taint("dedicated", "db", v1.TaintEffectNoSchedule)),
		node("b")}, "b"},
	{"taint tolerated", pod(tolerates(v1.Toleration{Key: "dedicated", Operator: v1.TolerationOpExists})),
		[]*framework.NodeInfo{node("a", taint("dedicated", "db", v1.TaintEffectNoExecute))}, "a"},
	{"taint of another value", pod(tolerates(v1.Toleration{Key: "dedicated", Value: "web"})),
		[]*framework.NodeInfo{node("a", taint("dedicated", "db", v1.TaintEffectNoSchedule))},
		"0/1 nodes are available: 1 node(s) had untolerated taint {dedicated: db}."},
	{"prefer no schedule", pod(), []*framework.NodeInfo{node("a", taint("x", "", v1.TaintEffectPreferNoSchedule)),
		node("b")}, "b"},
	{"cordoned", pod(), []*framework.NodeInfo{node("a", cordoned)},
		"0/1 nodes are available: 1 node(s) were unschedulable."},
	{"cordon tolerated",
		pod(tolerates(v1.Toleration{Key: v1.TaintNodeUnschedulable, Operator: v1.TolerationOpExists})),
		[]*framework.NodeInfo{node("a", cordoned)}, "a"},
	{"features of a node", pod(podLevelCPU("1")), []*framework.NodeInfo{node("a", declares("Other")),
		node("b", declares("Other", "PodLevelResources"))}, "b"},
	{"features nowhere", pod(podLevelCPU("1")), []*framework.NodeInfo{node("a"), node("b", declares("Other"))},
		"0/2 nodes are available: 2 node declared features check failed - " +
			"unsatisfied requirements: PodLevelResources."},
	{"resources of a pod", pod(podLevelCPU("3")), []*framework.NodeInfo{with(node("a", declares("PodLevelResources")),
		pod(podLevelCPU("2"), asks(v1.ResourceCPU, "1"))), node("b", declares("PodLevelResources"))}, "b"},
	{"resources of a pod nowhere", pod(podLevelCPU("3")),
		[]*framework.NodeInfo{with(node("a", declares("PodLevelResources")), pod(podLevelCPU("2")))},
		"0/1 nodes are available: 1 Insufficient cpu."},
	{"selector", pod(selects("disk", "ssd")), []*framework.NodeInfo{node("a"), node("b", label("disk", "ssd"))},
		"b"},
	{"selector nowhere", pod(selects("disk", "ssd")), []*framework.NodeInfo{node("a")},
		"0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."},
	{"affinity or",
		pod(affinity(filtersRequire(term("zone", v1.NodeSelectorOpIn, "x"),
			term("zone", v1.NodeSelectorOpNotIn, "one")))),
		[]*framework.NodeInfo{node("a", label("zone", "one")), node("b", label("zone", "two"))}, "b"},
	{"affinity by name",
		pod(
			affinity(filtersRequire(v1.NodeSelectorTerm{MatchFields: []v1.NodeSelectorRequirement{{Key: "metadata.name",
				Operator: v1.NodeSelectorOpIn, Values: []string{"b"}}}}))),
		[]*framework.NodeInfo{node("a"), node("b"), node("c")}, "b"},
	{"preferred", pod(affinity(filtersPrefer)), []*framework.NodeInfo{node("a", label("zone", "one")),
		node("b", label("zone", "two"))}, "b"},
	{"host port", pod(hostPort(80, "", "")),
		[]*framework.NodeInfo{with(node("a"), pod(hostPort(80, v1.ProtocolTCP, "10.0.0.1"))), node("b")}, "b"},
	{"host port nowhere", pod(hostPort(80, "", "")),
		[]*framework.NodeInfo{with(node("a"), pod(hostPort(80, "", "")))},
		"0/1 nodes are available: 1 node(s) didn't have free ports for the requested pod ports."},
	{"host port of another protocol", pod(hostPort(80, v1.ProtocolUDP, "")),
		[]*framework.NodeInfo{with(node("a"), pod(hostPort(80, v1.ProtocolTCP, "")))}, "a"},
	{"host port of another address", pod(hostPort(80, "", "10.0.0.2")),
		[]*framework.NodeInfo{with(node("a"), pod(hostPort(80, "", "10.0.0.1")))}, "a"},
	{"several filters", pod(asks(v1.ResourceCPU, "1")),
		[]*framework.NodeInfo{with(node("a"), filtersBusy), with(node("b"), filtersBusy),
			node("c", taint("key", "value", v1.TaintEffectNoSchedule))},
		"0/3 nodes are available: 1 node(s) had untolerated taint {key: value}, 2 Insufficient cpu."},
	{"bound volume", pod(claims("bound-to-b")), []*framework.NodeInfo{node("a"), node("b")}, "b"},
	{"bound volume elsewhere", pod(claims("bound-to-b")), []*framework.NodeInfo{node("a")},
		"0/1 nodes are available: 1 node(s) didn't match PersistentVolume's node affinity."},
	{"static volume", pod(claims("waits-local")), []*framework.NodeInfo{node("a"), node("c")}, "a"},
	{"static volume nowhere", pod(claims("waits-local")), []*framework.NodeInfo{node("c")},
		"0/1 nodes are available: 1 node(s) didn't find available persistent volumes to bind."},
	{"to be provisioned", pod(claims("waits-dynamic")), []*framework.NodeInfo{node("c")}, "c"},
	{"immediate claim", pod(claims("immediate")), []*framework.NodeInfo{node("a"), node("b")},
		"0/2 nodes are available: pod has unbound immediate PersistentVolumeClaims."},
	{"missing claim", pod(claims("nope")), []*framework.NodeInfo{node("a")},
		`0/1 nodes are available: persistentvolumeclaim "nope" not found.`},
	{"volume gone", pod(claims("dangling")), []*framework.NodeInfo{node("a")},
		"0/1 nodes are available: node(s) unavailable due to one or more pvc(s) bound to non-existent pv(s)."},
}

// F80, F81, F82, F83, F87, F91: what each filter keeps away, and in which words.
func TestFilters(t *testing.T) {
	st := newStorage()
	const wffc, immediate = storagev1.VolumeBindingWaitForFirstConsumer, storagev1.VolumeBindingImmediate
	st.class("local", "kubernetes.io/no-provisioner", wffc)
	st.class("dynamic", "csi.example", wffc)
	st.class("now", "csi.example", immediate)
	st.volume("on-b", "local", "b")
	st.claim("bound-to-b", "local", "on-b")
	st.claim("waits-local", "local", "")
	st.volume("free-on-a", "local", "a")
	st.claim("waits-dynamic", "dynamic", "")
	st.claim("immediate", "now", "")
	st.claim("dangling", "now", "no-such-volume")

	tests := filtersCases
	for _, tt := range tests {
		tt.run(t, st)
	}
}

// placing is a pod, the nodes that it may go to, and where it goes or why not.
type placing struct {
	name  string
	pod   *v1.Pod
	nodes []*framework.NodeInfo
	want  string // a node, or the message
}

func (c placing) run(t *testing.T, st *storage) {
	t.Run(c.name, func(t *testing.T) {
		res, err := schedule(profile(t, st.handle()), c.pod, c.nodes...)
		got := res.Node
		if err != nil {
			got = err.Error()
		}
		if got != c.want {
			t.Errorf("got  %s\nwant %s", got, c.want)
		}
	})
}

// F87: however many different reasons nodes have, each is counted as often as nodes say it, attempt after attempt, and
// the nodes that preemption may try are those that say so.
func TestEveryRefusalCounts(t *testing.T) {
	prof := profile(t, newStorage().handle())
	var nodes []*framework.NodeInfo
	for i := range 60 {
		name := fmt.Sprintf("n%02d", i)
		switch i % 4 {
		case 0:
			nodes = append(nodes, with(node(name),
				pod(asks(v1.ResourceCPU, "3"), asks(v1.ResourceMemory, fmt.Sprint(i%3*3, "Gi")))))
		case 1:
			nodes = append(nodes, node(name, taint("kept", fmt.Sprint("for-", i%20), v1.TaintEffectNoSchedule)))
		case 2:
			nodes = append(nodes, node(name, allocatable(v1.ResourcePods, "0"),
				allocatable(v1.ResourceCPU, fmt.Sprint(i%8))))
		default:
			nodes = append(nodes, node(name, cordoned))
		}
	}
	p := pod(asks(v1.ResourceCPU, "2"), asks(v1.ResourceMemory, "4Gi"))
	reasons, mendable := map[string]int{}, []string{}
	c := framework.NewCycle(framework.NewPodInfo(p), framework.NewSnapshot(nodes...))
	for _, n := range nodes {
		s := prof.Fits(t.Context(), c, n)
		for _, r := range s.Reasons {
			reasons[r]++
		}
		if s.Is(framework.Unschedulable) {
			mendable = append(mendable, n.Node.Name)
		}
	}
	if len(reasons) < 8 || len(mendable) < 20 {
		t.Fatalf("reasons %v of too few kinds, or too few nodes to mend: %v", reasons, mendable)
	}
	for range 3 {
		_, err := schedule(prof, p, nodes...)
		var why *framework.FitError
		if !errors.As(err, &why) {
			t.Fatal(err)
		}
		var got []string
		for _, n := range why.PreemptableNodes {
			got = append(got, n.Node.Name)
		}
		if !maps.Equal(why.Reasons, reasons) || !slices.Equal(got, mendable) {
			t.Errorf("got reasons %v and nodes %v\nwant %v and %v", why.Reasons, got, reasons, mendable)
		}
	}
}

// F86: the greatest total wins, and the totals are the weighted sums of what each plugin says.
func TestScores(t *testing.T) {
	empty, half := node("empty"), with(node("half"), pod(asks(v1.ResourceCPU, "2"), asks(v1.ResourceMemory, "4Gi")))
	lopsided := with(node("lopsided"), pod(asks(v1.ResourceCPU, "3"), asks(v1.ResourceMemory, "0")))
	p := pod(asks(v1.ResourceCPU, "400m"), asks(v1.ResourceMemory, "819Mi"))
	for _, tt := range []struct {
		nodes []*framework.NodeInfo
		want  string
		score int64
	}{
		{[]*framework.NodeInfo{empty, half}, "empty", 90 + 99},   // a tenth used of both
		{[]*framework.NodeInfo{half}, "half", 40 + 99},           // six tenths of both
		{[]*framework.NodeInfo{lopsided}, "lopsided", 52 + 62},   // 85% of the CPU, 10% of the memory
		{[]*framework.NodeInfo{lopsided, half}, "half", 40 + 99}, // balance outweighs the little more that is free
	} {
		res, err := schedule(profile(t, newStorage().handle()), p, tt.nodes...)
		if err != nil {
			t.Fatal(err)
		}
		if res.Node != tt.want || res.Score != tt.score {
			t.Errorf("chose %s with %d, want %s with %d", res.Node, res.Score, tt.want, tt.score)
		}
		if want := fmt.Sprintf("filtered 0 of %d nodes, score %d on %s", len(tt.nodes), tt.score,
			tt.want); res.Explain() != want {
			t.Errorf("explained as %q, want %q", res.Explain(), want)
		}
	}
}

// An image that a node holds draws the pod there.
func TestImageLocality(t *testing.T) {
	img := v1.ContainerImage{Names: []string{"hello:latest"}, SizeBytes: 900 << 20}
	holds := func(n *v1.Node) { n.Status.Images = []v1.ContainerImage{img} }
	res, err := schedule(profile(t, newStorage().handle()), pod(func(p *v1.Pod) {
		p.Spec.Containers[0].Image = "hello"
	}),
		node("a"), node("b", holds), node("c", holds))
	if err != nil || res.Node == "a" {
		t.Errorf("chose %s, %v", res.Node, err)
	}
}

// Two pods that wait for a local volume are never promised the same one.
func TestVolumeReservedOnce(t *testing.T) {
	st := newStorage()
	st.class("local", "kubernetes.io/no-provisioner", storagev1.VolumeBindingWaitForFirstConsumer)
	st.claim("one", "local", "")
	st.claim("two", "local", "")
	st.volume("only", "local", "a")
	prof := profile(t, st.handle())
	ctx := context.Background()
	first := framework.NewCycle(framework.NewPodInfo(pod(claims("one"))), framework.NewSnapshot(node("a")))
	res, err := prof.Schedule(ctx, first, framework.Options{})
	if err != nil {
		t.Fatal(err)
	}
	if s := prof.Reserve(ctx, first, res.Node); !s.OK() {
		t.Fatal(s.AsError())
	}
	second := pod(claims("two"))
	if _, err := schedule(prof, second, node("a")); err == nil ||
		!strings.Contains(err.Error(), "didn't find available persistent volumes") {
		t.Errorf("the second pod got the same volume: %v", err)
	}
	prof.Unreserve(ctx, first, res.Node)
	if _, err := schedule(prof, second, node("a")); err != nil {
		t.Errorf("after the first gave it back: %v", err)
	}
}

// F80: whatever comes, in whatever order, no node is ever given more than it has.
func TestNeverOvercommits(t *testing.T) {
	prof := profile(t, newStorage().handle())
	rapid.Check(t, func(t *rapid.T) {
		var nodes []*framework.NodeInfo
		for i := range rapid.IntRange(1, 6).Draw(t, "nodes") {
			nodes = append(nodes, node(fmt.Sprint("n", i),
				allocatable(v1.ResourceCPU, fmt.Sprintf("%dm", rapid.IntRange(0, 3000).Draw(t, "cpu"))),
				allocatable(v1.ResourceMemory, fmt.Sprintf("%dMi", rapid.IntRange(0, 4000).Draw(t, "memory"))),
				allocatable(v1.ResourcePods, fmt.Sprint(rapid.IntRange(0, 6).Draw(t, "pods")))))
		}
		snap := framework.NewSnapshot(nodes...)
		for range rapid.IntRange(1, 30).Draw(t, "arrivals") {
			p := pod(asks(v1.ResourceCPU, fmt.Sprintf("%dm", rapid.IntRange(0, 2000).Draw(t, "asks cpu"))),
				asks(v1.ResourceMemory, fmt.Sprintf("%dMi", rapid.IntRange(0, 2000).Draw(t, "asks memory"))))
			if rapid.Bool().Draw(t, "port") {
				hostPort(80, "", "")(p)
			}
			info := framework.NewPodInfo(p)
			c := framework.NewCycle(info, snap)
			res, err := prof.Schedule(context.Background(), c, framework.Options{
				Start: rapid.IntRange(0, 100).Draw(t, "start"), Sample: rapid.IntRange(0, 3).Draw(t, "sample")})
			if err != nil {
				// It must be right, too: no node would have taken it.
				for _, n := range nodes {
					if fits(n, info) {
						t.Fatalf("%v, but %s has room", err, n.Node.Name)
					}
				}
				continue
			}
			n := snap.ByName[res.Node]
			if !fits(n, info) {
				t.Fatalf("%s has no room", res.Node)
			}
			n.AddPod(info)
			if rapid.IntRange(0, 4).Draw(t, "ends") == 0 {
				n.RemovePod(n.Pods[0].Pod.UID)
			}
		}
		for _, n := range nodes {
			checkSums(t, n)
		}
	})
}

// fits is the dumb twin of the filters: it sums over the pods.
func fits(n *framework.NodeInfo, p *framework.PodInfo) bool {
	var cpu, memory int64
	for _, have := range append([]*framework.PodInfo{p}, n.Pods...) {
		r := have.Pod.Spec.Containers[0].Resources.Requests
		cpu += r.Cpu().MilliValue()
		memory += r.Memory().Value()
		if have != p && len(have.Ports) > 0 && len(p.Ports) > 0 {
			return false
		}
	}
	a, want := n.Node.Status.Allocatable, p.Requests
	return len(n.Pods) < int(a.Pods().Value()) && (want.MilliCPU == 0 || cpu <= a.Cpu().MilliValue()) &&
		(want.Memory == 0 || memory <= a.Memory().Value())
}

func checkSums(t *rapid.T, n *framework.NodeInfo) {
	fresh := &framework.NodeInfo{}
	fresh.SetNode(n.Node)
	for _, p := range n.Pods {
		fresh.AddPod(p)
	}
	if fresh.Requested.MilliCPU != n.Requested.MilliCPU || fresh.Requested.Memory != n.Requested.Memory ||
		len(fresh.Ports) != len(n.Ports) {
		t.Fatalf("sums of %s: %+v, recounted %+v", n.Node.Name, n.Requested, fresh.Requested)
	}
}

// The thinking alone, per pod, in a cluster of 1,000 nodes.
func BenchmarkSchedule1000Nodes(b *testing.B) {
	prof := profile(b, newStorage().handle())
	r := rand.New(rand.NewPCG(1, 2))
	var nodes []*framework.NodeInfo
	for i := range 1000 {
		n := node(fmt.Sprintf("n%04d", i), allocatable(v1.ResourceCPU, "32"), allocatable(v1.ResourceMemory, "128Gi"))
		for range r.IntN(20) {
			with(n, pod(asks(v1.ResourceCPU, "500m"), asks(v1.ResourceMemory, "1Gi")))
		}
		nodes = append(nodes, n)
	}
	snap := framework.NewSnapshot(nodes...)
	info := framework.NewPodInfo(pod(asks(v1.ResourceCPU, "100m"), asks(v1.ResourceMemory, "200Mi")))
	b.ReportAllocs()
	start := 0
	for b.Loop() {
		res, err := prof.Schedule(context.Background(), framework.NewCycle(info, snap),
			framework.Options{Sample: framework.SampleSize(1000, 0), Start: start, Rand: r})
		if err != nil {
			b.Fatal(err)
		}
		start = (start + res.Evaluated) % 1000
	}
}
