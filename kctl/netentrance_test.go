package kctl

import (
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	kubefake "k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"keelson.dev/keelson/kctl/nettrace"
)

// A cluster that has ReferenceGrants in their older version, no GRPCRoutes, and a caller who may not read Gateways: what is
// there is read, what is not served is none, and what may not be read is told.
func TestTracesReadGatewayAPI(t *testing.T) {
	gvr := func(version, resource string) schema.GroupVersionResource {
		return schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: version, Resource: resource}
	}
	kinds := map[schema.GroupVersionResource]string{gvr("v1beta1", "referencegrants"): "ReferenceGrantList"}
	for resource, kind := range map[string]string{"gatewayclasses": "GatewayClass", "gateways": "Gateway",
		"httproutes": "HTTPRoute", "grpcroutes": "GRPCRoute", "referencegrants": "ReferenceGrant"} {
		kinds[gvr("v1", resource)] = kind + "List"
	}
	grant := &unstructured.Unstructured{Object: map[string]any{"apiVersion": "gateway.networking.k8s.io/v1beta1",
		"kind":     "ReferenceGrant",
		"metadata": map[string]any{"namespace": "data", "name": "g"},
		"spec":     map[string]any{"to": []any{map[string]any{"kind": "Service", "group": ""}}}}}
	cluster := dynamicfake.NewSimpleDynamicClientWithCustomListKinds(runtime.NewScheme(), kinds, grant)
	cluster.PrependReactor("list", "*", func(a clienttesting.Action) (bool, runtime.Object, error) {
		switch at := a.GetResource(); {
		case at == gvr("v1", "referencegrants"), at.Resource == "grpcroutes":
			return true, nil, apierrors.NewNotFound(at.GroupResource(), "")
		case at.Resource == "gateways":
			return true, nil, apierrors.NewForbidden(at.GroupResource(), "", nil)
		}
		return false, nil, nil
	})
	r := &netReader{ctx: t.Context(), cs: kubefake.NewClientset()}
	r.readIngressObjects(cluster, nettrace.Target{Host: "shop.example.com", Scheme: "http"})
	if r.err != nil {
		t.Fatal(r.err)
	}
	e := r.world.Entrances
	if len(e.Grants) != 1 || e.Grants[0].Name != "g" || len(e.Grants[0].Spec.To) != 1 || len(e.GRPCRoutes) != 0 {
		t.Errorf("read %+v", e)
	}
	if u := r.world.Unread; len(u) != 1 || u[0] != "gateways" {
		t.Errorf("not read: %v", u)
	}
}
