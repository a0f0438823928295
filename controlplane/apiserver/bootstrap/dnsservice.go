package bootstrap

import (
	"context"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/registry"
)

// DNSServiceName is the name of the cluster's DNS Service in namespace kube-system.
const DNSServiceName = "kube-dns"

// EnsureDNSService creates the cluster's DNS Service, kube-system/kube-dns, if it does not exist.
// It does not change an existing Service. If a user gave the Service a selector, it routes to pods,
// and agents do not respond to DNS queries at its address. A new Service gets the address ip unless
// another Service has it. fence is the term of the leadership, 0 for none.
func (s *Setup) EnsureDNSService(ctx context.Context, fence uint64, ip netip.Addr) error {
	const name = DNSServiceName
	if _, ok := s.config.Cluster.Get(ctx, "services", metav1.NamespaceSystem, name); ok {
		return nil
	}
	svc := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: metav1.NamespaceSystem, Name: name, Labels: map[string]string{"k8s-app": name},
			Annotations: map[string]string{"keelson.dev/served-by": "agent"},
		},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP,
			Ports: []corev1.ServicePort{
				{Name: "dns", Protocol: corev1.ProtocolUDP, Port: 53, TargetPort: intstr.FromInt32(53)},
				{Name: "dns-tcp", Protocol: corev1.ProtocolTCP, Port: 53, TargetPort: intstr.FromInt32(53)},
				{Name: "metrics", Protocol: corev1.ProtocolTCP, Port: 9153, TargetPort: intstr.FromInt32(9153)},
			},
		},
	}
	if !s.config.Registry.Reserved(registry.SpaceClusterIPs, ip.String()) {
		svc.Spec.ClusterIP, svc.Spec.ClusterIPs = ip.String(), []string{ip.String()}
	}
	if err := s.writeObject(ctx, fence, api.VerbCreate, svc); err != nil && !apierrors.IsAlreadyExists(err) {
		return err
	}
	return nil
}
