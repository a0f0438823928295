package admission

import (
	"context"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// F82: an owner may block its deletion only through a version that is served.
func TestBlockingOwnersHaveAServedVersion(t *testing.T) {
	table := kinds.All()
	gadget := *table.ByGVK(corev1.SchemeGroupVersion.WithKind("ConfigMap"))
	allow := func(context.Context, api.User, string, schema.GroupVersionResource, string, string, string) (bool, string) {
		return true, ""
	}
	c := Config{Kinds: table, Allowed: allow}
	block := true
	attempt := func(kind string) error {
		cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "c", Namespace: "default"}}
		cm.OwnerReferences = []metav1.OwnerReference{
			{APIVersion: "v1", Kind: kind, Name: "o", UID: "u", BlockOwnerDeletion: &block}}
		k := table.ByGVK(corev1.SchemeGroupVersion.WithKind("Secret"))
		return ownerReferences(c)(t.Context(), &Attempt{Kind: k, Namespace: "default", Name: "c",
			Request: &api.Request{Kind: k}, Operation: api.Create, Whole: cm})
	}
	if err := attempt("ConfigMap"); err != nil {
		t.Fatal(err)
	}
	gadget.Hidden = true
	old := table.ByGVK(gadget.GVK)
	if err := table.Change([]*api.Kind{old}, []*api.Kind{&gadget}); err != nil {
		t.Fatal(err)
	}
	const want = `cannot find RESTMapping for APIVersion v1 Kind ConfigMap: no matches for kind "ConfigMap" in version "v1"`
	if err := attempt("ConfigMap"); err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the owner's version is not served: %v", err)
	}
}
