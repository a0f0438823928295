package servicemodel

import (
	"fmt"
	"testing"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
)

// F117: the pairs of external addresses and ports of one Service are limited on the node too.
func TestExternalFrontendsAreBounded(t *testing.T) {
	bomb := proxytest.Service("bomb", "10.96.0.66", 0, func(s *v1.Service) {
		s.Spec.Ports = nil
		for i := range 300 {
			s.Spec.Ports = append(s.Spec.Ports, v1.ServicePort{Name: fmt.Sprint("p", i), Port: int32(20000 + i)})
		}
		for i := range 400 {
			s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, fmt.Sprintf("203.0.%d.%d", i/200, 1+i%200))
		}
	})
	n := 0
	for _, p := range Compute([]*v1.Service{bomb}, nil, Location{Node: "w1", Zone: "a"}).Ports() {
		n += len(p.External)
	}
	if n > maxServicePairs || n < maxServicePairs/2 {
		t.Errorf("%d frontends, want %d at most", n, maxServicePairs)
	}
}
