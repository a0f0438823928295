package server

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"

	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/vip"
)

// sharedAddress returns the virtual IP address of the API, which the leader adds to its machine. It
// returns nil if no such address is configured.
func (r *Replica) sharedAddress() *vip.Address {
	if r.cfg.Network.SharedAPI == "" {
		return nil
	}
	return &vip.Address{IP: netip.MustParseAddr(r.cfg.Network.SharedAPI), Own: netip.MustParseAddr(r.cfg.Advertise),
		Peers: r.peerAddresses, Confirm: r.checkReadyLeader, Log: r.log.With("part", "shared address")}
}

// apiAddresses returns the addresses at which clients can connect to the API of this replica.
func (c Config) apiAddresses() []string {
	if c.Network.SharedAPI == "" {
		return []string{c.Advertise}
	}
	return []string{c.Advertise, c.Network.SharedAPI}
}

// peerAddresses returns the addresses of the other members.
func (r *Replica) peerAddresses() (out []netip.Addr) {
	for _, m := range r.store.Status().Members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil || m.ID == r.cfg.Name {
			continue
		}
		if ip, err := netip.ParseAddr(host); err == nil {
			out = append(out, ip)
		}
	}
	return out
}

// checkReadyLeader returns nil if this replica is ready and is the raft leader. It confirms the
// leadership with a quorum.
func (r *Replica) checkReadyLeader(ctx context.Context) error {
	if _, err := r.store.Sync(ctx); err != nil {
		return err
	}
	if leader := r.store.Status().Leader; leader != r.cfg.Name {
		return fmt.Errorf("replica %q leads", leader)
	}
	return r.checkReady(ctx)
}

// wireAddresses creates the index that validates the pod addresses that nodes report. The caller
// must start the informers of the index afterwards.
func (r *Replica) wireAddresses() (err error) {
	r.api.addresses, err = podaddress.New(podaddress.Rules{
		Services: r.cluster.ServicePrefixes(), ForeignRanges: r.cfg.Network.PodAddressRanges,
		MirrorPeers: r.cfg.Network.MirrorPodPeers,
		Replicas:    r.members.Peers().ListenAddresses, Sync: r.waitForReports,
	}, client.Informer[*corev1.Node](r.api.informers), client.Informer[*corev1.Pod](r.api.informers),
		client.Informer[*networkingv1.ServiceCIDR](r.api.informers))
	return err
}

// reportTimeout is the timeout of waitForReports. Before an IP address that a node reports is
// validated, this replica waits until its informers contain all addresses that were reported
// earlier.
const reportTimeout = 10 * time.Second

// waitForReports waits until this replica's informers contain all addresses that nodes reported
// before the call. It returns an error after reportTimeout.
func (r *Replica) waitForReports(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, reportTimeout)
	defer cancel()
	if err := client.WaitForChanges[*corev1.Pod](ctx, r.api.informers); err != nil {
		return fmt.Errorf("waiting for reports of pods: %w", err)
	}
	if err := client.WaitForChanges[*corev1.Node](ctx, r.api.informers); err != nil {
		return fmt.Errorf("waiting for reports of nodes: %w", err)
	}
	return nil
}
