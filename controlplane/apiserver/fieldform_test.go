package apiserver_test

import (
	"bytes"
	"context"
	"encoding/json"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/raftstore"
)

// Whichever form managedFields are stored in, a client sees the same, in every media type, in
// lists, tables and watches, and so does a person with kubectl.
func TestShortFieldsAreNotSeen(t *testing.T) {
	views := map[bool]map[string]any{}
	for _, short := range []bool{false, true} {
		r := apiservertest.StartReplica(t, nil, registry.WithShortFields(func() bool { return short }))
		c := r.Admin()
		ctx := context.Background()
		pod := apiservertest.NewPod("web")
		pod.Labels = map[string]string{"app": "web"}
		if _, err := c.CoreV1().Pods("default").Create(ctx, pod, metav1.CreateOptions{FieldManager: "first"}); err !=
			nil {
			t.Fatal(err)
		}
		for _, patch := range []struct {
			way         types.PatchType
			body, owner string
			subresource []string
		}{
			{types.ApplyPatchType,
				`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","annotations":{"a.b/c":"1"},` +
					`"labels":{"'\"odd":"x"}}}`, "bad", nil},
			{types.ApplyPatchType,
				`{"apiVersion":"v1","kind":"Pod","metadata":{"name":"web","annotations":{"a.b/c":"1"},` +
					`"finalizers":["x.y/z"]}}`, "second", nil},
			{types.StrategicMergePatchType,
				`{"status":{"conditions":[{"type":"Ready","status":"True"}],"podIPs":[{"ip":"10.1.2.3"}]}}`, "third",
				[]string{"status"}},
		} {
			_, err := c.CoreV1().Pods("default").Patch(ctx, "web", patch.way, []byte(patch.body),
				metav1.PatchOptions{FieldManager: patch.owner}, patch.subresource...)
			if (err != nil) != (patch.owner == "bad") {
				t.Fatalf("%s: %v", patch.owner, err)
			}
		}
		it, _, err := r.Store.Get(ctx, "/registry/pods/default/web", raftstore.ReadOptions{})
		if err != nil || bytes.Contains(it.Value, []byte("\x32\x02K1")) != short ||
			bytes.Contains(it.Value, []byte("\x32\x08FieldsV1")) == short {
			t.Fatalf("short=%t: %v, stored %q", short, err, it.Value)
		}
		views[short] = fieldViews(t, r)
	}
	if len(views[true]) == 0 {
		t.Fatal("nothing was looked at")
	}
	for name, long := range views[false] {
		if entries, _ := long.([]any); len(entries) != 3 {
			t.Errorf("%s: %v, want three managers", name, long)
		}
		if diff := cmp.Diff(long, views[true][name]); diff != "" {
			t.Errorf("%s: long and short:\n%s", name, diff)
		}
	}
}

// fieldViews returns the managedFields of pod default/web in all representations.
func fieldViews(t *testing.T, r *apiservertest.Replica) map[string]any {
	t.Helper()
	views := map[string]any{}
	const path = "/api/v1/namespaces/default/pods"
	const table = ";as=Table;g=meta.k8s.io;v=v1"
	for _, media := range []string{"application/json", "application/yaml", "application/cbor"} {
		for name, q := range map[string][2]string{
			"get": {path + "/web", media}, "list": {path, media},
			"table":            {path + "?includeObject=Object", media + table},
			"table, metadata":  {path + "/web?includeObject=Metadata", media + table},
			"metadata":         {path + "/web", media + ";as=PartialObjectMetadata;g=meta.k8s.io;v=v1"},
			"list of metadata": {path, media + ";as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"},
		} {
			a := r.Call(r.AdminHTTP(), "GET", q[0], "", "Accept", q[1])
			if a.Code != 200 {
				t.Fatalf("%s as %s: %d %s", name, q[1], a.Code, a.Body)
			}
			views[name+" "+media] = managedIn(apiservertest.Plain(t, media, []byte(a.Body)))
		}
	}
	ctx := context.Background()
	options := metav1.ListOptions{FieldSelector: "metadata.name=web", ResourceVersion: "0"}
	for _, media := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
		conf := r.ClientConfig("admin", "system:masters")
		conf.ContentType, conf.AcceptContentTypes = media, media
		pods := kubernetes.NewForConfigOrDie(conf).CoreV1().Pods("default")
		one, err := pods.Get(ctx, "web", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		views["client-go get "+media] = managedIn(asPlain(t, one))
		w, err := pods.Watch(ctx, options)
		if err != nil {
			t.Fatal(err)
		}
		views["client-go watch "+media] = managedIn(asPlain(t, (<-w.ResultChan()).Object))
		w.Stop()
	}
	conf, _ := r.CborConfig(t)
	w, err := dynamic.NewForConfigOrDie(conf).Resource(corev1.SchemeGroupVersion.WithResource("pods")).Namespace(
		"default").Watch(ctx, options)
	if err != nil {
		t.Fatal(err)
	}
	views["client-go watch application/cbor"] = managedIn(asPlain(t, (<-w.ResultChan()).Object))
	w.Stop()
	for name, binary := range apiservertest.StockKubectls() {
		k := &apiservertest.Kubectl{T: t, Binary: binary, Config: r.Kubeconfig("admin", "system:masters"),
			Home: t.TempDir()}
		raw, err := yaml.YAMLToJSON([]byte(k.Ok("", "get", "pod", "web", "-o", "yaml", "--show-managed-fields")))
		if err != nil {
			t.Fatal(err)
		}
		views[name+" get --show-managed-fields"] = managedIn(apiservertest.Plain(t, "application/json", raw))
	}
	return views
}

func asPlain(t *testing.T, v any) any {
	t.Helper()
	raw, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return apiservertest.Plain(t, "application/json", raw)
}

// managedIn returns all managedFields in a response, without their times.
func managedIn(v any) any {
	switch v := v.(type) {
	case map[string]any:
		if fields, ok := v["managedFields"].([]any); ok {
			for _, e := range fields {
				delete(e.(map[string]any), "time")
			}
			return fields
		}
		for _, below := range v {
			if found := managedIn(below); found != nil {
				return found
			}
		}
	case []any:
		for _, below := range v {
			if found := managedIn(below); found != nil {
				return found
			}
		}
	}
	return nil
}
