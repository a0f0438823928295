package conformance

import (
	"fmt"
	"net/url"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/controlplane/api"
)

// Every stored kind does all that a stored kind does.
func TestStoredKinds(t *testing.T) {
	for _, k := range shared.kinds.All() {
		if k.Serving.Virtual {
			continue
		}
		t.Run(k.GVK.Kind+"."+k.GVK.GroupVersion().String(), func(t *testing.T) {
			t.Parallel()
			doesAll(t, k, "")
		})
	}
}

// sideBySide are kinds of every sort that has code of its own in the server: with a status, with a scale, with a budget, with
// what other objects are made for, bare data, and without a Go type.
var sideBySide = []string{
	"configmaps", "deployments", "endpointslices", "jobs", "leases", "persistentvolumeclaims",
	"poddisruptionbudgets", "pods",
	"rolebindings", "secrets", "services", "widgets",
}

// A few of them do it side by side. What of the server is shared is the same for all, so this is what the race detector
// looks at: with all of them it takes minutes.
func TestSomeStoredKinds(t *testing.T) {
	seen := map[string]bool{}
	for _, k := range shared.kinds.All() {
		if k.Serving.Virtual || !slices.Contains(sideBySide, k.Resource) {
			continue
		}
		seen[k.Resource] = true
		t.Run(k.GVK.Kind+"."+k.GVK.GroupVersion().String(), func(t *testing.T) {
			t.Parallel()
			doesAll(t, k, "some-")
		})
	}
	if len(seen) != len(sideBySide) {
		t.Errorf("of %v only %v are there", sideBySide, seen)
	}
}

// doesAll asks a stored kind for all, in a namespace of its own, whose name begins with prefix.
func doesAll(t *testing.T, k *api.Kind, prefix string) {
	version := strings.ToLower(k.GVK.Version + "-" + strings.ReplaceAll(k.GVK.Group, ".", "-"))
	u := load(t, shared, k).inNamespace(t, prefix+strings.Trim(k.Resource+"-"+version, "-"))
	for _, test := range []struct {
		name string
		run  func(*testing.T, *kindUnderTest)
	}{
		{"create", creates}, {"generateName", generatesNames}, {"list", lists}, {"pages", pages}, {"watch", watches},
		{"update", updates}, {"unconditional update", unconditional}, {"patch", patches}, {"apply", applies},
		{"status", keepsStatusApart}, {"scale", scales},
		{"generation", countsWishes}, {"dry run", runsDry}, {"delete", deletes}, {"finalizers", waitsForFinalizers},
		{"deletecollection", deletesCollections}, {"methods", refusesMethods}, {"table", isShown},
		{"media", saysTheSame}, {"immutable", keepsWhatIsImmutable},
	} {
		t.Run(test.name, func(t *testing.T) { test.run(t, u) })
	}
}

func creates(t *testing.T, u *kindUnderTest) {
	sent := u.fresh(t)
	made := u.want(t, 201, "POST", u.path(), sent).object()
	apiVersion, kind := u.GVK.ToAPIVersionAndKind()
	if made.text("apiVersion") != apiVersion || made.text("kind") != kind || made.uid() == "" || made.version() == "" ||
		made.at("metadata", "creationTimestamp") == nil || made.at("metadata", "managedFields") == nil {
		t.Errorf("made %v", made)
	}
	if where := lacks(map[string]any(made), map[string]any(sent)); where != "" &&
		!strings.HasPrefix(where, "stringData") {
		t.Errorf("what was made differs at %s: %v, sent %v", where, made, sent)
	}
	if got := u.get(t, made.name()); lacks(map[string]any(got), map[string]any(made)) != "" {
		t.Errorf("read %v\nmade %v", got, made)
	}
	again := u.want(t, 409, "POST", u.path(), sent).object()
	if want := fmt.Sprintf("%s %q already exists", u.GroupResource(), made.name()); again.text("reason") !=
		"AlreadyExists" || again.message() != want {
		t.Errorf("a second time: %v, want %s", again, want)
	}
	none := u.want(t, 404, "GET", u.path("no-such-object"), nil).object()
	if want := fmt.Sprintf("%s %q not found", u.GroupResource(), "no-such-object"); none.text("reason") != "NotFound" ||
		none.message() != want {
		t.Errorf("what is not there: %v, want %s", none, want)
	}
	other := u.want(t, 400, "POST", u.path(), merged(u.fresh(t), object{"kind": "Other"})).object()
	if other.text("reason") != "BadRequest" {
		t.Errorf("another kind: %v", other)
	}
	if u.ns != "" {
		elsewhere := u.want(t, 400, "POST", u.path(),
			u.fresh(t, object{"metadata": map[string]any{"namespace": "elsewhere"}})).object()
		if want := "the namespace of the provided object does not match the namespace sent on the " +
			"request"; elsewhere.message() != want {
			t.Errorf("another namespace: %v", elsewhere)
		}
		u.want(t, 404, "POST", strings.Replace(u.path(), "/"+u.ns+"/", "/no-such-namespace/", 1), u.fresh(t))
	}
}

