package live

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/test/testenv/loopback"
)

// bed is a control plane with the tables of a proxy.
type bed struct {
	t       *testing.T
	ctx     context.Context
	cluster dynamic.Interface
	tables  chan *route.Table
}

// create creates an object of Gateway API.
func (b *bed) create(resource, text string) {
	b.t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		b.t.Fatal(err)
	}
	gvr := schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource}
	u.SetAPIVersion("gateway.networking.k8s.io/v1")
	var err error
	if resource == "gatewayclasses" {
		_, err = b.cluster.Resource(gvr).Create(b.ctx, u, metav1.CreateOptions{})
	} else {
		_, err = b.cluster.Resource(gvr).Namespace("default").Create(b.ctx, u, metav1.CreateOptions{})
	}
	if err != nil {
		b.t.Fatalf("%s: %v", text, err)
	}
}

// await waits for a table that meets a condition.
func (b *bed) await(what string, is func(*route.Table) bool) {
	b.t.Helper()
	var last *route.Table
	for {
		select {
		case <-b.ctx.Done():
			b.t.Fatalf("no table with %s; the last is %+v", what, last)
		case last = <-b.tables:
			if is(last) {
				return
			}
		}
	}
}

// begin starts a control plane, and a proxy that follows it with the rights of the proxies'
// ServiceAccount.
func begin(t *testing.T, account string, source Source) (b *bed, plane, proxy *kubernetes.Clientset, folder string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	t.Cleanup(cancel)
	p, err := loopback.Start(ctx, t.TempDir(), loopback.Shape{Name: "entry", Replicas: 1, Ready: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	cluster, err := dynamic.NewForConfig(p.Configs[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := definitions.Gateway.Install(ctx, cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	as := rest.CopyConfig(p.Configs[0])
	as.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:keelson-entry:" + account,
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:keelson-entry", "system:authenticated"}}
	if plane, err = kubernetes.NewForConfig(p.Configs[0]); err != nil {
		t.Fatal(err)
	}
	if proxy, err = kubernetes.NewForConfig(as); err != nil {
		t.Fatal(err)
	}
	b = &bed{t: t, ctx: ctx, cluster: cluster, tables: make(chan *route.Table, 100)}
	folder = t.TempDir()
	run, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(run, Config{API: as, Source: source, Certificates: folder, Log: slog.New(slog.DiscardHandler),
			Swap: func(t *route.Table) []error { b.tables <- t; return nil }})
	}()
	t.Cleanup(func() {
		stop()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("it ended with %v", err)
		}
	})
	return b, plane, proxy, folder
}

// readsNoSecret checks that the proxy can read no Secret, in any namespace and in its own.
func readsNoSecret(t *testing.T, b *bed, proxy *kubernetes.Clientset) {
	t.Helper()
	for _, namespace := range []string{"", "default", "keelson-entry", "kube-system"} {
		for _, verb := range []string{"get", "list", "watch"} {
			r, err := proxy.AuthorizationV1().SelfSubjectAccessReviews().Create(b.ctx,
				&authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
					ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: namespace, Verb: verb,
						Resource: "secrets"}}}, metav1.CreateOptions{})
			if err != nil || r.Status.Allowed {
				t.Errorf("a proxy may %s Secrets of namespace %q: %v", verb, namespace, err)
			}
		}
	}
	if _, err := proxy.CoreV1().Secrets("").List(b.ctx, metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a proxy lists Secrets: %v", err)
	}
}

