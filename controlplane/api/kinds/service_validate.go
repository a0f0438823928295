package kinds

import (
	"fmt"
	"net"
	"slices"

	corev1 "k8s.io/api/core/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api/balancer"
)

// maxAffinitySeconds is a day, the longest session affinity.
const maxAffinitySeconds = 86400

func validateService(s *corev1.Service) field.ErrorList {
	spec := field.NewPath("spec")
	errs := oneOf(s.Spec.Type, spec.Child("type"), corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	errs = append(errs, validateSessionAffinity(&s.Spec, spec)...)
	if s.Spec.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabels(s.Spec.Selector, spec.Child("selector"))...)
	}
	headless := s.Spec.ClusterIP == corev1.ClusterIPNone
	external := s.Spec.Type == corev1.ServiceTypeExternalName
	if len(s.Spec.Ports) == 0 && !headless && !external {
		errs = append(errs, field.Required(spec.Child("ports"), ""))
	}
	errs = append(errs, validateServicePorts(&s.Spec, spec.Child("ports"))...)
	switch {
	case external:
		errs = append(errs, validateExternalName(&s.Spec, spec)...)
	case headless && usesNodePorts(s.Spec.Type):
		errs = append(errs, field.Invalid(spec.Child("clusterIPs").Index(0), s.Spec.ClusterIP,
			fmt.Sprintf("may not be set to 'None' for %s services", s.Spec.Type)))
	}
	errs = append(errs, validateClusterIPs(&s.Spec, spec)...)
	for i, ip := range s.Spec.ExternalIPs {
		at := spec.Child("externalIPs").Index(i)
		if e := validation.IsValidIP(at, ip); len(e) > 0 {
			errs = append(errs, e...)
		} else if p := net.ParseIP(ip); p.IsUnspecified() || p.IsLoopback() || p.IsLinkLocalUnicast() || p.IsLinkLocalMulticast() {
			errs = append(errs, field.Invalid(at, ip, "may not be an unspecified, loopback or link-local address"))
		}
	}
	errs = append(errs, validateTopologyMode(s)...)
	errs = append(errs, validateBalancerWish(s)...)
	return append(errs, validateTrafficPolicies(&s.Spec, spec)...)
}

// validateBalancerWish refuses what nobody could follow in the annotations by which a Service asks for addresses.
func validateBalancerWish(s *corev1.Service) field.ErrorList {
	at := field.NewPath("metadata", "annotations")
	text, asked := s.Annotations[balancer.AddressesAnnotation]
	if !asked {
		return nil // spec.loadBalancerIP is text to Kubernetes
	}
	var errs field.ErrorList
	wish, err := balancer.WishOf(s)
	if err != nil {
		return append(errs, field.Invalid(at.Key(balancer.AddressesAnnotation), text, err.Error()))
	}
	for _, a := range wish.Addresses {
		family := corev1.IPv4Protocol
		if a.Is6() {
			family = corev1.IPv6Protocol
		}
		if s.Spec.Type == corev1.ServiceTypeLoadBalancer && len(s.Spec.IPFamilies) > 0 && !slices.Contains(s.Spec.IPFamilies, family) {
			errs = append(errs, field.Invalid(at.Key(balancer.AddressesAnnotation), text,
				fmt.Sprintf("the Service has no %s: ask for no %s address, or add it to spec.ipFamilies", family, family)))
		}
	}
	return errs
}

// validateTopologyMode wants the two names of one annotation to say the same.
func validateTopologyMode(s *corev1.Service) field.ErrorList {
	old, both := s.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	mode, ok := s.Annotations[corev1.AnnotationTopologyMode]
	if !both || !ok || old == mode {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "annotations").Key(corev1.DeprecatedAnnotationTopologyAwareHints), old,
		fmt.Sprintf("must match annotations[%s] when both are specified", corev1.AnnotationTopologyMode))}
}

func validateSessionAffinity(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	errs := oneOf(s.SessionAffinity, spec.Child("sessionAffinity"), corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	if c := s.SessionAffinityConfig; c != nil && c.ClientIP != nil {
		if t := val(c.ClientIP.TimeoutSeconds); t <= 0 || t > maxAffinitySeconds {
			errs = append(errs, field.Invalid(spec.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), t,
				fmt.Sprintf("must be greater than 0 and less than %d", maxAffinitySeconds)))
		}
	}
	return errs
}

