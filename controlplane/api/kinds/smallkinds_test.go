package kinds

import (
	"strings"
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

func TestServiceCIDR(t *testing.T) {
	cidrs := func(list string) string { return "{metadata: {name: a}, spec: {cidrs: [" + list + "]}}" }
	wrong := func(at, v string) string { return invalidText(at, v, validation.IsValidCIDR(nil, v)[0].Detail) }
	const at = "spec.cidrs"
	refuses[*networkingv1.ServiceCIDR](t,
		bad{cidrs("10.0.0.0/24"), ""},
		bad{cidrs("10.0.0.0/24, 'fd00::/112'"), ""},
		bad{cidrs(""), at + ": Required value: at least one CIDR required"},
		bad{cidrs("a, b, c"), at + `: Invalid value: {"CIDRs":["a","b","c"]}: may only hold up to 2 values`},
		bad{cidrs("10.0.0.0"), wrong(at+"[0]", "10.0.0.0")},
		bad{cidrs("10.0.0.1/24"), wrong(at+"[0]", "10.0.0.1/24")},
		bad{cidrs("10.0.0.0/024"), wrong(at+"[0]", "10.0.0.0/024")},
		bad{cidrs("10.0.0.0/24, x"), wrong(at+"[1]", "x")},
		bad{cidrs("10.0.0.0/24, 10.0.1.0/24"), at + `: Invalid value: ["10.0.0.0/24","10.0.1.0/24"]: may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64`},
		bad{cidrs("'fd00::/112', 'fd01::/112'"), at + `: Invalid value: ["fd00::/112","fd01::/112"]: may specify no more than one IP for each IP family, i.e 192.168.0.0/24 and 2001:db8::/64`},
		bad{"{metadata: {name: A}, spec: {cidrs: [10.0.0.0/24]}}", invalidText("metadata.name", "A", notSubdomain)},
	)
	set := func(list ...string) func(*networkingv1.ServiceCIDR) {
		return func(c *networkingv1.ServiceCIDR) { c.Spec.CIDRs = list }
	}
	changes(t, cidrs("10.0.0.0/24"),
		changed[*networkingv1.ServiceCIDR]{change: set("10.0.0.0/24", "fd00::/112")},
		changed[*networkingv1.ServiceCIDR]{change: set("10.0.1.0/24"), want: invalidText(at+"[0]", "10.0.1.0/24", "field is immutable")},
		changed[*networkingv1.ServiceCIDR]{change: set("10.0.1.0/24", "fd00::/112"), want: invalidText(at+"[0]", "10.0.1.0/24", "field is immutable")},
		changed[*networkingv1.ServiceCIDR]{sub: "status", change: set()},
	)
	changes(t, cidrs("10.0.0.0/24, 'fd00::/112'"),
		changed[*networkingv1.ServiceCIDR]{change: set("10.0.0.0/24"), want: at + `: Invalid value: ["10.0.0.0/24"]: field is immutable`})
	if got := table[*networkingv1.ServiceCIDR](t, cidrs("10.0.0.0/24, 'fd00::/112'")); got != "NAME|CIDRS|AGE\na|10.0.0.0/24,fd00::/112|3h" {
		t.Error(got)
	}
}

func TestIPAddress(t *testing.T) {
	named := func(name, ref string) string {
		return "{metadata: {name: '" + name + "'}, spec: {parentRef: {" + ref + "}}}"
	}
	ip := func(ref string) string { return named("10.0.0.1", ref) }
	const at = "spec.parentRef"
	refuses[*networkingv1.IPAddress](t,
		bad{ip("resource: services, namespace: a, name: b"), ""},
		bad{named("fd00::1", "group: gateway.networking.k8s.io, resource: gateways, namespace: a, name: b"), ""},
		bad{"{metadata: {name: 10.0.0.1}}", at + ": Required value"},
		bad{named("a", "resource: r, name: b"), invalidText("metadata.name", "a", "must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")},
		bad{named("fd00:0::1", "resource: r, name: b"), invalidText("metadata.name", "fd00:0::1", `must be in canonical form ("fd00::1")`)},
		bad{ip("name: b"), at + ".resource: Required value"},
		bad{ip("resource: r"), at + ".name: Required value"},
		bad{ip("resource: r, name: a/b"), invalidText(at+".name", "a/b", "may not contain '/'")},
		bad{ip("resource: '.', name: b"), invalidText(at+".resource", ".", "may not be '.'")},
		bad{ip("resource: r, name: b, namespace: a%"), invalidText(at+".namespace", "a%", "may not contain '%'")},
		bad{ip("group: G, resource: r, name: b"), invalidText(at+".group", "G", notSubdomain)},
	)
	changes(t, ip("resource: services, namespace: a, name: b"),
		changed[*networkingv1.IPAddress]{change: func(a *networkingv1.IPAddress) { a.Labels = map[string]string{"a": "b"} }},
		changed[*networkingv1.IPAddress]{change: func(a *networkingv1.IPAddress) { a.Spec.ParentRef = nil }, want: at + ": Required value\n" + at + ": Invalid value: null: field is immutable"},
	)
	for text, want := range map[string]string{
		ip("resource: services, namespace: a, name: b"): "10.0.0.1|services/a/b", ip("group: g.io, resource: rs, name: b"): "10.0.0.1|rs.g.io/b",
		"{metadata: {name: 10.0.0.1}}": "10.0.0.1|<none>",
	} {
		if got := table[*networkingv1.IPAddress](t, text); got != "NAME|PARENTREF\n"+want {
			t.Error(got)
		}
	}
	got := All().ByType(&networkingv1.IPAddress{}).Fields(load[*networkingv1.IPAddress](t, ip("group: g, resource: r, namespace: a, name: b")))
	if got.String() != "spec.parentRef.group=g,spec.parentRef.name=b,spec.parentRef.namespace=a,spec.parentRef.resource=r" {
		t.Error(got)
	}
}

func TestRuntimeClass(t *testing.T) {
	class := func(rest string) string { return "{metadata: {name: a}, handler: h, " + rest + "}" }
	refuses[*nodev1.RuntimeClass](t,
		bad{class("overhead: {podFixed: {cpu: 10m}}, scheduling: {nodeSelector: {a: b}, tolerations: [{key: k, operator: Exists}]}"), ""},
		bad{"{metadata: {name: a}}", "handler: Required value"},
		bad{"{metadata: {name: a}, handler: H}", invalidText("handler", "H", notLabel)},
		bad{"{metadata: {name: a}, handler: a.b}", invalidText("handler", "a.b", validation.IsDNS1123Label("a.b")[0])},
		bad{"{metadata: {name: a}, handler: " + strings.Repeat("a", 64) + "}", invalidText("handler", strings.Repeat("a", 64), "must be no more than 63 characters")},
		bad{class("overhead: {podFixed: {cpu: -1}}"), invalidText("overhead.limits[cpu]", "-1", "must be greater than or equal to 0")},
		bad{class("overhead: {podFixed: {beans: 1}}"), invalidText("overhead.limits[beans]", "beans", "must be a standard resource type or fully qualified") +
			"\n" + invalidText("overhead.limits[beans]", "beans", "must be a standard resource for containers")},
		bad{class("scheduling: {nodeSelector: {a b: c}}"), invalidText("scheduling.nodeSelector", "a b", validation.IsQualifiedName("a b")[0])},
		bad{class("scheduling: {nodeSelector: {a: c d}}"), invalidText("scheduling.nodeSelector", "c d", validation.IsValidLabelValue("c d")[0])},
		bad{class("scheduling: {tolerations: [{key: k, operator: Near}]}"), `scheduling.tolerations[0].operator: Unsupported value: "Near": supported values: "Equal", "Exists"`},
		bad{class("scheduling: {tolerations: [{key: k, operator: Exists, value: v}]}"), "scheduling.tolerations[0].operator: Invalid value: \"v\": value must be empty when `operator` is 'Exists'"},
	)
	twice := class("scheduling: {tolerations: [{key: k, operator: Exists}, {key: j}, {key: k, operator: Exists, tolerationSeconds: 1}]}")
	refuses[*nodev1.RuntimeClass](t, bad{twice, `scheduling.tolerations[2].effect: Invalid value: "": effect must be 'NoExecute' when ` +
		"`tolerationSeconds` is set\n" + `scheduling.tolerations[2]: Duplicate value: {"key":"k","operator":"Exists","tolerationSeconds":1}`})
	changes(t, class(""),
		changed[*nodev1.RuntimeClass]{change: func(c *nodev1.RuntimeClass) { c.Handler = "g" }, want: invalidText("handler", "g", "field is immutable")})
	if got := table[*nodev1.RuntimeClass](t, class("")); got != "NAME|HANDLER|AGE\na|h|3h" {
		t.Error(got)
	}
}
