package gateway_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/gateway"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/test/testenv/keypair"
)

// gatewayKinds returns the kinds of the Gateway API in the form of their definitions, without
// schemas.
func gatewayKinds() map[string]*api.Kind {
	out := map[string]*api.Kind{}
	for kind, plural := range map[string]string{"GatewayClass": "gatewayclasses", "Gateway": "gateways",
		"HTTPRoute": "httproutes",
		"GRPCRoute": "grpcroutes", "ReferenceGrant": "referencegrants"} {
		of := custom.Resource{Group: "gateway.networking.k8s.io", Kind: kind, Plural: plural,
			Singular: strings.ToLower(kind), Namespaced: kind != "GatewayClass"}
		out[kind] = custom.NewKind(of, "v1", kind != "ReferenceGrant", custom.NewStorage(of, "v1"))
	}
	return out
}

// said returns the status of a custom object as YAML, without times.
func said(w *testcluster.Cluster, k *api.Kind, namespace, name string) (string, error) {
	o, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name})
	if err != nil {
		return "", err
	}
	data, err := yaml.Marshal(o.(*custom.Object).Content["status"])
	return string(data), err
}

// says waits until a status has conditions such as "Programmed False AddressNotAssigned".
func says(w *testcluster.Cluster, k *api.Kind, namespace, name string, want ...string) {
	w.T.Helper()
	w.Eventually(fmt.Sprintf("the status of %s", name), func() error {
		text, err := said(w, k, namespace, name)
		if err != nil {
			return err
		}
		for _, c := range want {
			f := strings.Fields(c)
			if !strings.Contains(text, fmt.Sprintf("reason: %s\n", f[2])) ||
				!strings.Contains(text, fmt.Sprintf("reason: %s\n    status: %q\n    type: %s\n", f[2], f[1], f[0])) &&
					!strings.Contains(text, fmt.Sprintf("reason: %s\n  status: %q\n  type: %s\n", f[2], f[1], f[0])) {
				return fmt.Errorf("no %s in\n%s", c, text)
			}
		}
		return nil
	})
}

// made returns the only object of a type that was created for Gateways.
func made[T api.Object](w *testcluster.Cluster) (out T, err error) {
	list, err := client.List[T](w.Ctx, w.Admin, gateway.Namespace, metav1.ListOptions{})
	if err != nil {
		return out, err
	}
	list = slices.DeleteFunc(list, func(o T) bool { return o.GetLabels()["keelson.dev/gateway"] == "" })
	if len(list) != 1 {
		return out, fmt.Errorf("%d of %T", len(list), out)
	}
	return list[0], nil
}

func anyMade(w *testcluster.Cluster) error {
	var errs []error
	look := func(_ any, err error) {
		if err == nil || !strings.HasPrefix(err.Error(), "0 of") {
			errs = append(errs, errors.New("something is left"))
		}
	}
	d, err := made[*appsv1.Deployment](w)
	look(d, err)
	s, err := made[*corev1.Service](w)
	look(s, err)
	x, err := made[*corev1.Secret](w)
	look(x, err)
	a, err := made[*corev1.ServiceAccount](w)
	look(a, err)
	b, err := made[*policyv1.PodDisruptionBudget](w)
	look(b, err)
	return errors.Join(errs...)
}

// newGateways is a world with the Gateway controller, which acts with its own rights.
func newGateways(t *testing.T, image string) *testcluster.Cluster {
	w := testcluster.New(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
		return []*engine.Descriptor{gateway.New(d, gateway.Options{Image: image})}
	}})
	w.Lead(engine.Options{OwnIdentity: true})
	return w
}

