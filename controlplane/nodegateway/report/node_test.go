package report

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/nodegateway/wire"
)

// An agent that reports volumes in use replaces the whole list. F110
func TestReportedVolumesReplaceStoredOnes(t *testing.T) {
	stored := &v1.NodeStatus{VolumesInUse: []v1.UniqueVolumeName{"a"},
		VolumesAttached: []v1.AttachedVolume{{Name: "a"}},
		Conditions:      []v1.NodeCondition{{Type: v1.NodeReady, Status: v1.ConditionTrue, Message: "m"}}}
	for _, reported := range []bool{false, true} {
		facts := &v1.Node{}
		if reported {
			facts.Annotations = map[string]string{api.AnnotationVolumesInUse: "reported"}
		}
		got := mergeNodeStatus(stored, &facts.Status, reportsVolumes(facts), metav1.Now())
		if len(got.VolumesAttached) != 1 || (len(got.VolumesInUse) == 0) != reported {
			t.Errorf("reported %v: %v in use, %v attached", reported, got.VolumesInUse, got.VolumesAttached)
		}
	}
}

// Extended resources that other clients wrote stay in the node's capacity. Allocatable follows the
// capacity, also at removal.
func TestExtendedResourcesStay(t *testing.T) {
	own := v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), "example.com/gpu": resource.MustParse("1")}
	facts := &v1.NodeStatus{Capacity: own, Allocatable: own.DeepCopy()}
	stored := &v1.NodeStatus{
		Capacity: v1.ResourceList{v1.ResourceCPU: resource.MustParse("8"),
			"example.com/gpu": resource.MustParse("9"), "example.com/dongle": resource.MustParse("4")},
		Allocatable: v1.ResourceList{"example.com/dongle": resource.MustParse("1"),
			"example.com/gone": resource.MustParse("1")},
	}
	got := mergeNodeStatus(stored, facts, false, metav1.Now())
	want := v1.ResourceList{v1.ResourceCPU: resource.MustParse("2"), "example.com/gpu": resource.MustParse("1"),
		"example.com/dongle": resource.MustParse("4")}
	if !equality.Semantic.DeepEqual(got.Capacity, want) || !equality.Semantic.DeepEqual(got.Allocatable, want) {
		t.Errorf("capacity %v, allocatable %v, want %v", got.Capacity, got.Allocatable, want)
	}
	if len(facts.Capacity) != 2 || len(facts.Allocatable) != 2 {
		t.Error("the facts were changed")
	}
	again := mergeNodeStatus(got, facts, false, metav1.Now())
	if !equality.Semantic.DeepEqual(again, got) {
		t.Error("the second look writes again")
	}
}

// With another network product, the agent no longer reports a failure of its own network, and the
// stored one is removed. A condition of the other product stays.
func TestNetworkFailureIsWithdrawn(t *testing.T) {
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue}
	network := func(status v1.ConditionStatus, reason string) v1.NodeCondition {
		return v1.NodeCondition{Type: v1.NodeNetworkUnavailable, Status: status, Reason: reason}
	}
	for _, c := range []struct {
		name   string
		stored v1.NodeCondition
		facts  []v1.NodeCondition
		want   string // expected reason of the remaining condition
	}{
		{"it is silent now", network(v1.ConditionTrue, "NetworkPartFailed"), []v1.NodeCondition{ready}, ""},
		{"it still says so", network(v1.ConditionTrue, "NetworkPartFailed"),
			[]v1.NodeCondition{ready, network(v1.ConditionTrue, "NetworkPartFailed")}, "NetworkPartFailed"},
		{"it says nothing at all yet", network(v1.ConditionTrue, "NetworkPartFailed"), nil, "NetworkPartFailed"},
		{"all was well", network(v1.ConditionFalse, "NetworkReady"), []v1.NodeCondition{ready}, "NetworkReady"},
		{"a product's", network(v1.ConditionTrue, "CalicoIsDown"), []v1.NodeCondition{ready}, "CalicoIsDown"},
	} {
		is := ""
		got := mergeNodeStatus(&v1.NodeStatus{Conditions: []v1.NodeCondition{c.stored}},
			&v1.NodeStatus{Conditions: c.facts}, false, metav1.Now())
		if left := api.FindNodeCondition(got.Conditions, v1.NodeNetworkUnavailable); left != nil {
			is = left.Reason
		}
		if is != c.want {
			t.Errorf("%s: %q is left, want %q", c.name, is, c.want)
		}
	}
}

