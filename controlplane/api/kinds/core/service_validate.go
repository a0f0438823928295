package core

import (
	"fmt"
	"net"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metavalidation "k8s.io/apimachinery/pkg/apis/meta/v1/validation"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/apimachinery/pkg/util/validation/field"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/kinds/fieldrules"
)

// maxAffinitySeconds is the maximum timeout of session affinity: one day.
const maxAffinitySeconds = 86400

// ValidateService returns the errors in a Service.
func ValidateService(s *corev1.Service) field.ErrorList {
	spec := field.NewPath("spec")
	errs := fieldrules.ValidateOneOf(s.Spec.Type, spec.Child("type"), corev1.ServiceTypeClusterIP,
		corev1.ServiceTypeNodePort,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	errs = append(errs, validateSessionAffinity(&s.Spec, spec)...)
	if s.Spec.Selector != nil {
		errs = append(errs, metavalidation.ValidateLabels(s.Spec.Selector, spec.Child("selector"))...)
	}
	headless := isHeadless(&s.Spec)
	external := s.Spec.Type == corev1.ServiceTypeExternalName
	if len(s.Spec.Ports) == 0 && !headless && !external {
		errs = append(errs, field.Required(spec.Child("ports"), ""))
	}
	errs = append(errs, validateServicePorts(&s.Spec, spec.Child("ports"))...)
	switch {
	case external:
		errs = append(errs, validateExternalName(&s.Spec, spec)...)
	case headless && usesNodePorts(s.Spec.Type):
		errs = append(errs, field.Invalid(spec.Child("clusterIPs").Index(0), s.Spec.ClusterIPs[0],
			fmt.Sprintf("may not be set to 'None' for %s services", s.Spec.Type)))
	}
	errs = append(errs, ValidateClusterIPs(&s.Spec, spec)...)
	for i, ip := range s.Spec.ExternalIPs {
		fldPath := spec.Child("externalIPs").Index(i)
		if e := validation.IsValidIP(fldPath, ip); len(e) > 0 {
			errs = append(errs, e...)
		} else {
			errs = append(errs, validateSpecialAddress(ip, fldPath)...)
		}
	}
	errs = append(errs, validateTopologyMode(s)...)
	errs = append(errs, validateRangesAnnotation(s)...)
	errs = append(errs, validateBalancerWish(s)...)
	return append(errs, validateTrafficPolicies(&s.Spec, spec)...)
}

// validateSpecialAddress returns an error for an address that cannot be reached through the
// network, such as a loopback address.
func validateSpecialAddress(address string, fldPath *field.Path) field.ErrorList {
	p := net.ParseIP(address)
	for _, r := range []struct {
		in  bool
		why string
	}{
		{p.IsUnspecified(), "may not be unspecified (" + address + ")"},
		{p.IsLoopback(), "may not be in the loopback range (127.0.0.0/8, ::1/128)"},
		{p.IsLinkLocalUnicast(), "may not be in the link-local range (169.254.0.0/16, fe80::/10)"},
		{p.IsLinkLocalMulticast(), "may not be in the link-local multicast range (224.0.0.0/24, ff02::/10)"},
	} {
		if r.in {
			return field.ErrorList{field.Invalid(fldPath, address, r.why)}
		}
	}
	return nil
}

// validateRangesAnnotation validates the annotation that the field loadBalancerSourceRanges has
// replaced.
func validateRangesAnnotation(service *corev1.Service) field.ErrorList {
	text, set := service.Annotations[corev1.AnnotationLoadBalancerSourceRangesKey]
	if !set || len(service.Spec.LoadBalancerSourceRanges) > 0 {
		return nil
	}
	fldPath := field.NewPath("metadata", "annotations").Key(corev1.AnnotationLoadBalancerSourceRangesKey)
	var errs field.ErrorList
	if service.Spec.Type != corev1.ServiceTypeLoadBalancer {
		errs = append(errs, field.Forbidden(fldPath, "may only be used when `type` is 'LoadBalancer'"))
	}
	if text = strings.TrimSpace(text); text == "" {
		return errs
	}
	for _, cidr := range strings.Split(text, ",") {
		errs = append(errs, validation.IsValidCIDR(fldPath, strings.TrimSpace(cidr))...)
	}
	return errs
}

// validateBalancerWish returns errors for invalid values of the annotations by which a Service
// requests particular load balancer addresses or a pool.
func validateBalancerWish(service *corev1.Service) field.ErrorList {
	fldPath := field.NewPath("metadata", "annotations")
	text, asked := service.Annotations[balancer.AddressesAnnotation]
	if !asked {
		return nil // Kubernetes does not validate spec.loadBalancerIP
	}
	var errs field.ErrorList
	wish, err := balancer.ParseAddressRequest(service)
	if err != nil {
		return append(errs, field.Invalid(fldPath.Key(balancer.AddressesAnnotation), text, err.Error()))
	}
	for _, a := range wish.Addresses {
		family := corev1.IPv4Protocol
		if a.Is6() {
			family = corev1.IPv6Protocol
		}
		if service.Spec.Type == corev1.ServiceTypeLoadBalancer && len(service.Spec.IPFamilies) > 0 &&
			!slices.Contains(service.Spec.IPFamilies, family) {
			errs = append(errs, field.Invalid(fldPath.Key(balancer.AddressesAnnotation), text,
				fmt.Sprintf("the Service has no %s: ask for no %s address, or add it to spec.ipFamilies",
					family, family)))
		}
	}
	return errs
}

// validateTopologyMode returns an error if the old and the new annotation for topology-aware
// routing have different values.
func validateTopologyMode(service *corev1.Service) field.ErrorList {
	old, both := service.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	mode, ok := service.Annotations[corev1.AnnotationTopologyMode]
	if !both || !ok || old == mode {
		return nil
	}
	return field.ErrorList{field.Invalid(field.NewPath("metadata", "annotations").Key(corev1.AnnotationTopologyMode),
		mode,
		fmt.Sprintf("must match annotations[%s] when both are specified",
			corev1.DeprecatedAnnotationTopologyAwareHints))}
}

func validateSessionAffinity(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	errs := fieldrules.ValidateOneOf(s.SessionAffinity, spec.Child("sessionAffinity"), corev1.ServiceAffinityNone,
		corev1.ServiceAffinityClientIP)
	if c := s.SessionAffinityConfig; c != nil && c.ClientIP != nil {
		if t := ptr.Deref(c.ClientIP.TimeoutSeconds, 0); t <= 0 || t > maxAffinitySeconds {
			errs = append(errs, field.Invalid(spec.Child("sessionAffinityConfig", "clientIP", "timeoutSeconds"), t,
				fmt.Sprintf("must be greater than 0 and less than %d", maxAffinitySeconds)))
		}
	}
	return errs
}

// isHeadless reports whether clusterIPs contains only "None".
func isHeadless(spec *corev1.ServiceSpec) bool {
	return len(spec.ClusterIPs) == 1 && spec.ClusterIPs[0] == corev1.ClusterIPNone
}

func validateExternalName(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	const no = "may not be set for ExternalName services"
	errs := fieldrules.ForbidSetFields(spec, no, map[string]bool{
		"clusterIPs": len(s.ClusterIPs) > 0, "ipFamilies": len(s.IPFamilies) > 0,
		"ipFamilyPolicy": s.IPFamilyPolicy != nil,
	})
	fldPath := spec.Child("externalName")
	// A trailing dot makes the name absolute.
	name := strings.TrimSuffix(s.ExternalName, ".")
	if name == "" {
		return append(errs, field.Required(fldPath, ""))
	}
	return append(errs, fieldrules.InvalidErrors(fldPath, name, validation.IsDNS1123Subdomain(name))...)
}

// ValidateClusterIPs validates the cluster IPs and the IP families of a Service of any type except
// ExternalName.
func ValidateClusterIPs(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	if s.Type == corev1.ServiceTypeExternalName {
		return nil
	}
	fldPath := spec.Child("clusterIPs")
	errs := validateFamilies(s, spec)
	switch {
	case s.ClusterIP == "" && len(s.ClusterIPs) > 0:
		errs = append(errs, field.Invalid(fldPath, s.ClusterIPs, "must be empty when `clusterIP` is not specified"))
	case s.ClusterIP != "" && len(s.ClusterIPs) == 0:
		errs = append(errs, field.Required(fldPath, ""))
	case len(s.ClusterIPs) > 0 && s.ClusterIP != s.ClusterIPs[0]:
		errs = append(errs, field.Invalid(fldPath, s.ClusterIPs, "first value must match `clusterIP`"))
	}
	if len(s.ClusterIPs) > 2 {
		errs = append(errs, field.Invalid(fldPath, s.ClusterIPs, "may only hold up to 2 values"))
	}
	bad := false
	for i, ip := range s.ClusterIPs {
		if i > 0 || ip != corev1.ClusterIPNone {
			e := validation.IsValidIP(fldPath.Index(i), ip)
			errs, bad = append(errs, e...), bad || len(e) > 0
		} else if len(s.ClusterIPs) > 1 {
			errs, bad = append(errs, field.Invalid(fldPath, s.ClusterIPs, "'None' must be the first and only value")),
				true
		}
	}
	if bad {
		return errs
	}
	return append(errs, validateAddressFamilies(s, fldPath)...)
}

// validateFamilies validates ipFamilies and ipFamilyPolicy. It does not compare them with the
// addresses.
func validateFamilies(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	for i, f := range s.IPFamilies {
		here := spec.Child("ipFamilies").Index(i)
		errs = append(errs, fieldrules.ValidateSupported(f, here, corev1.IPv4Protocol, corev1.IPv6Protocol)...)
		if slices.Contains(s.IPFamilies[:i], f) {
			errs = append(errs, field.Duplicate(here, f))
		}
	}
	if p := s.IPFamilyPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, spec.Child("ipFamilyPolicy"),
			corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack,
			corev1.IPFamilyPolicySingleStack)...)
	}
	return errs
}

