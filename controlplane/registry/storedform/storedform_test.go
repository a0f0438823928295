package storedform

import (
	"encoding/json"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/raftstore"
)

func TestKeys(t *testing.T) {
	table := kinds.All()
	for _, c := range []struct {
		kind            any
		namespace, name string
		key             string
	}{
		{&corev1.Pod{}, "default", "a", "default/a"},
		{&corev1.Node{}, "", "w1", "w1"},
	} {
		k := table.ByType(c.kind)
		if got := ObjectKey(k, c.namespace, c.name); got != c.key {
			t.Errorf("%s: key %q, want %q", k.Resource, got, c.key)
		}
		if namespace, name := SplitKey(k.Namespaced, c.key); namespace != c.namespace || name != c.name {
			t.Errorf("%s: %q is split into %q and %q", k.Resource, c.key, namespace, name)
		}
	}
	if got := ReservationKey(api.Reservation{Space: "nodeports", Value: "TCP-30080"}); got !=
		"/registry/keelson.dev/reservations/nodeports/TCP-30080" {
		t.Errorf("the key of a reservation is %q", got)
	}
	if WhyInvalidName("a") != "" || WhyInvalidName("a/b") == "" || WhyInvalidName("..") == "" {
		t.Error("names with path segments are accepted, or other names rejected")
	}
}

func TestRevisions(t *testing.T) {
	for text, want := range map[string]raftstore.Revision{"": 0, "0": 0, "7": 7, FormatRevision(1 << 40): 1 << 40} {
		if got, err := ParseRevision(text); err != nil || got != want {
			t.Errorf("%q is parsed as %d, %v", text, got, err)
		}
	}
	for _, text := range []string{"-1", "x", "1.5"} {
		if _, err := ParseRevision(text); !apierrors.IsBadRequest(err) {
			t.Errorf("%q: %v, want a 400", text, err)
		}
	}
}

// A Form encodes what it decodes, without managedFields, and rejects values of other keys.
func TestForm(t *testing.T) {
	k := kinds.All().ByType(&corev1.Node{})
	form := NewForm(k.Storage)
	node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1", Labels: map[string]string{"a": "b"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "m", FieldsType: "K1",
			FieldsV1: &metav1.FieldsV1{Raw: []byte(`"(a"`)}}}}}
	value, err := form.Encode(node)
	if err != nil {
		t.Fatal(err)
	}
	got, err := form.Decode(raftstore.Item{Key: form.Key("", "w1"), Value: value})
	if err != nil || got.GetName() != "w1" || got.GetLabels()["a"] != "b" || len(got.GetManagedFields()) != 0 {
		t.Fatalf("decoded %+v, %v", got, err)
	}
	if value, err = form.Rewrite(node); err != nil {
		t.Fatal(err)
	}
	if got, err = form.Decode(raftstore.Item{Key: form.Key("", "w1"), Value: value}); err != nil ||
		len(got.GetManagedFields()) != 1 {
		t.Errorf("rewritten as %+v, %v", got, err)
	}
	for _, key := range []string{form.Key("", "w2"), "/registry/pods/default/w1"} {
		if _, err := form.Decode(raftstore.Item{Key: key, Value: value}); err == nil {
			t.Errorf("the value of w1 is accepted for key %s", key)
		}
	}
}

// Any stored bytes are decoded or rejected, without a panic.
func FuzzDecodeStored(f *testing.F) {
	c := NewCodec(kinds.All().ByType(&corev1.Pod{}).Storage)
	good, err := c.Encode(&corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Image: "hello:1"}}}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(good[:len(good)/2])
	f.Add([]byte(`{"metadata":{"name":"a"}}`))
	f.Add([]byte("k8s\x00\x0a\xff\xff\xff\xff\x0f"))
	f.Fuzz(func(t *testing.T, data []byte) {
		obj, _, err := c.Decode(data)
		if err != nil {
			return
		}
		// Every decodable object can be stored and decoded again unchanged.
		once, err := c.Encode(obj)
		if err != nil {
			return // invalid UTF-8 is readable, but not writable
		}
		again, _, err := c.Decode(once)
		if err != nil {
			t.Fatalf("unreadable after encoding: %v", err)
		}
		a, _ := json.Marshal(obj)
		b, _ := json.Marshal(again)
		if string(a) != string(b) {
			t.Fatalf("changed from %s to %s", a, b)
		}
	})
}
