package kinds

import (
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/networking"
)

func ingress(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

// pathOf is an Ingress with one rule for one path.
func pathOf(path string) string { return ingress("rules: [{http: {paths: [{" + path + "}]}}]") }

func TestIngressValidation(t *testing.T) {
	const service, at = "backend: {service: {name: s, port: {number: 80}}}", "spec.rules[0].http.paths[0]"
	backend := func(b string) string { return ingress("defaultBackend: {" + b + "}") }
	wildcard := validation.IsWildcardDNS1123Subdomain("*")[0]
	refuses[*networkingv1.Ingress](t,
		bad{pathOf("path: /, pathType: Prefix, " + service), ""},
		bad{pathOf("pathType: ImplementationSpecific, " + service), ""},
		bad{backend("resource: {apiGroup: x.io, kind: Bucket, name: b}"), ""},
		bad{ingress(""), "spec: Invalid value: null: either `defaultBackend` or `rules` must be specified"},
		bad{pathOf("path: /, " + service), at + ".pathType: Required value: pathType must be specified"},
		bad{pathOf("path: /, pathType: Regex, " + service), at + `.pathType: Unsupported value: "Regex": supported values: "Exact", "ImplementationSpecific", "Prefix"`},
		bad{pathOf("path: a, pathType: Exact, " + service), invalidText(at+".path", "a", "must be an absolute path")},
		bad{pathOf("pathType: Prefix, " + service), invalidText(at+".path", "", "must be an absolute path")},
		bad{pathOf("path: a, pathType: ImplementationSpecific, " + service), invalidText(at+".path", "a", "must be an absolute path")},
		bad{pathOf("path: /a//b, pathType: Prefix, " + service), invalidText(at+".path", "/a//b", "must not contain '//'")},
		bad{pathOf("path: /a/./b, pathType: Prefix, " + service), invalidText(at+".path", "/a/./b", "must not contain '/./'")},
		bad{pathOf("path: /a/../b, pathType: Prefix, " + service), invalidText(at+".path", "/a/../b", "must not contain '/../'")},
		bad{pathOf("path: /a%2fb, pathType: Prefix, " + service), invalidText(at+".path", "/a%2fb", "must not contain '%2f'")},
		bad{pathOf("path: /a%2Fb, pathType: Exact, " + service), invalidText(at+".path", "/a%2Fb", "must not contain '%2F'")},
		bad{pathOf("path: /a/.., pathType: Exact, " + service), invalidText(at+".path", "/a/..", "cannot end with '/..'")},
		bad{pathOf("path: /a/., pathType: Exact, " + service), invalidText(at+".path", "/a/.", "cannot end with '/.'")},
		bad{pathOf("path: /, pathType: Prefix, backend: {}"), invalidText(at+".backend", "", "resource or service backend is required")},
		bad{ingress("rules: [{host: a, http: {paths: []}}]"), "spec.rules[0].http.paths: Required value"},
		bad{ingress("rules: [{host: 10.0.0.1}]"), invalidText("spec.rules[0].host", "10.0.0.1", "must be a DNS name, not an IP address")},
		bad{ingress("rules: [{host: A.b}]"), invalidText("spec.rules[0].host", "A.b", notSubdomain)},
		bad{ingress("rules: [{host: 'a.*.b'}]"), invalidText("spec.rules[0].host", "a.*.b", wildcard)},
		bad{ingress("rules: [{host: '*.b'}], tls: [{hosts: ['*.*.b', 'B'], secretName: S}]"),
			invalidText("spec.tls[0].hosts[0]", "*.*.b", wildcard) + "\n" + invalidText("spec.tls[0].hosts[1]", "B", notSubdomain) + "\n" +
				invalidText("spec.tls[0].secretName", "S", notSubdomain)},
		bad{ingress("rules: [{host: b}], ingressClassName: C"), invalidText("spec.ingressClassName", "C", notSubdomain)},
		bad{backend("service: {name: s, port: {number: 80}}, resource: {kind: k, name: o}"), invalidText("spec.defaultBackend", "", "cannot set both resource and service backends")},
		bad{backend("service: {port: {number: 80}}"), "spec.defaultBackend.service.name: Required value"},
		bad{backend("service: {name: S, port: {number: 80}}"), invalidText("spec.defaultBackend.service.name", "S", notLabel)},
		bad{backend("service: {name: s}"), "spec.defaultBackend: Required value: port name or number is required"},
		bad{backend("service: {name: s, port: {name: p, number: 80}}"), invalidText("spec.defaultBackend", "", "cannot set both port name & port number")},
		bad{backend("service: {name: s, port: {number: 70000}}"), "spec.defaultBackend.service.port.number: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		bad{backend("service: {name: s, port: {name: p_a}}"), invalidText("spec.defaultBackend.service.port.name", "p_a", validation.IsValidPortName("p_a")[0])},
		bad{backend("resource: {apiGroup: X, kind: '', name: a/b}"), invalidText("spec.defaultBackend.resource.apiGroup", "X", notSubdomain) +
			"\nspec.defaultBackend.resource.kind: Required value\n" + invalidText("spec.defaultBackend.resource.name", "a/b", "may not contain '/'")},
		bad{"{metadata: {name: a, annotations: {kubernetes.io/ingress.class: x}}, spec: {ingressClassName: y, rules: [{host: b}]}}",
			invalidText("annotations.kubernetes.io/ingress.class", "x", "must match `ingressClassName` when both are specified")},
	)
}

func TestIngressUpdate(t *testing.T) {
	changes(t, pathOf("path: /, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}"),
		changed[*networkingv1.Ingress]{change: func(i *networkingv1.Ingress) { i.Spec.Rules[0].Host = "b.c" }, generation: 2},
		changed[*networkingv1.Ingress]{change: func(i *networkingv1.Ingress) { i.Labels = map[string]string{"a": "b"} }, generation: 1},
		// The rule about both classes is for new objects.
		changed[*networkingv1.Ingress]{change: func(i *networkingv1.Ingress) {
			i.Annotations, i.Spec.IngressClassName = map[string]string{networking.IngressClassAnnotation: "x"}, ptr("y")
		}, generation: 2},
		changed[*networkingv1.Ingress]{sub: "status", change: func(i *networkingv1.Ingress) {
			i.Spec.Rules = nil
			i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "10.0.0.01"}, {Hostname: "10.0.0.2"},
				{IP: "::1", Ports: []networkingv1.IngressPortStatus{{Port: 80, Protocol: "X"}}}}
		}, want: invalidText("status.loadBalancer.ingress[0].ip", "10.0.0.01", validation.IsValidIP(nil, "10.0.0.01")[0].Detail) + "\n" +
			invalidText("status.loadBalancer.ingress[1].hostname", "10.0.0.2", "must be a DNS name, not an IP address"), generation: 1},
	)
}