func validateExternalName(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if s.ClusterIP != "" {
		errs = append(errs, field.Forbidden(spec.Child("clusterIPs"), "may not be set for ExternalName services"))
	}
	if s.ExternalName == "" {
		return append(errs, field.Required(spec.Child("externalName"), ""))
	}
	return append(errs, invalid(spec.Child("externalName"), s.ExternalName, validation.IsDNS1123Subdomain(s.ExternalName))...)
}

func validateClusterIPs(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	at := spec.Child("clusterIPs")
	var errs field.ErrorList
	if len(s.ClusterIPs) > 0 && s.ClusterIP != s.ClusterIPs[0] {
		errs = append(errs, field.Invalid(at, s.ClusterIPs, "first value must match `clusterIP`"))
	}
	if len(s.ClusterIPs) > 2 {
		errs = append(errs, field.TooMany(at, len(s.ClusterIPs), 2))
	}
	for i, ip := range s.ClusterIPs {
		if ip == corev1.ClusterIPNone {
			if i > 0 || len(s.ClusterIPs) > 1 {
				errs = append(errs, field.Invalid(at.Index(i), ip, "may not be combined with addresses"))
			}
			continue
		}
		errs = append(errs, validation.IsValidIP(at.Index(i), ip)...)
	}
	for i, f := range s.IPFamilies {
		errs = append(errs, oneOf(f, spec.Child("ipFamilies").Index(i), corev1.IPv4Protocol, corev1.IPv6Protocol)...)
	}
	if p := s.IPFamilyPolicy; p != nil {
		errs = append(errs, oneOf(*p, spec.Child("ipFamilyPolicy"),
			corev1.IPFamilyPolicySingleStack, corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)...)
	}
	return errs
}