// validateAddressFamilies compares the families of valid cluster IPs with each other and with
// ipFamilies.
func validateAddressFamilies(s *corev1.ServiceSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	seen := map[corev1.IPFamily]bool{}
	for i, ip := range s.ClusterIPs {
		if ip == corev1.ClusterIPNone {
			return nil
		}
		family := corev1.IPv4Protocol
		if net.ParseIP(ip).To4() == nil {
			family = corev1.IPv6Protocol
		}
		seen[family] = true
		if i < len(s.IPFamilies) && s.IPFamilies[i] != family &&
			(s.IPFamilies[i] == corev1.IPv4Protocol || s.IPFamilies[i] == corev1.IPv6Protocol) {
			errs = append(errs, field.Invalid(fldPath.Index(i), ip,
				fmt.Sprintf("expected an %s value as indicated by `ipFamilies[%d]`", s.IPFamilies[i], i)))
		}
	}
	if len(s.ClusterIPs) > 1 && len(seen) < 2 {
		errs = append(errs, field.Invalid(fldPath, s.ClusterIPs, "may specify no more than one IP for each IP family"))
	}
	return errs
}

func validateTrafficPolicies(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	var errs field.ErrorList
	if p := s.InternalTrafficPolicy; p != nil {
		errs = append(errs, fieldrules.ValidateSupported(*p, spec.Child("internalTrafficPolicy"),
			corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)...)
	}
	if d := s.TrafficDistribution; d != nil {
		if known := trafficDistributions; !slices.Contains(known, *d) {
			errs = append(errs, field.NotSupported(spec.Child("trafficDistribution"), *d, known))
		}
	}
	fldPath := spec.Child("externalTrafficPolicy")
	if isExternallyAccessible(s) {
		errs = append(errs, fieldrules.ValidateOneOf(s.ExternalTrafficPolicy, fldPath,
			corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)...)
	} else if s.ExternalTrafficPolicy != "" {
		errs = append(errs, field.Invalid(fldPath, s.ExternalTrafficPolicy,
			"may only be set for externally-accessible services"))
	}
	errs = append(errs, validateHealthPort(s, spec.Child("healthCheckNodePort"))...)
	return append(errs, validateBalancerFields(s, spec)...)
}

