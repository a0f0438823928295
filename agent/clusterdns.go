package agent

import v1 "k8s.io/api/core/v1"

// The Service of the cluster's DNS, as every installation of CoreDNS names it, and the annotation by which the control
// plane says that the agents themselves answer at its address.
const (
	DNSNamespace = "kube-system"
	DNSService   = "kube-dns"
	ServedBy     = "keelson.dev/served-by"
	ServedByNode = "agent"
)

// ServesDNS says whether agents answer at the addresses of a Service: it is the cluster's DNS, and selects no pods. As
// soon as it has a selector, its addresses are those of the pods that it selects.
func ServesDNS(s *v1.Service) bool {
	return s.Namespace == DNSNamespace && s.Name == DNSService && len(s.Spec.Selector) == 0 && s.Annotations[ServedBy] == ServedByNode &&
		s.Spec.Type != v1.ServiceTypeExternalName && s.DeletionTimestamp == nil
}
