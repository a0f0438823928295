package servicecidr

import (
	"cmp"
	"fmt"
	"slices"

	corev1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds"
)

// portIndex finds Services by the node ports that they have: "TCP-30080".
const portIndex = "keelson.nodeport"

// nodePorts is the index function of portIndex.
func nodePorts(o api.Object) []string {
	svc, ok := o.(*corev1.Service)
	if !ok {
		return nil
	}
	var out []string
	for _, p := range kinds.NodePorts(svc) {
		out = append(out, p.Value())
	}
	return out
}

// JudgePorts says what is wrong with the node ports of a Service; sharing are the Services that have a port. A port is
// reserved by the commit that gives it to a Service, so that there is none that is not allocated: two have one, or one is
// out of the range, where a Service is older than reservations. Neither can be mended without a change that somebody
// relies on.
func JudgePorts(svc *corev1.Service, sharing func(port string) []*corev1.Service) (out []Fault) {
	for _, p := range kinds.NodePorts(svc) {
		if p.Port < kinds.MinNodePort || p.Port > kinds.MaxNodePort {
			out = append(out, Fault{Reason: "PortOutOfRange", Message: fmt.Sprintf("Node port %s is not within %d-%d; create the Service again, or give it another",
				p, kinds.MinNodePort, kinds.MaxNodePort)})
		}
		all := slices.Clone(sharing(p.Value()))
		if len(all) < 2 {
			continue
		}
		// The one that had it first keeps it.
		first := slices.MinFunc(all, func(a, b *corev1.Service) int {
			return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
		})
		if first.UID != svc.UID {
			out = append(out, Fault{Reason: "PortAlreadyAllocated", Message: fmt.Sprintf("Node port %s is that of Service %s/%s too; create this Service again, or give it another",
				p, first.Namespace, first.Name)})
		}
	}
	return out
}