// trafficDistributions are the valid values of trafficDistribution, in the order of Kubernetes'
// errors.
var trafficDistributions = []string{corev1.ServiceTrafficDistributionPreferClose,
	corev1.ServiceTrafficDistributionPreferSameZone, corev1.ServiceTrafficDistributionPreferSameNode}

// validateBalancerFields validates the fields that only a Service of type LoadBalancer may have. As
// in Kubernetes, the path of the source ranges starts with a capital letter.
func validateBalancerFields(s *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	const no = "may only be used when `type` is 'LoadBalancer'"
	var errs field.ErrorList
	ranges := spec.Child("LoadBalancerSourceRanges")
	for i, cidr := range s.LoadBalancerSourceRanges {
		errs = append(errs, validation.IsValidCIDR(ranges.Index(i), strings.TrimSpace(cidr))...)
	}
	class := spec.Child("loadBalancerClass")
	if s.Type == corev1.ServiceTypeLoadBalancer {
		if c := s.LoadBalancerClass; c != nil {
			errs = append(errs, fieldrules.InvalidErrors(class, *c, validation.IsQualifiedName(*c))...)
		}
		return errs
	}
	if len(s.LoadBalancerSourceRanges) > 0 {
		errs = append(errs, field.Forbidden(ranges, no))
	}
	if s.AllocateLoadBalancerNodePorts != nil {
		errs = append(errs, field.Forbidden(spec.Child("allocateLoadBalancerNodePorts"), no))
	}
	if s.LoadBalancerClass != nil {
		errs = append(errs, field.Forbidden(class, no))
	}
	return errs
}

