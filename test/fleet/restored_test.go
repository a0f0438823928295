package fleet_test

import (
	"errors"
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// A Node of a restored backup loses its mark when its agent has said which volumes it uses, in the same revision or a later one, and
// not by what else it says. F110
func TestNodesAreHeardAfterARestore(t *testing.T) {
	b := newBed(t, "cp1")
	n := b.join("w1", nil)
	b.awaitReady("w1", v1.ConditionTrue)
	if _, err := client.Patch[*v1.Node](b.ctx, b.client, "", "w1", "", types.MergePatchType, fmt.Appendf(nil, `{"metadata":{"annotations":{%q:""}}}`, api.AnnotationUnheard)); err != nil {
		t.Fatal(err)
	}
	node := func() *v1.Node {
		t.Helper()
		got, err := client.Get[*v1.Node](b.ctx, b.client, "", "w1")
		if err != nil {
			t.Fatal(err)
		}
		return got
	}
	facts := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"kubernetes.io/arch": "told"}}}
	n.Facts(facts)
	b.eventually("what it says of its machine", func() error {
		if node().Labels["kubernetes.io/arch"] != "told" {
			return errors.New("it has not come")
		}
		return nil
	})
	if !api.Unheard(node()) {
		t.Error("heard, though it has said nothing of volumes")
	}
	facts = facts.DeepCopy()
	facts.Annotations = map[string]string{"keelson.dev/volumes-in-use": "told"}
	facts.Status.VolumesInUse = []v1.UniqueVolumeName{api.AttachedName("disk.example", "h")}
	n.Facts(facts)
	b.eventually("being heard", func() error {
		got := node()
		if !api.Unheard(got) && len(got.Status.VolumesInUse) != 1 {
			t.Fatalf("heard before what it uses is known: %v", got.Status.VolumesInUse)
		}
		if api.Unheard(got) {
			return errors.New("it has the mark")
		}
		return nil
	})
}
