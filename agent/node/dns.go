package node

import (
	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
)

// The Service of a cluster's DNS, as every installation of CoreDNS names it.
const (
	dnsNamespace = "kube-system"
	dnsService   = "kube-dns"
)

// clusterDNS are the servers of pods with dnsPolicy ClusterFirst: those of --cluster-dns, or else the address of the
// Service kube-system/kube-dns, so that a DNS add-on is used from the next pod on. Without either pods have the node's.
func clusterDNS(given []string, objects agent.Objects) func() []string {
	return func() []string {
		if len(given) > 0 {
			return given
		}
		s, ok := objects.Service(dnsNamespace, dnsService)
		if !ok || s.Spec.ClusterIP == "" || s.Spec.ClusterIP == v1.ClusterIPNone {
			return nil
		}
		return []string{s.Spec.ClusterIP}
	}
}
