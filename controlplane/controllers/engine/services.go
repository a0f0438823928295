package engine

import (
	"cmp"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
)

// ServicesOf returns the keys of the Services with endpoints that a change of a pod may affect. It
// returns nil for an update that changes nothing that endpoints contain.
func ServicesOf(services cache.SharedIndexInformer, c Change[*corev1.Pod]) []Key {
	if c.Type == Updated && c.Old != nil && isSameEndpoint(c.Old, c.New) {
		return nil
	}
	var keys []Key
	for _, svc := range CachedBy[*corev1.Service](services, NamespaceIndex, c.New.Namespace) {
		if len(svc.Spec.Selector) == 0 {
			continue
		}
		sel := labels.SelectorFromSet(svc.Spec.Selector)
		if sel.Matches(labels.Set(c.New.Labels)) || c.Old != nil && sel.Matches(labels.Set(c.Old.Labels)) {
			keys = append(keys, KeyOf(svc))
		}
	}
	return keys
}

// ServicesOfNode returns the keys of the Services with endpoints that a change of a node may
// affect: the node may determine which addresses of its pods are accepted (see Deps.PodAddresses).
// pods must have PodNodeIndex.
func ServicesOfNode(
	services, pods cache.SharedIndexInformer, addresses *podaddress.Index, c Change[*corev1.Node],
) []Key {
	if addresses == nil || c.Type == Updated && c.Old != nil && !podaddress.IsNodeChanged(c.Old, c.New) {
		return nil
	}
	concerned := CachedBy[*corev1.Pod](pods, PodNodeIndex, c.New.Name)
	for _, n := range []*corev1.Node{c.Old, c.New} {
		if n != nil {
			concerned = append(concerned, addresses.PodsAffectedByNode(n)...)
		}
	}
	return servicesOfPods(services, concerned)
}

// ServicesOfRange returns the keys of the Services with endpoints that a change of a ServiceCIDR
// may affect: addresses of pods within a ServiceCIDR are not accepted as endpoints.
func ServicesOfRange(
	services cache.SharedIndexInformer, addresses *podaddress.Index, c Change[*networkingv1.ServiceCIDR],
) []Key {
	if addresses == nil || c.Type == Updated && !podaddress.IsRangeChanged(c.Old, c.New) {
		return nil
	}
	var concerned []*corev1.Pod
	for _, r := range []*networkingv1.ServiceCIDR{c.Old, c.New} {
		if r != nil {
			concerned = append(concerned, addresses.PodsAffectedByRange(r)...)
		}
	}
	return servicesOfPods(services, concerned)
}

func servicesOfPods(services cache.SharedIndexInformer, pods []*corev1.Pod) (keys []Key) {
	for _, p := range pods {
		keys = append(keys, ServicesOf(services, Change[*corev1.Pod]{Type: Added, New: p})...)
	}
	return keys
}

// ListSelectedPods returns the cached pods that Service svc selects. pods must have NamespaceIndex.
func ListSelectedPods(pods cache.SharedIndexInformer, svc *corev1.Service) []*corev1.Pod {
	sel := labels.SelectorFromSet(svc.Spec.Selector)
	var out []*corev1.Pod
	for _, p := range CachedBy[*corev1.Pod](pods, NamespaceIndex, svc.Namespace) {
		if sel.Matches(labels.Set(p.Labels)) {
			out = append(out, p)
		}
	}
	return out
}

// isSameEndpoint reports whether versions a and b of a pod result in the same endpoints.
func isSameEndpoint(a, b *corev1.Pod) bool {
	if a == b { // a resync: process every object
		return false
	}
	if a.Status.PodIP != b.Status.PodIP || len(a.Status.PodIPs) != len(b.Status.PodIPs) ||
		a.Spec.NodeName != b.Spec.NodeName || api.IsPodReady(a) != api.IsPodReady(b) ||
		api.IsPodTerminal(a) != api.IsPodTerminal(b) ||
		(a.DeletionTimestamp == nil) != (b.DeletionTimestamp == nil) || a.UID != b.UID ||
		a.Spec.Hostname != b.Spec.Hostname || a.Spec.Subdomain != b.Spec.Subdomain {
		return false
	}
	for i := range a.Status.PodIPs {
		if a.Status.PodIPs[i] != b.Status.PodIPs[i] {
			return false
		}
	}
	return labels.Equals(a.Labels, b.Labels)
}

// PodAddress returns the pod's first address of an IP family. It returns false if the pod has no
// such address.
func PodAddress(p *corev1.Pod, ipv6 bool) (string, bool) {
	ips := p.Status.PodIPs
	if len(ips) == 0 {
		ips = []corev1.PodIP{{IP: p.Status.PodIP}}
	}
	for _, ip := range ips {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Is6() == ipv6 {
			return ip.IP, true
		}
	}
	return "", false
}

// TargetPort returns the port number of pod p to which port sp of a Service is forwarded. It
// returns false if targetPort is a name and p has no container port with this name and protocol.
func TargetPort(p *corev1.Pod, sp *corev1.ServicePort) (int32, bool) {
	if sp.TargetPort.Type == intstr.Int {
		return cmp.Or(sp.TargetPort.IntVal, sp.Port), true
	}
	protocol := cmp.Or(sp.Protocol, corev1.ProtocolTCP)
	find := func(c *corev1.Container) (int32, bool) {
		for _, port := range c.Ports {
			if port.Name == sp.TargetPort.StrVal && cmp.Or(port.Protocol, corev1.ProtocolTCP) == protocol {
				return port.ContainerPort, true
			}
		}
		return 0, false
	}
	for i := range p.Spec.Containers {
		if n, ok := find(&p.Spec.Containers[i]); ok {
			return n, true
		}
	}
	for i := range p.Spec.InitContainers {
		c := &p.Spec.InitContainers[i]
		if c.RestartPolicy == nil || *c.RestartPolicy != corev1.ContainerRestartPolicyAlways {
			continue // only sidecars among the init containers still run when the pod serves
		}
		if n, ok := find(c); ok {
			return n, true
		}
	}
	return 0, false
}
