package nettrace

import (
	"flag"
	"fmt"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	gw "sigs.k8s.io/gateway-api/apis/v1"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/test/testenv/keypair"
)

var rewrite = flag.Bool("rewrite", false, "write the transcripts")

func read[T any](t *testing.T, text string) *T {
	t.Helper()
	o := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return o
}

// served adds a Service of proxies, and the slice of their pod, to a world.
func (w *World) served(name, note, vip, ip string, ports ...int32) {
	s := corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "keelson-entry", Name: name,
		Annotations: map[string]string{"keelson.dev/for-gateway": note}},
		Spec: corev1.ServiceSpec{ClusterIP: "10.96.9.9", ClusterIPs: []string{"10.96.9.9"}}}
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: vip}}
	slice := discoveryv1.EndpointSlice{ObjectMeta: metav1.ObjectMeta{Namespace: "keelson-entry", Name: name,
		Labels: map[string]string{discoveryv1.LabelServiceName: name}},
		AddressType: discoveryv1.AddressTypeIPv4}
	node := "w2"
	w.Pods = append(w.Pods, aPod("keelson-entry", name+"-0", ip, node, "app="+name))
	for _, p := range ports {
		port := fmt.Sprint("port-", p)
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: port, Port: p, Protocol: corev1.ProtocolTCP})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: &port, Port: new(p),
			Protocol: new(corev1.ProtocolTCP)})
	}
	slice.Endpoints = []discoveryv1.Endpoint{{Addresses: []string{ip}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
		TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "keelson-entry", Name: name + "-0"}}}
	w.Services, w.Slices = append(w.Services, s), append(w.Slices, slice)
}

// another adds a proxy to a Service of proxies.
func (w *World) another(service, name, ip, node, label string) {
	w.Pods = append(w.Pods, aPod("keelson-entry", name, ip, node, label))
	for i := range w.Slices {
		if s := &w.Slices[i]; s.Name == service {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node,
				Conditions: discoveryv1.EndpointConditions{Ready: new(true)},
				TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "keelson-entry", Name: name}})
		}
	}
}

// entered is aWorld with an Ingress of class web and a Gateway, both in namespace data in front of Service db.
func entered(t *testing.T) *World {
	t.Helper()
	w := aWorld()
	w.Slices[0].AddressType = discoveryv1.AddressTypeIPv4
	w.Namespaces = append(w.Namespaces, corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "keelson-entry"}})
	w.served("web", "", "192.0.2.90", "10.244.2.20", 80, 443)
	w.served("gw-edge", "data/edge", "192.0.2.91", "10.244.2.21", 80, 443)
	w.Entrances = &Entrances{
		Classes: []*networkingv1.IngressClass{read[networkingv1.IngressClass](t,
			`{metadata: {name: web}, spec: {controller: keelson.dev/ingress}}`),
			read[networkingv1.IngressClass](t, `{metadata: {name: other}, spec: {controller: example.com/other}}`)},
		Ingresses: []*networkingv1.Ingress{read[networkingv1.Ingress](t, `metadata: {name: shop, namespace: data}
spec:
  ingressClassName: web
  tls: [{hosts: [shop.example.com], secretName: pair}]
  rules:
  - host: shop.example.com
    http: {paths: [{path: /cart, pathType: Prefix, backend: {service: {name: db, port: {number: 5432}}}},
      {path: /lost, pathType: Exact, backend: {service: {name: nobody, port: {number: 80}}}}]}`)},
		Secrets: []*corev1.Secret{{ObjectMeta: metav1.ObjectMeta{Namespace: "data", Name: "pair"},
			Type: corev1.SecretTypeTLS,
			Data: keypair.DataWithSerial(t, 1, "shop.example.com", "edge.example.com")}},
		GatewayClasses: []*gw.GatewayClass{read[gw.GatewayClass](t,
			`{metadata: {name: keelson}, spec: {controllerName: keelson.dev/gateway}}`)},
		Gateways: []*gw.Gateway{read[gw.Gateway](t, `metadata: {name: edge, namespace: data}
spec:
  gatewayClassName: keelson
  listeners:
  - {name: http, port: 80, protocol: HTTP, allowedRoutes: {namespaces: {from: All}}}
  - {name: https, port: 443, protocol: HTTPS, hostname: edge.example.com, tls: {certificateRefs: [{name: pair}]}}`)},
		HTTPRoutes: []*gw.HTTPRoute{read[gw.HTTPRoute](t, `metadata: {name: edge, namespace: data}
spec:
  parentRefs: [{name: edge}]
  hostnames: [edge.example.com]
  rules:
  - matches: [{path: {value: /api}, headers: [{name: v, value: "2"}]}]
    backendRefs: [{name: db, port: 5432}]
  - matches: [{path: {value: /shop}}]
    backendRefs: [{name: db, port: 5432}]
  - matches: [{path: {value: /old}}]
    filters: [{type: RequestRedirect, requestRedirect: {scheme: https, statusCode: 301}}]`),
			read[gw.HTTPRoute](t, `metadata: {name: far, namespace: shop}
spec:
  parentRefs: [{name: edge, namespace: data}]
  hostnames: [far.example.com]
  rules: [{backendRefs: [{name: db, namespace: data, port: 5432}]}]`)},
		GRPCRoutes: []*gw.GRPCRoute{read[gw.GRPCRoute](t, `metadata: {name: talk, namespace: data}
spec:
  parentRefs: [{name: edge}]
  hostnames: [talk.example.com]
  rules: [{matches: [{method: {service: shop.Cart, method: Add}}], backendRefs: [{name: db, port: 5432}]}]`)},
	}
	return w
}

