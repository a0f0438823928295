package dialer

import (
	"context"
	"fmt"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
)

// Endpoints returns the ready endpoints of a Service port. An error is an *apierrors.StatusError.
func (d *Dialer) Endpoints(ctx context.Context, namespace, service string, port int32) ([]Endpoint, error) {
	return d.findEndpoints(ctx, namespace, service, port, false)
}

// findEndpoints is like Endpoints. If strict is true, it returns only endpoints that reference a
// pod in the Service's namespace, and neither names nor plain addresses.
func (d *Dialer) findEndpoints(ctx context.Context, namespace, service string, port int32, strict bool) (
	[]Endpoint, error,
) {
	svc, sp, err := d.findService(ctx, namespace, service, port)
	if err != nil {
		return nil, err
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		if strict {
			return nil, noEndpoints(service)
		}
		return []Endpoint{{Address: svc.Spec.ExternalName, Port: port}}, nil
	}
	lists, err := d.cluster.List(ctx, "endpointslices", namespace, false)
	if err != nil {
		return nil, err
	}
	var out []Endpoint
	for _, o := range lists {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || s.Labels[discoveryv1.LabelServiceName] != service || s.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		number := portOf(s, sp.Name)
		if number < 1 || number > 65535 {
			continue
		}
		for i := range s.Endpoints {
			if strict && !podEndpoint(&s.Endpoints[i], namespace) {
				continue
			}
			if e, ok := d.endpointFor(ctx, namespace, &s.Endpoints[i], number); ok {
				out = append(out, e)
			}
		}
	}
	if len(out) == 0 {
		return nil, noEndpoints(service)
	}
	return out, nil
}

func noEndpoints(service string) error {
	return apierrors.NewServiceUnavailable(fmt.Sprintf("no endpoints available for service %q", service))
}

// podEndpoint reports whether an endpoint references a pod of the namespace.
func podEndpoint(ep *discoveryv1.Endpoint, namespace string) bool {
	ref := ep.TargetRef
	return ref != nil && ref.Kind == "Pod" && (ref.Namespace == "" || ref.Namespace == namespace)
}

func (d *Dialer) findService(ctx context.Context, namespace, name string, port int32) (
	*corev1.Service, *corev1.ServicePort, error,
) {
	o, _ := d.cluster.Get(ctx, "services", namespace, name)
	svc, ok := o.(*corev1.Service)
	if !ok {
		return nil, nil, apierrors.NewServiceUnavailable(fmt.Sprintf("service %q not found", name))
	}
	if svc.Spec.Type == corev1.ServiceTypeExternalName {
		return svc, nil, nil
	}
	for i := range svc.Spec.Ports {
		if svc.Spec.Ports[i].Port == port {
			return svc, &svc.Spec.Ports[i], nil
		}
	}
	return nil, nil, apierrors.NewServiceUnavailable(fmt.Sprintf("no service port %d found for service %q", port, name))
}

// portOf returns the number of the slice's TCP port with the given name; 0 if the slice has no such
// port.
func portOf(s *discoveryv1.EndpointSlice, name string) int32 {
	for _, p := range s.Ports {
		has := ptr.Deref(p.Name, "")
		if has == name && p.Port != nil && (p.Protocol == nil || *p.Protocol == corev1.ProtocolTCP) {
			return *p.Port
		}
	}
	return 0
}

// endpointFor returns the destination of a ready endpoint; false if the endpoint is invalid or not
// ready. If the endpoint references a pod, the pod must exist and have the address; the node then
// comes from the Pod object.
func (d *Dialer) endpointFor(ctx context.Context, namespace string, ep *discoveryv1.Endpoint, port int32) (
	Endpoint, bool,
) {
	if len(ep.Addresses) == 0 || ep.Conditions.Ready != nil && !*ep.Conditions.Ready {
		return Endpoint{}, false
	}
	e := Endpoint{Address: ep.Addresses[0], Port: port}
	addr, err := netip.ParseAddr(e.Address)
	if err != nil || !Proxyable(addr) {
		return Endpoint{}, false
	}
	if ref := ep.TargetRef; ref != nil && ref.Kind == "Pod" {
		o, _ := d.cluster.Get(ctx, "pods", namespace, ref.Name)
		pod, ok := o.(*corev1.Pod)
		if !ok || ref.UID != "" && pod.UID != ref.UID || !d.hasPeerAddress(pod, addr) {
			return Endpoint{}, false
		}
		e.Node, e.Pod = pod.Spec.NodeName, pod.UID
		return e, true
	}
	return d.withNode(ctx, e, addr), true
}

// withNode sets e.Node if a running pod has the address of an endpoint that references no pod. The
// address must be in the node's pod CIDR. Otherwise a node could report an address to receive the
// traffic of other pods.
func (d *Dialer) withNode(ctx context.Context, e Endpoint, addr netip.Addr) Endpoint {
	pods, _ := d.cluster.List(ctx, "pods", "", false) // without the list, the endpoint is dialed directly
	for _, o := range pods {
		pod, ok := o.(*corev1.Pod)
		if !ok || pod.Spec.HostNetwork || pod.Spec.NodeName == "" || !isRunning(pod) || !hasAddress(pod, addr) ||
			!d.hasPeerAddress(pod, addr) {
			continue
		}
		n, _ := d.cluster.Get(ctx, "nodes", "", pod.Spec.NodeName)
		if node, ok := n.(*corev1.Node); ok && inRange(node, addr) {
			e.Node, e.Pod = node.Name, pod.UID
			return e
		}
	}
	return e
}

// hasPeerAddress reports whether Services may use the address as an endpoint of the pod.
func (d *Dialer) hasPeerAddress(pod *corev1.Pod, addr netip.Addr) bool {
	counted := d.podAddresses().PeerPod(pod)
	return counted != nil && hasAddress(counted, addr)
}

func inRange(node *corev1.Node, addr netip.Addr) bool {
	return slices.ContainsFunc(append(slices.Clone(node.Spec.PodCIDRs), node.Spec.PodCIDR), func(cidr string) bool {
		p, err := netip.ParsePrefix(cidr)
		return err == nil && p.Contains(addr.Unmap())
	})
}

func isRunning(pod *corev1.Pod) bool {
	return !api.IsPodTerminal(pod)
}

func hasAddress(pod *corev1.Pod, addr netip.Addr) bool {
	if isSameIP(pod.Status.PodIP, addr) {
		return true
	}
	for _, ip := range pod.Status.PodIPs {
		if isSameIP(ip.IP, addr) {
			return true
		}
	}
	return false
}

func isSameIP(ip string, addr netip.Addr) bool {
	a, err := netip.ParseAddr(ip)
	return err == nil && a.Unmap() == addr.Unmap()
}
