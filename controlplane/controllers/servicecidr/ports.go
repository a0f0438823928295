package servicecidr

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/core"
)

// portIndex indexes Services by protocol and number of their node ports, for example "TCP-30080".
const portIndex = "keelson.nodeport"

// nodePorts is the index function of portIndex: it returns the node ports of a Service.
func nodePorts(o api.Object) []string {
	svc, ok := o.(*corev1.Service)
	if !ok {
		return nil
	}
	var out []string
	for _, p := range core.NodePorts(svc) {
		out = append(out, p.Value())
	}
	return out
}

// JudgePorts returns the problems of the node ports of Service svc: a port that another Service has
// too, or that is out of range. sharing returns the Services that have a port. Only Services from
// old releases have such problems: newer releases reserve each port in the commit that assigns it.
// The problems are reported but not repaired, because clients may rely on the port.
func JudgePorts(svc *corev1.Service, sharing func(port string) []*corev1.Service) (out []Fault) {
	for _, p := range core.NodePorts(svc) {
		if p.Port < core.MinNodePort || p.Port > core.MaxNodePort {
			out = append(out, Fault{Reason: "PortOutOfRange",
				Message: fmt.Sprintf("Node port %s is not within %d-%d; create the Service again, or "+
					"change its node port",
					p, core.MinNodePort, core.MaxNodePort)})
		}
		all := slices.Clone(sharing(p.Value()))
		if len(all) < 2 {
			continue
		}
		// The port belongs to the Service that had it first.
		first := slices.MinFunc(all, func(a, b *corev1.Service) int {
			return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace),
				cmp.Compare(a.Name, b.Name))
		})
		if first.UID != svc.UID {
			out = append(out, Fault{Reason: "PortAlreadyAllocated",
				Message: fmt.Sprintf("Node port %s is also assigned to Service %s/%s; create this Service again, or "+
					"change its node port",
					p, first.Namespace, first.Name)})
		}
	}
	return out
}
