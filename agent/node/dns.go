package node

import (
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// clusterDNS are the servers of pods with dnsPolicy ClusterFirst: those of --cluster-dns, or else the address of the
// Service kube-system/kube-dns, where the agent itself answers unless the Service selects pods of a DNS add-on. Without
// either pods have the node's.
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
