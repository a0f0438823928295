package bootstrap

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

// KubernetesServiceName is the name of the Service of the API, its EndpointSlice and its Endpoints.
const KubernetesServiceName = "kubernetes"

// ErrAddressTaken is returned if another Service has the address of Service default/kubernetes.
var ErrAddressTaken = errors.New("the address of Service default/kubernetes is taken")

// EnsureKubernetesService creates or repairs Service default/kubernetes with the address serviceIP,
// and its EndpointSlice and Endpoints with the ready replicas. The leader calls it after each
// relevant change; fence is the term of its leadership, 0 for none. It writes only differences. As
// long as another Service has the address, it returns ErrAddressTaken with the name of that
// Service, but still maintains the EndpointSlice and Endpoints.
func (s *Setup) EnsureKubernetesService(ctx context.Context, fence uint64, serviceIP netip.Addr,
	readyReplicas []netip.AddrPort) error {
	// Clients that connect to a loopback address would reach their own machine.
	ready := slices.DeleteFunc(slices.Clone(readyReplicas), func(a netip.AddrPort) bool {
		ip := a.Addr()
		return ip.IsUnspecified() || ip.IsLoopback() || ip.IsLinkLocalUnicast()
	})
	slices.SortFunc(ready, netip.AddrPort.Compare)
	target := int32(443)
	if len(ready) > 0 {
		target = int32(ready[0].Port())
	}
	return errors.Join(
		s.ensureAPIService(ctx, fence, kubernetesService(serviceIP, target)),
		s.ensureAPISlice(ctx, fence, kubernetesSlice(ready, target)),
		s.ensureAPIEndpoints(ctx, fence, kubernetesEndpoints(ready, target)),
	)
}

func kubernetesService(ip netip.Addr, target int32) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: KubernetesServiceName,
			Labels: map[string]string{"component": "apiserver", "provider": "kubernetes"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip.String(), ClusterIPs: []string{ip.String()},
			Ports: []corev1.ServicePort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: 443,
				TargetPort: intstr.FromInt32(target)}},
		},
	}
}

// ensureAPIService creates the Service or restores the fields that a user has changed. A Service
// with another ClusterIP is deleted, and created again as soon as the wanted address is free.
func (s *Setup) ensureAPIService(ctx context.Context, fence uint64, wanted *corev1.Service) error {
	found, err := s.config.Cluster.GetStored(ctx, "services", wanted.Namespace, wanted.Name)
	if apierrors.IsNotFound(err) {
		if err := s.checkAddressFree(ctx, wanted); err != nil {
			return err
		}
		return s.writeObject(ctx, fence, api.VerbCreate, wanted)
	}
	if err != nil {
		return fmt.Errorf("reading Service %s/%s: %w", wanted.Namespace, wanted.Name, err)
	}
	have := found.(*corev1.Service)
	if have.DeletionTimestamp != nil {
		return nil // it is created again after its deletion
	}
	if have.Spec.ClusterIP != wanted.Spec.ClusterIP {
		if err := s.checkAddressFree(ctx, wanted); err != nil {
			return err
		}
		if err := s.writeObject(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		return s.writeObject(ctx, fence, api.VerbCreate, wanted)
	}
	labels := mergeLabels(have.Labels, wanted.Labels)
	if maps.Equal(have.Labels, labels) && have.Spec.Type == wanted.Spec.Type && len(have.Spec.Selector) == 0 &&
		samePorts(have.Spec.Ports, wanted.Spec.Ports) {
		return nil
	}
	next := have.DeepCopy()
	next.Labels, next.Spec.Type, next.Spec.Selector, next.Spec.Ports = labels, wanted.Spec.Type, nil, wanted.Spec.Ports
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}

// samePorts reports whether two lists of ports are equal. It compares only the fields that this
// server sets, not the node ports.
func samePorts(current, wanted []corev1.ServicePort) bool {
	return slices.EqualFunc(current, wanted, func(a, b corev1.ServicePort) bool {
		return a.Name == b.Name && a.Protocol == b.Protocol && a.Port == b.Port && a.TargetPort == b.TargetPort
	})
}

// mergeLabels returns a copy of current with all entries of wanted.
func mergeLabels(current, wanted map[string]string) map[string]string {
	out := maps.Clone(current)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, wanted)
	return out
}

