package apiserver

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

// apiService is the name of the API's Service, its EndpointSlice and its Endpoints.
const apiService = "kubernetes"

// ErrAddressTaken reports that another Service has the address of Service default/kubernetes.
var ErrAddressTaken = errors.New("the address of Service default/kubernetes is taken")

// EnsureKubernetesService creates or repairs Service default/kubernetes with the address serviceIP,
// and its EndpointSlice and Endpoints with the ready replicas. The leader calls it after each
// relevant change; fence is the term of its leadership, 0 for none. It writes only differences. It
// returns ErrAddressTaken, with the name of the Service, as long as another Service has the
// address. The EndpointSlice and Endpoints are maintained nevertheless.
func (s *Server) EnsureKubernetesService(ctx context.Context, fence uint64, serviceIP netip.Addr,
	readyReplicas []netip.AddrPort) error {
	// An address that is local to each machine would lead clients to themselves.
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
			Namespace: metav1.NamespaceDefault, Name: apiService,
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
// with another ClusterIP is deleted and created again as soon as the right address is free.
func (s *Server) ensureAPIService(ctx context.Context, fence uint64, want *corev1.Service) error {
	found, err := s.known.Fresh(ctx, "services", want.Namespace, want.Name)
	if apierrors.IsNotFound(err) {
		if err := s.addressFree(ctx, want); err != nil {
			return err
		}
		return s.write(ctx, fence, api.VerbCreate, want)
	}
	if err != nil {
		return fmt.Errorf("reading Service %s/%s: %w", want.Namespace, want.Name, err)
	}
	have := found.(*corev1.Service)
	if have.DeletionTimestamp != nil {
		return nil // it is created again after its deletion
	}
	if have.Spec.ClusterIP != want.Spec.ClusterIP {
		if err := s.addressFree(ctx, want); err != nil {
			return err
		}
		if err := s.write(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		return s.write(ctx, fence, api.VerbCreate, want)
	}
	labels := withAll(have.Labels, want.Labels)
	if maps.Equal(have.Labels, labels) && have.Spec.Type == want.Spec.Type && len(have.Spec.Selector) == 0 &&
		samePorts(have.Spec.Ports, want.Spec.Ports) {
		return nil
	}
	next := have.DeepCopy()
	next.Labels, next.Spec.Type, next.Spec.Selector, next.Spec.Ports = labels, want.Spec.Type, nil, want.Spec.Ports
	return s.write(ctx, fence, api.VerbUpdate, next)
}

// samePorts reports whether the fields of ports that this server sets are equal. It ignores node
// ports.
func samePorts(have, want []corev1.ServicePort) bool {
	return slices.EqualFunc(have, want, func(a, b corev1.ServicePort) bool {
		return a.Name == b.Name && a.Protocol == b.Protocol && a.Port == b.Port && a.TargetPort == b.TargetPort
	})
}

// withAll returns a copy of have with all entries of want.
func withAll(have, want map[string]string) map[string]string {
	out := maps.Clone(have)
	if out == nil {
		out = map[string]string{}
	}
	maps.Copy(out, want)
	return out
}

// addressFree returns ErrAddressTaken, with the name of the Service, if another Service has the
// ClusterIP of want.
func (s *Server) addressFree(ctx context.Context, want *corev1.Service) error {
	if !s.cfg.Registry.Reserved(registry.SpaceClusterIPs, want.Spec.ClusterIP) {
		return nil
	}
	all, err := s.known.List(ctx, "services", "", true)
	if err != nil {
		return fmt.Errorf("looking for the Service with address %s: %w", want.Spec.ClusterIP, err)
	}
	for _, o := range all {
		if svc := o.(*corev1.Service); slices.Contains(svc.Spec.ClusterIPs, want.Spec.ClusterIP) {
			return fmt.Errorf("%w: Service %s/%s has %s; delete that one, or create it again without a clusterIP",
				ErrAddressTaken, svc.Namespace, svc.Name, want.Spec.ClusterIP)
		}
	}
	return nil // it was released meanwhile, or the commit reports the conflict
}

// ensureAPISlice creates the EndpointSlice or restores its endpoints, ports and labels.
func (s *Server) ensureAPISlice(ctx context.Context, fence uint64, want *discoveryv1.EndpointSlice) error {
	found, err := s.known.Fresh(ctx, "endpointslices", want.Namespace, want.Name)
	if apierrors.IsNotFound(err) {
		return s.write(ctx, fence, api.VerbCreate, want)
	}
	if err != nil {
		return fmt.Errorf("reading EndpointSlice %s/%s: %w", want.Namespace, want.Name, err)
	}
	have := found.(*discoveryv1.EndpointSlice)
	if have.DeletionTimestamp != nil {
		return nil
	}
	if have.AddressType != want.AddressType { // the address type is immutable
		if err := s.write(ctx, fence, api.VerbDelete, have); err != nil && !apierrors.IsNotFound(err) {
			return err
		}
		return s.write(ctx, fence, api.VerbCreate, want)
	}
	labels := withAll(have.Labels, want.Labels)
	if reflect.DeepEqual(have.Endpoints, want.Endpoints) && reflect.DeepEqual(have.Ports, want.Ports) &&
		maps.Equal(have.Labels, labels) {
		return nil
	}
	next := have.DeepCopy()
	next.Endpoints, next.Ports, next.Labels = want.Endpoints, want.Ports, labels
	return s.write(ctx, fence, api.VerbUpdate, next)
}

// kubernetesSlice returns the EndpointSlice with the ready replicas. All replicas listen on the
// same port.
func kubernetesSlice(ready []netip.AddrPort, port int32) *discoveryv1.EndpointSlice {
	name, tcp, yes := "https", corev1.ProtocolTCP, true
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceDefault, Name: apiService,
			Labels: map[string]string{discoveryv1.LabelServiceName: apiService},
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
func (s *Server) ensureAPIEndpoints(ctx context.Context, fence uint64, want *corev1.Endpoints) error {
	found, err := s.known.Fresh(ctx, "endpoints", want.Namespace, want.Name)
	if apierrors.IsNotFound(err) {
		return s.write(ctx, fence, api.VerbCreate, want)
	}
	if err != nil {
		return fmt.Errorf("reading Endpoints %s/%s: %w", want.Namespace, want.Name, err)
	}
	have := found.(*corev1.Endpoints)
	labels := withAll(have.Labels, want.Labels)
	if have.DeletionTimestamp != nil || reflect.DeepEqual(have.Subsets, want.Subsets) && maps.Equal(have.Labels, labels) {
		return nil
	}
	next := have.DeepCopy()
	next.Subsets, next.Labels = want.Subsets, labels
	return s.write(ctx, fence, api.VerbUpdate, next)
}

// kubernetesEndpoints returns the same endpoints as kubernetesSlice. The skip-mirror label prevents
// a mirrored EndpointSlice.
func kubernetesEndpoints(ready []netip.AddrPort, port int32) *corev1.Endpoints {
	out := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Namespace: metav1.NamespaceDefault, Name: apiService, Labels: map[string]string{discoveryv1.LabelSkipMirror: "true"},
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