func TestIngressRows(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{ingress("rules: [{host: a.b}]"), "a|<none>|a.b||80|3h"},
		{ingress("ingressClassName: c, defaultBackend: {service: {name: s}}, tls: [{}]"), "a|c|*||80, 443|3h"},
		{"{metadata: {name: a}, spec: {rules: [{host: a}, {host: b}, {host: c}, {host: d}, {host: e}]}, " +
			"status: {loadBalancer: {ingress: [{ip: 10.0.0.2}, {hostname: h}, {ip: 10.0.0.1}]}}}", "a|<none>|a,b,c + 2 more...|10.0.0.1,10.0.0.2,h|80|3h"},
	} {
		if got, want := table[*networkingv1.Ingress](t, c.text), "NAME|CLASS|HOSTS|ADDRESS|PORTS|AGE\n"+c.want; got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}

func TestIngressClass(t *testing.T) {
	class := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	ref := func(p string) string { return class("controller: x.io/y, parameters: {" + p + "}") }
	const at = "spec.parameters"
	refuses[*networkingv1.IngressClass](t,
		bad{ref("kind: k, name: o"), ""},
		bad{ref("kind: k, name: o, scope: Namespace, namespace: b"), ""},
		bad{class(""), "spec.controller: Required value"},
		bad{class("controller: x.io"), invalidText("spec.controller", "x.io", "must be a domain-prefixed path (such as \"acme.io/foo\")")},
		bad{class("controller: x.io/" + strings.Repeat("a", 250)), "spec.controller: Too long: may not be more than 250 bytes"},
		bad{ref("name: o"), at + ".kind: Required value"},
		bad{ref("kind: k"), at + ".name: Required value"},
		bad{ref("kind: k, name: '..'"), invalidText(at+".name", "..", "may not be '..'")},
		bad{ref("kind: k, name: o, apiGroup: X"), invalidText(at+".apiGroup", "X", notSubdomain)},
		bad{ref("kind: k, name: o, scope: World"), at + `.scope: Unsupported value: "World": supported values: "Cluster", "Namespace"`},
		bad{ref("kind: k, name: o, scope: Namespace"), at + ".namespace: Required value: `parameters.scope` is set to 'Namespace'"},
		bad{ref("kind: k, name: o, scope: Namespace, namespace: B"), invalidText(at+".namespace", "B", notLabel)},
		bad{ref("kind: k, name: o, namespace: b"), at + ".namespace: Forbidden: `parameters.scope` is set to 'Cluster'"},
	)
	changes(t, ref("kind: k, name: o"),
		changed[*networkingv1.IngressClass]{change: func(c *networkingv1.IngressClass) { c.Spec.Parameters = nil }, generation: 2},
		changed[*networkingv1.IngressClass]{change: func(c *networkingv1.IngressClass) { c.Spec.Controller = "x.io/z" },
			want: invalidText("spec.controller", "x.io/z", "field is immutable"), generation: 2},
	)
	defaulted[*networkingv1.IngressClass](t, ref("kind: k, name: o"), ref("kind: k, name: o, scope: Cluster"))
	for text, want := range map[string]string{class("controller: x.io/y"): "a|x.io/y|<none>|3h", ref("apiGroup: g, kind: k, name: o"): "a|x.io/y|k.g/o|3h"} {
		if got := table[*networkingv1.IngressClass](t, text); got != "NAME|CONTROLLER|PARAMETERS|AGE\n"+want {
			t.Error(got)
		}
	}
}
