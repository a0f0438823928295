package services

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"
	utilnet "k8s.io/utils/net"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/internal/agentport"
)

// Limits of the forwarding entries that each node keeps for spec.externalIPs. There is one entry
// for each pair of address and port.
const (
	maxServicePairs   = 4096  // of one Service
	maxNamespacePairs = 16384 // of all Services of a namespace
)

// externalIPsWarning is the deprecation warning of Kubernetes since release 1.36.
const externalIPsWarning = "spec.externalIPs is deprecated and may no longer be implemented in some clusters"

// DenyExternalIPs is the plugin DenyServiceExternalIPs. It rejects Services that add an external
// IP.
func DenyExternalIPs(_ context.Context, a *admission.Attempt) error {
	if !a.IsCoreResource("services") || !a.CreatesObject() && !a.UpdatesObject() {
		return nil
	}
	before, _ := a.Stored.(*corev1.Service)
	for _, ip := range a.Whole.(*corev1.Service).Spec.ExternalIPs {
		if before == nil || !slices.Contains(before.Spec.ExternalIPs, ip) {
			return admission.NewForbidden(a, a.Whole,
				errors.New("Use of external IPs is denied by admission control")) //nolint:staticcheck // upstream text
		}
	}
	return nil
}

// CheckExternalAddresses returns a plugin that rejects external IPs that the cluster itself uses.
// It also rejects more pairs of external IP and port than the limits allow. Addresses, ports and
// numbers of pairs that the stored Service already has are not checked again.
func CheckExternalAddresses(c Config) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if !a.IsCoreResource("services") || !a.CreatesObject() && !a.UpdatesObject() {
			return nil
		}
		svc := a.Whole.(*corev1.Service)
		before, _ := a.Stored.(*corev1.Service)
		if len(svc.Spec.ExternalIPs) == 0 {
			return nil
		}
		if usesExternalIPs(svc) {
			api.Warn(ctx, externalIPsWarning)
			if before != nil && !usesExternalIPs(before) {
				before = nil
			}
		}
		errs := limitServicePairs(svc, before)
		if len(errs) == 0 && addsExternalAddress(svc, before) {
			own, err := ownAddresses(ctx, c)
			if err != nil {
				return admission.AsStatus(err)
			}
			errs = own.validateExternalIPs(svc, before)
		}
		if len(errs) > 0 {
			return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name, errs)
		}
		if countAddressPorts(svc) > countAddressPorts(before) {
			limitNamespacePairs(ctx, c, a, svc)
		}
		return nil
	}
}

// usesExternalIPs reports whether nodes forward traffic for the external IPs of a Service.
func usesExternalIPs(s *corev1.Service) bool {
	return needsIP(s) && s.Spec.ClusterIP != corev1.ClusterIPNone
}

// countAddressPorts returns how many pairs of an external address and a port a Service has.
func countAddressPorts(s *corev1.Service) int {
	if s == nil || !usesExternalIPs(s) {
		return 0
	}
	return len(s.Spec.ExternalIPs) * len(s.Spec.Ports)
}

var externalIPsField = field.NewPath("spec", "externalIPs")

// limitServicePairs returns an error if a Service has more than maxServicePairs pairs of external
// IP and port, and also more than the old Service.
func limitServicePairs(svc, old *corev1.Service) field.ErrorList {
	n := countAddressPorts(svc)
	if n <= maxServicePairs || n <= countAddressPorts(old) {
		return nil
	}
	return field.ErrorList{field.Forbidden(externalIPsField, fmt.Sprintf(
		"%d addresses with %d ports each are %d pairs, the maximum per Service is %d: use fewer addresses or ports, "+
			"or several Services",
		len(svc.Spec.ExternalIPs), len(svc.Spec.Ports), n, maxServicePairs))}
}

