package kinds

import (
	"testing"

	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

func netpol(spec string) string { return "{metadata: {name: a}, spec: {" + spec + "}}" }

func TestNetworkPolicyValidation(t *testing.T) {
	port := func(p string) string { return netpol("ingress: [{ports: [{" + p + "}]}]") }
	peer := func(p string) string { return netpol("egress: [{to: [{" + p + "}]}]") }
	block := func(b string) string { return peer("ipBlock: {" + b + "}") }
	const in, out = "spec.ingress[0].ports[0]", "spec.egress[0].to[0]"
	cidr := func(at, v string) string {
		return invalidText(at, v, validation.IsValidCIDRForLegacyField(nil, v, true, nil)[0].Detail)
	}
	refuses[*networkingv1.NetworkPolicy](t,
		bad{netpol("podSelector: {}"), ""},
		bad{port("port: 80, endPort: 90"), ""},
		bad{port("port: http"), ""},
		bad{block("cidr: 10.0.0.0/8, except: [10.1.0.0/16]"), ""},
		bad{peer("podSelector: {}, namespaceSelector: {}"), ""},
		bad{port("port: 80, protocol: ICMP"), in + `.protocol: Unsupported value: "ICMP": supported values: "TCP", "UDP", "SCTP"`},
		bad{port("port: 70000"), in + ".port: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		bad{port("port: 0"), in + ".port: Invalid value: 0: must be between 1 and 65535, inclusive"},
		bad{port("port: 80, endPort: 79"), in + ".endPort: Invalid value: 79: must be greater than or equal to `port`"},
		bad{port("port: 80, endPort: 70000"), in + ".endPort: Invalid value: 70000: must be between 1 and 65535, inclusive"},
		bad{port("endPort: 80"), in + ".endPort: Invalid value: 80: may not be specified when `port` is not specified"},
		bad{port("port: http, endPort: 80"), in + ".endPort: Invalid value: 80: may not be specified when `port` is non-numeric"},
		bad{port("port: h_a"), invalidText(in+".port", "h_a", validation.IsValidPortName("h_a")[0])},
		bad{peer(""), out + ": Required value: must specify a peer"},
		bad{netpol("ingress: [{from: [{}]}]"), "spec.ingress[0].from[0]: Required value: must specify a peer"},
		bad{peer("podSelector: {}, ipBlock: {cidr: 10.0.0.0/8}"), out + ": Forbidden: may not specify both ipBlock and another peer"},
		bad{peer("namespaceSelector: {}, ipBlock: {cidr: 10.0.0.0/8}"), out + ": Forbidden: may not specify both ipBlock and another peer"},
		bad{block("cidr: ''"), out + ".ipBlock.cidr: Required value"},
		bad{block("cidr: 10.0.0.0"), cidr(out+".ipBlock.cidr", "10.0.0.0")},
		bad{block("cidr: 10.0.0.1/8"), cidr(out+".ipBlock.cidr", "10.0.0.1/8")},
		bad{block("cidr: 010.0.0.0/8"), cidr(out+".ipBlock.cidr", "010.0.0.0/8")},
		bad{block("cidr: '::ffff:10.0.0.0/104'"), cidr(out+".ipBlock.cidr", "::ffff:10.0.0.0/104")},
		bad{block("cidr: 10.0.0.0/8, except: [x]"), cidr(out+".ipBlock.except[0]", "x")},
		bad{block("cidr: 10.0.0.0/8, except: [11.0.0.0/16]"), invalidText(out+".ipBlock.except[0]", "11.0.0.0/16", "must be a strict subset of `cidr`")},
		bad{block("cidr: 10.0.0.0/8, except: [10.0.0.0/8]"), invalidText(out+".ipBlock.except[0]", "10.0.0.0/8", "must be a strict subset of `cidr`")},
		bad{block("cidr: 10.0.0.0/8, except: ['fd00::/16']"), invalidText(out+".ipBlock.except[0]", "fd00::/16", "must be a strict subset of `cidr`")},
		bad{netpol("podSelector: {matchExpressions: [{key: a, operator: In}]}"), "spec.podSelector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'"},
		bad{peer("podSelector: {matchExpressions: [{key: a, operator: Near}]}"), out + `.podSelector.matchExpressions[0].operator: Invalid value: "Near": not a valid selector operator`},
		bad{netpol("policyTypes: [Ingress, Sideways]"), `spec.policyTypes[1]: Unsupported value: "Sideways": supported values: "Ingress", "Egress"`},
		bad{netpol("policyTypes: [Ingress, Egress, Ingress]"), `spec.policyTypes: Invalid value: ["Ingress","Egress","Ingress"]: may not specify more than two policyTypes`},
	)
}

func TestNetworkPolicyDefaults(t *testing.T) {
	for text, want := range map[string]string{
		netpol("podSelector: {}"):                                        netpol("podSelector: {}, policyTypes: [Ingress]"),
		netpol("podSelector: {}, policyTypes: [Egress]"):                 netpol("podSelector: {}, policyTypes: [Egress]"),
		netpol("podSelector: {}, egress: [{ports: [{port: 53}]}]"):       netpol("podSelector: {}, egress: [{ports: [{port: 53, protocol: TCP}]}], policyTypes: [Ingress, Egress]"),
		netpol("podSelector: {}, ingress: [{ports: [{protocol: UDP}]}]"): netpol("podSelector: {}, ingress: [{ports: [{protocol: UDP}]}], policyTypes: [Ingress]"),
	} {
		defaulted[*networkingv1.NetworkPolicy](t, text, want)
	}
}

func TestNetworkPolicyUpdate(t *testing.T) {
	changes(t, netpol("podSelector: {}"),
		changed[*networkingv1.NetworkPolicy]{change: func(p *networkingv1.NetworkPolicy) { p.Annotations = map[string]string{"a": "b"} }, generation: 1},
		changed[*networkingv1.NetworkPolicy]{change: func(p *networkingv1.NetworkPolicy) { p.Spec.Egress = []networkingv1.NetworkPolicyEgressRule{{}} }, generation: 2},
	)
	// A range that was stored when the rule was looser does not hold up other changes.
	changes(t, netpol("ingress: [{from: [{ipBlock: {cidr: 10.0.0.1/8}}]}]"),
		changed[*networkingv1.NetworkPolicy]{change: func(p *networkingv1.NetworkPolicy) { p.Spec.PodSelector.MatchLabels = map[string]string{"a": "b"} }, generation: 2})
}

func TestNetworkPolicyRows(t *testing.T) {
	for text, want := range map[string]string{netpol(""): "a|<none>|3h", netpol("podSelector: {matchLabels: {a: b}}"): "a|a=b|3h"} {
		if got := table[*networkingv1.NetworkPolicy](t, text); got != "NAME|POD-SELECTOR|AGE\n"+want {
			t.Error(got)
		}
	}
}
