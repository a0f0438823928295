package admission

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// errTaken is the error when another Service takes the chosen address first. A retry chooses
// another address.
var errTaken = errors.New("the address that was chosen for it is taken: try again")

// serviceAllocation returns a plugin that allocates cluster IPs and node ports of Services. It
// chooses values that are free in this replica's cache; a reservation in the same commit detects
// conflicts.
func serviceAllocation(c Config) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.Is("services") || !a.Creates() && !a.Updates() {
			return nil
		}
		svc := a.Whole.(*corev1.Service)
		var had []corev1.IPFamily
		if before, ok := a.Stored.(*corev1.Service); ok {
			core.SyncClusterIPs(&svc.Spec, &before.Spec)
			keepAllocated(svc, before)
			keepFamilies(svc, before)
			had = before.Spec.IPFamilies
		}
		if svc.Spec.ClusterIP != "" && len(svc.Spec.ClusterIPs) == 0 {
			svc.Spec.ClusterIPs = []string{svc.Spec.ClusterIP}
		}
		// As in Kubernetes, errors in addresses and families come first, because allocation needs
		// valid ones.
		if errs := core.ValidateClusterIPs(&svc.Spec, field.NewPath("spec")); len(errs) > 0 {
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, errs)
		}
		if errs := chooseFamilies(svc, serviceFamilies(c), had); len(errs) > 0 {
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, errs)
		}
		ranges, err := serviceRanges(ctx, c, false)
		if err != nil {
			return asStatus(err)
		}
		errs := inRange(svc, a.Stored, ranges, c.NodePorts)
		fresh := len(errs) > 0
		if fresh {
			if ranges, err = serviceRanges(ctx, c, true); err != nil {
				return asStatus(err)
			}
			errs = inRange(svc, a.Stored, ranges, c.NodePorts)
		}
		if before, ok := a.Stored.(*corev1.Service); !ok || before.Spec.ClusterIP != svc.Spec.ClusterIP {
			errs = append(errs, notOfTheAPI(svc, c.ServiceCIDR)...)
		}
		if len(errs) > 0 {
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, errs)
		}
		by := &allocator{ctx: ctx, c: c, attempt: a, ranges: ranges, fresh: fresh, own: map[string]bool{}}
		return by.allocate(svc)
	}
}

// keepAllocated restores allocated values that an update omits and the Service still needs.
func keepAllocated(svc, before *corev1.Service) {
	if needsIP(svc) && needsIP(before) && svc.Spec.ClusterIP == "" {
		if svc.Spec.ClusterIP = before.Spec.ClusterIP; len(svc.Spec.ClusterIPs) == 0 {
			svc.Spec.ClusterIPs = slices.Clone(before.Spec.ClusterIPs)
		}
	}
	if needsPorts(svc) && needsPorts(before) {
		type port struct {
			number   int32
			protocol corev1.Protocol
		}
		had := map[port]int32{}
		for _, p := range before.Spec.Ports {
			had[port{p.Port, p.Protocol}] = p.NodePort
		}
		used := map[port]bool{}
		for i := range svc.Spec.Ports {
			p := &svc.Spec.Ports[i]
			k := port{p.Port, p.Protocol}
			if p.NodePort == 0 && !used[k] {
				p.NodePort = had[k]
				used[k] = true
			}
		}
	}
	if needsHealthPort(svc) && needsHealthPort(before) && svc.Spec.HealthCheckNodePort == 0 {
		svc.Spec.HealthCheckNodePort = before.Spec.HealthCheckNodePort
	}
	if before.Spec.Type != svc.Spec.Type {
		releaseForType(svc, before)
	}
}

// releaseForType clears values that the new Service type cannot have, if the update left them
// unchanged.
func releaseForType(svc, before *corev1.Service) {
	if !needsIP(svc) && svc.Spec.ClusterIP == before.Spec.ClusterIP && svc.Spec.ClusterIP != corev1.ClusterIPNone {
		svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "", nil
		svc.Spec.IPFamilies, svc.Spec.IPFamilyPolicy = nil, nil
	}
	if !needsPorts(svc) {
		for i := range svc.Spec.Ports {
			for _, p := range before.Spec.Ports {
				if p.NodePort == svc.Spec.Ports[i].NodePort {
					svc.Spec.Ports[i].NodePort = 0
				}
			}
		}
	}
	if !needsHealthPort(svc) && svc.Spec.HealthCheckNodePort == before.Spec.HealthCheckNodePort {
		svc.Spec.HealthCheckNodePort = 0
	}
}

