package registry

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"reflect"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/randfill"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
)

// twins performs the same operations in several registries and compares field ownership.
type twins struct {
	t      *testing.T
	envs   []*env
	kind   *api.Kind
	rand   *rand.Rand
	fill   *randfill.Filler
	done   map[string]int // successful operations
	there  bool           // the object exists
	failed error          // last error
}

func newTwins(t *testing.T, envs []*env, k *api.Kind, r *rand.Rand) *twins {
	tw := &twins{t: t, envs: envs, kind: k, rand: r, done: map[string]int{}}
	tw.fill = randfill.NewWithSeed(r.Int64()).NilChance(.7).NumElements(1, 2).MaxDepth(10).Funcs(
		func(f *metav1.FieldsV1, _ randfill.Continue) { f.Raw = []byte(`{}`) },
		func(o *runtime.RawExtension, _ randfill.Continue) {},
		func(s *string, c randfill.Continue) { *s = fmt.Sprint("s", c.Intn(1000)) },
		func(s *types.UID, c randfill.Continue) { *s = types.UID(fmt.Sprint("u", c.Intn(1000))) },
		func(s *corev1.ResourceName, c randfill.Continue) {
			*s = corev1.ResourceName(fmt.Sprint("r", c.Intn(9)))
		},
		func(o *metav1.ObjectMeta, c randfill.Continue) {
			o.Labels = map[string]string{fmt.Sprint("l", c.Intn(5)): "v", "app.kubernetes.io/name": "x"}
			o.Annotations = map[string]string{fmt.Sprint("a", c.Intn(5)): "it's <odd>"}
		},
	)
	return tw
}

// object returns a random object, always with the same name.
func (tw *twins) object() api.Object {
	obj := tw.kind.Type.New()
	if w, ok := obj.(*custom.Object); ok {
		w.Labels = map[string]string{fmt.Sprint("l", tw.rand.IntN(5)): "v"}
		w.Content = map[string]any{"spec": map[string]any{fmt.Sprint("f", tw.rand.IntN(4)): int64(tw.rand.IntN(9)),
			"size": int64(1)}}
	} else {
		tw.fill.Fill(obj)
	}
	obj.SetName("twin")
	obj.SetNamespace("")
	if tw.kind.Namespaced {
		obj.SetNamespace("default")
	}
	tw.kind.SetTypeMeta(obj)
	return obj
}

var ways = []string{"create", "status", "merge", "json", "apply", "applyStatus", "scale", "delete", "update"}

// step performs one random operation in all registries and compares the results.
func (tw *twins) step() {
	tw.t.Helper()
	obj, manager := tw.object(), fmt.Sprint("m", tw.rand.IntN(3))
	way := "create"
	if tw.there {
		way = ways[min(tw.rand.IntN(len(ways)+4), len(ways)-1)]
	}
	patch := map[string]string{
		"merge": fmt.Sprintf(`{"metadata":{"labels":{"p%d":"1","l1":null}}}`, tw.rand.IntN(3)),
		"json":  `[{"op":"add","path":"/metadata/annotations","value":{"j":"1"}}]`,
		"scale": fmt.Sprintf(`{"spec":{"replicas":%d}}`, tw.rand.IntN(9)),
	}[way]
	if patch == "" {
		intent := map[string]any{"apiVersion": tw.kind.GVK.GroupVersion().String(), "kind": tw.kind.GVK.Kind,
			"metadata": map[string]any{
				"name": "twin", "labels": map[string]string{fmt.Sprint("l", tw.rand.IntN(5)): "applied", "it's": "x"}}}
		data, err := json.Marshal(intent)
		if err != nil {
			tw.t.Fatal(err)
		}
		patch = string(data)
	}
	var first string
	var said error
	for i, e := range tw.envs {
		err := tw.do(e, way, obj.DeepCopyObject().(api.Object), manager, patch)
		if i > 0 && (err == nil) != (said == nil) {
			tw.t.Fatalf("%s %s: %v here, %v there", way, tw.kind.Resource, said, err)
		}
		said = err
		got := tw.look(e)
		if i > 0 && got != first {
			tw.t.Fatalf("after %s of %s by %s:\n%s\nthere\n%s", way, tw.kind.Resource, manager, first, got)
		}
		first = got
	}
	if tw.there = first != ""; said == nil {
		tw.done[way]++
	} else {
		tw.failed = said
	}
}

