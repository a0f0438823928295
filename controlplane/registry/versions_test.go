package registry

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	k8sruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/controlplane/registry/watchcache"
	"keelson.dev/keelson/internal/await"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/raftstore"
)

// An Event is one object in both of its API groups: either may be used to create, read, watch or
// delete it.
func TestEventsOfBothGroups(t *testing.T) {
	e := newEnv(t)
	core := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "old"}, Reason: "Why",
		Message: "said", Type: "Normal",
		InvolvedObject: corev1.ObjectReference{Namespace: "default", Name: "p"}, Count: 3}
	modern := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "new"}, Reason: "Why",
		Note: "noted", Type: "Normal",
		Regarding: corev1.ObjectReference{Namespace: "default", Name: "q"}, EventTime: metav1.NowMicro(), Action: "a",
		ReportingController: "example.com/c", ReportingInstance: "i"}
	like := &eventsv1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}}
	w := e.watch(like, metav1.ListOptions{FieldSelector: "regarding.name=q"})
	e.create(core)
	made := e.create(modern).(*eventsv1.Event)
	if made.Note != "noted" || made.GroupVersionKind() != eventsv1.SchemeGroupVersion.WithKind("Event") {
		t.Fatalf("made %+v", made)
	}
	list, err := e.list(like, metav1.ListOptions{})
	if err != nil || len(list.Items) != 2 || list.GroupVersionKind() !=
		eventsv1.SchemeGroupVersion.WithKind("EventList") {
		t.Fatalf("%v, %v", list, err)
	}
	if old := list.Items[1].(*eventsv1.Event); old.Note != "said" || old.DeprecatedCount != 3 ||
		old.Regarding.Name != "p" || old.APIVersion != "events.k8s.io/v1" {
		t.Errorf("the core event is shown as %+v", old)
	}
	again, err := e.list(like, metav1.ListOptions{})
	if err != nil || again.Items[0] != list.Items[0] {
		t.Errorf("an event is converted twice (%v)", err)
	}
	both, err := e.list(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default"}},
		metav1.ListOptions{FieldSelector: "involvedObject.name=q"})
	if err != nil || len(both.Items) != 1 || both.Items[0].(*corev1.Event).Message != "noted" {
		t.Errorf("%+v, %v", both, err)
	}
	if ev := e.next(w); ev.Type != watch.Added || ev.Object.(*eventsv1.Event).Note != "noted" ||
		ev.Object != list.Items[0] {
		t.Errorf("the watch says %s, another object than the list: %v", show(ev), ev.Object != list.Items[0])
	}
	made = made.DeepCopy()
	made.Series = &eventsv1.EventSeries{Count: 2, LastObservedTime: metav1.NowMicro()}
	e.update(made, "")
	if ev := e.next(w); ev.Type != watch.Modified || ev.Object.(*eventsv1.Event).Series == nil {
		t.Errorf("the watch says %s", show(ev))
	}
	e.delete(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "new"}}, metav1.DeleteOptions{})
	if ev := e.next(w); ev.Type != watch.Deleted || ev.Object.(*eventsv1.Event).Note != "noted" {
		t.Errorf("the watch says %s", show(ev))
	}
	if _, err := e.get(modern); !apierrors.IsNotFound(err) {
		t.Errorf("got %v", err)
	}
	stored, err := e.store.List(e.ctx, storedform.Root+"events", raftstore.ListOptions{})
	if err != nil || len(stored.Items) != 1 || !strings.HasPrefix(stored.Items[0].Key, "/registry/events/default/old") {
		t.Errorf("stored: %v, %v", stored.Items, err)
	}
}

// Encodings are cached by version and media type.
func TestEncodingsOfVersions(t *testing.T) {
	e := newEnv(t)
	e.create(&corev1.Event{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "a"}, Message: "said",
		InvolvedObject: corev1.ObjectReference{Namespace: "default"}})
	seen := map[string]bool{}
	for _, obj := range []api.Object{&corev1.Event{}, &eventsv1.Event{}} {
		obj.SetNamespace("default")
		obj.SetName("a")
		got, err := e.get(obj)
		if err != nil {
			t.Fatal(err)
		}
		for _, media := range []string{k8sruntime.ContentTypeJSON, k8sruntime.ContentTypeProtobuf} {
			once := must[[]byte](t, media)(e.Encoded(got, media))
			twice := must[[]byte](t, media)(e.Encoded(got, media))
			if &once[0] != &twice[0] {
				t.Errorf("a %T is encoded twice as %s", got, media)
			}
			if v := got.GetObjectKind().GroupVersionKind().GroupVersion().String(); !strings.Contains(string(once),
				v) || seen[string(once)] {
				t.Errorf("a %T as %s: %q", got, media, once)
			}
			seen[string(once)] = true
		}
	}
}

