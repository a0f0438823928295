package conformance

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/types"
)

func updates(t *testing.T, u *kindUnderTest) {
	o := u.make(t)
	next := u.want(t, 200, "PUT", u.path(o.name()), merged(merged(o, u.row.Change), labelled("put", "1"))).object()
	if where := lacks(map[string]any(next), u.row.Change); where != "" || next.at("metadata", "labels", "put") != "1" ||
		next.version() == o.version() {
		t.Errorf("at %s: %v", where, next)
	}
	late := u.want(t, 409, "PUT", u.path(o.name()), merged(o, labelled("put", "2"))).object()
	if want := fmt.Sprintf("Operation cannot be fulfilled on %s %q: the object has been modified; please apply your "+
		"changes to the latest version and try again", u.GroupResource(), o.name()); late.text("reason") !=
		"Conflict" || late.message() != want {
		t.Errorf("%v\nwant %s", late, want)
	}
	same := u.want(t, 200, "PUT", u.path(o.name()), next).object()
	if same.version() != next.version() {
		t.Error("what changes nothing is written")
	}
	another := u.want(t, 400, "PUT", u.path(o.name()),
		merged(next, object{"metadata": map[string]any{"name": "other"}})).object()
	if want := "the name of the object (other) does not match the name on the URL (" + o.name() +
		")"; another.message() != want {
		t.Errorf("%v, want %s", another, want)
	}
	uid := u.want(t, 409, "PUT", u.path(o.name()),
		merged(next, object{"metadata": map[string]any{"uid": "00000000-0000-0000-0000-000000000000"}})).object()
	if !strings.Contains(uid.message(),
		"Precondition failed: UID in precondition: 00000000-0000-0000-0000-000000000000, UID in object meta: "+
			o.uid()) {
		t.Errorf("%v", uid)
	}
	absent(t, u)
}

// absent: an update of what is not there is refused, or creates it where Kubernetes lets it.
func absent(t *testing.T, u *kindUnderTest) {
	o := u.fresh(t)
	if !u.row.PutCreates {
		if a := u.send(t, "PUT", u.path(o.name()), o); a.code != 404 && a.code != 400 {
			t.Errorf("%d %s", a.code, a.body)
		}
		return
	}
	other := merged(o, object{"metadata": map[string]any{"uid": "00000000-0000-0000-0000-000000000000"}})
	if said := u.want(t, 409, "PUT", u.path(o.name()), other).object().message(); !strings.HasSuffix(said,
		"UID in object meta: ") {
		t.Error(said)
	}
	u.want(t, 201, "PUT", with(u.path(o.name()), "dryRun=All"), o)
	u.want(t, 404, "GET", u.path(o.name()), nil)
	made := u.want(t, 201, "PUT", u.path(o.name()),
		merged(o, object{"metadata": map[string]any{"resourceVersion": "1"}})).object()
	if made.uid() == "" || made.version() == "1" || made.at("metadata", "creationTimestamp") == nil {
		t.Errorf("%v", made)
	}
	u.want(t, 200, "PUT", u.path(o.name()), made)
}

// An update that does not say what it replaces replaces anything, unless the kind wants that said.
func unconditional(t *testing.T, u *kindUnderTest) {
	o := u.make(t)
	blind := merged(o, object{"metadata": map[string]any{"resourceVersion": nil,
		"labels": map[string]any{"blind": "yes"}}})
	if !u.row.Conditional {
		u.want(t, 200, "PUT", u.path(o.name()), blind)
		return
	}
	said := u.want(t, 422, "PUT", u.path(o.name()), blind).object()
	want := fmt.Sprintf("%s %q is invalid: metadata.resourceVersion: Invalid value: 0: must be specified for an update",
		u.GroupResource(), o.name())
	if said.message() != want {
		t.Errorf("%s\nwant %s", said.message(), want)
	}
	if u.row.Status != nil {
		u.want(t, 422, "PUT", u.path(o.name(), "status"), merged(blind, u.row.Status))
	}
	if u.row.PutCreates {
		return
	}
	u.want(t, 404, "PUT", u.path(u.fresh(t).name()),
		merged(blind, object{"metadata": map[string]any{"name": nil, "uid": nil}}))
}

