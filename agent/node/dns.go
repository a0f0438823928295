package node

import (
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// clusterDNS returns a function for the DNS servers of pods with dnsPolicy ClusterFirst: those of
// --cluster-dns, or the address of Service kube-system/kube-dns. At that address the agent's DNS
// server responds, unless the Service selects pods of a DNS add-on. With neither, pods have the
// node's servers.
func clusterDNS(given []string, objects agent.Objects) func() []string {
	return func() []string {
		if len(given) > 0 {
			return given
		}
		s, ok := objects.Service(agent.DNSNamespace, agent.DNSService)
		if !ok || s.Spec.ClusterIP == "" || s.Spec.ClusterIP == v1.ClusterIPNone {
			return nil
		}
		return []string{s.Spec.ClusterIP}
	}
}
