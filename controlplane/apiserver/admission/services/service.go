// Package services contains the admission plugins for Services: allocation of cluster IPs and node
// ports, and validation of external addresses and of load balancer pools.
package services

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
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// Config contains the dependencies and settings of the plugins for Services.
type Config struct {
	Cluster admission.Cluster
	Kinds   *api.Kinds
	// ListHeld lists the objects of a namespace from a cache that has reached resourceVersion
	// (watchcache.Reader.Held). The caller must not change the objects.
	ListHeld func(ctx context.Context, k *api.Kind, namespace, resourceVersion string) ([]api.Object, error)
	// ServiceCIDR and the optional SecondServiceCIDR, which has the other IP family, are the
	// Service ranges with which the cluster was created.
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	// PodCIDRs are the ranges of pod addresses.
	PodCIDRs []netip.Prefix
	// NodePorts is the inclusive range of node ports.
	NodePorts [2]int
	// ExternalIPRanges are the addresses that Services may list in spec.externalIPs. Empty means
	// all addresses that the cluster does not use itself.
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns each address and TCP port on which a control plane replica listens;
	// nil = unknown.
	ReplicaAddresses func() []netip.AddrPort
	// AllocateIP and AllocatePort choose a free address or port for the object of an attempt
	// (registry.AllocateClusterIP, AllocateNodePort).
	AllocateIP   func(a *admission.Attempt, cidr netip.Prefix) (netip.Addr, error)
	AllocatePort func(a *admission.Attempt, low, high int, protocols ...string) (int32, error)
}

// errTaken is the error if another Service was given the chosen address first. A retry chooses
// another address.
var errTaken = errors.New("the allocated address is already in use: try again")

// AllocateAddresses returns a plugin that allocates cluster IPs and node ports of Services. It
// chooses values that are free in this replica's cache. The commit also reserves each value in the
// store, and fails if another Service has it.
func AllocateAddresses(c Config) func(ctx context.Context, a *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if !a.IsCoreResource("services") || !a.CreatesObject() && !a.UpdatesObject() {
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
			return admission.AsStatus(err)
		}
		errs := inRange(svc, a.Stored, ranges, c.NodePorts)
		fresh := len(errs) > 0
		if fresh {
			if ranges, err = serviceRanges(ctx, c, true); err != nil {
				return admission.AsStatus(err)
			}
			errs = inRange(svc, a.Stored, ranges, c.NodePorts)
		}
		if before, ok := a.Stored.(*corev1.Service); !ok || before.Spec.ClusterIP != svc.Spec.ClusterIP {
			errs = append(errs, rejectAPIAddress(svc, c.ServiceCIDR)...)
		}
		if len(errs) > 0 {
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, errs)
		}
		by := &allocator{ctx: ctx, c: c, attempt: a, ranges: ranges, fresh: fresh, chosenPorts: map[string]bool{}}
		return by.allocateFields(svc)
	}
}