// renamed returns a conversion of widgets with another name of the size field in v2.
func renamed(from, to, version string) func(api.Object) (api.Object, error) {
	return func(o api.Object) (api.Object, error) {
		out := o.(*custom.Object).DeepCopy()
		if spec, ok := out.Content["spec"].(map[string]any); ok {
			if _, bad := spec["bad"]; bad {
				return nil, errors.New("this one cannot be converted")
			}
			if v, ok := spec[from]; ok {
				spec[to] = v
				delete(spec, from)
			}
		}
		out.APIVersion = widgets.Group + "/" + version
		return out, nil
	}
}

// widgetVersions returns two served versions, of which hub is the storage version. Stored objects
// of both are readable.
func widgetVersions(hub, other string) (kinds [2]*api.Kind) {
	s := custom.NewStorage(widgets, hub, other)
	names := map[string]string{"v1": "size", "v2": "width"}
	for i, v := range []string{"v1", "v2"} {
		k := custom.NewKind(widgets, v, true, s)
		foreign := map[string]string{"v1": "v2", "v2": "v1"}[v]
		to := renamed(names[v], names[hub], hub)
		k.Conversion = &api.Conversion{
			From: api.ConvertEach(renamed(names[foreign], names[v], v)),
			To:   func(_ context.Context, o api.Object) (api.Object, error) { return to(o) },
		}
		kinds[i] = k
	}
	return kinds
}

func inSpec(t *testing.T, o k8sruntime.Object, name string) any {
	t.Helper()
	return o.(*custom.Object).Content["spec"].(map[string]any)[name]
}

// Objects stored in an older version are read, listed, watched and changed in every served version;
// a write converts them to the storage version. If a conversion fails, only that object is
// unreadable in that version.
func TestStorageVersionChanges(t *testing.T) {
	e := newEnv(t)
	before := widgetVersions("v1", "v2")
	if err := e.kinds.Register(before[:]...); err != nil {
		t.Fatal(err)
	}
	must[k8sruntime.Object](t, "create")(e.Registry.Create(e.ctx, e.of(before[0], api.VerbCreate, widget("a", 1)),
		e.admit))
	wide := widget("b", 0)
	wide.Content = map[string]any{"spec": map[string]any{"width": int64(2)}}
	made := must[k8sruntime.Object](t, "create")(e.Registry.Create(e.ctx,
		e.of(before[1], api.VerbCreate, wide), e.admit))
	if inSpec(t, made, "width") != int64(2) || made.GetObjectKind().GroupVersionKind() != before[1].GVK {
		t.Fatalf("made %+v", made)
	}

	after := widgetVersions("v2", "v1")
	if err := e.kinds.Change(before[:], after[:]); err != nil {
		t.Fatal(err)
	}
	v1, v2 := after[0], after[1]
	w := must[watch.Interface](t, "watch")(e.Registry.Watch(e.ctx,
		e.of(v2, api.VerbWatch, &custom.Object{}))).(*watchcache.Watcher)
	t.Cleanup(w.Stop)
	for i, name := range []string{"a", "b"} {
		for k, fieldName := range map[*api.Kind]string{v1: "size", v2: "width"} {
			got := must[api.Object](t, "get")(e.Registry.GetObject(e.ctx, e.of(k, api.VerbGet, widget(name, 0))))
			if inSpec(t, got, fieldName) != int64(i+1) || got.GetObjectKind().GroupVersionKind() != k.GVK ||
				got.GetResourceVersion() == "" {
				t.Errorf("%s in %s is %+v", name, k.GVK.Version, got)
			}
		}
		if ev := e.next(w); ev.Type != watch.Added || inSpec(t, ev.Object, "width") != int64(i+1) {
			t.Errorf("the watch says %s: %+v", show(ev), ev.Object)
		}
	}
	if v := e.storedVersions(); v != "v1 v1" {
		t.Fatalf("stored are %s", v)
	}
	replace := func(name string, size int64) *api.Request {
		was := must[api.Object](t, "get")(e.Registry.GetObject(e.ctx, e.of(v1, api.VerbGet, widget(name, 0))))
		next := widget(name, size)
		next.SetResourceVersion(was.GetResourceVersion())
		return e.of(v1, api.VerbUpdate, next)
	}
	if _, _, err := e.Registry.Update(e.ctx, replace("a", 5), e.admit); err != nil {
		t.Fatal(err)
	}
	if v := e.storedVersions(); v != "v2 v1" {
		t.Fatalf("stored are %s", v)
	}
	if ev := e.next(w); ev.Type != watch.Modified || inSpec(t, ev.Object, "width") != int64(5) {
		t.Errorf("the watch says %s: %+v", show(ev), ev.Object)
	}
	// A write without changes, in any version, updates the stored version only.
	if _, _, err := e.Registry.Update(e.ctx, replace("b", 2), e.admit); err != nil {
		t.Fatal(err)
	}
	if v := e.storedVersions(); v != "v2 v2" {
		t.Errorf("stored are %s", v)
	}

	bad := widget("c", 0)
	bad.Content = map[string]any{"spec": map[string]any{"bad": true}}
	if _, err := e.Registry.Create(e.ctx, e.of(v1, api.VerbCreate, bad), e.admit); err == nil ||
		!strings.Contains(err.Error(), "cannot be converted") {
		t.Errorf("got %v", err)
	}
}

