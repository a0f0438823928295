package ingress

import (
	"net/http/httptest"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/ingressproxy/pairs"
	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/test/testenv/keypair"
)

type world struct {
	services map[string]*corev1.Service
	slices   map[string][]*discoveryv1.EndpointSlice
	secrets  map[string]*corev1.Secret
}

func (w world) Service(ns, name string) *corev1.Service             { return w.services[ns+"/"+name] }
func (w world) Slices(ns, name string) []*discoveryv1.EndpointSlice { return w.slices[ns+"/"+name] }
func (w world) Secret(ns, name string) *corev1.Secret               { return w.secrets[ns+"/"+name] }
func parse[T any](t *testing.T, text string) *T {
	t.Helper()
	out := new(T)
	if err := yaml.UnmarshalStrict([]byte(text), out); err != nil {
		t.Fatal(err)
	}
	return out
}

func secret(t *testing.T, name, version string, hosts ...string) *corev1.Secret {
	t.Helper()
	return &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: name, ResourceVersion: version,
		UID: types.UID(name)}, Type: corev1.SecretTypeTLS, Data: keypair.Data(t, hosts...)}
}

func shop(t *testing.T) world {
	web := parse[corev1.Service](t, `{metadata: {namespace: shop, name: web}, spec: {ipFamilies: [IPv4], ports: `+
		`[{name: http, port: 80}, {name: grpc, port: 90, appProtocol: kubernetes.io/h2c}, {name: odd, port: 91, `+
		`appProtocol: smtp}, {name: udp, port: 53, protocol: UDP}]}}`)
	slice := func(text string) *discoveryv1.EndpointSlice { return parse[discoveryv1.EndpointSlice](t, text) }
	broken := secret(t, "broken", "1", "a.x")
	broken.Data["tls.key"] = []byte("none")
	opaque := secret(t, "opaque", "1", "a.x")
	opaque.Type = corev1.SecretTypeOpaque
	return world{
		services: map[string]*corev1.Service{
			"shop/web": web, "shop/empty": parse[corev1.Service](t,
				`{metadata: {namespace: shop, name: empty}, spec: {ports: [{port: 80}]}}`),
			"shop/far": parse[corev1.Service](t, `{metadata: {namespace: shop, name: far}, spec: {type: ExternalName, `+
				`externalName: far.example, ports: [{port: 80}]}}`),
		},
		slices: map[string][]*discoveryv1.EndpointSlice{"shop/web": {
			slice(`{addressType: IPv4, ports: [{name: http, port: 8080}, {name: grpc, port: 9090}, {name: odd, port: ` +
				`1}], endpoints: [{addresses: [10.0.0.2]}, {addresses: [10.0.0.1], conditions: {ready: true}}, ` +
				`{addresses: [10.0.0.3], conditions: {ready: false, serving: true, terminating: true}}]}`),
			slice(`{addressType: IPv6, ports: [{name: http, port: 8080}], endpoints: [{addresses: ["fd00::1"]}]}`),
		}},
		secrets: map[string]*corev1.Secret{"shop/good": secret(t, "good", "1", "a.x", "*.w.x"), "shop/broken": broken,
			"shop/opaque": opaque},
	}
}

const webIngress = `
metadata: {namespace: shop, name: web, annotations: {keelson.dev/redirect-to-https: "true"}}
spec:
  ingressClassName: own
  defaultBackend: {service: {name: web, port: {name: grpc}}}
  tls: [{hosts: [a.x, "*.w.x"], secretName: good}]
  rules:
  - host: a.x
    http: {paths: [{path: /api, pathType: Prefix, backend: {service: {name: web, port: {number: 80}}}}, {path: /one, pathType: Exact, backend: {service: {name: empty, port: {number: 80}}}}]}
  - host: b.x
    http: {paths: [{pathType: ImplementationSpecific, path: /free, backend: {service: {name: web, port: {name: http}}}}]}
  - host: "*.w.x"
    http: {paths: [{path: /, pathType: Prefix, backend: {service: {name: lost, port: {number: 80}}}}]}
`

