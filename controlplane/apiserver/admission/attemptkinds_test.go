package admission_test

import (
	"context"
	"sync"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	authenticationv1 "k8s.io/api/authentication/v1"
	autoscalingv1 "k8s.io/api/autoscaling/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// Callers in this process send typed objects without apiVersion and kind. Admission receives
// objects with both: the webhooks of policy engines reject an object that they cannot decode, and
// would reject every binding of the scheduler. F41
func TestAdmissionGetsKindOfInProcessRequests(t *testing.T) {
	var mu sync.Mutex
	seen := map[string]string{}
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Admission.Validators = admission.Validators{{Name: "kinds seen",
			Plugins: []admission.Plugin{{Name: "seen", Admit: func(_ context.Context, a *api.Attempt) error {
				resource := a.Kind.Resource
				if a.Facet != "" {
					resource += "/" + a.Facet
				}
				body := a.Object
				if body == nil {
					body = a.OldObject
				}
				mu.Lock()
				defer mu.Unlock()
				seen[string(a.Operation)+" "+resource] = body.GetObjectKind().GroupVersionKind().String()
				return nil
			}}}}}
	})
	pod := func(name string) *corev1.Pod { return r.Must(apiservertest.NewPod(name)).(*corev1.Pod) }
	pod("bound")
	pod("bound-by-name")
	pod("evicted")
	labels := map[string]string{"a": "b"}
	r.Must(&appsv1.Deployment{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "d"},
		Spec: appsv1.DeploymentSpec{
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec: apiservertest.NewPod("x").Spec},
		}})
	resource := func(group, version, name string) *api.Kind {
		return r.Kinds.Table().ByResource(schema.GroupVersionResource{Group: group, Version: version, Resource: name})
	}
	named := func(name string) metav1.ObjectMeta { return metav1.ObjectMeta{Namespace: "default", Name: name} }
	target := corev1.ObjectReference{Kind: "Node", Name: "n"}
	pods, deployments := resource("", "v1", "pods"), resource("apps", "v1", "deployments")
	for _, c := range []struct {
		verb              api.Verb
		kind              *api.Kind
		name, subresource string
		object            runtime.Object
		attempt, want     string
	}{
		{api.VerbCreate, pods, "bound", "binding", &corev1.Binding{ObjectMeta: named("bound"), Target: target},
			"CREATE pods/binding", "/v1, Kind=Binding"},
		{api.VerbCreate, resource("", "v1", "bindings"), "", "",
			&corev1.Binding{ObjectMeta: named("bound-by-name"), Target: target}, "CREATE bindings",
			"/v1, Kind=Binding"},
		{api.VerbCreate, pods, "evicted", "eviction", &policyv1.Eviction{ObjectMeta: named("evicted")},
			"CREATE pods/eviction", "policy/v1, Kind=Eviction"},
		{api.VerbCreate, resource("", "v1", "serviceaccounts"), "default", "token", &authenticationv1.TokenRequest{},
			"CREATE serviceaccounts/token",
			"authentication.k8s.io/v1, Kind=TokenRequest"},
		{api.VerbUpdate, deployments, "d", "scale",
			&autoscalingv1.Scale{ObjectMeta: named("d"), Spec: autoscalingv1.ScaleSpec{Replicas: 2}},
			"UPDATE deployments/scale", "autoscaling/v1, Kind=Scale"},
		{api.VerbCreate, resource("", "v1", "configmaps"), "", "", &corev1.ConfigMap{ObjectMeta: named("c")},
			"CREATE configmaps", "/v1, Kind=ConfigMap"},
		{api.VerbUpdate, resource("", "v1", "configmaps"), "c", "",
			&corev1.ConfigMap{ObjectMeta: named("c"), Data: labels}, "UPDATE configmaps", "/v1, Kind=ConfigMap"},
		{api.VerbDelete, resource("", "v1", "configmaps"), "c", "", nil, "DELETE configmaps", "/v1, Kind=ConfigMap"},
	} {
		_, err := r.Server.Backend().Do(apiservertest.Within(t),
			&api.Request{User: api.APIServerUser(), Verb: c.verb, Kind: c.kind, Namespace: "default", Name: c.name,
				Subresource: c.subresource, Object: c.object})
		if err != nil {
			t.Errorf("%s: %v", c.attempt, err)
		}
		mu.Lock()
		if got := seen[c.attempt]; got != c.want {
			t.Errorf("%s: admission receives a %q, want %q", c.attempt, got, c.want)
		}
		mu.Unlock()
	}
}