// keepAllocated restores the allocated addresses and ports that an update omits, if the Service
// still needs them.
func keepAllocated(svc, old *corev1.Service) {
	if needsIP(svc) && needsIP(old) && svc.Spec.ClusterIP == "" {
		if svc.Spec.ClusterIP = old.Spec.ClusterIP; len(svc.Spec.ClusterIPs) == 0 {
			svc.Spec.ClusterIPs = slices.Clone(old.Spec.ClusterIPs)
		}
	}
	if needsPorts(svc) && needsPorts(old) {
		type port struct {
			number   int32
			protocol corev1.Protocol
		}
		had := map[port]int32{}
		for _, p := range old.Spec.Ports {
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
	if needsHealthPort(svc) && needsHealthPort(old) && svc.Spec.HealthCheckNodePort == 0 {
		svc.Spec.HealthCheckNodePort = old.Spec.HealthCheckNodePort
	}
	if old.Spec.Type != svc.Spec.Type {
		releaseForType(svc, old)
	}
}

// releaseForType clears the addresses and ports that the new Service type does not allow, if the
// update left them unchanged.
func releaseForType(svc, old *corev1.Service) {
	if !needsIP(svc) && svc.Spec.ClusterIP == old.Spec.ClusterIP && svc.Spec.ClusterIP != corev1.ClusterIPNone {
		svc.Spec.ClusterIP, svc.Spec.ClusterIPs = "", nil
		svc.Spec.IPFamilies, svc.Spec.IPFamilyPolicy = nil, nil
	}
	if !needsPorts(svc) {
		for i := range svc.Spec.Ports {
			for _, p := range old.Spec.Ports {
				if p.NodePort == svc.Spec.Ports[i].NodePort {
					svc.Spec.Ports[i].NodePort = 0
				}
			}
		}
	}
	if !needsHealthPort(svc) && svc.Spec.HealthCheckNodePort == old.Spec.HealthCheckNodePort {
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
	return s.Spec.Type == corev1.ServiceTypeLoadBalancer &&
		s.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
}

// inRange returns errors for cluster IPs and node ports that the user chose outside of the allowed
// ranges. An address that the Service already has is allowed even if its range no longer exists.
func inRange(svc *corev1.Service, stored api.Object, ranges []serviceRange, ports [2]int) field.ErrorList {
	var errs field.ErrorList
	spec := field.NewPath("spec")
	before, _ := stored.(*corev1.Service)
	for _, ip := range svc.Spec.ClusterIPs {
		if !needsIP(svc) ||
			before != nil && (before.Spec.ClusterIP == ip || slices.Contains(before.Spec.ClusterIPs, ip)) {
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
				"failed to allocate IP %s: the provided IP (%s) is not in the valid range. The range of valid IPs "+
					"is %s", ip, ip, strings.Join(cidr, ","))))
		}
	}
	return append(errs, portsInRange(svc, before, ports)...)
}

// portsInRange returns errors for node ports and health check ports outside the cluster's range.
// Ports of the stored Service are allowed.
func portsInRange(svc, old *corev1.Service, ports [2]int) field.ErrorList {
	if svc.Spec.Type != corev1.ServiceTypeNodePort && svc.Spec.Type != corev1.ServiceTypeLoadBalancer {
		return nil // validation rejects their ports
	}
	var errs field.ErrorList
	spec := field.NewPath("spec")
	outside := func(n int32) bool { return n != 0 && (int(n) < ports[0] || int(n) > ports[1]) }
	why := fmt.Sprintf("provided port is not in the valid range. The range of valid ports is %d-%d", ports[0], ports[1])
	for i, p := range svc.Spec.Ports {
		kept := old != nil && slices.ContainsFunc(old.Spec.Ports, func(b corev1.ServicePort) bool {
			return b.NodePort == p.NodePort
		})
		if outside(p.NodePort) && !kept {
			errs = append(errs, field.Invalid(spec.Child("ports").Index(i).Child("nodePort"), p.NodePort, why))
		}
	}
	// Validation rejects a change of the health check port.
	if n := svc.Spec.HealthCheckNodePort; needsHealthPort(svc) && outside(n) && (old == nil || !needsHealthPort(old)) {
		errs = append(errs, field.Invalid(spec.Child("healthCheckNodePort"), n,
			fmt.Sprintf("failed to allocate requested HealthCheck NodePort %d: %s", n, why)))
	}
	return errs
}

// isAPIService reports whether a Service is default/kubernetes. The cluster IP of
// default/kubernetes is the first address of the Service range.
func isAPIService(svc *corev1.Service) bool {
	return svc.Namespace == metav1.NamespaceDefault && svc.Name == "kubernetes"
}

// apiAddress returns the cluster IP of Service default/kubernetes: the first address of cidr after
// the network address.
func apiAddress(cidr netip.Prefix) netip.Addr { return cidr.Masked().Addr().Next() }

// rejectAPIAddress returns an error if svc is not Service default/kubernetes but uses its cluster
// IP.
func rejectAPIAddress(svc *corev1.Service, cidr netip.Prefix) field.ErrorList {
	if isAPIService(svc) || !needsIP(svc) {
		return nil
	}
	for i, ip := range append([]string{svc.Spec.ClusterIP}, svc.Spec.ClusterIPs...) {
		if a, err := netip.ParseAddr(ip); err == nil && a == apiAddress(cidr) {
			return field.ErrorList{field.Invalid(field.NewPath("spec", "clusterIPs").Index(max(0, i-1)), ip,
				"is reserved for Service default/kubernetes: use another address or none")}
		}
	}
	return nil
}