func validateTrafficPolicies(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := s.InternalTrafficPolicy; p != nil {
		errs = append(errs, oneOf(*p, spec.Child("internalTrafficPolicy"),
			corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	}
	if d := s.TrafficDistribution; d != nil {
		errs = append(errs, listed(*d, spec.Child("trafficDistribution"), corev1.ServiceTrafficDistributionPreferClose,
			corev1.ServiceTrafficDistributionPreferSameNode, corev1.ServiceTrafficDistributionPreferSameZone)...)
	}
	at := spec.Child("externalTrafficPolicy")
	switch {
	case usesNodePorts(s.Type):
		errs = append(errs, oneOf(s.ExternalTrafficPolicy, at,
			corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
	case s.ExternalTrafficPolicy != "" && len(s.ExternalIPs) == 0:
		errs = append(errs, field.Invalid(at, s.ExternalTrafficPolicy, "may only be set for externally-accessible services"))
	}
	errs = append(errs, validateHealthPort(s, spec.Child("healthCheckNodePort"))...)
	if s.Type != corev1.ServiceTypeLoadBalancer {
		if s.AllocateLoadBalancerNodePorts != nil {
			errs = append(errs, field.Forbidden(spec.Child("allocateLoadBalancerNodePorts"), "may only be used when `type` is 'LoadBalancer'"))
		}
		if s.LoadBalancerClass != nil {
			errs = append(errs, field.Forbidden(spec.Child("loadBalancerClass"), "may only be used when `type` is 'LoadBalancer'"))
		}
	}
	for i, cidr := range s.LoadBalancerSourceRanges {
		errs = append(errs, validation.IsValidCIDR(spec.Child("loadBalancerSourceRanges").Index(i), cidr)...)
	}
	return errs
}

func validateHealthPort(s *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	n := s.HealthCheckNodePort
	switch {
	case n == 0:
		return nil
	case !needsHealthPort(s):
		return field.ErrorList{field.Invalid(at, n, "may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'")}
	case n < MinNodePort || n > MaxNodePort:
		return field.ErrorList{field.Invalid(at, n,
			fmt.Sprintf("provided port is not in the valid range. The range of valid ports is %d-%d", MinNodePort, MaxNodePort))}
	}
	for _, p := range s.Ports {
		if p.NodePort == n && p.Protocol == corev1.ProtocolTCP {
			return field.ErrorList{field.Invalid(at, n, "provided port is already allocated")}
		}
	}
	return nil
}

func validateServicePorts(s *corev1.ServiceSpec, at *field.Path) field.ErrorList {
	var errs field.ErrorList
	names, ports, nodePorts := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for i, p := range s.Ports {
		here := at.Index(i)
		switch {
		case p.Name == "" && len(s.Ports) > 1:
			errs = append(errs, field.Required(here.Child("name"), ""))
		case p.Name != "":
			errs = append(errs, invalid(here.Child("name"), p.Name, validation.IsDNS1123Label(p.Name))...)
			if names[p.Name] {
				errs = append(errs, field.Duplicate(here.Child("name"), p.Name))
			}
			names[p.Name] = true
		}
		errs = append(errs, invalid(here.Child("port"), p.Port, validation.IsValidPortNum(int(p.Port)))...)
		errs = append(errs, validateProtocol(p.Protocol, here.Child("protocol"))...)
		errs = append(errs, validatePortNumOrName(p.TargetPort, here.Child("targetPort"))...)
		if key := fmt.Sprintf("%s-%d", p.Protocol, p.Port); ports[key] {
			errs = append(errs, field.Duplicate(here, corev1.ServicePort{Protocol: p.Protocol, Port: p.Port}))
		} else {
			ports[key] = true
		}
		errs = append(errs, validateNodePort(s.Type, p, nodePorts, here.Child("nodePort"))...)
	}
	return errs
}

func validateNodePort(t corev1.ServiceType, p corev1.ServicePort, seen map[string]bool, at *field.Path) field.ErrorList {
	switch {
	case p.NodePort == 0:
		return nil
	case !usesNodePorts(t):
		return field.ErrorList{field.Forbidden(at, fmt.Sprintf("may not be used when `type` is '%s'", t))}
	case p.NodePort < MinNodePort || p.NodePort > MaxNodePort:
		return field.ErrorList{field.Invalid(at, p.NodePort,
			fmt.Sprintf("provided port is not in the valid range. The range of valid ports is %d-%d", MinNodePort, MaxNodePort))}
	case seen[nodePortValue(p)]:
		return field.ErrorList{field.Duplicate(at, p.NodePort)}
	}
	seen[nodePortValue(p)] = true
	return nil
}

func validateProtocol(p corev1.Protocol, at *field.Path) field.ErrorList {
	return oneOf(p, at, corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP)
}

// validatePortNumOrName judges a port that may be the name of a container's port.
func validatePortNumOrName(p intstr.IntOrString, at *field.Path) field.ErrorList {
	if p.Type == intstr.String {
		return invalid(at, p.StrVal, validation.IsValidPortName(p.StrVal))
	}
	return invalid(at, p.IntVal, validation.IsValidPortNum(int(p.IntVal)))
}

func validateServiceUpdate(obj, old *corev1.Service) field.ErrorList {
	if !NeedsClusterIP(old) && old.Spec.ClusterIP == "" || obj.Spec.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	var errs field.ErrorList
	if needsHealthPort(&obj.Spec) && needsHealthPort(&old.Spec) && old.Spec.HealthCheckNodePort != 0 {
		errs = sameOr(obj.Spec.HealthCheckNodePort, old.Spec.HealthCheckNodePort,
			field.NewPath("spec", "healthCheckNodePort"))
	}
	at := field.NewPath("spec", "clusterIPs")
	if old.Spec.ClusterIP != "" && obj.Spec.ClusterIP != old.Spec.ClusterIP {
		errs = append(errs, field.Invalid(at.Index(0), obj.Spec.ClusterIP, "may not change once set"))
	}
	if len(old.Spec.ClusterIPs) == 2 && len(obj.Spec.ClusterIPs) == 2 && obj.Spec.ClusterIPs[1] != old.Spec.ClusterIPs[1] {
		errs = append(errs, field.Invalid(at.Index(1), obj.Spec.ClusterIPs[1], "may not change once set"))
	}
	if len(old.Spec.IPFamilies) > 0 && len(obj.Spec.IPFamilies) > 0 && !slices.Equal(obj.Spec.IPFamilies[:1], old.Spec.IPFamilies[:1]) {
		errs = append(errs, field.Invalid(field.NewPath("spec", "ipFamilies").Index(0), obj.Spec.IPFamilies[0], "may not change once set"))
	}
	return errs
}