func generatesNames(t *testing.T, u *kindUnderTest) {
	prefix := strings.ToLower(u.GVK.Kind) + "-made-"
	o := u.fresh(t, object{"metadata": map[string]any{"name": nil, "generateName": prefix}})
	a := u.send(t, "POST", u.path(), o)
	if u.row.NoGenerateName != "" {
		if a.code != 422 {
			t.Errorf("%s, and yet: %d %s", u.row.NoGenerateName, a.code, a.body)
		}
		return
	}
	name := a.object().name()
	if a.code != 201 || len(name) != len(prefix)+5 || !strings.HasPrefix(name, prefix) {
		t.Errorf("%d %s", a.code, a.body)
	}
	nameless := u.want(t, 422, "POST", u.path(), merged(o, object{"metadata": map[string]any{"generateName": nil}})).
		object()
	if !strings.Contains(nameless.message(), "metadata.name: Required value: name or generateName is required") {
		t.Errorf("neither name nor generateName: %v", nameless)
	}
}

// some makes n objects with a label that no others have, and returns the selector and the names in order.
func (u *kindUnderTest) some(t *testing.T, n int, label string) (selector string, names []string) {
	t.Helper()
	for range n {
		names = append(names, u.make(t, labelled("seen", label)).name())
	}
	slices.Sort(names)
	return "labelSelector=seen%3D" + label, names
}

func lists(t *testing.T, u *kindUnderTest) {
	selector, names := u.some(t, 3, "list")
	got := u.want(t, 200, "GET", with(u.path(), selector), nil).object()
	if got.text("kind") != u.ListGVK().Kind || got.version() == "" || !slices.Equal(got.names(), names) {
		t.Errorf("%v, want %v", got, names)
	}
	if got := u.want(t, 200, "GET", with(u.path(), "labelSelector=seen+notin+(list)"), nil).object(); slices.Contains(
		got.names(), names[0]) {
		t.Errorf("all others are %v", got.names())
	}
	one := []string{"metadata.name=" + names[1]}
	if u.ns != "" {
		one = append(one, "metadata.namespace="+u.ns)
	}
	for _, f := range append(one, u.row.Selectors...) {
		got := u.want(t, 200, "GET", with(u.path(), selector, "fieldSelector="+url.QueryEscape(f)), nil).object()
		if !slices.Contains(got.names(), names[1]) ||
			strings.HasPrefix(f, "metadata.name=") != (len(got.names()) == 1) {
			t.Errorf("%s: %v", f, got.names())
		}
		key, _, _ := strings.Cut(f, "=")
		if got := u.want(t, 200, "GET", with(u.path(), selector, "fieldSelector="+key+"%3Dno-such"), nil).object(); len(
			got.names()) > 0 {
			t.Errorf("%s=no-such: %v", key, got.names())
		}
	}
	said := u.want(t, 400, "GET", with(u.path(), "fieldSelector=spec.no.such%3Da"), nil).object()
	if !strings.Contains(said.message(), "field label not supported: spec.no.such") {
		t.Errorf("an unknown field: %v", said)
	}
	u.want(t, 400, "GET", with(u.path(), "labelSelector=%3D%3D%3D"), nil)
	if u.ns != "" { // of all namespaces
		got := u.want(t, 200, "GET", with(u.group()+"/"+u.Resource, selector), nil).object()
		for _, name := range names {
			if !slices.Contains(got.names(), name) {
				t.Errorf("of all namespaces: %v", got.names())
			}
		}
	}
}

func pages(t *testing.T, u *kindUnderTest) {
	selector, names := u.some(t, 3, "pages")
	first := u.want(t, 200, "GET", with(u.path(), selector, "limit=2"), nil).object()
	token := first.text("metadata", "continue")
	if !slices.Equal(first.names(), names[:2]) || token == "" {
		t.Fatalf("%v", first)
	}
	u.make(t, labelled("seen", "pages")) // later than the list
	rest := u.want(t, 200, "GET", with(u.path(), selector, "limit=2", "continue="+url.QueryEscape(token)), nil).object()
	if !slices.Equal(rest.names(), names[2:]) || rest.version() != first.version() ||
		rest.text("metadata", "continue") != "" {
		t.Errorf("%v after %v", rest, first)
	}
	u.want(t, 400, "GET", with(u.path(), "limit=2", "continue=nonsense"), nil)
	if u.ns != "" {
		all := u.want(t, 200, "GET", u.path(), nil).object()
		one := u.want(t, 200, "GET", with(u.path(), "limit=1"), nil).object()
		if left := one.at("metadata", "remainingItemCount"); left != float64(len(all.items())-1) {
			t.Errorf("%v remain of %d", left, len(all.items()))
		}
	}
}

