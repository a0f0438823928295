package gateways

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/entry/route"
	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/test/bed/loopback"
)

// bed is a control plane, and a proxy's tables.
type bed struct {
	t       *testing.T
	ctx     context.Context
	cluster dynamic.Interface
	tables  chan *route.Table
}

// create makes an object of Gateway API.
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

// await waits for a table of which a word is true.
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

// A proxy follows its Gateway, with the rights that proxies have.
func TestFollowsTheCluster(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	plane, err := loopback.Start(ctx, t.TempDir(), loopback.Shape{Name: "gateways", Replicas: 1, Ready: time.Minute})
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := plane.Stop(); err != nil {
			t.Error(err)
		}
	}()
	cluster, err := dynamic.NewForConfig(plane.Configs[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := definitions.Gateway.Install(ctx, cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	cs, err := kubernetes.NewForConfig(plane.Configs[0])
	if err != nil {
		t.Fatal(err)
	}
	as := rest.CopyConfig(plane.Configs[0])
	as.Impersonate = rest.ImpersonationConfig{UserName: "system:serviceaccount:keelson-entry:gw-x",
		Groups: []string{"system:serviceaccounts", "system:serviceaccounts:keelson-entry", "system:authenticated"}}
	b := &bed{t: t, ctx: ctx, cluster: cluster, tables: make(chan *route.Table, 100)}
	dir := t.TempDir()
	run, stop := context.WithCancel(ctx)
	ended := make(chan error, 1)
	go func() {
		ended <- Run(run, Config{API: as, Namespace: "default", Name: "web", Certificates: dir, Log: slog.New(slog.DiscardHandler),
			Swap: func(t *route.Table) []error { b.tables <- t; return nil }})
	}()
	b.await("nothing", func(t *route.Table) bool { return len(t.Listeners) == 0 })
	b.create("gatewayclasses", "kind: GatewayClass\nmetadata: {name: k}\nspec: {controllerName: keelson.dev/gateway}")
	b.create("gateways", "kind: Gateway\nmetadata: {name: other}\nspec: {gatewayClassName: k, listeners: [{name: http, port: 81, protocol: HTTP}]}")
	b.create("gateways", `kind: Gateway
metadata: {name: web}
spec:
  gatewayClassName: k
  listeners: [{name: http, port: 80, protocol: HTTP}, {name: https, port: 443, protocol: HTTPS, tls: {certificateRefs: [{name: pair}]}}]`)
	b.await("a listener", func(t *route.Table) bool { return len(t.Listeners) == 1 && t.Listeners[0].Port == 80 })
	b.create("httproutes", "kind: HTTPRoute\nmetadata: {name: r}\nspec: {parentRefs: [{name: web}], rules: [{backendRefs: [{name: shop, port: 80}]}]}")
	b.await("a rule without a backend", func(t *route.Table) bool {
		return len(t.Listeners) == 1 && len(t.Listeners[0].Rules) == 1 && t.Listeners[0].Rules[0].Backends[0].Answer == 500
	})
	if _, err := cs.CoreV1().Services("default").Create(ctx, &corev1.Service{ObjectMeta: metav1.ObjectMeta{Name: "shop"},
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
	b.await("the certificate", func(t *route.Table) bool { return len(t.Listeners) == 2 && t.Listeners[1].Default != nil })
	gateways := cluster.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: "gateways"}).Namespace("default")
	if err := gateways.Delete(ctx, "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	b.await("nothing again", func(t *route.Table) bool { return len(t.Listeners) == 0 })
	stop()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("it ended with %v", err)
	}
	// The rights are enough, and no more than that.
	other, err := kubernetes.NewForConfig(as)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := other.CoreV1().Secrets("").List(ctx, metav1.ListOptions{}); err == nil || !strings.Contains(err.Error(), "forbidden") {
		t.Errorf("a proxy may read Secrets: %v", err)
	}
}

// Files that are none, too large, or a pipe are no certificate.
func TestHostileCertificates(t *testing.T) {
	dir := t.TempDir()
	f := &follower{Config: Config{Certificates: dir}}
	if f.secret("a", "b") != nil {
		t.Error("a Secret of nothing")
	}
	writePair(t, dir, "a", "b")
	first := f.secret("a", "b")
	if first == nil {
		t.Fatal("no Secret of a pair")
	}
	files, err := filepath.Glob(filepath.Join(dir, "*.key"))
	if err != nil || len(files) != 1 {
		t.Fatal(files, err)
	}
	if err := os.WriteFile(files[0], make([]byte, mostFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if f.secret("a", "b") != nil {
		t.Error("a key of more than a MiB was read")
	}
}