// limitNamespacePairs enforces maxNamespacePairs: it adds the check of the limit to the commit of a
// Service that gets more pairs of external IP and port. The commit also writes the namespace
// without changing it. Of two concurrent commits that add pairs, the second therefore conflicts and
// counts again.
func limitNamespacePairs(ctx context.Context, c Config, a *admission.Attempt, svc *corev1.Service) {
	next := func(stored api.Object) (api.Object, error) {
		if stored == nil {
			return nil, admission.NewNotFound("namespaces", a.Namespace)
		}
		// Every earlier commit that added pairs wrote the namespace. A cache at this
		// resourceVersion therefore contains their Services.
		all, err := c.ListHeld(ctx, a.Kind, a.Namespace, stored.GetResourceVersion())
		if err != nil {
			return nil, admission.AsStatus(err)
		}
		others := 0
		for _, o := range all {
			if s := o.(*corev1.Service); s.Name != svc.Name {
				others += countAddressPorts(s)
			}
		}
		if n := countAddressPorts(svc); others+n > maxNamespacePairs {
			return nil, apierrors.NewInvalid(a.Kind.GVK.GroupKind(), svc.Name,
				field.ErrorList{field.Forbidden(externalIPsField, fmt.Sprintf(
					"this Service has %d pairs of an external address and a port, and the other Services in "+
						"namespace %s have %d; "+
						"the maximum per namespace is %d: use fewer addresses or ports, or another namespace", n,
					a.Namespace, others, maxNamespacePairs))})
		}
		return stored.DeepCopyObject().(api.Object), nil
	}
	a.Write(api.Change{Ref: api.Ref{Kind: c.Kinds.ByType(&corev1.Namespace{}), Name: a.Namespace}, Next: next})
}

// listenAddress is a port on which a machine of the cluster listens.
type listenAddress struct {
	address netip.Addr
	port    agentport.Port
}

// ownedAddresses contains the addresses and ports that the cluster itself uses.
type ownedAddresses struct {
	pods, services []netip.Prefix
	allowed        []netip.Prefix           // allowed ranges; empty = all addresses not in use
	dns            []netip.Addr             // addresses of the cluster DNS Service
	listens        map[listenAddress]string // description of the listener on each port
}

// addsExternalAddress reports whether a Service has an external IP or a port that the stored
// Service lacks.
func addsExternalAddress(svc, old *corev1.Service) bool {
	if old == nil {
		return true
	}
	for _, ip := range svc.Spec.ExternalIPs {
		if !slices.Contains(old.Spec.ExternalIPs, ip) {
			return true
		}
	}
	return slices.ContainsFunc(svc.Spec.Ports, func(p corev1.ServicePort) bool { return !hasPort(old, p) })
}

func hasPort(s *corev1.Service, port corev1.ServicePort) bool {
	return slices.ContainsFunc(s.Spec.Ports, func(o corev1.ServicePort) bool {
		return o.Port == port.Port && o.Protocol == port.Protocol
	})
}

// ownAddresses returns the addresses and ports that the cluster itself uses, from c and the stored
// objects.
func ownAddresses(ctx context.Context, c Config) (*ownedAddresses, error) {
	own := &ownedAddresses{pods: slices.Clone(c.PodCIDRs), allowed: c.ExternalIPRanges,
		listens: map[listenAddress]string{}}
	for _, p := range []netip.Prefix{c.ServiceCIDR, c.SecondServiceCIDR} {
		if p.IsValid() {
			own.services = append(own.services, p)
		}
	}
	if c.Cluster == nil {
		return own, nil
	}
	ranges, err := c.Cluster.List(ctx, "servicecidrs", "", false)
	if err != nil {
		return nil, err
	}
	for _, o := range ranges {
		own.services = append(own.services, networking.ParseRanges(o.(*networkingv1.ServiceCIDR))...)
	}
	if s, ok := c.Cluster.Get(ctx, "services", dnsNamespace, dnsService); ok {
		own.dns = addressesOf(networking.ClusterAddresses(s.(*corev1.Service)))
	}
	return own, own.addMachines(ctx, c)
}

// Namespace and name of the cluster DNS Service in every CoreDNS installation.
const dnsNamespace, dnsService = "kube-system", "kube-dns"

func addressesOf(addresses []string) []netip.Addr {
	var out []netip.Addr
	for _, text := range addresses {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, a.Unmap())
		}
	}
	return out
}

