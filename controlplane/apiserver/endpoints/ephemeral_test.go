package endpoints_test

import (
	"slices"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

const ephemeralFacet = "ephemeralcontainers"

// F128: ephemeral containers are added with every kind of patch, also with the one that kubectl
// debug sends. Every other change in the patch has no effect. The pod itself cannot be changed so.
func TestEphemeralContainersByEveryPatch(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	pods := r.Admin().CoreV1().Pods("default")
	if _, err := pods.Create(ctx, apiservertest.NewPod("p"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, c := range []struct {
		kind       types.PatchType
		name, body string
	}{
		{types.StrategicMergePatchType, "s", `{"spec":{"ephemeralContainers":[{"name":"s","image":"i",` +
			`"resources":{},"stdin":true,"targetContainerName":"c"}]}}`},
		{types.JSONPatchType, "j", `[{"op":"add","path":"/spec/ephemeralContainers/-",` +
			`"value":{"name":"j","image":"i"}}]`},
		{types.MergePatchType, "m", `{"metadata":{"labels":{"a":"b"}},"spec":{"ephemeralContainers":[{"name":"s",` +
			`"image":"i","stdin":true,"targetContainerName":"c"},{"name":"j","image":"i"},{"name":"m","image":"i"}]}}`},
		{types.ApplyPatchType, "a", `{"apiVersion":"v1","kind":"Pod","metadata":{"name":"p","labels":{"a":"b"}},` +
			`"spec":{"ephemeralContainers":[{"name":"a","image":"i"}]}}`},
	} {
		o := metav1.PatchOptions{FieldManager: "debugger"}
		if _, err := pods.Patch(ctx, "p", c.kind, []byte(c.body), o); err == nil {
			t.Errorf("%s: the pod itself can be changed", c.kind)
		}
		got, err := pods.Patch(ctx, "p", c.kind, []byte(c.body), o, ephemeralFacet)
		if err != nil {
			t.Fatalf("%s: %v", c.kind, err)
		}
		names = append(names, c.name)
		var have []string
		for _, e := range got.Spec.EphemeralContainers {
			have = append(have, e.Name)
		}
		slices.Sort(names)
		slices.Sort(have)
		if !slices.Equal(have, names) || len(got.Labels) > 0 {
			t.Errorf("%s: ephemeral containers %q, labels %v", c.kind, have, got.Labels)
		}
	}
	// Server-side apply owns the applied container, and none of the fields that it cannot set here.
	got, err := pods.Get(ctx, "p", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	i := slices.IndexFunc(got.ManagedFields, func(e metav1.ManagedFieldsEntry) bool {
		return e.Operation == metav1.ManagedFieldsOperationApply && e.Subresource == ephemeralFacet &&
			e.Manager == "debugger"
	})
	if i < 0 {
		t.Fatalf("managed fields: %v", got.ManagedFields)
	}
	owned := string(got.ManagedFields[i].FieldsV1.Raw)
	if !strings.Contains(owned, `k:{\"name\":\"a\"}`) || strings.Contains(owned, "f:metadata") ||
		strings.Contains(owned, `\"s\"`) {
		t.Errorf("the applier owns %s", owned)
	}
}

// F128: the right to change pods does not include their ephemeral containers, as in Kubernetes.
func TestEphemeralContainersNeedTheirOwnRight(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	r.Must(apiservertest.NewPod("p"))
	apiservertest.GrantEdit(t, r, "dev")
	pods := r.Client("dev").CoreV1().Pods("default")
	const body = `{"spec":{"ephemeralContainers":[{"name":"d","image":"i"}]}}`
	_, err := pods.Patch(ctx, "p", types.StrategicMergePatchType, []byte(body), metav1.PatchOptions{}, ephemeralFacet)
	if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(),
		`User "dev" cannot patch resource "pods/ephemeralcontainers"`) {
		t.Errorf("%v", err)
	}
}