func TestTranslate(t *testing.T) {
	w := shop(t)
	older := parse[networkingv1.Ingress](t, webIngress)
	younger := older.DeepCopy()
	younger.Name, younger.CreationTimestamp = "a-rival", metav1.Now()
	other := older.DeepCopy()
	*other.Spec.IngressClassName, other.Name = "other", "other"
	var keys pairs.Cache
	table := Translate("own", []*networkingv1.Ingress{younger, older, other}, w, &keys)
	x, wrong := route.Compile(table)
	if len(wrong) > 0 {
		t.Fatal(wrong)
	}
	for _, c := range []struct {
		port         uint16
		url, backend string
	}{
		{443, "http://a.x/api/v1", "shop/web/80"}, {443, "http://a.x/one", "shop/empty/80"},
		{443, "http://a.x/one/more", "shop/web/90"},
		{80, "http://b.x/free", "shop/web/80"}, {80, "http://b.x/", "shop/web/90"},
		{80, "http://elsewhere/", "shop/web/90"},
		{443, "http://q.w.x/", "503"}, {443, "http://p.q.w.x/", "shop/web/90"},
		{80, "http://a.x/api", "308"}, {80, "http://q.w.x/", "308"},
	} {
		f, ok := x.Match(c.port, httptest.NewRequest("GET", c.url, nil))
		got := "none"
		switch {
		case !ok:
		case f.Rule.Filters.Redirect != nil:
			got = "308"
		case f.Rule.Backends[0].Answer != 0:
			got = "503"
		default:
			got = f.Rule.Backends[0].Pool
		}
		if got != c.backend || f.Rule.Name != "ingress/shop/web" {
			t.Errorf("%d %s: %s of %s, want %s", c.port, c.url, got, f.Rule.Name, c.backend)
		}
	}
	if p := table.Pools["shop/web/80"]; len(p.Endpoints) != 2 || p.Endpoints[0].String() != "10.0.0.1:8080" ||
		p.Protocol != "" {
		t.Errorf("%+v", p)
	}
	if p := table.Pools["shop/web/90"]; p.Protocol != route.H2C || p.Endpoints[1].String() != "10.0.0.2:9090" {
		t.Errorf("%+v", p)
	}
	first := x.Certificate(443, "a.x")
	if first == nil || x.Certificate(443, "q.w.x") != first || x.Certificate(443, "b.x") != nil {
		t.Error("other certificates")
	}
	again, _ := route.Compile(Translate("own", []*networkingv1.Ingress{older}, w, &keys))
	if again.Certificate(443, "a.x") != first {
		t.Error("a key pair was read twice")
	}
	w.secrets["shop/good"] = secret(t, "good", "2", "a.x")
	if rotated, _ := route.Compile(Translate("own", []*networkingv1.Ingress{older}, w, &keys)); rotated.Certificate(443,
		"a.x") == first {
		t.Error("a new key pair is not seen")
	}
}

func TestProblems(t *testing.T) {
	w := shop(t)
	backend := func(text string) string {
		return `{metadata: {namespace: shop, name: i}, spec: {defaultBackend: {` + text + `}}}`
	}
	withTLS := func(text string) string {
		return `{metadata: {namespace: shop, name: i}, spec: {tls: [{` + text +
			`}], defaultBackend: {service: {name: web, port: {number: 80}}}}}`
	}
	for _, c := range []struct{ ingress, want string }{
		{backend(`service: {name: web, port: {number: 80}}`), ""},
		{backend(`service: {name: lost, port: {number: 80}}`), "Service lost does not exist"},
		{backend(`service: {name: web, port: {number: 81}}`), "Service web has no TCP port 81"},
		{backend(`service: {name: web, port: {name: udp}}`), "Service web has no TCP port udp"},
		{backend(`service: {name: web, port: {name: odd}}`), `its appProtocol "smtp" is none of`},
		{backend(`service: {name: empty, port: {number: 80}}`), "Service empty has no ready endpoint for port 80"},
		{backend(`service: {name: far, port: {number: 80}}`), "Service far is of type ExternalName"},
		{backend(`resource: {kind: Bucket, name: b}`), "A backend is a resource"},
		{withTLS(`hosts: [a.x, q.w.x], secretName: good`), ""},
		{withTLS(`hosts: [c.x], secretName: good`), "The certificate in Secret good is not for host c.x"},
		{withTLS(`hosts: [a.x], secretName: lost`), "Secret lost of tls does not exist"},
		{withTLS(`hosts: [a.x], secretName: broken`), "Secret broken of tls has no valid key pair"},
		{withTLS(`hosts: [a.x], secretName: opaque`), "Secret opaque of tls is of type Opaque"},
		{withTLS(`hosts: [a.x]`), "tls without secretName"},
		{`{metadata: {namespace: shop, name: i, annotations: {keelson.dev/redirect-to-https: maybe}}}`, "is \"maybe\""},
	} {
		got := strings.Join(Problems(parse[networkingv1.Ingress](t, c.ingress), w), "\n")
		if c.want == "" && got != "" || !strings.Contains(got, c.want) {
			t.Errorf("%s:\n%q\nwant %q", c.ingress, got, c.want)
		}
	}
}

// Terminating endpoints serve only while there are no ready ones.
func TestEndingEndpointsAreTheLastResort(t *testing.T) {
	w := shop(t)
	for _, s := range w.slices["shop/web"] {
		no := false
		for i := range s.Endpoints[:min(2, len(s.Endpoints))] {
			s.Endpoints[i].Conditions.Ready = &no
		}
	}
	web := w.services["shop/web"]
	p, err := NewPool(web, &web.Spec.Ports[0], w.slices["shop/web"])
	if err != nil || len(p.Endpoints) != 1 || p.Endpoints[0].String() != "10.0.0.3:8080" {
		t.Errorf("%+v, %v", p, err)
	}
}