func patches(t *testing.T, u *kindUnderTest) {
	o := u.make(t, labelled("kept", "yes"))
	takes := u.SupportedPatchTypes()
	for _, c := range []struct {
		media types.PatchType
		body  any
	}{
		{jsonPatch, []any{object{"op": "test", "path": "/metadata/uid", "value": o.uid()},
			object{"op": "add", "path": "/metadata/labels/patched", "value": "json-patch"}}},
		{mergePatch, labelled("patched", "merge-patch")},
		{strategic, labelled("patched", "strategic-merge-patch")},
	} {
		a := u.send(t, "PATCH", u.path(o.name()), c.body, contentType, string(c.media))
		if !slices.Contains(takes, c.media) {
			if a.code != 415 || a.object().text("reason") != "UnsupportedMediaType" {
				t.Errorf("%s: %d %s", c.media, a.code, a.body)
			}
			continue
		}
		got := a.object()
		labels := map[string]any{"kept": "yes", "patched": strings.TrimSuffix(strings.TrimPrefix(string(c.media),
			"application/"), "+json")}
		if a.code != 200 || lacks(got.at("metadata", "labels"), labels) != "" {
			t.Errorf("%s: %d %s", c.media, a.code, a.body)
		}
		stale := merged(labelled("patched", "late"), object{"metadata": map[string]any{"resourceVersion": "1"}})
		if c.media != jsonPatch {
			u.want(t, 409, "PATCH", u.path(o.name()), stale, contentType, string(c.media))
		}
	}
	failed := u.want(t, 422, "PATCH", u.path(o.name()),
		[]any{object{"op": "test", "path": "/metadata/uid", "value": "x"}}, contentType, jsonPatch)
	if failed.object().text("reason") != "Invalid" {
		t.Errorf("%s", failed.body)
	}
	u.want(t, 400, "PATCH", u.path(o.name()), "{", contentType, mergePatch)
	u.want(t, 404, "PATCH", u.path("no-such-object"), object{}, contentType, mergePatch)
	u.want(t, 415, "PATCH", u.path(o.name()), object{}, contentType, "text/plain")
	if u.row.Change != nil {
		got := u.want(t, 200, "PATCH", u.path(o.name()), u.row.Change, contentType, mergePatch).object()
		if where := lacks(map[string]any(got), u.row.Change); where != "" {
			t.Errorf("differs at %s: %v", where, got)
		}
	}
}

func applies(t *testing.T, u *kindUnderTest) {
	o := merged(u.fresh(t), labelled("owned", "one"))
	at := u.path(o.name())
	made := u.want(t, 201, "PATCH", with(at, "fieldManager=one"), o, contentType, applyPatch).object()
	again := u.want(t, 200, "PATCH", with(at, "fieldManager=one"), o, contentType, applyPatch).object()
	if made.uid() == "" || again.version() != made.version() {
		t.Errorf("applied twice: %v, %v", made, again)
	}
	bare := merged(object{"apiVersion": o["apiVersion"], "kind": o["kind"],
		"metadata": map[string]any{"name": o.name()}}, labelled("owned", "two"))
	conflict := u.want(t, 409, "PATCH", with(at, "fieldManager=two"), bare, contentType, applyPatch).object()
	if !strings.Contains(conflict.message(), `conflict with "one": .metadata.labels.owned`) ||
		!strings.Contains(fmt.Sprint(conflict.at("details", "causes")), "FieldManagerConflict") {
		t.Errorf("%v", conflict)
	}
	forced := u.want(t, 200, "PATCH", with(at, "fieldManager=two", "force=true"), bare, contentType,
		applyPatch).object()
	if forced.at("metadata", "labels", "owned") != "two" {
		t.Errorf("%v", forced)
	}
	left := u.want(t, 200, "PATCH", with(at, "fieldManager=two"),
		merged(bare, object{"metadata": map[string]any{"labels": nil}}), contentType, applyPatch).object()
	if left.at("metadata", "labels", "owned") != nil {
		t.Errorf("what the only manager leaves out stays: %v", left)
	}
	u.want(t, 422, "PATCH", at, o, contentType, applyPatch) // without a manager
	unknown := merged(o, object{"noSuchField": 1})
	a := u.send(t, "PATCH", with(at, "fieldManager=one", "force=true"), unknown, contentType, applyPatch)
	if u.Type.Typed && a.code != 400 && a.code != 422 && a.code != 500 {
		t.Errorf("an unknown field that is applied: %d %v %s", a.code, a.header, a.body)
	}
	if a.code == 500 {
		t.Errorf("an unknown field that is applied: %s", a.body)
	}
}