// checkAddressFree returns ErrAddressTaken, with the name of the Service, if another Service has
// the ClusterIP of service.
func (s *Setup) checkAddressFree(ctx context.Context, service *corev1.Service) error {
	if !s.config.Registry.Reserved(registry.SpaceClusterIPs, service.Spec.ClusterIP) {
		return nil
	}
	all, err := s.config.Cluster.List(ctx, "services", "", true)
	if err != nil {
		return fmt.Errorf("listing Services to find the address %s: %w", service.Spec.ClusterIP, err)
	}
	for _, o := range all {
		if svc := o.(*corev1.Service); slices.Contains(svc.Spec.ClusterIPs, service.Spec.ClusterIP) {
			return fmt.Errorf("%w: Service %s/%s has %s; delete that Service, or recreate it without a clusterIP",
				ErrAddressTaken, svc.Namespace, svc.Name, service.Spec.ClusterIP)
		}
	}
	return nil // it was released meanwhile, or the commit reports the conflict
}

// ensureAPISlice creates the EndpointSlice or restores its endpoints, ports and labels.
func (s *Setup) ensureAPISlice(ctx context.Context, fence uint64, wanted *discoveryv1.EndpointSlice) error {
	found, err := s.config.Cluster.GetStored(ctx, "endpointslices", wanted.Namespace, wanted.Name)
	if apierrors.IsNotFound(err) {
		return s.writeObject(ctx, fence, api.VerbCreate, wanted)
	}
	if err != nil {
		return fmt.Errorf("reading EndpointSlice %s/%s: %w", wanted.Namespace, wanted.Name, err)
	}
	have := found.(*discoveryv1.EndpointSlice)
	if have.DeletionTimestamp != nil {
		return nil
	}
	if have.AddressType != wanted.AddressType { // the address type is immutable
		if err := s.writeObject(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		return s.writeObject(ctx, fence, api.VerbCreate, wanted)
	}
	labels := mergeLabels(have.Labels, wanted.Labels)
	if reflect.DeepEqual(have.Endpoints, wanted.Endpoints) && reflect.DeepEqual(have.Ports, wanted.Ports) &&
		maps.Equal(have.Labels, labels) {
		return nil
	}
	next := have.DeepCopy()
	next.Endpoints, next.Ports, next.Labels = wanted.Endpoints, wanted.Ports, labels
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}

// kubernetesSlice returns the EndpointSlice with the ready replicas. All replicas listen on the
// same port.
func kubernetesSlice(ready []netip.AddrPort, port int32) *discoveryv1.EndpointSlice {
	name, tcp, yes := "https", corev1.ProtocolTCP, true
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: KubernetesServiceName,
			Labels: map[string]string{discoveryv1.LabelServiceName: KubernetesServiceName},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Protocol: &tcp, Port: &port}},
	}
	for _, r := range ready {
		if r.Addr().Is6() {
			slice.AddressType = discoveryv1.AddressTypeIPv6
		}
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{r.Addr().String()}, Conditions: discoveryv1.EndpointConditions{Ready: &yes},
		})
	}
	return slice
}

// ensureAPIEndpoints creates the Endpoints, for clients that do not read EndpointSlices, or
// restores them.
func (s *Setup) ensureAPIEndpoints(ctx context.Context, fence uint64, wanted *corev1.Endpoints) error {
	found, err := s.config.Cluster.GetStored(ctx, "endpoints", wanted.Namespace, wanted.Name)
	if apierrors.IsNotFound(err) {
		return s.writeObject(ctx, fence, api.VerbCreate, wanted)
	}
	if err != nil {
		return fmt.Errorf("reading Endpoints %s/%s: %w", wanted.Namespace, wanted.Name, err)
	}
	have := found.(*corev1.Endpoints)
	labels := mergeLabels(have.Labels, wanted.Labels)
	if have.DeletionTimestamp != nil || reflect.DeepEqual(have.Subsets, wanted.Subsets) &&
		maps.Equal(have.Labels, labels) {
		return nil
	}
	next := have.DeepCopy()
	next.Subsets, next.Labels = wanted.Subsets, labels
	return s.writeObject(ctx, fence, api.VerbUpdate, next)
}

// kubernetesEndpoints returns the same endpoints as kubernetesSlice. The skip-mirror label prevents
// a mirrored EndpointSlice.
func kubernetesEndpoints(ready []netip.AddrPort, port int32) *corev1.Endpoints {
	out := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Namespace: metav1.NamespaceDefault, Name: KubernetesServiceName,
		Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"},
	}}
	if len(ready) == 0 {
		return out
	}
	subset := corev1.EndpointSubset{Ports: []corev1.EndpointPort{{Name: "https",
		Protocol: corev1.ProtocolTCP, Port: port}}}
	for _, r := range ready {
		subset.Addresses = append(subset.Addresses, corev1.EndpointAddress{IP: r.Addr().String()})
	}
	out.Subsets = []corev1.EndpointSubset{subset}
	return out
}