func validateHealthPort(s *corev1.ServiceSpec, fldPath *field.Path) field.ErrorList {
	n := s.HealthCheckNodePort
	switch {
	case n == 0:
		return nil
	case !needsHealthPort(s):
		return field.ErrorList{field.Invalid(fldPath, n,
			"may only be set when `type` is 'LoadBalancer' and `externalTrafficPolicy` is 'Local'")}
	}
	if errs := fieldrules.InvalidErrors(fldPath, n, validation.IsValidPortNum(int(n))); len(errs) > 0 {
		return errs
	}
	for _, p := range s.Ports {
		if p.NodePort == n && p.Protocol == corev1.ProtocolTCP {
			return field.ErrorList{field.Invalid(fldPath, n, "provided port is already allocated")}
		}
	}
	return nil
}

// internalPort has the fields of a ServicePort in Kubernetes' internal type. Errors contain it as
// their value.
type internalPort struct {
	Name        string
	Protocol    corev1.Protocol
	AppProtocol *string
	Port        int32
	TargetPort  intstr.IntOrString
	NodePort    int32
}

// validateServicePorts validates the ports of a Service. The allocator checks the range of node
// ports.
func validateServicePorts(s *corev1.ServiceSpec, fldPath *field.Path) field.ErrorList {
	var errs field.ErrorList
	names, ports, nodePorts := map[string]bool{}, map[string]bool{}, map[string]bool{}
	for i, p := range s.Ports {
		here := fldPath.Index(i)
		switch {
		case p.Name == "" && len(s.Ports) > 1:
			errs = append(errs, field.Required(here.Child("name"), ""))
		case p.Name != "":
			errs = append(errs, fieldrules.InvalidErrors(here.Child("name"), p.Name,
				validation.IsDNS1123Label(p.Name))...)
			if names[p.Name] {
				errs = append(errs, field.Duplicate(here.Child("name"), p.Name))
			}
			names[p.Name] = true
		}
		errs = append(errs, fieldrules.InvalidErrors(here.Child("port"), p.Port,
			validation.IsValidPortNum(int(p.Port)))...)
		errs = append(errs, fieldrules.ValidateProtocol(p.Protocol, here.Child("protocol"))...)
		errs = append(errs, fieldrules.ValidatePortNumOrName(p.TargetPort, here.Child("targetPort"))...)
		if p.AppProtocol != nil {
			errs = append(errs, fieldrules.InvalidErrors(here.Child("appProtocol"), *p.AppProtocol,
				validation.IsQualifiedName(*p.AppProtocol))...)
		}
		if key := fmt.Sprintf("%s-%d", p.Protocol, p.Port); ports[key] {
			errs = append(errs, field.Duplicate(here, internalPort{Protocol: p.Protocol, Port: p.Port}))
		} else {
			ports[key] = true
		}
		errs = append(errs, validateNodePort(s.Type, p, nodePorts, here.Child("nodePort"))...)
	}
	return errs
}

func validateNodePort(t corev1.ServiceType, p corev1.ServicePort, seen map[string]bool,
	fldPath *field.Path) field.ErrorList {
	switch {
	case p.NodePort == 0:
		return nil
	case t == corev1.ServiceTypeClusterIP:
		return field.ErrorList{field.Forbidden(fldPath, "may not be used when `type` is 'ClusterIP'")}
	case t == corev1.ServiceTypeExternalName:
		return nil
	case seen[nodePortValue(p)]:
		return field.ErrorList{field.Duplicate(fldPath, p.NodePort)}
	}
	seen[nodePortValue(p)] = true
	return nil
}

