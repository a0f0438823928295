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

// pathOf returns an Ingress with one rule for one path.
func pathOf(path string) string { return ingress("rules: [{http: {paths: [{" + path + "}]}}]") }

func TestIngressValidation(t *testing.T) {
	const service, at = "backend: {service: {name: s, port: {number: 80}}}", "spec.rules[0].http.paths[0]"
	backend := func(b string) string { return ingress("defaultBackend: {" + b + "}") }
	wildcard := validation.IsWildcardDNS1123Subdomain("*")[0]
	kindstest.CheckRefused[*networkingv1.Ingress](t,
		kindstest.BadObject{Text: pathOf("path: /, pathType: Prefix, " + service), Want: ""},
		kindstest.BadObject{Text: pathOf("pathType: ImplementationSpecific, " + service), Want: ""},
		kindstest.BadObject{Text: backend("resource: {apiGroup: x.io, kind: Bucket, name: b}"), Want: ""},
		kindstest.BadObject{Text: ingress(""),
			Want: "spec: Invalid value: null: either `defaultBackend` or `rules` must be specified"},
		kindstest.BadObject{Text: pathOf("path: /, " + service),
			Want: at + ".pathType: Required value: pathType must be specified"},
		kindstest.BadObject{Text: pathOf("path: /, pathType: Regex, " + service),
			Want: at + `.pathType: Unsupported value: "Regex": supported values: "Exact", ` +
				`"ImplementationSpecific", "Prefix"`},
		kindstest.BadObject{Text: pathOf("path: a, pathType: Exact, " + service),
			Want: kindstest.InvalidText(at+".path", "a", "must be an absolute path")},
		kindstest.BadObject{Text: pathOf("pathType: Prefix, " + service),
			Want: kindstest.InvalidText(at+".path", "", "must be an absolute path")},
		kindstest.BadObject{Text: pathOf("path: a, pathType: ImplementationSpecific, " + service),
			Want: kindstest.InvalidText(at+".path", "a", "must be an absolute path")},
		kindstest.BadObject{Text: pathOf("path: /a//b, pathType: Prefix, " + service),
			Want: kindstest.InvalidText(at+".path", "/a//b", "must not contain '//'")},
		kindstest.BadObject{Text: pathOf("path: /a/./b, pathType: Prefix, " + service),
			Want: kindstest.InvalidText(at+".path", "/a/./b", "must not contain '/./'")},
		kindstest.BadObject{Text: pathOf("path: /a/../b, pathType: Prefix, " + service),
			Want: kindstest.InvalidText(at+".path", "/a/../b", "must not contain '/../'")},
		kindstest.BadObject{Text: pathOf("path: /a%2fb, pathType: Prefix, " + service),
			Want: kindstest.InvalidText(at+".path", "/a%2fb", "must not contain '%2f'")},
		kindstest.BadObject{Text: pathOf("path: /a%2Fb, pathType: Exact, " + service),
			Want: kindstest.InvalidText(at+".path", "/a%2Fb", "must not contain '%2F'")},
		kindstest.BadObject{Text: pathOf("path: /a/.., pathType: Exact, " + service),
			Want: kindstest.InvalidText(at+".path", "/a/..", "cannot end with '/..'")},
		kindstest.BadObject{Text: pathOf("path: /a/., pathType: Exact, " + service),
			Want: kindstest.InvalidText(at+".path", "/a/.", "cannot end with '/.'")},
		kindstest.BadObject{Text: pathOf("path: /, pathType: Prefix, backend: {}"),
			Want: kindstest.InvalidText(at+".backend", "", "resource or service backend is required")},
		kindstest.BadObject{Text: ingress("rules: [{host: a, http: {paths: []}}]"),
			Want: "spec.rules[0].http.paths: Required value"},
		kindstest.BadObject{Text: ingress("rules: [{host: 10.0.0.1}]"),
			Want: kindstest.InvalidText("spec.rules[0].host", "10.0.0.1", "must be a DNS name, not an IP address")},
		kindstest.BadObject{Text: ingress("rules: [{host: A.b}]"),
			Want: kindstest.InvalidText("spec.rules[0].host", "A.b", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: ingress("rules: [{host: 'a.*.b'}]"),
			Want: kindstest.InvalidText("spec.rules[0].host", "a.*.b", wildcard)},
		kindstest.BadObject{Text: ingress("rules: [{host: '*.b'}], tls: [{hosts: ['*.*.b', 'B'], secretName: S}]"),
			Want: kindstest.InvalidText("spec.tls[0].hosts[0]", "*.*.b", wildcard) + "\n" +
				kindstest.InvalidText("spec.tls[0].hosts[1]", "B", kindstest.NotSubdomain) + "\n" +
				kindstest.InvalidText("spec.tls[0].secretName", "S", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: ingress("rules: [{host: b}], ingressClassName: C"),
			Want: kindstest.InvalidText("spec.ingressClassName", "C", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: backend("service: {name: s, port: {number: 80}}, resource: {kind: k, name: o}"),
			Want: kindstest.InvalidText("spec.defaultBackend", "", "cannot set both resource and service backends")},
		kindstest.BadObject{Text: backend("service: {port: {number: 80}}"),
			Want: "spec.defaultBackend.service.name: Required value"},
		kindstest.BadObject{Text: backend("service: {name: S, port: {number: 80}}"),
			Want: kindstest.InvalidText("spec.defaultBackend.service.name", "S", kindstest.NotLabel)},
		kindstest.BadObject{Text: backend("service: {name: s}"),
			Want: "spec.defaultBackend: Required value: port name or number is required"},
		kindstest.BadObject{Text: backend("service: {name: s, port: {name: p, number: 80}}"),
			Want: kindstest.InvalidText("spec.defaultBackend", "", "cannot set both port name & port number")},
		kindstest.BadObject{Text: backend("service: {name: s, port: {number: 70000}}"),
			Want: "spec.defaultBackend.service.port.number: Invalid value: 70000: must be between 1 and " +
				"65535, inclusive"},
		kindstest.BadObject{Text: backend("service: {name: s, port: {name: p_a}}"),
			Want: kindstest.InvalidText("spec.defaultBackend.service.port.name", "p_a",
				validation.IsValidPortName("p_a")[0])},
		kindstest.BadObject{Text: backend("resource: {apiGroup: X, kind: '', name: a/b}"),
			Want: kindstest.InvalidText("spec.defaultBackend.resource.apiGroup", "X", kindstest.NotSubdomain) +
				"\nspec.defaultBackend.resource.kind: Required value\n" +
				kindstest.InvalidText("spec.defaultBackend.resource.name", "a/b", "may not contain '/'")},
		kindstest.BadObject{Text: "{metadata: {name: a, annotations: {kubernetes.io/ingress.class: x}}, spec: " +
			"{ingressClassName: y, rules: [{host: b}]}}",
			Want: kindstest.InvalidText("annotations.kubernetes.io/ingress.class", "x",
				"must match `ingressClassName` when both are specified")},
	)
}

func TestIngressUpdate(t *testing.T) {
	kindstest.CheckChanges(t, pathOf("path: /, pathType: Prefix, backend: {service: {name: s, port: {number: 80}}}"),
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) {
			i.Spec.Rules[0].Host = "b.c"
		}, Generation: 2},
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) {
			i.Labels = map[string]string{"a": "b"}
		}, Generation: 1},
		// The rule about both classes is for new objects.
		kindstest.Change[*networkingv1.Ingress]{Change: func(i *networkingv1.Ingress) {
			i.Annotations, i.Spec.IngressClassName = map[string]string{networking.IngressClassAnnotation: "x"}, new("y")
		}, Generation: 2},
		kindstest.Change[*networkingv1.Ingress]{Sub: "status", Change: func(i *networkingv1.Ingress) {
			i.Spec.Rules = nil
			i.Status.LoadBalancer.Ingress = []networkingv1.IngressLoadBalancerIngress{{IP: "10.0.0.01"},
				{Hostname: "10.0.0.2"},
				{IP: "::1", Ports: []networkingv1.IngressPortStatus{{Port: 80, Protocol: "X"}}}}
		}, Want: kindstest.InvalidText("status.loadBalancer.ingress[0].ip", "10.0.0.01",
			validation.IsValidIP(nil, "10.0.0.01")[0].Detail) + "\n" +
			kindstest.InvalidText("status.loadBalancer.ingress[1].hostname", "10.0.0.2",
				"must be a DNS name, not an IP address"), Generation: 1},
	)
}