// isAllocatable reports whether an address of the range can be allocated. The network address of a
// range and the last address of an IPv4 range cannot.
func isAllocatable(cidr netip.Prefix, a netip.Addr) bool {
	return cidr.Contains(a) && a != cidr.Masked().Addr() && (cidr.Contains(a.Next()) || a.Is6())
}

// allocator allocates the addresses and ports of one Service.
type allocator struct {
	ctx         context.Context
	c           Config
	ranges      []serviceRange
	fresh       bool // ranges were read from the store
	attempt     *api.Attempt
	chosenPorts map[string]bool // node ports that this Service already has, such as "TCP-30080"
}

func portKey(protocol corev1.Protocol, n int32) string { return fmt.Sprintf("%s-%d", protocol, n) }

func (a *allocator) allocateFields(svc *corev1.Service) error {
	if needsIP(svc) {
		if err := a.allocateAddress(svc); err != nil {
			return err
		}
	}
	if needsPorts(svc) {
		if err := a.nodePorts(svc); err != nil {
			return err
		}
	}
	if needsHealthPort(svc) && svc.Spec.HealthCheckNodePort == 0 {
		n, err := a.allocateNodePort([]corev1.Protocol{corev1.ProtocolTCP})
		if err != nil {
			return err
		}
		svc.Spec.HealthCheckNodePort = n
	}
	return nil
}

func (a *allocator) allocateAddress(svc *corev1.Service) error {
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		return nil
	}
	if svc.Spec.ClusterIP == "" && isAPIService(svc) {
		svc.Spec.ClusterIPs = []string{apiAddress(a.c.ServiceCIDR).String()}
	}
	for i := len(svc.Spec.ClusterIPs); i < len(svc.Spec.IPFamilies); i++ {
		ip, err := a.pickAddress(svc.Spec.IPFamilies[i])
		if err != nil {
			return admission.AsStatus(err)
		}
		svc.Spec.ClusterIPs = append(svc.Spec.ClusterIPs, ip.String())
	}
	svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
	return nil
}

// nodePorts allocates a node port for each port without one. Service ports with the same number and
// different protocols share a node port, as is usual for DNS over TCP and UDP.
func (a *allocator) nodePorts(svc *corev1.Service) error {
	shared := map[int32]int32{}
	for _, p := range svc.Spec.Ports {
		if p.NodePort != 0 {
			shared[p.Port] = p.NodePort
			a.chosenPorts[portKey(p.Protocol, p.NodePort)] = true
		}
	}
	for i := range svc.Spec.Ports {
		p := &svc.Spec.Ports[i]
		if p.NodePort != 0 {
			continue
		}
		n := shared[p.Port]
		if n == 0 || a.chosenPorts[portKey(p.Protocol, n)] {
			var err error
			if n, err = a.allocateNodePort(portProtocols(svc, p.Port)); err != nil {
				return err
			}
			shared[p.Port] = n
		}
		p.NodePort = n
		a.chosenPorts[portKey(p.Protocol, n)] = true
	}
	return nil
}

func portProtocols(svc *corev1.Service, port int32) []corev1.Protocol {
	var out []corev1.Protocol
	for _, p := range svc.Spec.Ports {
		if p.Port == port && !slices.Contains(out, p.Protocol) {
			out = append(out, p.Protocol)
		}
	}
	return out
}

// allocateNodePort allocates a node port that is free for all given protocols, also among the ports
// of this Service.
func (a *allocator) allocateNodePort(protocols []corev1.Protocol) (int32, error) {
	names := make([]string, len(protocols))
	for i, p := range protocols {
		names[i] = string(p)
	}
	for range a.c.NodePorts[1] - a.c.NodePorts[0] + 1 {
		n, err := a.c.AllocatePort(a.attempt, a.c.NodePorts[0], a.c.NodePorts[1], names...)
		if err != nil {
			return 0, admission.AsStatus(err)
		}
		if !slices.ContainsFunc(protocols, func(p corev1.Protocol) bool { return a.chosenPorts[portKey(p, n)] }) {
			return n, nil
		}
	}
	return 0, apierrors.NewInternalError(fmt.Errorf("failed to allocate a nodePort: range is full (%d-%d)",
		a.c.NodePorts[0], a.c.NodePorts[1]))
}