// validateServiceUpdate returns errors for changes of a Service's cluster IPs and IP families,
// because clients may have cached the addresses. A second family may be added or removed.
func validateServiceUpdate(obj, old *corev1.Service) field.ErrorList {
	spec := field.NewPath("spec")
	var errs field.ErrorList
	if needsHealthPort(&obj.Spec) && needsHealthPort(&old.Spec) && old.Spec.HealthCheckNodePort != 0 &&
		obj.Spec.HealthCheckNodePort != old.Spec.HealthCheckNodePort {
		errs = append(errs, field.Forbidden(spec.Child("healthCheckNodePort"), "field is immutable"))
	}
	both := obj.Spec.Type == corev1.ServiceTypeLoadBalancer && old.Spec.Type == corev1.ServiceTypeLoadBalancer
	if both && !fieldrules.SemanticEqual(obj.Spec.LoadBalancerClass, old.Spec.LoadBalancerClass) {
		errs = append(errs, field.Invalid(spec.Child("loadBalancerClass"), obj.Spec.LoadBalancerClass,
			"may not change once set"))
	}
	if obj.Spec.Type == corev1.ServiceTypeExternalName || old.Spec.Type == corev1.ServiceTypeExternalName {
		return errs
	}
	updated, previous := isHeadless(&obj.Spec), isHeadless(&old.Spec)
	if !updated || !previous {
		errs = append(errs, validateAddressUpdate(&obj.Spec, &old.Spec, spec)...)
	}
	if !updated && !previous {
		errs = append(errs, validateFamilyUpdate(&obj.Spec, &old.Spec, spec)...)
	}
	return errs
}

const mayNotChange = "may not change once set"

func validateAddressUpdate(s, old *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	fldPath := spec.Child("clusterIPs")
	updated, previous := s.ClusterIPs, old.ClusterIPs
	var errs field.ErrorList
	if len(previous) > len(updated) && len(updated) == 0 {
		return field.ErrorList{field.Invalid(fldPath.Index(0), updated, "primary clusterIP can not be unset")}
	}
	for i := range min(len(updated), len(previous)) {
		if updated[i] != previous[i] && (i == 0 || len(updated) == len(previous)) {
			errs = append(errs, field.Invalid(fldPath.Index(i), updated, mayNotChange))
		}
	}
	if len(previous) > len(updated) && len(updated) == 1 &&
		ptr.Deref(s.IPFamilyPolicy, "") != corev1.IPFamilyPolicySingleStack {
		errs = append(errs, field.Invalid(spec.Child("ipFamilyPolicy"), s.IPFamilyPolicy,
			"must be set to 'SingleStack' when releasing the secondary clusterIP"))
	}
	return errs
}

// validateFamilyUpdate validates a change of the IP families. As in Kubernetes, its errors about
// the list have the path of the first entry.
func validateFamilyUpdate(s, old *corev1.ServiceSpec, spec *field.Path) field.ErrorList {
	fldPath := spec.Child("ipFamilies").Index(0)
	updated, previous := s.IPFamilies, old.IPFamilies
	var errs field.ErrorList
	for i := range min(len(updated), len(previous)) {
		if updated[i] != previous[i] && (i == 0 || len(updated) == len(previous)) {
			errs = append(errs, field.Invalid(fldPath, updated, mayNotChange))
		}
	}
	if len(previous) > len(updated) && len(updated) == 1 &&
		ptr.Deref(s.IPFamilyPolicy, "") != corev1.IPFamilyPolicySingleStack {
		errs = append(errs, field.Invalid(spec.Child("ipFamilyPolicy"), s.IPFamilyPolicy,
			"must be set to 'SingleStack' when releasing the secondary ipFamily"))
	}
	return errs
}

// validateServiceStatus validates the addresses in the status, which a load balancer reports.
func validateServiceStatus(s, _ *corev1.Service) field.ErrorList {
	fldPath := field.NewPath("status", "loadBalancer", "ingress")
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer && len(s.Status.LoadBalancer.Ingress) > 0 {
		return field.ErrorList{field.Forbidden(fldPath, "may only be used when `spec.type` is 'LoadBalancer'")}
	}
	var errs field.ErrorList
	for i, in := range s.Status.LoadBalancer.Ingress {
		here := fldPath.Index(i)
		mode := here.Child("ipMode")
		if in.IP != "" {
			errs = append(errs, validation.IsValidIP(here.Child("ip"), in.IP)...)
		}
		switch {
		case in.IPMode == nil && in.IP != "":
			errs = append(errs, field.Required(mode, "must be specified when `ip` is set"))
		case in.IPMode != nil && in.IP == "":
			errs = append(errs, field.Forbidden(mode, "may not be specified when `ip` is not set"))
		case in.IPMode != nil:
			errs = append(errs, fieldrules.ValidateSupported(*in.IPMode, mode, corev1.LoadBalancerIPModeProxy,
				corev1.LoadBalancerIPModeVIP)...)
		}
		if in.Hostname == "" {
			continue
		}
		errs = append(errs, fieldrules.InvalidErrors(here.Child("hostname"), in.Hostname,
			validation.IsDNS1123Subdomain(in.Hostname))...)
		if net.ParseIP(in.Hostname) != nil {
			errs = append(errs, field.Invalid(here.Child("hostname"), in.Hostname,
				"must be a DNS name, not an IP address"))
		}
	}
	return errs
}