func TestIngressRows(t *testing.T) {
	for _, c := range []struct{ text, want string }{
		{ingress("rules: [{host: a.b}]"), "a|<none>|a.b||80|3h"},
		{ingress("ingressClassName: c, defaultBackend: {service: {name: s}}, tls: [{}]"), "a|c|*||80, 443|3h"},
		{"{metadata: {name: a}, spec: {rules: [{host: a}, {host: b}, {host: c}, {host: d}, {host: e}]}, " +
			"status: {loadBalancer: {ingress: [{ip: 10.0.0.2}, {hostname: h}, {ip: 10.0.0.1}]}}}",
			"a|<none>|a,b,c + 2 more...|10.0.0.1,10.0.0.2,h|80|3h"},
	} {
		if got, want := kindstest.PrintTable[*networkingv1.Ingress](t, c.text),
			"NAME|CLASS|HOSTS|ADDRESS|PORTS|AGE\n"+c.want; got != want {
			t.Errorf("got\n%s\nwant\n%s", got, want)
		}
	}
}

func TestIngressClass(t *testing.T) {
	class := func(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }
	ref := func(p string) string { return class("controller: x.io/y, parameters: {" + p + "}") }
	const at = "spec.parameters"
	kindstest.CheckRefused[*networkingv1.IngressClass](t,
		kindstest.BadObject{Text: ref("kind: k, name: o"), Want: ""},
		kindstest.BadObject{Text: ref("kind: k, name: o, scope: Namespace, namespace: b"), Want: ""},
		kindstest.BadObject{Text: class(""), Want: "spec.controller: Required value"},
		kindstest.BadObject{Text: class("controller: x.io"),
			Want: kindstest.InvalidText("spec.controller", "x.io",
				"must be a domain-prefixed path (such as \"acme.io/foo\")")},
		kindstest.BadObject{Text: class("controller: x.io/" + strings.Repeat("a", 250)),
			Want: "spec.controller: Too long: may not be more than 250 bytes"},
		kindstest.BadObject{Text: ref("name: o"), Want: at + ".kind: Required value"},
		kindstest.BadObject{Text: ref("kind: k"), Want: at + ".name: Required value"},
		kindstest.BadObject{Text: ref("kind: k, name: '..'"),
			Want: kindstest.InvalidText(at+".name", "..", "may not be '..'")},
		kindstest.BadObject{Text: ref("kind: k, name: o, apiGroup: X"),
			Want: kindstest.InvalidText(at+".apiGroup", "X", kindstest.NotSubdomain)},
		kindstest.BadObject{Text: ref("kind: k, name: o, scope: World"),
			Want: at + `.scope: Unsupported value: "World": supported values: "Cluster", "Namespace"`},
		kindstest.BadObject{Text: ref("kind: k, name: o, scope: Namespace"),
			Want: at + ".namespace: Required value: `parameters.scope` is set to 'Namespace'"},
		kindstest.BadObject{Text: ref("kind: k, name: o, scope: Namespace, namespace: B"),
			Want: kindstest.InvalidText(at+".namespace", "B", kindstest.NotLabel)},
		kindstest.BadObject{Text: ref("kind: k, name: o, namespace: b"),
			Want: at + ".namespace: Forbidden: `parameters.scope` is set to 'Cluster'"},
	)
	kindstest.CheckChanges(t, ref("kind: k, name: o"),
		kindstest.Change[*networkingv1.IngressClass]{Change: func(c *networkingv1.IngressClass) {
			c.Spec.Parameters = nil
		}, Generation: 2},
		kindstest.Change[*networkingv1.IngressClass]{Change: func(c *networkingv1.IngressClass) {
			c.Spec.Controller = "x.io/z"
		},
			Want: kindstest.InvalidText("spec.controller", "x.io/z", "field is immutable"), Generation: 2},
	)
	kindstest.CheckDefaults[*networkingv1.IngressClass](t, ref("kind: k, name: o"),
		ref("kind: k, name: o, scope: Cluster"))
	for text, want := range map[string]string{class("controller: x.io/y"): "a|x.io/y|<none>|3h",
		ref("apiGroup: g, kind: k, name: o"): "a|x.io/y|k.g/o|3h"} {
		if got := kindstest.PrintTable[*networkingv1.IngressClass](t, text); got !=
			"NAME|CONTROLLER|PARAMETERS|AGE\n"+want {
			t.Error(got)
		}
	}
}
