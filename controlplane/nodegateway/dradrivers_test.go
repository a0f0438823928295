package nodegateway

import (
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// F110: the reported held volumes stay until a restarted agent has determined its volumes. An agent
// that reports volumes in use but no held volumes is of an earlier release; the annotation is
// removed.
func TestVolumesHeldStandUntilToldOtherwise(t *testing.T) {
	node := func(annotations map[string]string) *v1.Node {
		return &v1.Node{ObjectMeta: metav1.ObjectMeta{Annotations: annotations}}
	}
	stored := node(map[string]string{api.AnnotationVolumesHeld: `["a"]`, api.AnnotationClaimsHeld: `[{"pod":"p"}]`, api.AnnotationVolumesInUse: "told"})
	for _, c := range []struct {
		facts map[string]string
		want  string
	}{
		{nil, ""},
		{map[string]string{api.AnnotationVolumesInUse: "told"}, `{"metadata":{"annotations":{"keelson.dev/claims-held":null,"keelson.dev/volumes-held":null}}}`},
		{map[string]string{api.AnnotationVolumesInUse: "told", api.AnnotationVolumesHeld: "[]", api.AnnotationClaimsHeld: "[]"},
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
		{node(draDrivers, "a", "example.com/x", "y"), node(), `{"metadata":{"annotations":{"keelson.dev/dra-drivers":null}}}`},
		{node("example.com/x", "y"), node(), ""},
	} {
		if got := string(labelPatch(c.stored, c.facts)); got != c.want {
			t.Errorf("%v to %v: %s, want %s", c.stored.Annotations, c.facts.Annotations, got, c.want)
		}
	}
}
