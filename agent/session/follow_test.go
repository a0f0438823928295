package session

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// sentService returns a Service as a control plane sends it.
func sentService(t *testing.T, name string, revision uint64) *fleetv1.Object {
	t.Helper()
	svc := &v1.Service{TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name, UID: types.UID(name)}}
	raw, err := svc.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	whole, err := (&runtime.Unknown{TypeMeta: runtime.TypeMeta{APIVersion: "v1", Kind: "Service"}, Raw: raw}).Marshal()
	if err != nil {
		t.Fatal(err)
	}
	return &fleetv1.Object{Kind: "Service", Namespace: "default", Name: name, Revision: revision,
		Raw: append([]byte(protobufMagic), whole...)}
}

func applyBatch(t *testing.T, v *view, set *fleetv1.ObjectSet, revision uint64) {
	t.Helper()
	if err := v.applyObjects(set); err != nil {
		t.Fatal(err)
	}
	v.completeBatch(revision, set.Full)
}

// F110: a follower receives the changed objects of each revision, or the instruction to read
// everything if there are too many.
func TestFollow(t *testing.T) {
	s := New(Config{NodeName: "w1"})
	news := s.Follow(t.Context(), "Service")
	key := func(name string) agent.ObjectKey {
		return agent.ObjectKey{Kind: "Service", Namespace: "default", Name: name}
	}
	applyBatch(t, s.view,
		&fleetv1.ObjectSet{Full: true, Upserts: []*fleetv1.Object{sentService(t, "a", 1), sentService(t, "b", 2)}}, 2)
	if c := <-news; !c.All || c.Revision != 2 {
		t.Errorf("first: %+v, want all at 2", c)
	}
	applyBatch(t, s.view, &fleetv1.ObjectSet{Upserts: []*fleetv1.Object{sentService(t, "a", 3)}}, 3)
	if c := <-news; c.All || c.Revision != 3 || len(c.Keys) != 1 || !hasKey(c, key("a")) {
		t.Errorf("one changed: %+v", c)
	}
	applyBatch(t, s.view,
		&fleetv1.ObjectSet{Deletes: []*fleetv1.Ref{{Kind: "Service", Namespace: "default", Name: "b", Uid: "b"}}}, 4)
	if c := <-news; c.All || c.Revision != 4 || len(c.Keys) != 1 || !hasKey(c, key("b")) {
		t.Errorf("one is gone: %+v", c)
	}
	applyBatch(t, s.view, &fleetv1.ObjectSet{}, 9)
	if c := <-news; c.All || c.Revision != 9 || len(c.Keys) != 0 {
		t.Errorf("nothing changed: %+v", c)
	}
	// A full assignment, for example after a move to another replica, reports the differences from
	// the current objects.
	applyBatch(t, s.view, &fleetv1.ObjectSet{Full: true,
		Upserts: []*fleetv1.Object{sentService(t, "a", 3), sentService(t, "c", 10)}}, 10)
	if c := <-news; c.All || c.Revision != 10 || len(c.Keys) != 1 || !hasKey(c, key("c")) {
		t.Errorf("a full assignment: %+v", c)
	}
	many := &fleetv1.ObjectSet{}
	for i := range agent.MaxChangedKeys + 1 {
		many.Upserts = append(many.Upserts, sentService(t, fmt.Sprint("s", i), 11))
	}
	applyBatch(t, s.view, many, 11)
	if c := <-news; !c.All || c.Revision != 11 || c.Keys != nil {
		t.Errorf("too many: all %v, %d named, revision %d", c.All, len(c.Keys), c.Revision)
	}
	later := s.Follow(t.Context(), "Pod")
	if c := <-later; !c.All || c.Revision != 11 {
		t.Errorf("a later follower gets %+v", c)
	}
}

func hasKey(c agent.ObjectChanges, k agent.ObjectKey) bool { _, ok := c.Keys[k]; return ok }
