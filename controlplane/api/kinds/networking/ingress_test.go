package networking_test

import (
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
)

func ingress(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

// pathOf is an Ingress with one rule for one path.
func pathOf(path string) string { return ingress("rules: [{http: {paths: [{" + path + "}]}}]") }

func TestIngressValidation(t *testing.T) {
	const service, at = "backend: {service: {name: s, port: {number: 80}}}", "spec.rules[0].http.paths[0]"
	backend := func(b string) string { return ingress("defaultBackend: {" + b + "}") }
	wildcard := validation.IsWildcardDNS1123Subdomain("*")[0]
	kindstest.CheckRefused[*networkingv1.Ingress](t,
		kindstest.BadObject{pathOf("path: /, pathType: Prefix, " + service), ""},
		kindstest.BadObject{pathOf("pathType: ImplementationSpecific, " + service), ""},
		kindstest.BadObject{backend("resource: {apiGroup: x.io, kind: Bucket, name: b}"), ""},
		kindstest.BadObject{ingress(""), "spec: Invalid value: null: either `defaultBackend` or `rules` must be specified"},
		kindstest.BadObject{pathOf("path: /, " + service), at + ".pathType: Required value: pathType must be specified"},
		kindstest.BadObject{pathOf("path: /, pathType: Regex, " + service), at + `.pathType: Unsupported value: "Regex": supported values: "Exact", "ImplementationSpecific", "Prefix"`},
		kindstest.BadObject{pathOf("path: a, pathType: Exact, " + service), kindstest.InvalidText(at+".path", "a", "must be an absolute path")},
		kindstest.BadObject{pathOf("pathType: Prefix, " + service), kindstest.InvalidText(at+".path", "", "must be an absolute path")},
		kindstest.BadObject{pathOf("path: a, pathType: ImplementationSpecific, " + service), kindstest.InvalidText(at+".path", "a", "must be an absolute path")},
		kindstest.BadObject{pathOf("path: /a//b, pathType: Prefix, " + service), kindstest.InvalidText(at+".path", "/a//b", "must not contain '//'")},
		kindstest.BadObject{pathOf("path: /a/./b, pathType: Prefix, " + service), kindstest.InvalidText(at+".path", "/a/./b", "must not contain '/./'")},
		kindstest.BadObject{pathOf("path: /a/../b, pathType: Prefix, " + service), kindstest.InvalidText(at+".path", "/a/../b", "must not contain '/../'")},
		kindstest.BadObject{pathOf("path: /a%2fb, pathType: Prefix, " + service), kindstest.InvalidText(at+".path", "/a%2fb", "must not contain '%2f'")},
		kindstest.BadObject{pathOf("path: /a%2Fb, pathType: Exact, " + service), kindstest.InvalidText(at+".path", "/a%2Fb", "must not contain '%2F'")},
		kindstest.BadObject{pathOf("path: /a/.., pathType: Exact, " + service), kindstest.InvalidText(at+".path", "/a/..", "cannot end with '/..'")},
		kindstest.BadObject{pathOf("path: /a/., pathType: Exact, " + service), kindstest.InvalidText(at+".path", "/a/.", "cannot end with '/.'")},
		kindstest.BadObject{pathOf("path: /, pathType: Prefix, backend: {}"), kindstest.InvalidText(at+".backend", "", "resource or service backend is required")},
		kindstest.BadObject{ingress("rules: [{host: a, http: {paths: []}}]"), "spec.rules[0].http.paths: Required value"},
		kindstest.BadObject{ingress("rules: [{host: 10.0.0.1}]"), kindstest.InvalidText("spec.rules[0].host", "10.0.0.1", "must be a DNS name, not an IP address")},
		kindstest.BadObject{ingress("rules: [{host: A.b}]"), kindstest.InvalidText("spec.rules[0].host", "A.b", kindstest.NotSubdomain)},
		kindstest.BadObject{ingress("rules: [{host: 'a.*.b'}]"), kindstest.InvalidText("spec.rules[0].host", "a.*.b", wildcard)},
		kindstest.BadObject{ingress("rules: [{host: '*.b'}], tls: [{hosts: ['*.*.b', 'B'], secretName: S}]"),
			kindstest.InvalidText("spec.tls[0].hosts[0]", "*.*.b", wildcard) + "\n" + kindstest.InvalidText("spec.tls[0].hosts[1]", "B", kindstest.NotSubdomain) + "\n" +
				kindstest.InvalidText("spec.tls[0].secretName", "S", kindstest.NotSubdomain)},
		kindstest.BadObject{ingress("rules: [{host: b}], ingressClassName: C"), kindstest.InvalidText("spec.ingressClassName", "C", kindstest.NotSubdomain)},
		kindstest.BadObject{backend("service: {name: s, port: {number: 80}}, resource: {kind: k, name: o}"), kindstest.InvalidText("spec.defaultBackend", "", "cannot set both resource and service backends")},
		kindstest.BadObject{backend("service: {port: {number: 80}}"), "spec.defaultBackend.service.name: Required value"},
		kindstest.BadObject{backend("service: {name: S, port: {number: 80}}"), kindstest.InvalidText("spec.defaultBackend.service.name", "S", kindstest.NotLabel)},
		kindstest.BadObject{backend("service: {name: s}"), "spec.defaultBackend: Required value: port name or number is required"},
		kindstest.BadObject{backend("service: {name: s, port: {name: p, number: 80}}"), kindstest.InvalidText("spec.defaultBackend", "", "cannot set both port name & port number")},
		kindstest.BadObject{backend("service: {name: s, port: {number: 70000}}"), "spec.defaultBackend.service.port.number: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{backend("service: {name: s, port: {name: p_a}}"), kindstest.InvalidText("spec.defaultBackend.service.port.name", "p_a", validation.IsValidPortName("p_a")[0])},
		kindstest.BadObject{backend("resource: {apiGroup: X, kind: '', name: a/b}"), kindstest.InvalidText("spec.defaultBackend.resource.apiGroup", "X", kindstest.NotSubdomain) +
			"\nspec.defaultBackend.resource.kind: Required value\n" + kindstest.InvalidText("spec.defaultBackend.resource.name", "a/b", "may not contain '/'")},
		kindstest.BadObject{"{metadata: {name: a, annotations: {kubernetes.io/ingress.class: x}}, spec: {ingressClassName: y, rules: [{host: b}]}}",
			kindstest.InvalidText("annotations.kubernetes.io/ingress.class", "x", "must match `ingressClassName` when both are specified")},
	)
}

func TestIngressUpdate(t *testing.T) {
	kindstest.CheckChanges(t, pathOf("path: /, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}"),
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) { i.Spec.Rules[0].Host = "b.c" }, Generation: 2},
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) { i.Labels = map[string]string{"a": "b"} }, Generation: 1},
		// The rule about both classes is for new objects.
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) {
			i.Annotations, i.Spec.IngressClassName = map[string]string{networking.IngressClassAnnotation: "x"}, kindstest.Ptr("y")
		}, Generation: 2},
		kindstest.Change[*networkingv1.Ingress]{Sub: "status", Change: func(i *networkingv1.Ingress) {
			i.Spec.Rules = nil
			i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "10.0.0.01"}, {Hostname: "10.0.0.2"},
				{IP: "::1", Ports: []networkingv1.IngressPortStatus{{Port: 80, Protocol: "X"}}}}
		}, Want: kindstest.InvalidText("status.loadBalancer.ingress[0].ip", "10.0.0.01", validation.IsValidIP(nil, "10.0.0.01")[0].Detail) + "\n" +
			kindstest.InvalidText("status.loadBalancer.ingress[1].hostname", "10.0.0.2", "must be a DNS name, not an IP address"), Generation: 1},
	)
}