// addMachines adds the ports on which control plane replicas and agents listen. On a machine with a
// replica and an agent, all ports are added for all addresses of the machine.
func (own *ownedAddresses) addMachines(ctx context.Context, c Config) error {
	var replicas []netip.AddrPort
	if c.ReplicaAddresses != nil {
		replicas = c.ReplicaAddresses()
	}
	add := func(ip netip.Addr, p agentport.Port, what string) { own.listens[listenAddress{ip, p}] = what }
	for _, r := range replicas {
		add(r.Addr(), agentport.Port{Proto: "tcp", Number: r.Port()}, "a control plane replica")
	}
	nodes, err := c.Cluster.List(ctx, "nodes", "", false)
	if err != nil {
		return err
	}
	for _, o := range nodes {
		n := o.(*corev1.Node)
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				own.pods = append(own.pods, p)
			}
		}
		ports := agentport.Default()
		if p := n.Status.DaemonEndpoints.KubeletEndpoint.Port; p > 0 && p <= 65535 {
			ports = append(ports, agentport.Port{Proto: "tcp", Number: uint16(p)})
		}
		addresses := balancer.NodeAddresses(n)
		for _, ip := range addresses {
			for _, p := range ports {
				add(ip, p, "the agent of node "+n.Name)
			}
			for _, r := range replicas {
				if slices.Contains(addresses, r.Addr()) {
					add(ip, agentport.Port{Proto: "tcp", Number: r.Port()}, "a control plane replica")
				}
			}
		}
	}
	return nil
}

// validateExternalIPs returns errors for external IPs that the stored Service lacks and that the
// cluster may use itself. It also returns errors for new ports on which a machine of the cluster
// listens at an external IP.
func (own *ownedAddresses) validateExternalIPs(svc, old *corev1.Service) field.ErrorList {
	var errs field.ErrorList
	for i, text := range svc.Spec.ExternalIPs {
		raw, ok := netip.AddrFromSlice(utilnet.ParseIPSloppy(text))
		if !ok {
			continue // validation rejects it
		}
		ip, at := raw.Unmap(), externalIPsField.Index(i)
		had := old != nil && slices.Contains(old.Spec.ExternalIPs, text)
		if !had {
			if why := own.refusalReason(ip); why != "" {
				errs = append(errs, field.Invalid(at, text, why))
				continue
			}
		}
		for _, p := range svc.Spec.Ports {
			if had && hasPort(old, p) {
				continue
			}
			port := agentport.Port{Proto: strings.ToLower(string(p.Protocol)), Number: uint16(p.Port)}
			if what, ok := own.listens[listenAddress{ip, port}]; ok {
				errs = append(errs, field.Invalid(at, text, fmt.Sprintf(
					"port %d/%s of this address is used by %s: use another port, or remove the address", p.Port,
					p.Protocol, what)))
			}
		}
	}
	return errs
}

// refusalReason returns the reason why the address may not be an external IP; "" if it is allowed.
func (own *ownedAddresses) refusalReason(ip netip.Addr) string {
	within := func(all []netip.Prefix) int {
		return slices.IndexFunc(all, func(p netip.Prefix) bool { return p.Contains(ip) })
	}
	switch {
	case ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast() || ip.IsMulticast():
		return "may not be an unspecified, loopback, link-local or multicast address"
	case slices.Contains(own.dns, ip):
		return "is the address of the cluster DNS: use an address that the cluster does not use itself"
	}
	if i := within(own.pods); i >= 0 {
		return fmt.Sprintf("is in the pod range %s: use an address that the cluster does not use itself", own.pods[i])
	}
	if i := within(own.services); i >= 0 {
		return fmt.Sprintf("is in the Service range %s: use an address that the cluster does not use itself",
			own.services[i])
	}
	if len(own.allowed) > 0 && within(own.allowed) < 0 {
		return fmt.Sprintf("is outside the ranges that this cluster allows (--service-external-ip-ranges): %s",
			joinPrefixes(own.allowed))
	}
	return ""
}

func joinPrefixes(prefixes []netip.Prefix) string {
	out := make([]string, len(prefixes))
	for i, p := range prefixes {
		out[i] = p.String()
	}
	return strings.Join(out, ", ")
}
