package servicemodel

import (
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// ServiceHealth is the JSON response at the health check node port of a Service.
type ServiceHealth struct {
	Port    int32 `json:"-"` // the health check node port
	Service struct {
		Namespace string `json:"namespace"`
		Name      string `json:"name"`
	} `json:"service"`
	LocalEndpoints int `json:"localEndpoints"`
}

// computeHealth returns the health check response of the Service s on this node. parts are its
// EndpointSlices. ok is false if the Service has no health check node port.
func computeHealth(s *v1.Service, parts map[string]*discoveryv1.EndpointSlice, node string) (h ServiceHealth, ok bool) {
	h.Port = s.Spec.HealthCheckNodePort
	if h.Port == 0 || s.Spec.Type != v1.ServiceTypeLoadBalancer ||
		s.Spec.ExternalTrafficPolicy != v1.ServiceExternalTrafficPolicyLocal {
		return h, false
	}
	h.Service.Namespace, h.Service.Name = s.Namespace, s.Name
	local := map[discoveryv1.AddressType]map[string]bool{}
	for _, p := range parts {
		if local[p.AddressType] == nil {
			local[p.AddressType] = map[string]bool{}
		}
		for _, e := range p.Endpoints {
			if e.NodeName != nil && *e.NodeName == node && (e.Conditions.Ready == nil || *e.Conditions.Ready) &&
				len(e.Addresses) > 0 {
				local[p.AddressType][e.Addresses[0]] = true
			}
		}
	}
	// The slices of both address families list the same pods.
	h.LocalEndpoints = max(len(local[discoveryv1.AddressTypeIPv4]), len(local[discoveryv1.AddressTypeIPv6]))
	return h, true
}
