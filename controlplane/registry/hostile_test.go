package registry

import (
	"context"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
)

func joined(n int, item func(i int) string) string {
	items := make([]string, n)
	for i := range items {
		items[i] = item(i)
	}
	return strings.Join(items, ",")
}

var hostilePatchesText = strings.Repeat("x", 1<<20)

const hostilePatchesHead = `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"small"},`

func hostilePatchesEnvs(n int) string {
	return `{"spec":{"containers":[{"name":"main","env":[` + joined(n, func(i int) string {
		return fmt.Sprintf(`{"name":"F%d"}`, i)
	}) + `]}]}}`
}

// hostilePatchesCases are the cases of TestHostilePatches.
var hostilePatchesCases = map[string]struct {
	obj   api.Object
	kind  types.PatchType
	patch string
}{
	"copies that double": {configMap("default", "small"), types.JSONPatchType,
		`[{"op":"add","path":"/metadata/finalizers","value":["` + strings.Repeat("a", 60) + `"]},` +
			joined(40, func(i int) string {
				return fmt.Sprintf(`{"op":"copy","from":"/metadata","path":"/metadata/x%d"}`, i)
			}) + `]`},
	"copies of the large value": {configMap("default", "large"), types.JSONPatchType,
		"[" + joined(10000, func(i int) string {
			return fmt.Sprintf(`{"op":"copy","from":"/data/k","path":"/data/k%d"}`, i)
		}) + "]"},
	"tests of the large value": {configMap("default", "large"), types.JSONPatchType,
		"[" + joined(10000, func(i int) string { return `{"op":"test","path":"/data","value":{"k":"x"}}` }) + "]"},
	"containers out of nothing": {pod("default", "long"), types.JSONPatchType,
		`[{"op":"add","path":"/spec/containers","value":[` + joined(1<<19, func(int) string {
			return "{}"
		}) + `]}]`},
	"containers out of copies": {pod("default", "long"), types.JSONPatchType,
		`[{"op":"add","path":"/spec/containers","value":[` + joined(1000, func(int) string {
			return "{}"
		}) + `]},` +
			joined(200, func(i int) string {
				return fmt.Sprintf(`{"op":"copy","from":"/spec/containers","path":"/spec/x%d"}`, i)
			}) + `]`},
	"containers by merge": {pod("default", "long"), types.MergePatchType,
		`{"spec":{"containers":[` + joined(1<<19, func(int) string { return "{}" }) + `]}}`},
	"merge of many members": {configMap("default", "small"), types.MergePatchType,
		`{"data":{` + joined(200000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"merge of members that pass": {configMap("default", "one"), types.MergePatchType,
		`{"data":{` + joined(8000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"strategic, members that pass": {configMap("default", "two"), types.StrategicMergePatchType,
		`{"data":{` + joined(8000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"apply, members that pass": {configMap("default", "small"), types.ApplyPatchType,
		hostilePatchesHead + `"data":{` + joined(4000, func(i int) string {
			return fmt.Sprintf(`"%d":"v"`, i)
		}) + `}}`},
	"apply, the widest object": {configMap("default", "widest"), types.ApplyPatchType,
		strings.Replace(hostilePatchesHead, "small", "widest", 1) + `"data":{` + joined(16000, func(i int) string {
			return fmt.Sprintf(`"%d":"v"`, i)
		}) + `}}`},
	"merge of the widest object": {configMap("default", "three"), types.MergePatchType,
		`{"data":{` + joined(16000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"strategic, the widest object": {configMap("default", "four"), types.StrategicMergePatchType,
		`{"data":{` + joined(16000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"apply, the longest list": {pod("default", "applied"), types.ApplyPatchType,
		`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"applied","namespace":"default"},` +
			`"spec":{"containers":[{"name":"main","image":"a","env":[` +
			joined(16000, func(i int) string { return fmt.Sprintf(`{"name":"F%d"}`, i) }) + `]}]}}`},
	"deep merge": {configMap("default", "small"), types.MergePatchType,
		strings.Repeat(`{"data":`, 300000) + "1" + strings.Repeat("}", 300000)},
	"strategic, long lists":      {pod("default", "long"), types.StrategicMergePatchType, hostilePatchesEnvs(16000)},
	"strategic, lists that pass": {pod("default", "long"), types.StrategicMergePatchType, hostilePatchesEnvs(400)},
	"strategic, deep": {pod("default", "long"), types.StrategicMergePatchType,
		strings.Repeat(`{"metadata":`, 200000) + "1" + strings.Repeat("}", 200000)},
	"strategic, many members": {configMap("default", "many"), types.StrategicMergePatchType,
		`{"data":{` + joined(150000, func(i int) string { return fmt.Sprintf(`"%d":"v"`, i) }) + `}}`},
	"apply, aliases of a string": {configMap("default", "small"), types.ApplyPatchType,
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: small}\nx: &a " + hostilePatchesText + "\ndata: {" +
			joined(2000, func(i int) string { return fmt.Sprintf("k%d: *a", i) }) + "}\n"},
	"apply, deep": {configMap("default", "small"), types.ApplyPatchType,
		hostilePatchesHead + `"data":` + strings.Repeat(`{"a":`, 200000) + "1" + strings.Repeat("}", 200001)},
	"apply, deep YAML": {configMap("default", "small"), types.ApplyPatchType, strings.Repeat("- ", 1<<20)},
	"apply, many members": {configMap("default", "small"), types.ApplyPatchType,
		hostilePatchesHead + `"data":{` + joined(200000, func(i int) string {
			return fmt.Sprintf(`"%d":"v"`, i)
		}) + `}}`},
}

// Any patch of at most 3 MiB ends within seconds, rejected or not, with memory in proportion to its
// size.
func TestHostilePatches(t *testing.T) {
	e := newEnv(t)

	e.create(configMap("default", "large", "k", hostilePatchesText))
	for _, name := range []string{"small", "one", "two", "three", "four"} {
		e.create(configMap("default", name, "k", "v"))
	}
	many := configMap("default", "many")
	many.Data = map[string]string{}
	for i := range 5000 {
		many.Data[fmt.Sprintf("key-%d", i)] = "v"
	}
	e.create(many)
	long := pod("default", "long")
	for i := range 2000 {
		long.Spec.Containers[0].Env = append(long.Spec.Containers[0].Env, corev1.EnvVar{Name: fmt.Sprintf("E%d", i)})
	}
	e.create(long)

	for name, c := range hostilePatchesCases {
		t.Run(name, func(t *testing.T) {
			if len(c.patch) > 3<<20 {
				t.Fatalf("the patch has %d bytes", len(c.patch))
			}
			runtime.GC()
			var before, after runtime.MemStats
			runtime.ReadMemStats(&before)
			began := time.Now()
			_, _, err := e.patch(c.obj, c.kind, c.patch)
			took := time.Since(began)
			runtime.ReadMemStats(&after)
			grown := after.TotalAlloc - before.TotalAlloc
			t.Logf("%v, %.1f MiB allocated, %.200v", took, float64(grown)/(1<<20), err)
			var status apierrors.APIStatus
			if err != nil {
				status, _ = err.(apierrors.APIStatus)
				if status == nil || status.Status().Code >= 500 {
					t.Errorf("refused with %v", err)
				}
			}
			if grown > 32<<20+256*uint64(len(c.patch)) {
				t.Errorf("it allocated %d MiB", grown>>20)
			}
			if took > 10*time.Second { // a second on an idle machine
				t.Errorf("it took %v", took)
			}
		})
	}
}

// A patch is not applied if its client has disconnected.
func TestPatchStopsWithItsClient(t *testing.T) {
	e := newEnv(t)
	e.create(configMap("default", "a", "k", "v"))
	ctx, cancel := context.WithCancel(e.ctx)
	cancel()
	req := e.request(api.VerbPatch, configMap("default", "a"))
	req.Patch.Type, req.Patch.Body = types.JSONPatchType, []byte(`[{"op":"add","path":"/data/b","value":"c"}]`)
	if _, _, err := e.Registry.Patch(ctx, req, e.admit); err == nil {
		t.Error("it was applied")
	}
}
