package kctl

import (
	"testing"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/resource"

	"keelson.dev/keelson/controlplane/api"
)

func TestTimelinePath(t *testing.T) {
	info := func(group, plural, namespace, name string) *resource.Info {
		scope := meta.RESTScopeNamespace
		if namespace == "" {
			scope = meta.RESTScopeRoot
		}
		return &resource.Info{Namespace: namespace, Name: name,
			Object: &unstructured.Unstructured{Object: map[string]any{}},
			Mapping: &meta.RESTMapping{Resource: schema.GroupVersionResource{Group: group, Version: "v1",
				Resource: plural}, Scope: scope}}
	}
	traced := info("", "pods", "default", "p")
	traced.Object.(*unstructured.Unstructured).SetAnnotations(map[string]string{
		api.TraceParentAnnotation: "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"})
	for want, in := range map[string]*resource.Info{
		"/timeline/apis/apps/v1/namespaces/default/deployments/hello": info("apps", "deployments", "default", "hello"),
		"/timeline/api/v1/namespaces/default/services/hello":          info("", "services", "default", "hello"),
		"/timeline/api/v1/namespaces/a":                               info("", "namespaces", "", "a"),
		"/timeline/0123456789abcdef0123456789abcdef":                  traced,
	} {
		if got, err := timelinePath(in); err != nil || got != want {
			t.Errorf("got %s (%v), want %s", got, err, want)
		}
	}
}
