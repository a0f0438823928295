package server

import (
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
)

// wireAddresses builds the judge of the addresses that nodes report for pods. The informers have not started.
func (r *Replica) wireAddresses() (err error) {
	r.addresses, err = podaddress.New(podaddress.Rules{
		Services: r.cluster.servicePrefixes(), ForeignRanges: r.cfg.PodAddressRanges, MirrorPeers: r.cfg.MirrorPodPeers,
		Replicas: r.peers.listening,
	}, client.Informer[*corev1.Node](r.informers), client.Informer[*corev1.Pod](r.informers),
		client.Informer[*networkingv1.ServiceCIDR](r.informers))
	return err
}
