package discovery_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/controlplane/api/kinds/core"
	"keelson.dev/keelson/controlplane/api/kinds/discovery"
	"keelson.dev/keelson/controlplane/api/kinds/kindstest"
)

// What is asked of traffic's ways is judged as Kubernetes judges it.
func TestValidateTopology(t *testing.T) {
	svc := func(change func(s *corev1.Service)) *corev1.Service {
		s := &corev1.Service{Spec: corev1.ServiceSpec{Ports: []corev1.ServicePort{{Port: 80}}}}
		core.DefaultService(s)
		change(s)
		return s
	}
	for _, how := range []string{"PreferClose", "PreferSameZone", "PreferSameNode"} {
		kindstest.CheckErrors(t, how, core.ValidateService(svc(func(s *corev1.Service) {
			s.Spec.TrafficDistribution = &how
		})))
	}
	for _, how := range []string{"", "Far", "preferclose"} {
		kindstest.CheckErrors(t, how, core.ValidateService(svc(func(s *corev1.Service) {
			s.Spec.TrafficDistribution = &how
		})),
			`spec.trafficDistribution: Unsupported value: `+fmt.Sprintf("%q", how)+
				`: supported values: "PreferClose", "PreferSameZone", "PreferSameNode"`)
	}
	modes := func(old, mode string) *corev1.Service {
		return svc(func(s *corev1.Service) {
			s.Annotations = map[string]string{corev1.DeprecatedAnnotationTopologyAwareHints: old,
				corev1.AnnotationTopologyMode: mode}
		})
	}
	kindstest.CheckErrors(t, "one annotation by two names", core.ValidateService(modes("Auto", "Auto")))
	kindstest.CheckErrors(t, "two annotations", core.ValidateService(modes("Auto", "Disabled")),
		`metadata.annotations[service.kubernetes.io/topology-mode]: Invalid value: "Disabled": must match `+
			`annotations[service.kubernetes.io/topology-aware-hints] when both are specified`)

	slice := func(h discoveryv1.EndpointHints) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{AddressType: discoveryv1.AddressTypeIPv4,
			Endpoints: []discoveryv1.Endpoint{{Addresses: []string{"10.0.0.1"}, Hints: &h}}}
	}
	zones := func(names ...string) (out []discoveryv1.ForZone) {
		for _, n := range names {
			out = append(out, discoveryv1.ForZone{Name: n})
		}
		return out
	}
	nodes := func(names ...string) (out []discoveryv1.ForNode) {
		for _, n := range names {
			out = append(out, discoveryv1.ForNode{Name: n})
		}
		return out
	}
	kindstest.CheckErrors(t, "hints",
		discovery.ValidateEndpointSlice(slice(discoveryv1.EndpointHints{ForZones: zones("a", "b"),
			ForNodes: nodes("w1", "w2.example")})))
	kindstest.CheckErrors(t, "wrong names",
		discovery.ValidateEndpointSlice(slice(discoveryv1.EndpointHints{ForZones: zones("a/b"),
			ForNodes: nodes("W1")})),
		`endpoints[0].hints.forZones[0].name: Invalid value: "a/b"`,
		`endpoints[0].hints.forNodes[0].name: Invalid value: "W1"`)
	kindstest.CheckErrors(t, "twice",
		discovery.ValidateEndpointSlice(slice(discoveryv1.EndpointHints{ForZones: zones("a", "a"),
			ForNodes: nodes("w1", "w1")})),
		`endpoints[0].hints.forZones[1].name: Duplicate value: "a"`,
		`endpoints[0].hints.forNodes[1].name: Duplicate value: "w1"`)
	nine := []string{"a", "b", "c", "d", "e", "f", "g", "h", "i"}
	kindstest.CheckErrors(t, "too many",
		discovery.ValidateEndpointSlice(slice(discoveryv1.EndpointHints{ForZones: zones(nine...),
			ForNodes: nodes(nine...)})),
		`endpoints[0].hints.forZones: Too many: 9: must have at most 8 items`,
		`endpoints[0].hints.forNodes: Too many: 9: must have at most 8 items`)
}