// A request with a kind that was replaced by another of the same name gets a retriable error, not
// NotFound.
func TestExchangedKindIsNoMissingOne(t *testing.T) {
	e := newEnv(t)
	before, after := widgetVersions("v1", "v2"), widgetVersions("v1", "v2")
	if err := e.kinds.Register(before[:]...); err != nil {
		t.Fatal(err)
	}
	if err := e.kinds.Change(before[:], after[:]); err != nil {
		t.Fatal(err)
	}
	ask := func(of *api.Kind) error {
		// the cache follows the table
		must[api.Object](t, "get")(e.Registry.GetObject(e.ctx, e.of(after[0], api.VerbGet, widget("a", 0))))
		_, err := e.Registry.GetObject(e.ctx, e.of(of, api.VerbGet, widget("a", 0)))
		return err
	}
	must[k8sruntime.Object](t, "create")(e.Registry.Create(e.ctx,
		e.of(after[0], api.VerbCreate, widget("a", 1)), e.admit))
	var err error
	_ = wait.For(within(t, e), time.Millisecond, func() error { // until the cache follows the table
		if err = ask(before[0]); err == nil {
			return errors.New("not yet")
		}
		return nil
	})
	if !apierrors.IsServiceUnavailable(err) || !strings.Contains(err.Error(), "try again") {
		t.Errorf("an exchanged kind: %v", err)
	} else if seconds, ok := apierrors.SuggestsClientDelay(err); !ok || seconds != 1 {
		t.Errorf("clients are not told when to ask again: %v", err)
	}
	if err := e.kinds.Change([]*api.Kind{after[1]}, nil); err != nil {
		t.Fatal(err)
	}
	await.Until(within(t, e), t, await.Patience, time.Millisecond, "the removal of the kind", func() error {
		if err := ask(after[1]); !apierrors.IsNotFound(err) {
			return fmt.Errorf("a kind that is gone: %w", err)
		}
		return nil
	})
}

// storedVersions returns the versions in which the widgets are stored, in order.
func (e *env) storedVersions() string {
	e.t.Helper()
	l, err := e.store.List(e.ctx, "/registry/example.com/widgets/", raftstore.ListOptions{})
	if err != nil {
		e.t.Fatal(err)
	}
	var out []string
	for _, it := range l.Items {
		var tm metav1.TypeMeta
		if err := json.Unmarshal(it.Value, &tm); err != nil {
			e.t.Fatal(err)
		}
		out = append(out, strings.TrimPrefix(tm.APIVersion, "example.com/"))
	}
	return strings.Join(out, " ")
}

// Field ownership holds across versions: an apply in one version conflicts with owners in another,
// and can remove fields that were applied in another.
func TestOwnersAcrossVersions(t *testing.T) {
	e := newEnv(t)
	kinds := widgetVersions("v1", "v2")
	if err := e.kinds.Register(kinds[:]...); err != nil {
		t.Fatal(err)
	}
	apply := func(k *api.Kind, manager, spec string) (k8sruntime.Object, error) {
		force := false
		req := &api.Request{User: api.User{Name: "alice"}, Verb: api.VerbPatch, Kind: k, Namespace: "default",
			Name: "a", Patch: api.PatchRequest{Type: types.ApplyPatchType, Body: []byte(
				fmt.Sprintf(`{"apiVersion":%q,"kind":"Widget","metadata":{"name":"a","namespace":"default"},"spec":%s}`,
					k.GVK.GroupVersion(), spec)), Options: metav1.PatchOptions{FieldManager: manager, Force: &force}}}
		obj, _, err := e.Registry.Patch(e.ctx, req, e.admit)
		return obj, err
	}
	must[k8sruntime.Object](t, "apply")(apply(kinds[0], "one", `{"size":1,"more":1}`))
	if _, err := apply(kinds[1], "two", `{"width":2}`); !apierrors.IsConflict(err) {
		t.Fatalf("the owner of the size is not asked for the width: %v", err)
	}
	got := must[k8sruntime.Object](t, "apply")(apply(kinds[1], "one", `{"width":3}`))
	if inSpec(t, got, "width") != int64(3) {
		t.Errorf("got %+v", got)
	}
	now := must[api.Object](t, "get")(e.Registry.GetObject(e.ctx, e.of(kinds[0], api.VerbGet, widget("a", 0))))
	if inSpec(t, now, "size") != int64(3) || now.GetGeneration() != 2 {
		t.Errorf("stored is %+v", now)
	}
}
