package server

import (
	"context"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
)

// wireAddresses builds the judge of the addresses that nodes report for pods. The informers have not started.
func (r *Replica) wireAddresses() (err error) {
	r.addresses, err = podaddress.New(podaddress.Rules{
		Services: r.cluster.ServicePrefixes(), ForeignRanges: r.cfg.PodAddressRanges, MirrorPeers: r.cfg.MirrorPodPeers,
		Replicas: r.peers.listening, Sync: r.seeReports,
	}, client.Informer[*corev1.Node](r.informers), client.Informer[*corev1.Pod](r.informers),
		client.Informer[*networkingv1.ServiceCIDR](r.informers))
	return err
}

// reportPatience is how long a report of an address waits for the reports before it.
const reportPatience = 10 * time.Second

// seeReports blocks until this replica's informers show every address that was reported before the call.
func (r *Replica) seeReports(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reportPatience)
	defer cancel()
	if err := client.WaitForChanges[*corev1.Pod](ctx, r.informers); err != nil {
		return fmt.Errorf("waiting for reports of pods: %w", err)
	}
	if err := client.WaitForChanges[*corev1.Node](ctx, r.informers); err != nil {
		return fmt.Errorf("waiting for reports of nodes: %w", err)
	}
	return nil
}