// entranceWays are connections through entrances, in the order of the transcript.
var entranceWays = []struct {
	name, to, stops string
	with            func(t *testing.T, w *World)
}{
	{"an Ingress", "http://shop.example.com/cart/3", "", nil},
	{"a host alone", "shop.example.com", "match", nil},
	{"an Ingress by HTTPS", "https://shop.example.com/cart", "", nil},
	{"by the entrance's address", "http://192.0.2.91/shop", "match", nil},
	{"without the Secret", "https://shop.example.com/cart", "listener", func(_ *testing.T, w *World) {
		w.Entrances.Secrets = nil
	}},
	{"Secrets may not be read", "https://shop.example.com/cart", "", func(_ *testing.T, w *World) {
		w.Entrances.Secrets, w.Unread = nil, []string{Secrets}
	}},
	{"no path", "http://shop.example.com/car", "match", nil},
	{"no Service", "http://shop.example.com/lost", "match", nil},
	{"no endpoints", "http://shop.example.com/cart", "backend", func(_ *testing.T, w *World) {
		w.Slices = w.Slices[1:]
	}},
	{"another port", "http://shop.example.com:8080/cart", "listener", nil},
	{"the other protocol", "http://shop.example.com:443/cart", "listener", nil},
	{"no class", "http://shop.example.com/cart", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.Ingresses[0].Spec.IngressClassName = nil
	}},
	{"a class that is not there", "http://shop.example.com/cart", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.Classes = nil
	}},
	{"another's class", "http://shop.example.com/cart", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.Ingresses[0].Spec.IngressClassName = new("other")
	}},
	{"no proxy", "http://shop.example.com/cart", "entrance", func(_ *testing.T, w *World) {
		w.Services = w.Services[:1]
	}},
	{"no proxy ready", "http://shop.example.com/cart", "endpoint", func(_ *testing.T, w *World) {
		w.Slices[1].Endpoints[0].Conditions.Ready = new(false)
	}},
	{"policy of the pods", "http://shop.example.com/cart", "policy", func(_ *testing.T, w *World) {
		w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "deny",
			networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}})}
	}},
	{"two proxies, of which policies keep one from the pods", "http://shop.example.com/cart", "",
		func(_ *testing.T, w *World) {
			w.another("web", "web-1", "10.244.1.20", "w1", "pod-template-hash=new")
			w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "old",
				networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress},
					Ingress: []networkingv1.NetworkPolicyIngressRule{
						{From: []networkingv1.NetworkPolicyPeer{{NamespaceSelector: &metav1.LabelSelector{},
							PodSelector: &metav1.LabelSelector{MatchLabels: map[string]string{"app": "web"}}}}}}})}
		}},
	{"three proxies, of which two are alike", "http://shop.example.com/cart", "", func(_ *testing.T, w *World) {
		w.another("web", "web-1", "10.244.1.20", "w1", "app=web")
		w.another("web", "web-2", "10.244.1.21", "w1", "app=web")
	}},
	{"two proxies, and neither gets through", "http://shop.example.com/cart", "policy", func(_ *testing.T, w *World) {
		w.another("web", "web-1", "10.244.1.20", "w1", "app=web")
		w.Policies = []networkingv1.NetworkPolicy{aPolicy("data", "deny",
			networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}})}
	}},
	{"policy of the client", "http://shop.example.com/cart", "name", func(_ *testing.T, w *World) {
		w.Policies = []networkingv1.NetworkPolicy{aPolicy("shop", "deny",
			networkingv1.NetworkPolicySpec{PolicyTypes: []networkingv1.PolicyType{networkingv1.PolicyTypeEgress}})}
	}},
	{"a Gateway", "http://edge.example.com/shop?a=b", "", nil},
	{"a Gateway by HTTPS", "https://edge.example.com/shop", "", nil},
	{"a redirect", "http://edge.example.com/old", "", nil},
	{"a header that a URL does not have", "http://edge.example.com/api", "match", nil},
	{"a Gateway without the Secret", "https://edge.example.com/shop", "listener", func(_ *testing.T, w *World) {
		w.Entrances.Secrets = nil
	}},
	{"gRPC", "http://talk.example.com/shop.Cart/Add", "", nil},
	{"not granted", "http://far.example.com/", "match", nil},
	{"granted", "http://far.example.com/", "", func(t *testing.T, w *World) {
		w.Entrances.Grants = []*gw.ReferenceGrant{read[gw.ReferenceGrant](t, `metadata: {name: g, namespace: data}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: shop}]
  to: [{group: "", kind: Service}]`)}
	}},
	{"a listener does not allow it", "http://far.example.com/", "match", func(_ *testing.T, w *World) {
		w.Entrances.Gateways[0].Spec.Listeners[0].AllowedRoutes = nil
	}},
	{"a Gateway that is not there", "http://far.example.com/", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.Gateways = nil
	}},
	{"a Gateway's class is not there", "http://far.example.com/", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.GatewayClasses = nil
	}},
	{"Gateways may not be read", "http://far.example.com/", "entrance", func(_ *testing.T, w *World) {
		w.Entrances.Gateways, w.Unread = nil, []string{Gateways}
	}},
	{"nobody's host", "http://elsewhere.example.com/", "", nil},
}