func (tw *twins) do(e *env, way string, obj api.Object, manager, patch string) error {
	req := &api.Request{User: api.User{Name: "alice"}, Kind: e.kinds.ByGVK(tw.kind.GVK), Namespace: obj.GetNamespace(),
		Name: "twin", Client: api.ClientInfo{UserAgent: manager}, Object: obj}
	var err error
	switch way {
	case "create":
		req.Verb = api.VerbCreate
		_, err = e.Registry.Create(e.ctx, req, nil)
	case "update", "status":
		req.Verb = api.VerbUpdate
		if way == "status" {
			req.Subresource = way
		}
		_, _, err = e.Registry.Update(e.ctx, req, nil)
	case "delete":
		req.Verb = api.VerbDelete
		_, _, err = e.Registry.Delete(e.ctx, req, nil)
	default:
		req.Verb, req.Object, req.Patch.Body = api.VerbPatch, nil, []byte(patch)
		req.Patch.Type = map[string]types.PatchType{"json": types.JSONPatchType, "apply": types.ApplyPatchType,
			"applyStatus": types.ApplyPatchType}[way]
		switch way {
		case "merge":
			req.Patch.Type = types.MergePatchType
		case "scale":
			req.Patch.Type, req.Subresource = types.MergePatchType, "scale"
		case "applyStatus":
			req.Subresource = "status"
		}
		if req.Patch.Type == types.ApplyPatchType {
			req.Patch.Options.FieldManager, req.Patch.Options.Force = manager, new(true)
		}
		_, _, err = e.Registry.Patch(e.ctx, req, nil)
	}
	return err
}

// look returns the ownership by get, by list and as encoded, which must be equal.
func (tw *twins) look(e *env) string {
	tw.t.Helper()
	req := &api.Request{User: e.user, Verb: api.VerbList, Kind: e.kinds.ByGVK(tw.kind.GVK),
		Internal: api.InternalOptions{Pointers: true}}
	l, err := e.Registry.List(e.ctx, req)
	if err != nil {
		tw.t.Fatal(err)
	}
	for _, obj := range l.(*api.ObjectList).Items {
		if obj.GetName() != "twin" {
			continue
		}
		var shown struct{ Metadata metav1.ObjectMeta }
		if err := json.Unmarshal(e.spelledOut(obj), &shown); err != nil {
			tw.t.Fatal(err)
		}
		for i, m := range obj.GetManagedFields() {
			if m.FieldsType != longFieldsType || string(shown.Metadata.ManagedFields[i].FieldsV1.Raw) !=
				string(m.FieldsV1.Raw) {
				tw.t.Fatalf("%v is shown as %v", m, shown.Metadata.ManagedFields[i])
			}
		}
		data, err := json.Marshal(managedBy(obj))
		if err != nil {
			tw.t.Fatal(err)
		}
		req := &api.Request{User: e.user, Verb: api.VerbGet, Kind: e.kinds.ByGVK(tw.kind.GVK),
			Namespace: obj.GetNamespace(), Name: "twin"}
		got, err := e.Registry.GetObject(e.ctx, req)
		if err != nil || !reflect.DeepEqual(managedBy(got), managedBy(obj)) {
			tw.t.Fatalf("get gives %v, list %v (%v)", managedBy(got), managedBy(obj), err)
		}
		return "it: " + string(data)
	}
	return ""
}

// count adds the number of successful operations to all.
func (tw *twins) count(all map[string]int) {
	for way, n := range tw.done {
		all[way] += n
	}
	if len(tw.done) == 0 {
		tw.t.Errorf("nothing could be done with %s: %v", tw.kind.Resource, tw.failed)
	}
}
