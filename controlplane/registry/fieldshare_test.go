package registry

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry/storedform"
	"keelson.dev/keelson/raftstore"
)

func shortFields(r *Registry) { WithShortFields(func() bool { return true })(r) }

// storedForms returns the fieldsTypes of an object in the store.
func (e *env) storedForms(obj api.Object) (out []string) {
	e.t.Helper()
	if err := e.catchUp(); err != nil {
		e.t.Fatal(err)
	}
	s := e.cache.ByKind(e.kinds.ByType(obj))
	stored, _, err := s.Codec().Decode(s.Current(storedform.ObjectKey(s.Kind, obj.GetNamespace(), obj.GetName())).Value)
	if err != nil {
		e.t.Fatal(err)
	}
	for _, m := range stored.GetManagedFields() {
		out = append(out, m.FieldsType)
	}
	return out
}

// managedBy returns managedFields without times, in a fixed order.
func managedBy(obj api.Object) []metav1.ManagedFieldsEntry {
	out := append([]metav1.ManagedFieldsEntry(nil), obj.GetManagedFields()...)
	for i := range out {
		out[i].Time = nil
	}
	slices.SortFunc(out, func(a, b metav1.ManagedFieldsEntry) int {
		return strings.Compare(fmt.Sprint(a.Operation, a.Subresource, a.Manager, a.APIVersion),
			fmt.Sprint(b.Operation, b.Subresource, b.Manager, b.APIVersion))
	})
	return out
}

// Objects with and without short forms are readable by both kinds of replicas, and rewritten in the
// writer's form. A cluster with mixed replicas loses no ownership.
func TestShortFieldsBesideLongOnes(t *testing.T) {
	long := newEnv(t)
	short := runEnv(t, long.store, New(long.store, long.kinds, shortFields))
	forms := map[*env]string{long: longFieldsType, short: shortFieldsType}
	for i, pair := range [][2]*env{{long, short}, {short, long}, {short, short}} {
		a, b := pair[0], pair[1]
		p := pod("default", fmt.Sprint("p", i))
		made := a.create(p)
		want := long.spelledOut(made)
		if got := a.storedForms(p); !reflect.DeepEqual(got, []string{forms[a]}) {
			t.Errorf("%d: stored as %q", i, got)
		}
		rev := made.GetResourceVersion()
		for _, e := range []*env{a, b} {
			if err := e.catchUp(); err != nil {
				t.Fatal(err)
			}
			got, err := e.get(p)
			if err != nil || got.GetResourceVersion() != rev || !bytes.Equal(e.spelledOut(got), want) {
				t.Fatalf("%d: %s\nwant %s (%v)", i, e.spelledOut(got), want, err)
			}
		}
		// A write without changes does not convert the form.
		same, err := b.get(p)
		if err != nil {
			t.Fatal(err)
		}
		if got := b.update(same, ""); got.GetResourceVersion() != rev {
			t.Errorf("%d: an update without a change wrote revision %s over %s", i, got.GetResourceVersion(), rev)
		}
		next, _, err := b.patch(p, types.MergePatchType, `{"metadata":{"labels":{"x":"y"}}}`, func(r *api.Request) {
			r.Patch.Options.FieldManager = "second"
		})
		if err != nil {
			t.Fatal(err)
		}
		if got := b.storedForms(p); !reflect.DeepEqual(got, []string{forms[b], forms[b]}) ||
			len(owners(next, "x")) != 1 || len(owners(next, "image")) != 1 {
			t.Errorf("%d: then stored as %q: %v", i, got, next.GetManagedFields())
		}
	}
}

func (e *env) catchUp() error {
	_, err := e.cache.Refresh(e.ctx)
	return err
}

// spelledOut returns the JSON of an object.
func (e *env) spelledOut(obj api.Object) []byte {
	e.t.Helper()
	data, err := e.Encoded(obj, "application/json")
	if err != nil {
		e.t.Fatal(err)
	}
	return data
}