// background is what a deletion says of the dependents: some kinds keep theirs where it says nothing.
var background = object{"propagationPolicy": "Background"}

func deletes(t *testing.T, u *kindUnderTest) {
	o := u.make(t)
	for name, value := range map[string]string{"uid": "00000000-0000-0000-0000-000000000000", "resourceVersion": "1"} {
		a := u.want(t, 409, "DELETE", u.path(o.name()), object{"preconditions": map[string]any{name: value}}).object()
		if a.text("reason") != "Conflict" || !strings.Contains(strings.ToLower(a.message()), "precondition") {
			t.Errorf("%v", a)
		}
	}
	is := map[string]any{"uid": o.uid(), "resourceVersion": u.get(t, o.name()).version()}
	code := 200
	a := u.send(t, "DELETE", u.path(o.name()), object{"preconditions": is, "propagationPolicy": "Background"})
	if a.code != code {
		t.Fatalf("%d %s", a.code, a.body)
	}
	switch got := a.object(); {
	case u.Deletion.ReturnsDeleted || u.row.Lingers != "":
		if got.name() != o.name() || got.text("kind") != u.GVK.Kind {
			t.Errorf("the answer is %v", got)
		}
	case got.text("kind") != "Status" || got.text("status") != "Success" || got.text("details", "uid") != o.uid() ||
		got.text("details", "kind") != u.Resource || got.text("details", "name") != o.name():
		t.Errorf("the answer is %v", got)
	}
	if !u.gone(t, o.name()) {
		t.Error("it is still there")
	}
	u.want(t, 404, "DELETE", u.path(o.name()), nil)
}

func waitsForFinalizers(t *testing.T, u *kindUnderTest) {
	o := u.make(t, object{"metadata": map[string]any{"finalizers": []any{"example.com/hold"}}})
	u.want(t, 200, "DELETE", u.path(o.name()), background)
	held := u.get(t, o.name())
	if !held.deleted() || held.uid() != o.uid() {
		t.Fatalf("%v", held)
	}
	more := u.send(t, "PATCH", u.path(o.name()),
		object{"metadata": map[string]any{"finalizers": []any{"example.com/hold", "example.com/new"}}},
		contentType, mergePatch)
	if more.code != 422 ||
		!strings.Contains(string(more.body), "metadata.finalizers: Forbidden: no new finalizers can be added if the "+
			"object is being deleted, found new finalizers") {
		t.Errorf("a finalizer that is added to a deleted object: %d %s", more.code, more.body)
	}
	u.want(t, 200, "PATCH", u.path(o.name()), object{"metadata": map[string]any{"finalizers": nil}},
		contentType, mergePatch)
	if u.Subresources["finalize"] != nil {
		u.gone(t, o.name())
	}
	u.want(t, 404, "GET", u.path(o.name()), nil)
}

func deletesCollections(t *testing.T, u *kindUnderTest) {
	selector, names := u.some(t, 2, "collection")
	if u.Serving.Verbs != nil && !slices.Contains(u.Serving.Verbs, "deletecollection") {
		u.want(t, 405, "DELETE", with(u.path(), selector), nil)
		return
	}
	stays := u.make(t, labelled("seen", "stays")).name()
	a := u.want(t, 200, "DELETE", with(u.path(), selector, "dryRun=All"), nil)
	if got := u.want(t, 200, "GET", with(u.path(), selector), nil).object(); !slices.Equal(got.names(), names) {
		t.Errorf("after a dry run there are %v: %s", got.names(), a.body)
	}
	if a = u.want(t, 200, "DELETE", with(u.path(), selector), background); a.object().text("kind") != u.ListGVK().Kind {
		t.Errorf("%s", a.body)
	}
	for _, name := range names {
		if !u.gone(t, name) {
			t.Errorf("%s is still there", name)
		}
	}
	u.get(t, stays)
}

func refusesMethods(t *testing.T, u *kindUnderTest) {
	o := u.make(t)
	for _, c := range []struct{ method, path string }{
		{"PUT", u.path()}, {"PATCH", u.path()}, {"POST", u.path(o.name())},
	} {
		a := u.send(t, c.method, c.path, o, contentType,
			map[bool]string{true: mergePatch, false: asJSON}[c.method == "PATCH"])
		if a.code != 405 || a.object().text("reason") != "MethodNotAllowed" {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.code, a.body)
		}
	}
	u.want(t, 404, "GET", u.path(o.name(), "no-such-facet"), nil)
}
