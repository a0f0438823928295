package services

import (
	"context"
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/apiserver/admission"
)

// CheckBalancerPools returns a plugin that validates the ConfigMap of load balancer pools. It
// rejects invalid pools, pools with addresses in use, and ServiceCIDRs that overlap a pool.
func CheckBalancerPools(c Config) func(ctx context.Context, a *admission.Attempt) error {
	return func(ctx context.Context, a *admission.Attempt) error {
		if !a.CreatesObject() && !a.UpdatesObject() {
			return nil
		}
		switch o := a.Whole.(type) {
		case *corev1.ConfigMap:
			if o.Namespace != balancer.Namespace || o.Name != balancer.ConfigMap {
				return nil
			}
			before, _ := a.Stored.(*corev1.ConfigMap)
			err := validatePools(ctx, c, o, before)
			if err != nil {
				return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), o.Name,
					field.ErrorList{field.Forbidden(field.NewPath("data"), err.Error())})
			}
		case *networkingv1.ServiceCIDR:
			pools, ok := c.Cluster.Newest(ctx, "configmaps", balancer.Namespace, balancer.ConfigMap)
			if !ok {
				return nil
			}
			have, err := balancer.ParsePools(pools.(*corev1.ConfigMap).Data)
			if err != nil {
				return nil // an unreadable pool gives no addresses
			}
			if err := balancer.CheckConflicts(have,
				rangesOf("ServiceCIDR "+o.Name, networking.ParseRanges(o)...)); err != nil {
				return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), o.Name,
					field.ErrorList{field.Invalid(field.NewPath("spec", "cidrs"), o.Spec.CIDRs,
						fmt.Sprintf("the range is in use by load balancers: %s", err))})
			}
		}
		return nil
	}
}

// validatePools returns an error if the pools in o are invalid or contain addresses in use. A
// node's address that the old pools also contain is not an error, because the node may have got it
// after the pool was created. Services are not given such an address.
func validatePools(ctx context.Context, c Config, o, old *corev1.ConfigMap) error {
	if len(o.BinaryData) > 0 {
		return fmt.Errorf("address pools must be text: use data, not binaryData")
	}
	pools, err := balancer.ParsePools(o.Data)
	if err != nil || len(pools) == 0 {
		return err
	}
	var had []*balancer.Pool
	if old != nil {
		had, _ = balancer.ParsePools(old.Data) // invalid pools count as empty
	}
	taken := rangesOf("the Service range", c.ServiceCIDR)
	if c.SecondServiceCIDR.IsValid() {
		taken = append(taken, rangesOf("the Service range", c.SecondServiceCIDR)...)
	}
	taken = append(taken, rangesOf("the pod range", c.PodCIDRs...)...)
	read := func(resource string, each func(o api.Object)) error {
		all, err := c.Cluster.List(ctx, resource, "", true)
		if err != nil {
			return fmt.Errorf("cannot check whether the addresses are free: %w", err)
		}
		for _, o := range all {
			each(o)
		}
		return nil
	}
	if err := read("servicecidrs", func(o api.Object) {
		taken = append(taken, rangesOf("ServiceCIDR "+o.GetName(),
			networking.ParseRanges(o.(*networkingv1.ServiceCIDR))...)...)
	}); err != nil {
		return err
	}
	if err := read("nodes", func(o api.Object) {
		n := o.(*corev1.Node)
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				taken = append(taken, rangesOf("the pod range of node "+n.Name, p)...)
			}
		}
		for _, ip := range balancer.NodeAddresses(n) {
			if balancer.FindPool(had, ip) == nil {
				taken = append(taken, rangesOf("the address of node "+n.Name, netip.PrefixFrom(ip, ip.BitLen()))...)
			}
		}
	}); err != nil {
		return err
	}
	return balancer.CheckConflicts(pools, taken)
}

func rangesOf(subject string, reserved ...netip.Prefix) []balancer.UsedRange {
	var out []balancer.UsedRange
	for _, p := range reserved {
		out = append(out, balancer.UsedRange{Range: balancer.PrefixRange(p), Description: subject + " " + p.String()})
	}
	return out
}
