package networking_test

import (
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func TestServiceCIDR(t *testing.T) {
	cidrs := func(list string) string { return "{metadata: {name: a}, spec: {cidrs: [" + list + "]}}" }
	wrong := func(at, v string) string {
		return kindstest.InvalidText(at, v, validation.IsValidCIDR(nil, v)[0].Detail)
	}
	const at = "spec.cidrs"
	kindstest.CheckRefused[*networkingv1.ServiceCIDR](t,
		kindstest.BadObject{Text: cidrs("10.0.0.0/24"), Want: ""},
		kindstest.BadObject{Text: cidrs("10.0.0.0/24, 'fd00::/112'"), Want: ""},
		kindstest.BadObject{Text: cidrs(""), Want: at + ": Required value: at least one CIDR required"},
		kindstest.BadObject{Text: cidrs("a, b, c"),
			Want: at + `: Invalid value: {"CIDRs":["a","b","c"]}: may only hold up to 2 values`},
		kindstest.BadObject{Text: cidrs("10.0.0.0"), Want: wrong(at+"[0]", "10.0.0.0")},
		kindstest.BadObject{Text: cidrs("10.0.0.1/24"), Want: wrong(at+"[0]", "10.0.0.1/24")},
		kindstest.BadObject{Text: cidrs("10.0.0.0/024"), Want: wrong(at+"[0]", "10.0.0.0/024")},
		kindstest.BadObject{Text: cidrs("10.0.0.0/24, x"), Want: wrong(at+"[1]", "x")},
		kindstest.BadObject{Text: cidrs("10.0.0.0/24, 10.0.1.0/24"),
			Want: at + `: Invalid value: ["10.0.0.0/24","10.0.1.0/24"]: may specify no more than one IP for each IP ` +
				`family, i.e 192.168.0.0/24 and 2001:db8::/64`},
		kindstest.BadObject{Text: cidrs("'fd00::/112', 'fd01::/112'"),
			Want: at + `: Invalid value: ["fd00::/112","fd01::/112"]: may specify no more than one IP for each IP ` +
				`family, i.e 192.168.0.0/24 and 2001:db8::/64`},
		kindstest.BadObject{Text: "{metadata: {name: A}, spec: {cidrs: [10.0.0.0/24]}}",
			Want: kindstest.InvalidText("metadata.name", "A", kindstest.NotSubdomain)},
	)
	set := func(list ...string) func(*networkingv1.ServiceCIDR) {
		return func(c *networkingv1.ServiceCIDR) { c.Spec.CIDRs = list }
	}
	kindstest.CheckChanges(t, cidrs("10.0.0.0/24"),
		kindstest.Change[*networkingv1.ServiceCIDR]{Change: set("10.0.0.0/24", "fd00::/112")},
		kindstest.Change[*networkingv1.ServiceCIDR]{Change: set("10.0.1.0/24"),
			Want: kindstest.InvalidText(at+"[0]", "10.0.1.0/24", "field is immutable")},
		kindstest.Change[*networkingv1.ServiceCIDR]{Change: set("10.0.1.0/24", "fd00::/112"),
			Want: kindstest.InvalidText(at+"[0]", "10.0.1.0/24", "field is immutable")},
		kindstest.Change[*networkingv1.ServiceCIDR]{Sub: "status", Change: set()},
	)
	kindstest.CheckChanges(t, cidrs("10.0.0.0/24, 'fd00::/112'"),
		kindstest.Change[*networkingv1.ServiceCIDR]{Change: set("10.0.0.0/24"),
			Want: at + `: Invalid value: ["10.0.0.0/24"]: field is immutable`})
	if got := kindstest.PrintTable[*networkingv1.ServiceCIDR](t, cidrs("10.0.0.0/24, 'fd00::/112'")); got !=
		"NAME|CIDRS|AGE\na|10.0.0.0/24,fd00::/112|3h" {
		t.Error(got)
	}
}

func TestIPAddress(t *testing.T) {
	named := func(name, ref string) string {
		return "{metadata: {name: '" + name + "'}, spec: {parentRef: {" + ref + "}}}"
	}
	ip := func(ref string) string { return named("10.0.0.1", ref) }
	const at = "spec.parentRef"
	kindstest.CheckRefused[*networkingv1.IPAddress](t,
		kindstest.BadObject{Text: ip("resource: services, namespace: a, name: b"), Want: ""},
		kindstest.BadObject{Text: named("fd00::1",
			"group: gateway.networking.k8s.io, resource: gateways, namespace: a, name: b"), Want: ""},
		kindstest.BadObject{Text: "{metadata: {name: 10.0.0.1}}", Want: at + ": Required value"},
		kindstest.BadObject{Text: named("a", "resource: r, name: b"),
			Want: kindstest.InvalidText("metadata.name", "a",
				"must be a valid IP address, (e.g. 10.9.8.7 or 2001:db8::ffff)")},
		kindstest.BadObject{Text: named("fd00:0::1", "resource: r, name: b"),
			Want: kindstest.InvalidText("metadata.name", "fd00:0::1", `must be in canonical form ("fd00::1")`)},
		kindstest.BadObject{Text: ip("name: b"), Want: at + ".resource: Required value"},
		kindstest.BadObject{Text: ip("resource: r"), Want: at + ".name: Required value"},
		kindstest.BadObject{Text: ip("resource: r, name: a/b"),
			Want: kindstest.InvalidText(at+".name", "a/b", "may not contain '/'")},
		kindstest.BadObject{Text: ip("resource: '.', name: b"),
			Want: kindstest.InvalidText(at+".resource", ".", "may not be '.'")},
		kindstest.BadObject{Text: ip("resource: r, name: b, namespace: a%"),
			Want: kindstest.InvalidText(at+".namespace", "a%", "may not contain '%'")},
		kindstest.BadObject{Text: ip("group: G, resource: r, name: b"),
			Want: kindstest.InvalidText(at+".group", "G", kindstest.NotSubdomain)},
	)
	kindstest.CheckChanges(t, ip("resource: services, namespace: a, name: b"),
		kindstest.Change[*networkingv1.IPAddress]{Change: func(a *networkingv1.IPAddress) {
			a.Labels = map[string]string{"a": "b"}
		}},
		kindstest.Change[*networkingv1.IPAddress]{Change: func(a *networkingv1.IPAddress) {
			a.Spec.ParentRef = nil
		}, Want: at + ": Required value\n" + at + ": Invalid value: null: field is immutable"},
	)
	for text, want := range map[string]string{
		ip("resource: services, namespace: a, name: b"): "10.0.0.1|services/a/b",
		ip("group: g.io, resource: rs, name: b"):        "10.0.0.1|rs.g.io/b",
		"{metadata: {name: 10.0.0.1}}":                  "10.0.0.1|<none>",
	} {
		if got := kindstest.PrintTable[*networkingv1.IPAddress](t, text); got != "NAME|PARENTREF\n"+want {
			t.Error(got)
		}
	}
	got := kinds.All().ByType(&networkingv1.IPAddress{}).Lists.Fields(kindstest.Load[*networkingv1.IPAddress](t,
		ip("group: g, resource: r, namespace: a, name: b")))
	if got.String() !=
		"spec.parentRef.group=g,spec.parentRef.name=b,spec.parentRef.namespace=a,spec.parentRef.resource=r" {
		t.Error(got)
	}
}
