package watchcache

import (
	"testing"
	"weak"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Objects converted to other versions count in the bound of encodings, at most one per version.
func TestFormsAreBounded(t *testing.T) {
	e := newEnv(t)
	e.create(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"},
		InvolvedObject: corev1.ObjectReference{Namespace: "default"}})
	old := e.kinds.ByType(&eventsv1.Event{})
	for range 20 {
		next := *old
		if err := e.kinds.Change([]*api.Kind{old}, []*api.Kind{&next}); err != nil {
			t.Fatal(err)
		}
		old = &next
		must[api.Object](t, "get")(e.reader.GetObject(e.ctx,
			&api.Request{Verb: api.VerbGet, Kind: old, Namespace: "default", Name: "a"}))
	}
	stored := e.ByKind(e.kinds.ByType(&corev1.Event{})).Current("default/a")
	if n := len(*stored.convertedObjects.Load()); n != 1 {
		t.Errorf("%d forms of one version", n)
	}
	enc := &e.encodings
	for i := range 100 {
		enc.addCounted(cachedEncoding{media: mediaJSON, size: maxEncodedBytes / 10, entry: weak.Make(stored)})
		if enc.bytes > maxEncodedBytes {
			t.Fatalf("%d bytes after %d", enc.bytes, i)
		}
	}
	if n := len(*stored.convertedObjects.Load()); n != 0 {
		t.Errorf("%d forms are kept when there is no room", n)
	}
}