// The main resource does not write the status, and the facet writes nothing else.
func keepsStatusApart(t *testing.T, u *kindUnderTest) {
	if (u.Subresources["status"] != nil) != (u.row.Status != nil) {
		t.Fatalf("the kind has a facet status: %v, the row has one: %v", u.Subresources["status"] != nil,
			u.row.Status != nil)
	}
	o := u.make(t, u.row.Status)
	if u.row.StatusAtCreation {
		if where := lacks(map[string]any(o), u.row.Status); where != "" {
			t.Errorf("a creation does not set the status: %v", o["status"])
		}
		o = u.make(t)
	}
	if u.row.Status == nil {
		u.want(t, 404, "GET", u.path(o.name(), "status"), nil)
		return
	}
	if lacks(map[string]any(o), u.row.Status) == "" {
		t.Errorf("a creation set the status: %v", o["status"])
	}
	main := u.want(t, 200, "PATCH", u.path(o.name()), u.row.Status, contentType, mergePatch).object()
	if lacks(map[string]any(main), u.row.Status) == "" {
		t.Errorf("the main resource set the status: %v", main["status"])
	}
	at := u.path(o.name(), "status")
	both := merged(u.row.Status, u.row.Change)
	for _, media := range []types.PatchType{mergePatch, strategic} {
		if !slices.Contains(u.SupportedPatchTypes(), media) {
			continue
		}
		got := u.want(t, 200, "PATCH", at, both, contentType, string(media)).object()
		if where := lacks(map[string]any(got), u.row.Status); where != "" {
			t.Errorf("%s: differs at %s: %v", media, where, got)
		}
		if u.row.Change != nil && lacks(map[string]any(got), u.row.Change) == "" || got.generation() != o.generation() {
			t.Errorf("%s: the facet wrote what is wished for: %v", media, got)
		}
	}
	got := u.want(t, 200, "GET", at, nil).object()
	if got.text("kind") != u.GVK.Kind || lacks(map[string]any(got), u.row.Status) != "" {
		t.Errorf("%v", got)
	}
	put := u.want(t, 200, "PUT", at, merged(got, u.row.Change)).object()
	if u.row.Change != nil && lacks(map[string]any(put), u.row.Change) == "" || put.generation() != o.generation() {
		t.Errorf("the facet wrote what is wished for: %v", put)
	}
	kept := u.want(t, 200, "PUT", u.path(o.name()),
		merged(merged(put, object{"status": nil}), labelled("kept", "yes"))).object()
	if lacks(map[string]any(kept), u.row.Status) != "" {
		t.Errorf("a replaced object lost its status: %v", kept)
	}
	u.want(t, 409, "PUT", at, got, contentType, asJSON)
	for _, method := range []string{"POST", "DELETE"} {
		u.want(t, 405, method, at, o)
	}
}

func scales(t *testing.T, u *kindUnderTest) {
	if u.Subresources["scale"] == nil {
		return
	}
	o := u.make(t)
	at := u.path(o.name(), "scale")
	s := u.want(t, 200, "GET", at, nil).object()
	if s.text("kind") != "Scale" || s.text("apiVersion") != "autoscaling/v1" || s.name() != o.name() ||
		s.uid() != o.uid() || s.text("status", "selector") == "" {
		t.Errorf("%v", s)
	}
	s = u.want(t, 200, "PUT", at, merged(s, object{"spec": map[string]any{"replicas": 3}})).object()
	if s.at("spec", "replicas") != 3.0 || u.get(t, o.name()).at("spec", "replicas") != 3.0 {
		t.Errorf("%v", s)
	}
	s = u.want(t, 200, "PATCH", at, object{"spec": map[string]any{"replicas": 4}}, contentType, mergePatch).object()
	scaled := u.get(t, o.name())
	if s.at("spec", "replicas") != 4.0 || scaled.at("spec", "replicas") != 4.0 ||
		scaled.generation() != o.generation().(float64)+2 {
		t.Errorf("%v", s)
	}
	bad := u.want(t, 422, "PATCH", at, object{"spec": map[string]any{"replicas": -1}}, contentType, mergePatch).object()
	if !strings.Contains(bad.message(), "spec.replicas: Invalid value: -1: must be greater than or equal to 0") {
		t.Errorf("%v", bad)
	}
}

