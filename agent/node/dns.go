package node

import (
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// clusterDNS returns a function that returns the DNS servers of pods with dnsPolicy ClusterFirst.
// These are servers, the values of --cluster-dns. If servers is empty, they are the address of the
// Service kube-system/kube-dns. At that address the agent's own DNS server responds, unless the
// Service selects pods of a DNS add-on. If the Service does not exist either, the result is empty,
// and pods use the DNS servers of the node.
func clusterDNS(servers []string, objects agent.Objects) func() []string {
	return func() []string {
		if len(servers) > 0 {
			return servers
		}
		s, ok := objects.Service(agent.DNSNamespace, agent.DNSService)
		if !ok || s.Spec.ClusterIP == "" || s.Spec.ClusterIP == v1.ClusterIPNone {
			return nil
		}
		return []string{s.Spec.ClusterIP}
	}
}
