package kctl

import (
	"fmt"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// A cluster that asks for Gateway API has it at once; what it has of its own stays. F15
func TestGatewayInstall(t *testing.T) {
	ctx, plane := oneReplica(t, "gateway")
	cluster, kubeconfig := dynamicOf(t, plane)
	resources := []string{"gatewayclasses", "gateways", "httproutes", "grpcroutes", "referencegrants"}
	outcome := func(verdicts ...string) string {
		var s strings.Builder
		for i, r := range resources {
			v := verdicts[min(i, len(verdicts)-1)]
			fmt.Fprintf(&s, "customresourcedefinition/%s.gateway.networking.k8s.io %s\n", r, v)
		}
		return s.String()
	}
	expect := func(line, want string) {
		t.Helper()
		if got, _ := withKubeconfig(t, kubeconfig, strings.Split(line, " ")...); got != want {
			t.Fatalf("kctl %s:\n%s\nwant:\n%s", line, got, want)
		}
	}
	expect("gateway install --class ", outcome("created"))
	for _, r := range resources {
		gvr := schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: r}
		if _, err := cluster.Resource(gvr).List(ctx, metav1.ListOptions{}); err != nil {
			t.Errorf("%s is not served: %v", r, err)
		}
	}
	expect("gateway install", outcome("unchanged")+"gatewayclass/keelson created\n")
	expect("gateway install", outcome("unchanged")+"gatewayclass/keelson unchanged\n")

	definitions := cluster.Resource(schema.GroupVersionResource{Group: "apiextensions.k8s.io", Version: "v1",
		Resource: "customresourcedefinitions"})
	note := func(resource, release string) {
		t.Helper()
		patch := fmt.Sprintf(`{"metadata":{"annotations":{"gateway.networking.k8s.io/bundle-version":%q,`+
			`"mine":"kept"}}}`, release)
		if _, err := definitions.Patch(ctx, resource+".gateway.networking.k8s.io", "application/merge-patch+json",
			[]byte(patch), metav1.PatchOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	note("gatewayclasses", "v9.0.0")
	note("gateways", "v1.0.0")
	expect("gateway install --class ", outcome("kept: the cluster's is of release v9.0.0, which is newer than v1.6.3",
		"upgraded: from v1.0.0 to v1.6.3", "unchanged"))
	d, err := definitions.Get(ctx, "gateways.gateway.networking.k8s.io", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if n := d.GetAnnotations(); n["mine"] != "kept" || n["gateway.networking.k8s.io/bundle-version"] != "v1.6.3" {
		t.Errorf("the annotations of an upgraded definition are %v", n)
	}

	foreign := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "gateway.networking.k8s.io/v1",
		"kind":     "GatewayClass",
		"metadata": map[string]any{"name": "theirs"}, "spec": map[string]any{"controllerName": "example.com/theirs"}}}
	if _, err := cluster.Resource(gatewayClasses).Create(ctx, foreign, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	note("gatewayclasses", "v1.6.3")
	expect("gateway install --class theirs", outcome("unchanged")+
		"error: GatewayClass theirs is served by controller \"example.com/theirs\": choose another name with --class\n")
}