// A Gateway has proxies and a status as soon as its kind is there, and loses them with itself, its class or its kind.
func TestGateways(t *testing.T) {
	w := newGateways(t, "keelson-entry:test")
	kinds := gatewayKinds()
	for _, k := range kinds {
		if err := w.Admin.Kinds().Register(k); err != nil {
			t.Fatal(err)
		}
	}
	class, gw, route := kinds["GatewayClass"], kinds["Gateway"], kinds["HTTPRoute"]
	testcluster.CreateCustom(w, class, "metadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}")
	testcluster.CreateCustom(w, class, "metadata: {name: theirs}\nspec: {controllerName: example.com/x}")
	says(w, class, "", "k", "Accepted True Accepted")
	testcluster.CreateCustom(w, gw, `metadata: {name: web, namespace: default}
spec:
  gatewayClassName: k
  infrastructure: {labels: {team: red}, annotations: {a.example/b: c}}
  listeners: [{name: http, port: 80, protocol: HTTP}, {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: pair}]}}]`)
	testcluster.CreateCustom(w, gw, "metadata: {name: foreign}\nspec: {gatewayClassName: theirs, listeners: [{name: "+
		"http, port: 80, protocol: HTTP}]}")
	testcluster.CreateCustom(w, route, "metadata: {name: r}\nspec: {parentRefs: [{name: web}], rules: [{backendRefs: "+
		"[{name: shop, port: 80}]}]}")
	says(w, gw, "default", "web", "Accepted True ListenersNotValid", "Programmed False AddressNotAssigned")
	says(w, route, "default", "r", "Accepted True Accepted", "ResolvedRefs False BackendNotFound")
	w.CreateObject(&corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "shop"},
		Spec: corev1.ServiceSpec{
			Selector: map[string]string{"a": "b"}, Ports: []corev1.ServicePort{{Port: 80}}}})
	says(w, route, "default", "r", "Accepted True Accepted", "ResolvedRefs True ResolvedRefs")
	w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "pair"},
		Type: corev1.SecretTypeTLS, Data: keypair.Data(t, "a.example")})
	says(w, gw, "default", "web", "Accepted True Accepted")

	var service *corev1.Service
	w.Eventually("the Service", func() (err error) {
		if service, err = made[*corev1.Service](w); err == nil && len(service.Spec.Ports) != 2 {
			err = fmt.Errorf("ports %v", service.Spec.Ports)
		}
		return err
	})
	if service.Labels["team"] != "red" || service.Annotations["a.example/b"] != "c" ||
		service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		t.Errorf("the Service is %+v", service)
	}
	// Changes by users are reverted, and annotations of other controllers stay.
	testcluster.Edit(w, service, client.Update, func(o *corev1.Service) {
		o.Annotations["keelson.dev/noted"], o.Spec.Selector = "kept", map[string]string{"x": "y"}
	})
	w.Eventually("the selector again", func() (err error) {
		if service, err = made[*corev1.Service](w); err == nil && service.Spec.Selector["x"] != "" {
			err = errors.New("bent")
		}
		return err
	})
	if service.Annotations["keelson.dev/noted"] != "kept" {
		t.Errorf("the annotations are %v", service.Annotations)
	}
	testcluster.Edit(w, service, client.UpdateStatus, func(o *corev1.Service) {
		o.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.7"}}
	})
	says(w, gw, "default", "web", "Programmed False Pending")
	d, err := made[*appsv1.Deployment](w)
	if err != nil {
		t.Fatal(err)
	}
	if pod := d.Spec.Template; pod.Labels["team"] != "red" || pod.Spec.Containers[0].Image != "keelson-entry:test" {
		t.Errorf("the pods are %+v", pod)
	}
	x, err := made[*corev1.Secret](w)
	if err != nil || len(x.Data) != 2 {
		t.Errorf("%d files of certificates, %v", len(x.Data), err)
	}
	testcluster.Edit(w, d, client.UpdateStatus, func(o *appsv1.Deployment) {
		o.Status.Replicas, o.Status.ReadyReplicas, o.Status.AvailableReplicas = 1, 1, 1
	})
	says(w, gw, "default", "web", "Programmed True Programmed")
	if text, err := said(w, gw, "default", "web"); err != nil || !strings.Contains(text, "value: 192.0.2.7") {
		t.Errorf("no address in\n%s\n%v", text, err)
	}
	if text, err := said(w, gw, "default", "foreign"); err != nil || text != "null\n" {
		t.Errorf("another controller's Gateway has status\n%s\n%v", text, err)
	}
	// An object that a user deletes is created again.
	if err := client.Delete[*corev1.Service](w.Ctx, w.Admin, gateway.Namespace, service.Name,
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("the Service again", func() error { _, err := made[*corev1.Service](w); return err })

	if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: gw, Namespace: "default",
		Name: "web"}); err != nil {
		t.Fatal(err)
	}
	w.Eventually("all goes with the Gateway", func() error { return anyMade(w) })
	w.Eventually("the route is nobody's", func() error {
		if text, err := said(w, route, "default", "r"); err != nil || strings.Contains(text, "keelson.dev") {
			return fmt.Errorf("%s %w", text, err)
		}
		return nil
	})
	w.CheckRules(t)
}

// Definitions may go with all their objects, and come again.
func TestGatewayKindsGo(t *testing.T) {
	w := newGateways(t, "keelson-entry:test")
	for range 2 {
		kinds := gatewayKinds()
		for _, k := range kinds {
			if err := w.Admin.Kinds().Register(k); err != nil {
				t.Fatal(err)
			}
		}
		testcluster.CreateCustom(w, kinds["GatewayClass"],
			"metadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}")
		testcluster.CreateCustom(w, kinds["Gateway"],
			"metadata: {name: web}\nspec: {gatewayClassName: k, listeners: [{name: http, port: 80, protocol: HTTP}]}")
		w.Eventually("the Deployment", func() error { _, err := made[*appsv1.Deployment](w); return err })
		for _, o := range []struct{ kind, namespace, name string }{{"Gateway", "default", "web"},
			{"GatewayClass", "", "k"}} {
			if _, err := w.Admin.Do(w.Ctx, &api.Request{Verb: api.VerbDelete, Kind: kinds[o.kind],
				Namespace: o.namespace, Name: o.name}); err != nil {
				t.Fatal(err)
			}
		}
		w.Eventually("all goes with the objects", func() error { return anyMade(w) })
		for _, k := range kinds {
			if err := w.Admin.Kinds().Drop(k); err != nil {
				t.Fatal(err)
			}
		}
	}
}
