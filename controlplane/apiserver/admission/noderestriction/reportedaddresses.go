package noderestriction

import (
	"context"
	"fmt"
	"hash/fnv"
	"net/netip"
	"slices"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// checkPodAddresses returns an error if the reported pod status has an address that the pod cannot
// have.
func (c Config) checkPodAddresses(ctx context.Context, a *api.Attempt, stored, reported *corev1.Pod) error {
	x := c.podAddresses()
	if err := c.orderReports(ctx, a, x.ContestedPodAddresses(stored, reported)); err != nil {
		return err
	}
	if err := x.CheckPodReport(stored, reported); err != nil {
		return c.refuseAddress(a, stored, err)
	}
	return nil
}

// checkMachineAddresses returns an error if the reported node status has an address that belongs to
// another part of the cluster.
func (c Config) checkMachineAddresses(ctx context.Context, a *api.Attempt, stored, reported *corev1.Node) error {
	x := c.podAddresses()
	if err := c.orderReports(ctx, a, x.ContestedNodeAddresses(stored, reported)); err != nil {
		return err
	}
	if err := x.CheckNodeReport(ctx, stored, reported); err != nil {
		return c.refuseAddress(a, reported, err)
	}
	return nil
}

// refuseAddress returns the error that rejects a report, and calls AddressRefused unless the
// request is a dry run.
func (c Config) refuseAddress(a *api.Attempt, about api.Object, err error) error {
	if c.AddressRefused != nil && !a.DryRun {
		c.AddressRefused(about, err)
	}
	return admission.NewForbidden(a, about, err)
}

// addressLeases is the number of Leases that serialize the reports of pod and node addresses. A
// hash of the address determines its Lease. Reports with different Leases do not wait for each
// other.
const addressLeases = 16

// AddressLeasePrefix is the name prefix of the Leases in kube-system that serialize address
// reports; a number follows.
const AddressLeasePrefix = "keelson-pod-addresses-"

// orderReports serializes all reports of an address across replicas. The commit of a report updates
// the address's Lease, and requires that no other report has updated the Lease since orderReports
// read it. If another report has, the attempt is repeated. When orderReports returns nil, the index
// contains all reports that were committed before.
func (c Config) orderReports(ctx context.Context, a *api.Attempt, addresses []netip.Addr) error {
	if len(addresses) == 0 || c.Kinds == nil {
		return nil
	}
	kind := c.Kinds.ByType(&coordinationv1.Lease{})
	if kind == nil {
		return nil
	}
	var names []string
	for _, address := range addresses {
		h := fnv.New32a()
		_, _ = h.Write(address.AsSlice()) // never fails
		names = append(names, fmt.Sprint(AddressLeasePrefix, h.Sum32()%addressLeases))
	}
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		ref := api.Ref{Kind: kind, Namespace: metav1.NamespaceSystem, Name: name}
		seen, ok := c.Cluster.Get(ctx, "leases", ref.Namespace, name)
		if !ok {
			seen = nil
		}
		a.Require(api.Check{Ref: ref, Seen: seen})
		a.Write(api.Change{Ref: ref, Next: func(stored api.Object) (api.Object, error) {
			return countReport(ref, stored), nil
		}})
	}
	if err := c.podAddresses().Sync(ctx); err != nil {
		return admission.AsStatus(fmt.Errorf("cannot validate the addresses that %s %q reports: %w; try again",
			a.Kind.GVK.Kind, a.Name, err))
	}
	return nil
}

// countReport returns the stored Lease with its counter of reports (leaseTransitions) incremented.
// It creates the Lease ref if stored is nil.
func countReport(ref api.Ref, stored api.Object) api.Object {
	next := &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Namespace: ref.Namespace, Name: ref.Name}}
	if have, ok := stored.(*coordinationv1.Lease); ok {
		next = have.DeepCopy()
	}
	next.Spec.LeaseTransitions = ptr.To((ptr.Deref(next.Spec.LeaseTransitions, 0) + 1) & (1<<31 - 1))
	return next
}
