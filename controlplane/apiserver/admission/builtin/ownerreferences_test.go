package builtin

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// F70: the kind of an owner that blocks its deletion must have a served version.
func TestBlockingOwnersHaveAServedVersion(t *testing.T) {
	table := kinds.All()
	gadget := *table.ByGVK(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	allow := func(_ context.Context, _ api.User, _ string, r schema.GroupVersionResource,
		_, _, _ string) (bool, string) {
		return r.Resource != "*", ""
	}
	c := Config{Kinds: table, Access: Access{Allowed: allow}}
	block := true
	attempt := func(kind string) error {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default"}}
		cm.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "v1", Kind: kind, Name: "o", UID: "u", BlockOwnerDeletion: &block}}
		k := table.ByGVK(corev1.SchemeGroupVersion.WithKind("Secret"))
		return ownerReferences(c)(t.Context(), &admission.Attempt{Kind: k, Namespace: "default", Name: "c",
			Request: &api.Request{Kind: k}, Operation: api.Create, Whole: cm})
	}
	if err := attempt("ConfigMap"); err != nil {
		t.Fatal(err)
	}
	gadget.Serving.Hidden = true
	old := table.ByGVK(gadget.GVK)
	if err := table.Change([]*api.Kind{old}, []*api.Kind{&gadget}); err != nil {
		t.Fatal(err)
	}
	const want = `cannot find RESTMapping for APIVersion v1 Kind ConfigMap: no matches for kind ` +
		`"ConfigMap" in version "v1"`
	if err := attempt("ConfigMap"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the owner's version is not served: %v", err)
	}
}

// F70: an owner of a kind that only an aggregated API server serves may block its deletion. A user
// that may update all finalizers may name owners of unknown kinds.
func TestBlockingOwnersOfAggregatedAndUnknownKinds(t *testing.T) {
	table := kinds.All()
	block := true
	var asked []string
	attempt := func(kind string, may ...string) error {
		asked = nil
		c := Config{Kinds: table, Access: Access{
			Allowed: func(_ context.Context, _ api.User, verb string, r schema.GroupVersionResource,
				sub, ns, name string) (bool, string) {
				what := fmt.Sprintf("%s %s/%s/%s/%s of %q in %q", verb, r.Group, r.Version, r.Resource, sub, name, ns)
				asked = append(asked, what)
				return slices.Contains(may, what), "no rule"
			},
			AggregatedResources: func(_ context.Context, gvk schema.GroupVersionKind) []metav1.APIResource {
				if gvk != (schema.GroupVersionKind{Group: "good.example.com", Version: "v1", Kind: "Flunder"}) {
					return nil
				}
				return []metav1.APIResource{{Group: gvk.Group, Version: gvk.Version, Name: "flunders",
					Namespaced: true},
					{Group: gvk.Group, Version: gvk.Version, Name: "allflunders"}}
			}}}
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default"}}
		cm.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "good.example.com/v1", Kind: kind, Name: "o", UID: "u", BlockOwnerDeletion: &block}}
		k := table.ByGVK(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
		return ownerReferences(c)(t.Context(), &admission.Attempt{Kind: k, Namespace: "default", Name: "c",
			Request: &api.Request{Kind: k}, Operation: api.Create, Whole: cm})
	}
	const anything = `update */*/*/finalizers of "*" in ""`
	one := `update good.example.com/v1/flunders/finalizers of "o" in "default"`
	other := `update good.example.com/v1/allflunders/finalizers of "o" in ""`
	if err := attempt("Flunder", one, other); err != nil || !slices.Equal(asked, []string{anything, one, other}) {
		t.Errorf("%v after %q", err, asked)
	}
	const refusal = "a resource you can't set finalizers on: no rule"
	if err := attempt("Flunder", one); err == nil || !strings.Contains(err.Error(), refusal) {
		t.Errorf("without a right on each resource of the kind: %v", err)
	}
	if err := attempt("Nobody"); err == nil || !strings.Contains(err.Error(), "cannot find RESTMapping") {
		t.Errorf("an unknown kind: %v", err)
	}
	if err := attempt("Nobody", anything); err != nil || !slices.Equal(asked, []string{anything}) {
		t.Errorf("an unknown kind with the right on all finalizers: %v after %q", err, asked)
	}
}
