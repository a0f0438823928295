package networking

import (
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// NetworkPolicyKind returns the definition of the kind NetworkPolicy.
func NetworkPolicyKind() *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: networkingv1.SchemeGroupVersion, Kind: "NetworkPolicy", Plural: "networkpolicies",
		Singular: "networkpolicy",
		Short:    []string{"netpol"},
	}, func(l *networkingv1.NetworkPolicyList) *[]networkingv1.NetworkPolicy { return &l.Items })
	k.Writes.Default = builder.Default(defaultNetworkPolicy)
	builder.CountGenerations(k, func(p *networkingv1.NetworkPolicy) any { return p.Spec })
	builder.AddValidation(k, func(p *networkingv1.NetworkPolicy) field.ErrorList {
		return validateNetworkPolicy(&p.Spec, field.NewPath("spec"))
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.StringColumn("Pod-Selector"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(p *networkingv1.NetworkPolicy, now time.Time) []any {
		return []any{p.Name, metav1.FormatLabelSelector(&p.Spec.PodSelector), builder.Age(p, now)}
	})
	return k
}

// defaultNetworkPolicy sets the defaults of a NetworkPolicy. The protocol of a port is TCP. The
// policy types are Ingress, and also Egress if there are egress rules.
func defaultNetworkPolicy(policy *networkingv1.NetworkPolicy) {
	ports := func(list []networkingv1.NetworkPolicyPort) {
		for i := range list {
			builder.SetDefaultPtr(&list[i].Protocol, corev1.ProtocolTCP)
		}
	}
	for i := range policy.Spec.Ingress {
		ports(policy.Spec.Ingress[i].Ports)
	}
	for i := range policy.Spec.Egress {
		ports(policy.Spec.Egress[i].Ports)
	}
	if len(policy.Spec.PolicyTypes) == 0 {
		policy.Spec.PolicyTypes = []networkingv1.PolicyType{networkingv1.PolicyTypeIngress}
		if len(policy.Spec.Egress) > 0 {
			policy.Spec.PolicyTypes = append(policy.Spec.PolicyTypes, networkingv1.PolicyTypeEgress)
		}
	}
}

func validateNetworkPolicy(s *networkingv1.NetworkPolicySpec, spec *field.Path) field.ErrorList {
	errs := fieldrules.ValidateSelector(&s.PodSelector, spec.Child("podSelector"))
	rule := func(ports []networkingv1.NetworkPolicyPort, peers []networkingv1.NetworkPolicyPeer,
		fldPath *field.Path, side string) {
		for i := range ports {
			errs = append(errs, validatePolicyPort(&ports[i], fldPath.Child("ports").Index(i))...)
		}
		for i := range peers {
			errs = append(errs, validatePolicyPeer(&peers[i], fldPath.Child(side).Index(i))...)
		}
	}
	for i, r := range s.Ingress {
		rule(r.Ports, r.From, spec.Child("ingress").Index(i), "from")
	}
	for i, r := range s.Egress {
		rule(r.Ports, r.To, spec.Child("egress").Index(i), "to")
	}
	types := spec.Child("policyTypes")
	if len(s.PolicyTypes) > 2 {
		return append(errs, field.Invalid(types, &s.PolicyTypes, "may not specify more than two policyTypes"))
	}
	for i, t := range s.PolicyTypes {
		if t != networkingv1.PolicyTypeIngress && t != networkingv1.PolicyTypeEgress {
			errs = append(errs, field.NotSupported(types.Index(i), t, []networkingv1.PolicyType{
				networkingv1.PolicyTypeIngress, networkingv1.PolicyTypeEgress}))
		}
	}
	return errs
}

func validatePolicyPort(p *networkingv1.NetworkPolicyPort, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if t := p.Protocol; t != nil && *t != corev1.ProtocolTCP && *t != corev1.ProtocolUDP && *t != corev1.ProtocolSCTP {
		errs = append(errs, field.NotSupported(fldPath.Child("protocol"), *t, []corev1.Protocol{
			corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}))
	}
	end := fldPath.Child("endPort")
	switch {
	case p.Port == nil:
		if p.EndPort != nil {
			errs = append(errs, field.Invalid(end, *p.EndPort, "may not be specified when `port` is not specified"))
		}
	case p.Port.Type == intstr.Int:
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("port"), p.Port.IntVal,
			validation.IsValidPortNum(int(p.Port.IntVal)))...)
		if p.EndPort == nil {
			break
		}
		if *p.EndPort < p.Port.IntVal {
			errs = append(errs, field.Invalid(end, *p.EndPort, "must be greater than or equal to `port`"))
		}
		errs = append(errs, fieldrules.InvalidErrors(end, *p.EndPort, validation.IsValidPortNum(int(*p.EndPort)))...)
	default:
		if p.EndPort != nil {
			errs = append(errs, field.Invalid(end, *p.EndPort, "may not be specified when `port` is non-numeric"))
		}
		errs = append(errs, fieldrules.InvalidErrors(fldPath.Child("port"), p.Port.StrVal,
			validation.IsValidPortName(p.Port.StrVal))...)
	}
	return errs
}

func validatePolicyPeer(p *networkingv1.NetworkPolicyPeer, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p.PodSelector != nil {
		errs = append(errs, fieldrules.ValidateSelector(p.PodSelector, fldPath.Child("podSelector"))...)
	}
	if p.NamespaceSelector != nil {
		errs = append(errs, fieldrules.ValidateSelector(p.NamespaceSelector, fldPath.Child("namespaceSelector"))...)
	}
	if p.IPBlock != nil {
		errs = append(errs, validateIPBlock(p.IPBlock, fldPath.Child("ipBlock"))...)
	}
	switch selects := p.PodSelector != nil || p.NamespaceSelector != nil; {
	case !selects && p.IPBlock == nil:
		errs = append(errs, field.Required(fldPath, "must specify a peer"))
	case selects && p.IPBlock != nil:
		errs = append(errs, field.Forbidden(fldPath, "may not specify both ipBlock and another peer"))
	}
	return errs
}

func validateIPBlock(b *networkingv1.IPBlock, fldPath *field.Path) field.ErrorList {
	if b.CIDR == "" {
		return field.ErrorList{field.Required(fldPath.Child("cidr"), "")}
	}
	errs := validation.IsValidCIDRForLegacyField(fldPath.Child("cidr"), b.CIDR, true, nil)
	block, err := netip.ParsePrefix(b.CIDR)
	if err != nil {
		return errs
	}
	for i, e := range b.Except {
		here := fldPath.Child("except").Index(i)
		errs = append(errs, validation.IsValidCIDRForLegacyField(here, e, true, nil)...)
		part, err := netip.ParsePrefix(e)
		if err == nil && (!block.Contains(part.Addr()) || block.Bits() >= part.Bits()) {
			errs = append(errs, field.Invalid(here, e, "must be a strict subset of `cidr`"))
		}
	}
	return errs
}