// A managedFields entry in a later release's form, or a damaged one, owns nothing and is not shown.
// It remains stored.
func TestUnknownFieldForms(t *testing.T) {
	e := newEnv(t, shortFields)
	p := pod("default", "p")
	made := e.create(p)
	s := e.cache.ByKind(e.kinds.ByType(p))
	later := made.DeepCopyObject().(*corev1.Pod)
	later.ResourceVersion = ""
	for i, form := range []string{"K2", shortFieldsType} {
		later.ManagedFields = append(later.ManagedFields,
			metav1.ManagedFieldsEntry{Manager: fmt.Sprint("later", i), Operation: "Update",
				APIVersion: "v1", FieldsType: form, FieldsV1: &metav1.FieldsV1{Raw: []byte(`"(what"`)}})
	}
	data, err := s.Codec().Encode(later)
	if err != nil {
		t.Fatal(err)
	}
	op := raftstore.Put(s.Storage().Prefix+storedform.ObjectKey(s.Kind, "default", "p"), data)
	if _, err := e.store.Commit(e.ctx, raftstore.Commit{Ops: []raftstore.Op{op}}); err != nil {
		t.Fatal(err)
	}
	if err := e.catchUp(); err != nil {
		t.Fatal(err)
	}
	got, err := e.get(p)
	if err != nil || !reflect.DeepEqual(managedBy(got), managedBy(made)) {
		t.Fatalf("shown is %v (%v)", got.GetManagedFields(), err)
	}
	applied, _, err := e.patch(p, types.ApplyPatchType,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","labels":{"a":"b"}}}`)
	if err != nil {
		t.Fatal(err)
	}
	if n := len(applied.GetManagedFields()); n != 2 {
		t.Errorf("%d managers after an apply", n)
	}
	if got, want := e.storedForms(p), []string{shortFieldsType, shortFieldsType, "K2",
		shortFieldsType}; !reflect.DeepEqual(got, want) {
		t.Errorf("stored are %q, want %q", got, want)
	}
}

// A client cannot write the internal forms: not by create, update, patch or through the status.
func TestFieldFormsOfClients(t *testing.T) {
	e := newEnv(t, shortFields)
	hostile := []metav1.ManagedFieldsEntry{{Manager: "x", Operation: "Update", APIVersion: "v1", FieldsType: "K2",
		FieldsV1: &metav1.FieldsV1{Raw: []byte(`"(("`)}}}
	check := func(how string, obj api.Object, err error) {
		t.Helper()
		if err != nil {
			t.Errorf("%s: %v", how, err)
			return
		}
		for _, m := range obj.GetManagedFields() {
			if m.FieldsType != longFieldsType {
				t.Errorf("%s: shown is %v", how, m)
			}
		}
		for _, form := range e.storedForms(obj) {
			if form != shortFieldsType {
				t.Errorf("%s: stored is %q", how, form)
			}
		}
	}
	for _, user := range []string{"alice", api.UserController} {
		e.user.Name = user
		p := pod("default", "p-"+user[:5])
		p.ManagedFields = hostile
		made, err := e.tryCreate(p)
		check("create by "+user, made, err)
		for _, facet := range []string{"", "status"} {
			next := made.DeepCopyObject().(*corev1.Pod)
			next.ResourceVersion, next.ManagedFields, next.Status.Message = "", hostile, facet
			next.Labels = map[string]string{"changed": "by" + facet}
			out, err := e.tryUpdate(next, facet)
			check("update of "+facet+" by "+user, out, err)
		}
		out, _, err := e.patch(p, types.MergePatchType,
			`{"metadata":{"labels":{"z":"1"},"managedFields":[{"manager":"x","operation":"Update",
			"apiVersion":"v1","fieldsType":"K1","longFieldsType":{}}]}}`)
		check("patch by "+user, out, err)
	}
}

// Objects of one shape share one field set, and an unused set is freed.
func TestSharedFields(t *testing.T) {
	for _, opts := range [][]Option{nil, {shortFields}} {
		e := newEnv(t, opts...)
		var sets []*metav1.FieldsV1
		for i := range 3 {
			p := pod("default", fmt.Sprint("p", i))
			e.create(p)
			got, err := e.get(p)
			if err != nil {
				t.Fatal(err)
			}
			sets = append(sets, got.GetManagedFields()[0].FieldsV1)
		}
		if sets[0] != sets[1] || sets[1] != sets[2] {
			t.Error("pods of one shape have sets of their own")
		}
	}
}

// For random objects of every kind and any writes by several managers, get and list show the same
// ownership with and without the short forms.
func TestShortFieldsChangeNothing(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	clock := WithClock(func() time.Time { return time.Unix(1_700_000_000, 0) })
	envs := []*env{newEnv(t, clock), newEnv(t, clock, shortFields)}
	tables, did := []*api.Kind{}, map[string]int{}
	for _, k := range envs[0].kinds.All() {
		if !k.Serving.Virtual {
			tables = append(tables, k)
		}
	}
	for n, k := range tables {
		twins := newTwins(t, envs, k, rand.New(rand.NewPCG(seed, uint64(n))))
		for range 40 {
			twins.step()
		}
		twins.count(did)
	}
	k := widgetKind()
	for _, e := range envs {
		if err := e.kinds.Register(k); err != nil {
			t.Fatal(err)
		}
	}
	twins := newTwins(t, envs, k, rand.New(rand.NewPCG(seed, 1000)))
	for range 60 {
		twins.step()
	}
	twins.count(did)
	t.Logf("done: %v", did)
	for _, way := range ways {
		if did[way] == 0 {
			t.Errorf("no %s has succeeded", way)
		}
	}
}