func needsIP(s *corev1.Service) bool { return s.Spec.Type != corev1.ServiceTypeExternalName }

func needsPorts(s *corev1.Service) bool {
	switch s.Spec.Type {
	case corev1.ServiceTypeNodePort:
		return true
	case corev1.ServiceTypeLoadBalancer:
		return s.Spec.AllocateLoadBalancerNodePorts == nil || *s.Spec.AllocateLoadBalancerNodePorts
	}
	return false
}

func needsHealthPort(s *corev1.Service) bool {
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer && s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// inRange returns errors for cluster IPs and node ports of the user that are out of range. An
// address that the Service already has is allowed even if its range no longer exists.
func inRange(svc *corev1.Service, stored api.Object, ranges []serviceRange, ports [2]int) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	before, _ := stored.(*corev1.Service)
	for _, ip := range svc.Spec.ClusterIPs {
		if !needsIP(svc) || before != nil && (before.Spec.ClusterIP == ip || slices.Contains(before.Spec.ClusterIPs, ip)) {
			continue
		}
		a, err := netip.ParseAddr(ip)
		if _, ok := rangeOf(ranges, a); err == nil && !ok {
			var cidr []string
			for _, r := range ranges {
				if r.Addr().Is4() == a.Is4() {
					cidr = append(cidr, r.String())
				}
			}
			errs = append(errs, field.Invalid(spec.Child("clusterIPs"), []string{ip}, fmt.Sprintf(
				"failed to allocate IP %s: the provided IP (%s) is not in the valid range. The range of valid IPs is %s", ip, ip, strings.Join(cidr, ","))))
		}
	}
	return append(errs, portsInRange(svc, before, ports)...)
}

// portsInRange returns errors for node ports and health check ports outside the cluster's range.
// Ports of the stored Service are allowed.
func portsInRange(svc, before *corev1.Service, ports [2]int) field.ErrorList {
	if svc.Spec.Type != corev1.ServiceTypeNodePort && svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil // validation rejects their ports
	}
	var errs field.ErrorList
	spec := field.NewPath("spec")
	outside := func(n int32) bool { return n != 0 && (int(n) < ports[0] || int(n) > ports[1]) }
	why := fmt.Sprintf("provided port is not in the valid range. The range of valid ports is %d-%d", ports[0], ports[1])
	for i, p := range svc.Spec.Ports {
		kept := before != nil && slices.ContainsFunc(before.Spec.Ports, func(b corev1.ServicePort) bool { return b.NodePort == p.NodePort })
		if outside(p.NodePort) && !kept {
			errs = append(errs, field.Invalid(spec.Child("ports").Index(i).Child("nodePort"), p.NodePort, why))
		}
	}
	// Validation rejects a change of the health check port.
	if n := svc.Spec.HealthCheckNodePort; needsHealthPort(svc) && outside(n) && (before == nil || !needsHealthPort(before)) {
		errs = append(errs, field.Invalid(spec.Child("healthCheckNodePort"), n, fmt.Sprintf("failed to allocate requested HealthCheck NodePort %d: %s", n, why)))
	}
	return errs
}

// isAPIService reports whether a Service is default/kubernetes, which has the first address of the
// range.
func isAPIService(svc *corev1.Service) bool {
	return svc.Namespace == metav1.NamespaceDefault && svc.Name == "kubernetes"
}

// apiAddress returns the cluster IP of the API server.
func apiAddress(cidr netip.Prefix) netip.Addr { return cidr.Masked().Addr().Next() }