// A URL is followed through the entrance that serves its host, up to where it stops.
func TestTraceThroughEntrances(t *testing.T) {
	var b strings.Builder
	for _, c := range entranceWays {
		w := entered(t)
		if c.with != nil {
			c.with(t, w)
		}
		target, err := ParseTarget(c.to)
		if err != nil {
			t.Fatal(err)
		}
		r := Trace(w, target)
		if r.Stops != c.stops {
			t.Errorf("%s: it stops at %q, want %q", c.name, r.Stops, c.stops)
		}
		fmt.Fprintf(&b, "# %s\n", c.name)
		if err := r.Print(&b); err != nil {
			t.Fatal(err)
		}
		b.WriteByte('\n')
	}
	const golden = "testdata/entrances.txt"
	if *rewrite {
		if err := os.WriteFile(golden, []byte(b.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if b.String() != string(want) {
		t.Errorf("the transcripts differ from %s (-rewrite writes them):\n%s", golden, b.String())
	}
}

// What a trace has to read is what its way needs, and no more.
func TestWhatTracesRead(t *testing.T) {
	w := entered(t)
	target, err := ParseTarget("https://shop.example.com/cart")
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(TLSSecretNames(w, target)); got != "[data/pair]" {
		t.Errorf("Secrets %s", got)
	}
	var services []string
	for _, s := range ServicesBehind(w, target) {
		services = append(services, s.Namespace+"/"+s.Name)
	}
	if got := strings.Join(services, " "); got != "keelson-entry/web data/db" {
		t.Errorf("Services %s", got)
	}
	for host, want := range map[string]bool{"shop.example.com": true, "db.data": false, "db": false,
		"10.0.0.1": false} {
		if got := IsOutside(w, Target{Host: host}); got != want {
			t.Errorf("%s is outside: %v", host, got)
		}
	}
}
