package agent

import v1 "k8s.io/api/core/v1"

// The namespace and the name of the cluster DNS Service, which are the same in every installation
// of CoreDNS, and an annotation of this Service. The control plane sets ServedByAnnotation to
// ServedByAgent if the agents serve DNS at the Service's addresses.
const (
	DNSNamespace       = "kube-system"
	DNSService         = "kube-dns"
	ServedByAnnotation = "keelson.dev/served-by"
	ServedByAgent      = "agent"
)

// AgentsServeDNS reports whether the agents serve DNS at the addresses of a Service: it is the
// cluster DNS Service, has the annotation ServedByAgent and has no selector. If the Service has a
// selector, the selected pods serve DNS.
func AgentsServeDNS(s *v1.Service) bool {
	return s.Namespace == DNSNamespace && s.Name == DNSService && len(s.Spec.Selector) == 0 &&
		s.Annotations[ServedByAnnotation] == ServedByAgent &&
		s.Spec.Type != v1.ServiceTypeExternalName && s.DeletionTimestamp == nil
}
