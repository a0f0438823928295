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

// gatewayAPI creates objects of the Gateway API.
type gatewayAPI struct {
	testNamespace
	dynamic.Interface
}

func (g gatewayAPI) resourceClient(resource string) dynamic.NamespaceableResourceInterface {
	return g.Resource(schema.GroupVersionResource{Group: "gateway.networking.k8s.io", Version: "v1",
		Resource: resource})
}

// createObject creates an object from YAML. The namespace is "" for cluster-scoped kinds.
func (g gatewayAPI) createObject(t *testing.T, resource, kind, namespace, text string) {
	t.Helper()
	u := &unstructured.Unstructured{}
	if err := yaml.Unmarshal([]byte(text), &u.Object); err != nil {
		t.Fatal(err)
	}
	u.SetAPIVersion("gateway.networking.k8s.io/v1")
	u.SetKind(kind)
	var to dynamic.ResourceInterface = g.resourceClient(resource)
	if namespace != "" {
		to = g.resourceClient(resource).Namespace(namespace)
	}
	if _, err := to.Create(t.Context(), u, metav1.CreateOptions{}); err != nil {
		t.Fatalf("%s\n%v", text, err)
	}
}

// awaitConditions waits until the conditions anywhere in an object's status contain the words.
func (g gatewayAPI) awaitConditions(t *testing.T, resource, name string, words ...string) {
	t.Helper()
	testenv.Eventually(t, 2*soon, func() error {
		u, err := g.resourceClient(resource).Namespace(g.ns).Get(t.Context(), name, metav1.GetOptions{})
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

// createBackends creates two Services in the test's namespace, one in the other namespace, and a
// key pair.
func (w testNamespace) createBackends(t *testing.T, other string) {
	t.Helper()
	for _, name := range []string{"one", "two"} {
		w.createPod(newPod(name, hello))
		w.createService(webService(name, v1.ServiceTypeClusterIP))
	}
	far := newPod("far", hello)
	far.Namespace = other
	if _, err := w.cs.CoreV1().Pods(other).Create(t.Context(), far, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.cs.CoreV1().Services(other).Create(t.Context(), webService("far", v1.ServiceTypeClusterIP),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := w.cs.CoreV1().Secrets(w.ns).Create(t.Context(), keyPairSecret(t, 1, "a.example"),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
}

// A Gateway of Keelson's class gets proxies with an address of a pool. HTTP and HTTPS listeners,
// weights, headers, redirects and backends that another namespace grants work there. Refused parts
// report it in their conditions. Everything is deleted with the Gateway.
func TestGateway(t *testing.T) {
	w := newNamespace(t)
	cluster, err := dynamic.NewForConfig(testenv.RestConfig(t))
	if err != nil {
		t.Fatal(err)
	}
	g := gatewayAPI{testNamespace: w, Interface: cluster}
	if err := definitions.Gateway.Install(t.Context(), cluster, func(definitions.Outcome) {}); err != nil {
		t.Fatal(err)
	}
	outside := testenv.Host(t, "registry")
	raw := outside.IP.As4()
	raw[3] = 242
	vip := netip.AddrFrom4(raw)
	w.createPool(fmt.Sprintf("{addresses: [%s], namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: "+
		"keelson-entry}}}", vip))
	class, other := w.ns, w.ns+"-data"
	g.createObject(t, "gatewayclasses", "GatewayClass", "",
		fmt.Sprintf("metadata: {name: %s}\nspec: {controllerName: keelson.dev/gateway}", class))
	w.Cleanup(func() {
		_ = g.resourceClient("gatewayclasses").Delete(context.Background(), class, metav1.DeleteOptions{})
	})
	if _, err := w.cs.CoreV1().Namespaces().Create(t.Context(),
		&v1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: other}}, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	w.Cleanup(func() { _ = w.cs.CoreV1().Namespaces().Delete(context.Background(), other, metav1.DeleteOptions{}) })
	w.createBackends(t, other)
	port := fmt.Sprint(webService("one", v1.ServiceTypeClusterIP).Spec.Ports[0].Port)
	g.createObject(t, "gateways", "Gateway", w.ns, fmt.Sprintf(`metadata: {name: web}
spec:
  gatewayClassName: %s
  listeners:
  - {name: http, port: 80, protocol: HTTP}
  - {name: https, port: 443, protocol: HTTPS, hostname: a.example, tls: {certificateRefs: [{name: web-tls}]}}
  - {name: raw, port: 9000, protocol: TCP}`, class))
	g.createObject(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: plain}
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
	g.createObject(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: split}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [split.example]
  rules: [{backendRefs: [{name: one, port: `+port+`, weight: 1}, {name: two, port: `+port+`, weight: 1}]}]`)
	g.createObject(t, "httproutes", "HTTPRoute", w.ns, `metadata: {name: far}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [far.example]
  rules: [{backendRefs: [{name: far, namespace: `+other+`, port: `+port+`}]}]`)
	// Of two routes of one second the first by name has a host.
	g.createObject(t, "grpcroutes", "GRPCRoute", w.ns, `metadata: {name: talks}
spec:
  parentRefs: [{name: web, sectionName: http}]
  hostnames: [a.example]
  rules: [{backendRefs: [{name: one, port: `+port+`}]}]`)
	w.awaitPod("one", requireReady)
	w.awaitPod("two", requireReady)

	door := proxyClient{dial: testenv.HTTP(outside).Transport.(*http.Transport).DialContext, at: vip.String()}
	door.awaitResponse(t, "http://a.example/", 200, "one", 0)
	door.awaitResponse(t, "https://a.example/", 200, "one", 1)
	door.awaitResponse(t, "http://a.example/lost", 500, "", 0)
	door.awaitResponse(t, "http://none.example/", 404, "", 0)
	door.awaitResponse(t, "http://far.example/", 500, "", 0) // not granted
	g.awaitConditions(t, "httproutes", "far", "RefNotPermitted")
	w.awaitTrace(t, "http://far.example/", "gateway "+w.ns+"/web, for httproute "+w.ns+"/far",
		"no ReferenceGrant in namespace "+other, "stops at match")
	w.awaitTrace(t, "https://a.example/", "TLS Secret "+w.ns+"/web-tls is there", "nothing stands in the way")
	g.awaitConditions(t, "gateways", "web", "value: "+vip.String(), "reason: Programmed", "reason: UnsupportedProtocol",
		"reason: ListenersNotValid")
	g.awaitConditions(t, "grpcroutes", "talks", "reason: HostnameConflict")
	g.createObject(t, "referencegrants", "ReferenceGrant", other, `metadata: {name: g}
spec:
  from: [{group: gateway.networking.k8s.io, kind: HTTPRoute, namespace: `+w.ns+`}]
  to: [{group: "", kind: Service, name: far}]`)
	door.awaitResponse(t, "http://far.example/", 200, "far", 0)

	checkRoutes(t, door)

	g.deleteGateway(t, class)
}

// deleteGateway deletes Gateway web, and waits until its Service no longer exists.
func (g gatewayAPI) deleteGateway(t *testing.T, class string) {
	t.Helper()
	err := g.resourceClient("gateways").Namespace(g.ns).Delete(t.Context(), "web", metav1.DeleteOptions{})
	if err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 2*soon, func() error {
		left, err := g.cs.CoreV1().Services("keelson-entry").List(t.Context(),
			metav1.ListOptions{LabelSelector: "gateway.networking.k8s.io/gateway-class-name=" + class})
		if err == nil && len(left.Items) > 0 {
			err = fmt.Errorf("%d Services are left", len(left.Items))
		}
		return err
	})
}

// checkRoutes checks the headers, redirects and weights of the routes. Each request may reach
// either of two proxies, and one of them may receive a route later than the other.
func checkRoutes(t *testing.T, door proxyClient) {
	t.Helper()
	ask := func(url string, header ...string) (*http.Response, string, error) {
		r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, url, nil)
		if err != nil {
			return nil, "", err
		}
		for i := 0; i < len(header); i += 2 {
			r.Header.Set(header[i], header[i+1])
		}
		resp, err := door.httpClient().Transport.RoundTrip(r)
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
			err = fmt.Errorf("the response has header %v", resp.Header)
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