func TestIngressRows(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{ingress("rules: [{host: a.b}]"), "a|<none>|a.b||80|3h"},
		{ingress("ingressClassName: c, defaultBackend: {service: {name: s}}, tls: [{}]"), "a|c|*||80, 443|3h"},
		{"{metadata: {name: a}, spec: {rules: [{host: a}, {host: b}, {host: c}, {host: d}, {host: e}]}, " +
			"status: {loadBalancer: {ingress: [{ip: 10.0.0.2}, {hostname: h}, {ip: 10.0.0.1}]}}}", "a|<none>|a,b,c + 2 more...|10.0.0.1,10.0.0.2,h|80|3h"},
	} {
		if got, want := kindstest.PrintTable[*networkingv1.Ingress](t, c.text), "NAME|CLASS|HOSTS|ADDRESS|PORTS|AGE\n"+c.want; got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}

func TestIngressClass(t *testing.T) {
	class := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	ref := func(p string) string { return class("controller: x.io/y, parameters: {" + p + "}") }
	const at = "spec.parameters"
	kindstest.CheckRefused[*networkingv1.IngressClass](t,
		kindstest.BadObject{ref("kind: k, name: o"), ""},
		kindstest.BadObject{ref("kind: k, name: o, scope: Namespace, namespace: b"), ""},
		kindstest.BadObject{class(""), "spec.controller: Required value"},
		kindstest.BadObject{class("controller: x.io"), kindstest.InvalidText("spec.controller", "x.io", "must be a domain-prefixed path (such as \"acme.io/foo\")")},
		kindstest.BadObject{class("controller: x.io/" + strings.Repeat("a", 250)), "spec.controller: Too long: may not be more than 250 bytes"},
		kindstest.BadObject{ref("name: o"), at + ".kind: Required value"},
		kindstest.BadObject{ref("kind: k"), at + ".name: Required value"},
		kindstest.BadObject{ref("kind: k, name: '..'"), kindstest.InvalidText(at+".name", "..", "may not be '..'")},
		kindstest.BadObject{ref("kind: k, name: o, apiGroup: X"), kindstest.InvalidText(at+".apiGroup", "X", kindstest.NotSubdomain)},
		kindstest.BadObject{ref("kind: k, name: o, scope: World"), at + `.scope: Unsupported value: "World": supported values: "Cluster", "Namespace"`},
		kindstest.BadObject{ref("kind: k, name: o, scope: Namespace"), at + ".namespace: Required value: `parameters.scope` is set to 'Namespace'"},
		kindstest.BadObject{ref("kind: k, name: o, scope: Namespace, namespace: B"), kindstest.InvalidText(at+".namespace", "B", kindstest.NotLabel)},
		kindstest.BadObject{ref("kind: k, name: o, namespace: b"), at + ".namespace: Forbidden: `parameters.scope` is set to 'Cluster'"},
	)
	kindstest.CheckChanges(t, ref("kind: k, name: o"),
		kindstest.Change[*networkingv1.IngressClass]{Change: func(c *networkingv1.IngressClass) { c.Spec.Parameters = nil }, Generation: 2},
		kindstest.Change[*networkingv1.IngressClass]{Change: func(c *networkingv1.IngressClass) { c.Spec.Controller = "x.io/z" },
			Want: kindstest.InvalidText("spec.controller", "x.io/z", "field is immutable"), Generation: 2},
	)
	kindstest.CheckDefaults[*networkingv1.IngressClass](t, ref("kind: k, name: o"), ref("kind: k, name: o, scope: Cluster"))
	for text, want := range map[string]string{class("controller: x.io/y"): "a|x.io/y|<none>|3h", ref("apiGroup: g, kind: k, name: o"): "a|x.io/y|k.g/o|3h"} {
		if got := kindstest.PrintTable[*networkingv1.IngressClass](t, text); got != "NAME|CONTROLLER|PARAMETERS|AGE\n"+want {
			t.Error(got)
		}
	}
}
