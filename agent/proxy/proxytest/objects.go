// Package proxytest provides Services and EndpointSlices for the tests of the Service proxy.
package proxytest

import (
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Service returns a Service in namespace default with the port http (80), changed by change.
func Service(name, ip string, nodePort int32, change ...func(*v1.Service)) *v1.Service {
	s := &v1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name}}
	s.Spec.ClusterIP = ip
	s.Spec.Ports = []v1.ServicePort{{Name: "http", Port: 80, NodePort: nodePort, Protocol: v1.ProtocolTCP}}
	for _, c := range change {
		c(s)
	}
	return s
}

// Endpoint returns an endpoint on a node with the given conditions.
func Endpoint(ip, node string, ready, serving, terminating bool) discoveryv1.Endpoint {
	return discoveryv1.Endpoint{Addresses: []string{ip}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating}}
}

// Slice returns an EndpointSlice of the Service svc with the port http (8080).
func Slice(svc string, endpoints ...discoveryv1.Endpoint) *discoveryv1.EndpointSlice {
	name, port, proto := "http", int32(8080), v1.ProtocolTCP
	return &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: svc + "-x",
			Labels: map[string]string{discoveryv1.LabelServiceName: svc}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Endpoints:   endpoints,
		Ports:       []discoveryv1.EndpointPort{{Name: &name, Port: &port, Protocol: &proto}},
	}
}

// Hint returns the endpoint with hints for a zone and a node.
func Hint(e discoveryv1.Endpoint, zone, node string) discoveryv1.Endpoint {
	e.Hints = &discoveryv1.EndpointHints{}
	if zone != "" {
		e.Hints.ForZones = []discoveryv1.ForZone{{Name: zone}}
	}
	if node != "" {
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: node}}
	}
	return e
}