// F110: the reported held volumes stay until a restarted agent has determined its volumes. An agent
// that reports volumes in use but no held volumes is of an earlier release; the annotation is
// removed.
func TestHeldVolumesStayUntilReported(t *testing.T) {
	node := func(annotations map[string]string) *v1.Node {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}
	}
	stored := node(map[string]string{api.AnnotationVolumesHeld: `["a"]`, api.AnnotationClaimsHeld: `[{"pod":"p"}]`,
		api.AnnotationVolumesInUse: "told"})
	for _, c := range []struct {
		facts map[string]string
		want  string
	}{
		{nil, ""},
		{map[string]string{api.AnnotationVolumesInUse: "told"},
			`{"metadata":{"annotations":{"keelson.dev/claims-held":null,"keelson.dev/volumes-held":null}}}`},
		{map[string]string{api.AnnotationVolumesInUse: "told", api.AnnotationVolumesHeld: "[]",
			api.AnnotationClaimsHeld: "[]"},
			`{"metadata":{"annotations":{"keelson.dev/claims-held":"[]","keelson.dev/volumes-held":"[]"}}}`},
	} {
		if got := string(labelPatch(stored, node(c.facts))); got != c.want {
			t.Errorf("%v: %s, want %s", c.facts, got, c.want)
		}
	}
}

// The DRA drivers that an agent reports are stored in its Node, also an empty list. They are
// removed if an agent of an earlier release reports none, because ResourceSlices are validated with
// them.
func TestDRADriversOfANode(t *testing.T) {
	node := func(kv ...string) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: map[string]string{}}}
		for i := 0; i < len(kv); i += 2 {
			n.Annotations[kv[i]] = kv[i+1]
		}
		return n
	}
	for _, c := range []struct {
		stored, facts *v1.Node
		want          string
	}{
		{node(), node(draDrivers, "a,b"), `{"metadata":{"annotations":{"keelson.dev/dra-drivers":"a,b"}}}`},
		{node(draDrivers, "a,b"), node(draDrivers, "a,b"), ""},
		{node(draDrivers, "a"), node(draDrivers, ""), `{"metadata":{"annotations":{"keelson.dev/dra-drivers":""}}}`},
		{node(draDrivers, "a", "example.com/x", "y"), node(),
			`{"metadata":{"annotations":{"keelson.dev/dra-drivers":null}}}`},
		{node("example.com/x", "y"), node(), ""},
	} {
		if got := string(labelPatch(c.stored, c.facts)); got != c.want {
			t.Errorf("%v to %v: %s, want %s", c.stored.Annotations, c.facts.Annotations, got, c.want)
		}
	}
}

// F108: the WireGuard key that an agent reports replaces the stored one. The key of an agent that
// no longer encrypts is removed.
func TestReportedWireGuardKey(t *testing.T) {
	node := func(key string) *v1.Node {
		n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Annotations: map[string]string{}}}
		if key != "" {
			n.Annotations[wire.WireGuardKey] = key
		}
		return n
	}
	const a, b = "key-a", "key-b"
	if got, want := string(labelPatch(node(a), node(b))),
		`{"metadata":{"annotations":{"keelson.dev/wireguard-key":"`+b+`"}}}`; got != want {
		t.Errorf("another key: %s", got)
	}
	if got, want := string(labelPatch(node(a), node(""))),
		`{"metadata":{"annotations":{"keelson.dev/wireguard-key":null}}}`; got != want {
		t.Errorf("no key any more: %s", got)
	}
}
