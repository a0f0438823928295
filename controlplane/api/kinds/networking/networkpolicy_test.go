package networking_test

import (
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"

	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

func netpol(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

func TestNetworkPolicyValidation(t *testing.T) {
	port := func(p string) string { return netpol("ingress: [{ports: [{" + p + "}]}]") }
	peer := func(p string) string { return netpol("egress: [{to: [{" + p + "}]}]") }
	block := func(b string) string { return peer("ipBlock: {" + b + "}") }
	const in, out = "spec.ingress[0].ports[0]", "spec.egress[0].to[0]"
	cidr := func(at, v string) string {
		return kindstest.InvalidText(at, v, validation.IsValidCIDRForLegacyField(nil, v, true, nil)[0].Detail)
	}
	kindstest.CheckRefused[*networkingv1.NetworkPolicy](t,
		kindstest.BadObject{Text: netpol("podSelector: {}"), Want: ""},
		kindstest.BadObject{Text: port("port: 80, endPort: 90"), Want: ""},
		kindstest.BadObject{Text: port("port: http"), Want: ""},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0/8, except: [10.1.0.0/16]"), Want: ""},
		kindstest.BadObject{Text: peer("podSelector: {}, namespaceSelector: {}"), Want: ""},
		kindstest.BadObject{Text: port("port: 80, protocol: ICMP"),
			Want: in + `.protocol: Unsupported value: "ICMP": supported values: "TCP", "UDP", "SCTP"`},
		kindstest.BadObject{Text: port("port: 70000"),
			Want: in + ".port: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{Text: port("port: 0"),
			Want: in + ".port: Invalid value: 0: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{Text: port("port: 80, endPort: 79"),
			Want: in + ".endPort: Invalid value: 79: must be greater than or equal to `port`"},
		kindstest.BadObject{Text: port("port: 80, endPort: 70000"),
			Want: in + ".endPort: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		kindstest.BadObject{Text: port("endPort: 80"),
			Want: in + ".endPort: Invalid value: 80: may not be specified when `port` is not specified"},
		kindstest.BadObject{Text: port("port: http, endPort: 80"),
			Want: in + ".endPort: Invalid value: 80: may not be specified when `port` is non-numeric"},
		kindstest.BadObject{Text: port("port: h_a"),
			Want: kindstest.InvalidText(in+".port", "h_a", validation.IsValidPortName("h_a")[0])},
		kindstest.BadObject{Text: peer(""), Want: out + ": Required value: must specify a peer"},
		kindstest.BadObject{Text: netpol("ingress: [{from: [{}]}]"),
			Want: "spec.ingress[0].from[0]: Required value: must specify a peer"},
		kindstest.BadObject{Text: peer("podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}"),
			Want: out + ": Forbidden: may not specify both ipBlock and another peer"},
		kindstest.BadObject{Text: peer("namespaceSelector: {}, ipBlock: {cidr: 10.0.0.0/8}"),
			Want: out + ": Forbidden: may not specify both ipBlock and another peer"},
		kindstest.BadObject{Text: block("cidr: ''"), Want: out + ".ipBlock.cidr: Required value"},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0"), Want: cidr(out+".ipBlock.cidr", "10.0.0.0")},
		kindstest.BadObject{Text: block("cidr: 10.0.0.1/8"), Want: cidr(out+".ipBlock.cidr", "10.0.0.1/8")},
		kindstest.BadObject{Text: block("cidr: 010.0.0.0/8"), Want: cidr(out+".ipBlock.cidr", "010.0.0.0/8")},
		kindstest.BadObject{Text: block("cidr: '::ffff:10.0.0.0/104'"),
			Want: cidr(out+".ipBlock.cidr", "::ffff:10.0.0.0/104")},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0/8, except: [x]"), Want: cidr(out+".ipBlock.except[0]", "x")},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0/8, except: [11.0.0.0/16]"),
			Want: kindstest.InvalidText(out+".ipBlock.except[0]", "11.0.0.0/16", "must be a strict subset of `cidr`")},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0/8, except: [10.0.0.0/8]"),
			Want: kindstest.InvalidText(out+".ipBlock.except[0]", "10.0.0.0/8", "must be a strict subset of `cidr`")},
		kindstest.BadObject{Text: block("cidr: 10.0.0.0/8, except: ['fd00::/16']"),
			Want: kindstest.InvalidText(out+".ipBlock.except[0]", "fd00::/16", "must be a strict subset of `cidr`")},
		kindstest.BadObject{Text: netpol("podSelector: {matchExpressions: [{key: a, operator: In}]}"),
			Want: "spec.podSelector.matchExpressions[0].values: Required value: must be specified when `operator` is " +
				"'In' or 'NotIn'"},
		kindstest.BadObject{Text: peer("podSelector: {matchExpressions: [{key: a, operator: Near}]}"),
			Want: out + `.podSelector.matchExpressions[0].operator: Invalid value: "Near": not a valid ` +
				`selector operator`},
		kindstest.BadObject{Text: netpol("policyTypes: [Ingress, Sideways]"),
			Want: `spec.policyTypes[1]: Unsupported value: "Sideways": supported values: "Ingress", "Egress"`},
		kindstest.BadObject{Text: netpol("policyTypes: [Ingress, Egress, Ingress]"),
			Want: `spec.policyTypes: Invalid value: ["Ingress","Egress","Ingress"]: may not specify more than ` +
				`two policyTypes`},
	)
}

func TestNetworkPolicyDefaults(t *testing.T) {
	for text, want := range map[string]string{
		netpol("podSelector: {}"): netpol(
			"podSelector: {}, policyTypes: [Ingress]"),
		netpol("podSelector: {}, policyTypes: [Egress]"): netpol(
			"podSelector: {}, policyTypes: [Egress]"),
		netpol("podSelector: {}, egress: [{ports: [{port: 53}]}]"): netpol(
			"podSelector: {}, egress: [{ports: [{port: 53, protocol: TCP}]}], policyTypes: [Ingress, Egress]"),
		netpol("podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]"): netpol(
			"podSelector: {}, ingress: [{ports: [{protocol: UDP}]}], policyTypes: [Ingress]"),
	} {
		kindstest.CheckDefaults[*networkingv1.NetworkPolicy](t, text, want)
	}
}

func TestNetworkPolicyUpdate(t *testing.T) {
	kindstest.CheckChanges(t, netpol("podSelector: {}"),
		kindstest.Change[*networkingv1.NetworkPolicy]{Change: func(p *networkingv1.NetworkPolicy) {
			p.Annotations = map[string]string{"a": "b"}
		}, Generation: 1},
		kindstest.Change[*networkingv1.NetworkPolicy]{Change: func(p *networkingv1.NetworkPolicy) {
			p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{}}
		}, Generation: 2},
	)
	// A range that was stored when the rule was looser does not hold up other changes.
	kindstest.CheckChanges(t, netpol("ingress: [{from: [{ipBlock: {cidr: 10.0.0.1/8}}]}]"),
		kindstest.Change[*networkingv1.NetworkPolicy]{Change: func(p *networkingv1.NetworkPolicy) {
			p.Spec.PodSelector.MatchLabels = map[string]string{"a": "b"}
		}, Generation: 2})
}

func TestNetworkPolicyRows(t *testing.T) {
	for text, want := range map[string]string{netpol(""): "a|<none>|3h",
		netpol("podSelector: {matchLabels: {a: b}}"): "a|a=b|3h"} {
		if got := kindstest.PrintTable[*networkingv1.NetworkPolicy](t, text); got != "NAME|POD-SELECTOR|AGE\n"+want {
			t.Error(got)
		}
	}
}