// The generation counts changes of what is wished for, and nothing else.
func countsWishes(t *testing.T, u *kindUnderTest) {
	o := u.make(t)
	if !u.row.Counts {
		want := any(nil)
		if u.row.Numbered {
			want = 1.0
		}
		if o.generation() != want {
			t.Errorf("its generation is %v, want %v", o.generation(), want)
		}
		if u.row.Change == nil {
			return
		}
		next := u.want(t, 200, "PATCH", u.path(o.name()), object(u.row.Change), contentType, mergePatch).object()
		if next.generation() != want {
			t.Errorf("changed: its generation is %v, want %v", next.generation(), want)
		}
		return
	}
	if o.generation() != 1.0 {
		t.Errorf("it begins with generation %v", o.generation())
	}
	got := u.want(t, 200, "PATCH", u.path(o.name()), labelled("changed", "yes"), contentType, mergePatch).object()
	if got.generation() != 1.0 {
		t.Errorf("a label counts: %v", got.generation())
	}
	got = u.want(t, 200, "PATCH", u.path(o.name()), object{"metadata": map[string]any{"generation": 77}}, contentType,
		mergePatch).object()
	if got.generation() != 1.0 {
		t.Errorf("a client set it: %v", got.generation())
	}
	if u.row.Change == nil {
		return
	}
	got = u.want(t, 200, "PATCH", u.path(o.name()), u.row.Change, contentType, mergePatch).object()
	if got.generation() != 2.0 {
		t.Errorf("a change does not count: %v", got.generation())
	}
}

// What is asked for as a dry run is answered in full, and nothing of it is stored.
func runsDry(t *testing.T, u *kindUnderTest) {
	o := u.fresh(t)
	if made := u.want(t, 201, "POST", with(u.path(), "dryRun=All"), o).object(); made.uid() == "" {
		t.Errorf("%v", made)
	}
	u.want(t, 404, "GET", u.path(o.name()), nil)
	o = u.make(t)
	at := with(u.path(o.name()), "dryRun=All")
	if got := u.want(t, 200, "PUT", at, merged(o, labelled("dry", "put"))).object(); got.at("metadata", "labels",
		"dry") != "put" {
		t.Errorf("%v", got)
	}
	if got := u.want(t, 200, "PATCH", at, labelled("dry", "patch"), contentType, mergePatch).object(); got.at(
		"metadata", "labels", "dry") != "patch" {
		t.Errorf("%v", got)
	}
	u.want(t, 200, "DELETE", at, nil)
	u.want(t, 422, "POST", with(u.path(), "dryRun=Some"), u.fresh(t))
	if got := u.get(t, o.name()); lacks(map[string]any(got), map[string]any(o)) != "" || got.version() != o.version() ||
		got.deleted() {
		t.Errorf("a dry run stored %v", got)
	}
}

// causes are the lines of a refusal: the field and what is wrong with it.
func causes(a answer) []string {
	var out []string
	list, _ := a.object().at("details", "causes").([]any)
	for _, c := range list {
		c := object(c.(map[string]any))
		out = append(out, c.text("field")+": "+c.text("message"))
	}
	return out
}

func keepsWhatIsImmutable(t *testing.T, u *kindUnderTest) {
	if len(u.row.Immutable) == 0 {
		return
	}
	o := u.make(t)
	for _, c := range u.row.Immutable {
		a := u.send(t, "PATCH", u.path(o.name()), c.Patch, contentType, mergePatch)
		if got := causes(a); a.code != 422 || !slices.Equal(got, c.Causes) {
			t.Errorf("%v: %d\n got  %q\n want %q\n%s", c.Patch, a.code, got, c.Causes, a.body)
		}
	}
	if got := u.get(t, o.name()); got.version() != o.version() {
		t.Error("what was refused has changed the object")
	}
}
