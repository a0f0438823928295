package e2e

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"strings"
	"testing"

	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/kctl/definitions"
	"keelson.dev/keelson/test/testenv"
)

// gatewayAPI makes objects of Gateway API.
type gatewayAPI struct {
	world
	dynamic.Interface
}

func (g gatewayAPI) of(resource string) dynamic.NamespaceableResourceInterface {
	return g.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1", Resource: resource})
}

// make creates an object of the given YAML; an empty namespace is for kinds without.
func (g gatewayAPI) make(t *testing.T, resource, kind, namespace, text string) {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	u.SetAPIVersion("gateway.networking.k8s.io/v1")
	u.SetKind(kind)
	var to dynamic.ResourceInterface = g.of(resource)
	if namespace != "" {
		to = g.of(resource).Namespace(namespace)
	}
	if _, err := to.Create(t.Context(), u, metav1.CreateOptions{}); err != nil {
		t.Fatalf("%s\n%v", text, err)
	}
}

// says waits until the conditions of an object have the words, in any place of its status.
func (g gatewayAPI) says(t *testing.T, resource, name string, words ...string) {
	t.Helper()
	testenv.Eventually(t, 2*soon, func() error {
		u, err := g.of(resource).Namespace(g.ns).Get(t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		text, err := yaml.Marshal(u.Object["status"])
		if err != nil {
			return err
		}
		for _, word := range words {
			if !strings.Contains(string(text), word) {
				return fmt.Errorf("no %q in the status of %s %s:\n%s", word, resource, name, text)
			}
		}
		return nil
	})
}

// backends makes two Services here, one in the other namespace, and a key pair.
func (w world) backends(t *testing.T, other string) {
	t.Helper()
	for _, name := range []string{"one", "two"} {
		w.createPod(pod(name, hello))
		w.createService(front(name, v1.ServiceTypeClusterIP))
	}
	far := pod("far", hello)
	far.Namespace = other
	if _, err := w.cs.CoreV1().Pods(other).Create(t.Context(), far, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.cs.CoreV1().Services(other).Create(t.Context(), front("far", v1.ServiceTypeClusterIP), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.cs.CoreV1().Secrets(w.ns).Create(t.Context(), keyPair(t, 1, "a.example"), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A Gateway of Keelson's class gets proxies with an address of a pool. HTTP and HTTPS listeners, shares, headers, redirects and backends
// that another namespace grants work there; what is refused says so; all goes with the Gateway.
func TestGateway(t *testing.T) {
	w := begin(t)
	cluster, err := dynamic.NewForConfig(testenv.RestConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	g := gatewayAPI{world: w, Interface: cluster}
	if err := definitions.Gateway.Install(t.Context(), cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	raw[3] = 242
	vip := netip.AddrFrom4(raw)
	w.pool(fmt.Sprintf("{addresses: [%s], namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: keelson-entry}}}", vip))
	class, other := w.ns, w.ns+"-data"
	g.make(t, "gatewayclasses", "GatewayClass", "", fmt.Sprintf("metadata: {name: %s}\nspec: {controllerName: keelson.dev/gateway}", class))
	w.Cleanup(func() { _ = g.of("gatewayclasses").Delete(context.Background(), class, metav1.DeleteOptions{}) })
	if _, err := w.cs.CoreV1().Namespaces().Create(t.Context(), &v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Cleanup(func() { _ = w.cs.CoreV1().Namespaces().Delete(context.Background(), other, metav1.DeleteOptions{}) })
	w.backends(t, other)
	port := fmt.Sprint(front("one", v1.ServiceTypeClusterIP).Spec.Ports[0].Port)
	g.make(t, "gateways", "Gateway", w.ns, fmt.Sprintf(`metadata: {name: web}
spec:
  gatewayClassName: %s
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: https, port: 443, protocol: HTTPS, hostname: a.example, tls: {certificateRefs: [{name: web-tls}]}}
  - {name: raw, port: 9000, protocol: TCP}`, class))
	g.make(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: plain}
spec:
  parentRefs: [{name: web}]
  hostnames: [a.example]
  rules:
  - backendRefs: [{name: one, port: `+port+`}]
    filters: [{type: ResponseHeaderModifier, responseHeaderModifier: {set: [{name: X-By, value: gateway}]}}]
  - matches: [{headers: [{name: side, value: b}]}]
    backendRefs: [{name: two, port: `+port+`}]
  - matches: [{path: {value: /old}}]
    filters: [{type: RequestRedirect, requestRedirect: {scheme: https, statusCode: 301}}]
  - matches: [{path: {value: /lost}}]
    backendRefs: [{name: nobody, port: 80}]`)
	g.make(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: split}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [split.example]
  rules: [{backendRefs: [{name: one, port: `+port+`, weight: 1}, {name: two, port: `+port+`, weight: 1}]}]`)
	g.make(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: far}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [far.example]
  rules: [{backendRefs: [{name: far, namespace: `+other+`, port: `+port+`}]}]`)
	// Of two routes of one second the first by name has a host.
	g.make(t, "grpcroutes", "GRPCRoute", w.ns, `metadata: {name: talks}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [a.example]
  rules: [{backendRefs: [{name: one, port: `+port+`}]}]`)
	w.waitPod("one", isReady)
	w.waitPod("two", isReady)

	door := entrance{dial: testenv.HTTP(outside).Transport.(*http.Transport).DialContext, at: vip.String()}
	door.expect(t, "http://a.example/", 200, "one", 0)
	door.expect(t, "https://a.example/", 200, "one", 1)
	door.expect(t, "http://a.example/lost", 500, "", 0)
	door.expect(t, "http://none.example/", 404, "", 0)
	door.expect(t, "http://far.example/", 500, "", 0) // not granted
	g.says(t, "httproutes", "far", "RefNotPermitted")
	w.traced(t, "http://far.example/", "gateway "+w.ns+"/web, for httproute "+w.ns+"/far", "no ReferenceGrant in namespace "+other, "stops at match")
	w.traced(t, "https://a.example/", "TLS Secret "+w.ns+"/web-tls is there", "nothing stands in the way")
	g.says(t, "gateways", "web", "value: "+vip.String(), "reason: Programmed", "reason: UnsupportedProtocol", "reason: ListenersNotValid")
	g.says(t, "grpcroutes", "talks", "reason: HostnameConflict")
	g.make(t, "referencegrants", "ReferenceGrant", other, `metadata: {name: g}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: `+w.ns+`}]
  to: [{group: "", kind: Service, name: far}]`)
	door.expect(t, "http://far.example/", 200, "far", 0)

	asksOfRoutes(t, door)

	if err := g.of("gateways").Namespace(w.ns).Delete(t.Context(), "web", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*soon, func() error {
		left, err := w.cs.CoreV1().Services("keelson-entry").List(t.Context(), metav1.ListOptions{LabelSelector: "gateway.networking.k8s.io/gateway-class-name=" + class})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d Services are left", len(left.Items))
		}
		return err
	})
}

// asksOfRoutes asks for what the routes say of headers, redirects and shares. Each question may meet either of two proxies, of
// which one may hear of a route later than the other.
func asksOfRoutes(t *testing.T, door entrance) {
	t.Helper()
	ask := func(url string, header ...string) (*http.Response, string, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return nil, "", err
		}
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		resp, err := door.client().Transport.RoundTrip(r)
		if err != nil {
			return nil, "", err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return resp, string(body), err
	}
	testenv.Eventually(t, soon, func() error {
		resp, body, err := ask("http://a.example/", "side", "b")
		if err == nil && !strings.Contains(body, "two") {
			err = fmt.Errorf("with the header: %d %q", resp.StatusCode, body)
		}
		return err
	})
	testenv.Eventually(t, soon, func() error {
		resp, _, err := ask("http://a.example/")
		if err == nil && resp.Header.Get("X-By") != "gateway" {
			err = fmt.Errorf("the answer has header %v", resp.Header)
		}
		return err
	})
	testenv.Eventually(t, soon, func() error {
		resp, _, err := ask("http://a.example/old/x")
		if err == nil && (resp.StatusCode != 301 || resp.Header.Get("Location") != "https://a.example/old/x") {
			err = fmt.Errorf("the redirect is %d to %s", resp.StatusCode, resp.Header.Get("Location"))
		}
		return err
	})
	seen := map[string]bool{}
	testenv.Eventually(t, soon, func() error {
		_, body, err := ask("http://split.example/")
		for _, name := range []string{"one", "two"} {
			seen[name] = seen[name] || strings.Contains(body, name)
		}
		if !seen["one"] || !seen["two"] {
			return fmt.Errorf("of equal shares only %v was met: %v", seen, err)
		}
		return nil
	})
}