// A proxy follows the Ingresses of its class and its key pairs without the right to read Secrets.
func TestFollowsIngresses(t *testing.T) {
	b, plane, proxy, folder := begin(t, "entry", Ingresses("own"))
	b.await("no rules", func(t *route.Table) bool { return len(t.Listeners) == 2 && len(t.Listeners[0].Rules) == 0 })
	class := "own"
	_, err := plane.NetworkingV1().Ingresses("default").Create(b.ctx,
		&networkingv1.Ingress{ObjectMeta: metav1.ObjectMeta{Name: "web"}, Spec: networkingv1.IngressSpec{
			IngressClassName: &class, TLS: []networkingv1.IngressTLS{{Hosts: []string{"a.example"},
				SecretName: "pair"}},
			DefaultBackend: &networkingv1.IngressBackend{Service: &networkingv1.IngressServiceBackend{Name: "shop",
				Port: networkingv1.ServiceBackendPort{Number: 80}}}}}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	b.await("a rule without certificate", func(t *route.Table) bool {
		return len(t.Listeners[1].Rules) == 1 && len(t.Listeners[1].Certificates) == 0
	})
	shown := func(t *route.Table) []byte {
		if len(t.Listeners[1].Certificates) == 0 {
			return nil
		}
		return t.Listeners[1].Certificates[0].Pair.Certificate[0]
	}
	var first []byte
	writePair(t, folder, "default", "pair")
	b.await("the certificate", func(t *route.Table) bool { first = shown(t); return first != nil })
	files, err := filepath.Glob(filepath.Join(folder, "*"))
	if err != nil || len(files) != 2 {
		t.Fatal(files, err)
	}
	for _, f := range files {
		if err := os.Remove(f); err != nil {
			t.Fatal(err)
		}
	}
	writePair(t, folder, "default", "pair")
	b.await("another certificate", func(t *route.Table) bool {
		now := shown(t)
		return now != nil && !bytes.Equal(now, first)
	})
	readsNoSecret(t, b, proxy)
}

// A proxy follows its Gateway with the rights of the proxies.
func TestFollowsAGateway(t *testing.T) {
	b, cs, proxy, dir := begin(t, "gw-x", Gateway("default", "web", nil))
	ctx, cluster := b.ctx, b.cluster
	b.await("nothing", func(t *route.Table) bool { return len(t.Listeners) == 0 })
	b.create("gatewayclasses", "kind: GatewayClass\nmetadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}")
	b.create("gateways", "kind: Gateway\nmetadata: {name: other}\nspec: {gatewayClassName: k, listeners: [{name: "+
		"http, port: 81, protocol: HTTP}]}")
	b.create("gateways", `kind: Gateway
metadata: {name: web}
spec:
  gatewayClassName: k
  listeners: [{name: http, port: 80, protocol: HTTP}, {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: pair}]}}]`)
	b.await("a listener", func(t *route.Table) bool { return len(t.Listeners) == 1 && t.Listeners[0].Port == 80 })
	b.create("httproutes", "kind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: web}], rules: "+
		"[{backendRefs: [{name: shop, port: 80}]}]}")
	b.await("a rule without a backend", func(t *route.Table) bool {
		return len(t.Listeners) == 1 && len(t.Listeners[0].Rules) == 1 &&
			t.Listeners[0].Rules[0].Backends[0].Answer == 500
	})
	if _, err := cs.CoreV1().Services("default").Create(ctx,
		&corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "shop"},
			Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	port, name := int32(8080), ""
	if _, err := cs.DiscoveryV1().EndpointSlices("default").Create(ctx, &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Name: "shop-1", Labels: map[string]string{discoveryv1.LabelServiceName: "shop"}},
		AddressType: discoveryv1.AddressTypeIPv4, Ports: []discoveryv1.EndpointPort{{Name: &name, Port: &port}},
		Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.1.2.3"}}}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await("an endpoint", func(t *route.Table) bool {
		for _, p := range t.Pools {
			return fmt.Sprint(p.Endpoints) == "[10.1.2.3:8080]"
		}
		return false
	})
	writePair(t, dir, "default", "pair")
	b.await("the certificate", func(t *route.Table) bool {
		return len(t.Listeners) == 2 && t.Listeners[1].Default != nil
	})
	gateways := cluster.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1",
		Resource: "gateways"}).Namespace("default")
	if err := gateways.Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await("nothing again", func(t *route.Table) bool { return len(t.Listeners) == 0 })
	readsNoSecret(t, b, proxy)
}

// Missing files, files that are too large, and pipes are not accepted as certificates.
func TestHostileCertificates(t *testing.T) {
	dir := t.TempDir()
	f := &certificateFiles{folder: dir}
	if f.cachedSecret("a", "b") != nil {
		t.Error("a Secret of nothing")
	}
	writePair(t, dir, "a", "b")
	if f.cachedSecret("a", "b") != nil {
		t.Error("files are read though nobody said that they changed")
	}
	f.clearCache()
	first := f.cachedSecret("a", "b")
	if first == nil {
		t.Fatal("no Secret of a pair")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.key"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.WriteFile(files[0], make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	f.clearCache()
	if f.cachedSecret("a", "b") != nil {
		t.Error("a key of more than a MiB was read")
	}
}
