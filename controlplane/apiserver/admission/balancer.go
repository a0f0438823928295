package admission

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
)

// balancerPools returns a plugin that validates the ConfigMap of load balancer pools. It rejects
// invalid pools, pools with addresses in use, and ServiceCIDRs that overlap a pool.
func balancerPools(c Config) func(ctx context.Context, a *Attempt) error {
	return func(ctx context.Context, a *Attempt) error {
		if !a.Creates() && !a.Updates() {
			return nil
		}
		switch o := a.Whole.(type) {
		case *corev1.ConfigMap:
			if o.Namespace != balancer.Namespace || o.Name != balancer.ConfigMap {
				return nil
			}
			before, _ := a.Stored.(*corev1.ConfigMap)
			err := judgePools(ctx, c, o, before)
			if err != nil {
				return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), o.Name, field.ErrorList{field.Forbidden(field.NewPath("data"), err.Error())})
			}
		case *networkingv1.ServiceCIDR:
			pools, ok := c.Cluster.Newest(ctx, "configmaps", balancer.Namespace, balancer.ConfigMap)
			if !ok {
				return nil
			}
			have, err := balancer.Parse(pools.(*corev1.ConfigMap).Data)
			if err != nil {
				return nil // an unreadable pool gives no addresses
			}
			if err := balancer.Conflict(have, rangesOf("ServiceCIDR "+o.Name, networking.RangesOf(o)...)); err != nil {
				return apierrors.NewInvalid(a.Kind.GVK.GroupKind(), o.Name, field.ErrorList{field.Invalid(field.NewPath("spec", "cidrs"), o.Spec.CIDRs,
					fmt.Sprintf("load balancers have addresses of it: %s", err))})
			}
		}
		return nil
	}
}

// judgePools returns an error if the pools of o are invalid or contain addresses in use. A node's
// address that is already in a stored pool is not an error: the node got the address after the pool
// was created. Such an address must not prevent changes of the pools. Services get other addresses.
func judgePools(ctx context.Context, c Config, o, before *corev1.ConfigMap) error {
	if len(o.BinaryData) > 0 {
		return fmt.Errorf("pools are text: give each in data, and nothing in binaryData")
	}
	pools, err := balancer.Parse(o.Data)
	if err != nil || len(pools) == 0 {
		return err
	}
	var had []*balancer.Pool
	if before != nil {
		had, _ = balancer.Parse(before.Data) // invalid pools count as empty
	}
	taken := rangesOf("the addresses of Services", c.ServiceCIDR)
	if c.SecondServiceCIDR.IsValid() {
		taken = append(taken, rangesOf("the addresses of Services", c.SecondServiceCIDR)...)
	}
	taken = append(taken, rangesOf("the addresses of pods", c.PodCIDRs...)...)
	read := func(resource string, each func(o api.Object)) error {
		all, err := c.Cluster.List(ctx, resource, "", true)
		if err != nil {
			return fmt.Errorf("whether its addresses are free is not known: %w", err)
		}
		for _, o := range all {
			each(o)
		}
		return nil
	}
	if err := read("servicecidrs", func(o api.Object) {
		taken = append(taken, rangesOf("ServiceCIDR "+o.GetName(), networking.RangesOf(o.(*networkingv1.ServiceCIDR))...)...)
	}); err != nil {
		return err
	}
	if err := read("nodes", func(o api.Object) {
		n := o.(*corev1.Node)
		for _, text := range n.Spec.PodCIDRs {
			if p, err := netip.ParsePrefix(text); err == nil {
				taken = append(taken, rangesOf("the pods' addresses of node "+n.Name, p)...)
			}
		}
		for _, ip := range balancer.OfMachine(n) {
			if balancer.PoolOf(had, ip) == nil {
				taken = append(taken, rangesOf("the address of node "+n.Name, netip.PrefixFrom(ip, ip.BitLen()))...)
			}
		}
	}); err != nil {
		return err
	}
	return balancer.Conflict(pools, taken)
}

func rangesOf(what string, of ...netip.Prefix) []balancer.Taken {
	var out []balancer.Taken
	for _, p := range of {
		out = append(out, balancer.Taken{Range: balancer.RangeOf(p), What: what + " " + p.String()})
	}
	return out
}
