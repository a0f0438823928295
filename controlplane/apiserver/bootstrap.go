package apiserver

import (
	"context"
	"fmt"
	"net/netip"
	"reflect"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/authz"
)

// itself is the identity under which the apiserver writes.
func itself() api.User {
	return api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters, api.GroupAuthenticated}}
}

// EnsureBootstrap creates what every cluster has from the start, where missing: the system
// namespaces and priority classes, and the default roles and bindings. The leader calls it.
func (s *Server) EnsureBootstrap(ctx context.Context) error {
	var all []api.Object
	for _, name := range []string{metav1.NamespaceDefault, metav1.NamespaceSystem, metav1.NamespacePublic, corev1.NamespaceNodeLease} {
		all = append(all, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: name}})
	}
	all = append(all, admission.SystemPriorityClasses()...)
	all = append(all, authz.BootstrapObjects()...)
	for _, o := range all {
		if err := s.ensure(ctx, o); err != nil {
			return err
		}
	}
	return nil
}

// kindOf finds the kind of a Go object.
func (s *Server) kindOf(o api.Object) (*api.Kind, error) {
	gvks, _, err := s.cfg.Scheme.ObjectKinds(o)
	if err != nil {
		return nil, err
	}
	for _, gvk := range gvks {
		if k := s.cfg.Kinds.ByGVK(gvk); k != nil {
			return k, nil
		}
	}
	return nil, nil
}

// ensure creates an object unless it is there. A kind that is not served needs none.
func (s *Server) ensure(ctx context.Context, o api.Object) error {
	kind, err := s.kindOf(o)
	if kind == nil || err != nil {
		return err
	}
	if _, ok := s.known.Get(ctx, kind.Resource, o.GetNamespace(), o.GetName()); ok {
		return nil
	}
	_, err = s.chain.Do(ctx, &api.Request{
		User: itself(), Verb: api.VerbCreate, Kind: kind, Namespace: o.GetNamespace(), Name: o.GetName(), Object: o,
	})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating %s %s: %w", kind.GVK.Kind, o.GetName(), err)
	}
	return nil
}

// apiService is the name of the Service of the API, and of its EndpointSlice.
const apiService = "kubernetes"

// EnsureKubernetesService writes Service default/kubernetes at serviceIP and its
// EndpointSlice with the ready replicas. The leader calls it whenever these
// change; it writes only what differs.
func (s *Server) EnsureKubernetesService(ctx context.Context, serviceIP netip.Addr, readyReplicas []netip.AddrPort) error {
	ready := slices.Clone(readyReplicas)
	slices.SortFunc(ready, netip.AddrPort.Compare)
	target := int32(443)
	if len(ready) > 0 {
		target = int32(ready[0].Port())
	}
	labels := map[string]string{"component": "apiserver", "provider": "kubernetes"}
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: apiService, Labels: labels},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: serviceIP.String(), ClusterIPs: []string{serviceIP.String()},
			Ports: []corev1.ServicePort{{Name: "https", Protocol: corev1.ProtocolTCP, Port: 443, TargetPort: intstr.FromInt32(target)}},
		},
	}
	if err := s.ensure(ctx, svc); err != nil {
		return err
	}
	slice := kubernetesSlice(ready, target)
	gvr := discoveryv1.SchemeGroupVersion.WithResource("endpointslices")
	have, err := s.known.Fresh(ctx, gvr.Resource, slice.Namespace, slice.Name)
	if apierrors.IsNotFound(err) {
		return s.ensure(ctx, slice)
	}
	if err != nil {
		return fmt.Errorf("reading EndpointSlice %s/%s: %w", slice.Namespace, slice.Name, err)
	}
	return s.updateSlice(ctx, gvr, have.(*discoveryv1.EndpointSlice), slice)
}

func (s *Server) updateSlice(ctx context.Context, gvr schema.GroupVersionResource, have, want *discoveryv1.EndpointSlice) error {
	if reflect.DeepEqual(have.Endpoints, want.Endpoints) && reflect.DeepEqual(have.Ports, want.Ports) {
		return nil
	}
	next := have.DeepCopy()
	next.Endpoints, next.Ports = want.Endpoints, want.Ports
	_, err := s.chain.Do(ctx, &api.Request{
		User: itself(), Verb: api.VerbUpdate, Kind: s.cfg.Kinds.ByResource(gvr),
		Namespace: next.Namespace, Name: next.Name, Object: next,
	})
	if err != nil {
		return fmt.Errorf("writing EndpointSlice %s/%s: %w", next.Namespace, next.Name, err)
	}
	return nil
}

// kubernetesSlice holds the replicas; all of them listen on the same port.
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