// notOfTheAPI returns an error if another Service uses the cluster IP of the API server.
func notOfTheAPI(svc *corev1.Service, cidr netip.Prefix) field.ErrorList {
	if isAPIService(svc) || !needsIP(svc) {
		return nil
	}
	for i, ip := range append([]string{svc.Spec.ClusterIP}, svc.Spec.ClusterIPs...) {
		if a, err := netip.ParseAddr(ip); err == nil && a == apiAddress(cidr) {
			return field.ErrorList{field.Invalid(field.NewPath("spec", "clusterIPs").Index(max(0, i-1)), ip,
				"is reserved for Service default/kubernetes, give another address or none")}
		}
	}
	return nil
}

// usable reports whether an address of the range can be allocated. The first address and the last
// IPv4 address of a range cannot.
func usable(cidr netip.Prefix, a netip.Addr) bool {
	return cidr.Contains(a) && a != cidr.Masked().Addr() && (cidr.Contains(a.Next()) || a.Is6())
}

// allocator allocates the addresses and ports of one Service.
type allocator struct {
	ctx     context.Context
	c       Config
	ranges  []serviceRange
	fresh   bool // ranges were read from the store
	attempt *api.Attempt
	own     map[string]bool // node ports that this Service already has, such as "TCP-30080"
}

func portKey(p corev1.Protocol, n int32) string { return fmt.Sprintf("%s-%d", p, n) }

func (a *allocator) allocate(svc *corev1.Service) error {
	if needsIP(svc) {
		if err := a.address(svc); err != nil {
			return err
		}
	}
	if needsPorts(svc) {
		if err := a.nodePorts(svc); err != nil {
			return err
		}
	}
	if needsHealthPort(svc) && svc.Spec.HealthCheckNodePort == 0 {
		n, err := a.port([]corev1.Protocol{corev1.ProtocolTCP})
		if err != nil {
			return err
		}
		svc.Spec.HealthCheckNodePort = n
	}
	return nil
}

func (a *allocator) address(svc *corev1.Service) error {
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		return nil
	}
	if svc.Spec.ClusterIP == "" && isAPIService(svc) {
		svc.Spec.ClusterIPs = []string{apiAddress(a.c.ServiceCIDR).String()}
	}
	for i := len(svc.Spec.ClusterIPs); i < len(svc.Spec.IPFamilies); i++ {
		ip, err := a.pick(svc.Spec.IPFamilies[i])
		if err != nil {
			return asStatus(err)
		}
		svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, ip.String())
	}
	svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
	return nil
}

// nodePorts allocates a node port for each port without one. Ports with the same number and
// different protocols share one, as expected for DNS over TCP and UDP.
func (a *allocator) nodePorts(svc *corev1.Service) error {
	shared := map[int32]int32{}
	for _, p := range svc.Spec.Ports {
		if p.NodePort != 0 {
			shared[p.Port] = p.NodePort
			a.own[portKey(p.Protocol, p.NodePort)] = true
		}
	}
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		if p.NodePort != 0 {
			continue
		}
		n := shared[p.Port]
		if n == 0 || a.own[portKey(p.Protocol, n)] {
			var err error
			if n, err = a.port(protocols(svc, p.Port)); err != nil {
				return err
			}
			shared[p.Port] = n
		}
		p.NodePort = n
		a.own[portKey(p.Protocol, n)] = true
	}
	return nil
}

func protocols(svc *corev1.Service, port int32) []corev1.Protocol {
	var out []corev1.Protocol
	for _, p := range svc.Spec.Ports {
		if p.Port == port && !slices.Contains(out, p.Protocol) {
			out = append(out, p.Protocol)
		}
	}
	return out
}

// port allocates a node port that no other port of this Service has for the protocols.
func (a *allocator) port(of []corev1.Protocol) (int32, error) {
	names := make([]string, len(of))
	for i, p := range of {
		names[i] = string(p)
	}
	for range a.c.NodePorts[1] - a.c.NodePorts[0] + 1 {
		n, err := a.c.AllocatePort(a.attempt, a.c.NodePorts[0], a.c.NodePorts[1], names...)
		if err != nil {
			return 0, asStatus(err)
		}
		if !slices.ContainsFunc(of, func(p corev1.Protocol) bool { return a.own[portKey(p, n)] }) {
			return n, nil
		}
	}
	return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: range is full (%d-%d)", a.c.NodePorts[0], a.c.NodePorts[1]))
}
