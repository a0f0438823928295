package kctl

import (
	"fmt"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/client-go/dynamic"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/kctl/nettrace"
)

// maxTraceSecrets is the maximum number of TLS Secrets that one trace reads.
const maxTraceSecrets = 50

// readIngressObjects reads the objects that route requests from outside the cluster to Services:
// Ingresses, Gateways, routes and their classes. It then reads the TLS Secrets for target t, and
// the EndpointSlices of the Services behind it.
func (r *netReader) readIngressObjects(cluster dynamic.Interface, t nettrace.Target) {
	w := &r.world
	w.Entrances = &nettrace.Entrances{}
	e := w.Entrances
	if l, ok := listForTrace(r, nettrace.IngressClasses, metav1.ListOptions{},
		r.cs.NetworkingV1().IngressClasses().List); ok {
		e.Classes = pointersTo(l.Items)
	}
	if l, ok := listForTrace(r, nettrace.Ingresses, metav1.ListOptions{}, r.cs.NetworkingV1().Ingresses("").List); ok {
		e.Ingresses = pointersTo(l.Items)
	}
	e.GatewayClasses = listGatewayKind[gw.GatewayClass](r, cluster, nettrace.GatewayClasses)
	e.Gateways = listGatewayKind[gw.Gateway](r, cluster, nettrace.Gateways)
	e.HTTPRoutes = listGatewayKind[gw.HTTPRoute](r, cluster, "httproutes")
	e.GRPCRoutes = listGatewayKind[gw.GRPCRoute](r, cluster, "grpcroutes")
	// v1beta1 has the same fields
	e.Grants = listGatewayKind[gw.ReferenceGrant](r, cluster, "referencegrants", "v1beta1")
	for i, at := range nettrace.TLSSecretNames(w, t) {
		if i >= maxTraceSecrets {
			r.addUnread(nettrace.Secrets)
			break
		}
		if r.err != nil {
			return
		}
		s, err := r.cs.CoreV1().Secrets(at.Namespace).Get(r.ctx, at.Name, metav1.GetOptions{})
		switch {
		case apierrors.IsForbidden(err):
			r.addUnread(nettrace.Secrets)
		case apierrors.IsNotFound(err): // the trace reports it as missing
		case err != nil:
			r.err = fmt.Errorf("reading secret %s: %w", at, err)
		default:
			e.Secrets = append(e.Secrets, s)
		}
	}
	for _, svc := range nettrace.ServicesBehind(w, t) {
		r.readEndpointSlices(svc.Namespace, svc.Name)
	}
}

// readEndpointSlices adds the EndpointSlices of a Service to r.world.Slices.
func (r *netReader) readEndpointSlices(namespace, service string) {
	o := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: service}.String()}
	if l, ok := listForTrace(r, nettrace.Slices, o, r.cs.DiscoveryV1().EndpointSlices(namespace).List); ok {
		r.world.Slices = append(r.world.Slices, l.Items...)
	}
}

// listGatewayKind returns all objects of a Gateway API resource. It requests version v1. If v1 is
// not served, it requests the versions in older, in order, until one is served. It returns nil if
// no version is served. If the user may not read the resource, its name is added to r.world.Unread.
func listGatewayKind[T any](r *netReader, cluster dynamic.Interface, resource string, older ...string) (out []*T) {
	if r.err != nil {
		return nil
	}
	read := func(version string) (*unstructured.UnstructuredList, error) {
		return cluster.Resource(schema.GroupVersionResource{Group: gatewayClasses.Group, Version: version,
			Resource: resource}).List(r.ctx, metav1.ListOptions{Limit: listLimit})
	}
	l, err := read(gatewayClasses.Version)
	for _, version := range older {
		if apierrors.IsNotFound(err) {
			l, err = read(version)
		}
	}
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case apierrors.IsForbidden(err):
		r.addUnread(resource)
		return nil
	case err != nil:
		r.err = fmt.Errorf("reading %s: %w", resource, err)
		return nil
	}
	if l.GetContinue() != "" {
		r.addUnread(resource)
	}
	for _, u := range l.Items {
		o := new(T)
		if err := runtime.DefaultUnstructuredConverter.FromUnstructured(u.Object, o); err != nil {
			r.err = fmt.Errorf("reading %s %s/%s: %w", resource, u.GetNamespace(), u.GetName(), err)
			return nil
		}
		out = append(out, o)
	}
	return out
}

func pointersTo[T any](all []T) []*T {
	out := make([]*T, len(all))
	for i := range all {
		out[i] = &all[i]
	}
	return out
}
