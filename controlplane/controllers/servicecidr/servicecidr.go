package servicecidr

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// defaultCheckPeriod is the interval at which the existence of the default ServiceCIDR is checked.
const defaultCheckPeriod = time.Minute

// defaultKey is the key in the controller's queue that checks the default ServiceCIDR.
var defaultKey = engine.Key{Kind: "default", Name: networking.DefaultServiceCIDR}

// New returns the controller of ServiceCIDRs. serviceCIDR holds the ranges of the default
// ServiceCIDR, separated by a comma.
func New(d engine.Deps, serviceCIDR string) *engine.Descriptor {
	cidrs := client.Informer[*networkingv1.ServiceCIDR](d.Informers)
	addresses := client.Informer[*networkingv1.IPAddress](d.Informers)
	services := client.Informer[*corev1.Service](d.Informers)
	ending := func() []engine.Key { // ServiceCIDRs that are being deleted and may wait for addresses to be released
		var keys []engine.Key
		for _, c := range engine.CachedAll[*networkingv1.ServiceCIDR](cidrs) {
			if c.DeletionTimestamp != nil {
				keys = append(keys, engine.KeyOf(c))
			}
		}
		return keys
	}
	return &engine.Descriptor{
		Name:    "service-cidr-controller",
		Workers: 1,
		Watches: []engine.Watch{
			engine.OnInformer(cidrs, func(c engine.Change[*networkingv1.ServiceCIDR]) []engine.Key {
				return append(ending(), engine.KeyOf(c.New), defaultKey)
			}),
			engine.OnInformer(addresses, func(c engine.Change[*networkingv1.IPAddress]) []engine.Key {
				return ending()
			}),
			engine.OnInformer(services, func(c engine.Change[*corev1.Service]) []engine.Key {
				if c.Type != engine.Deleted {
					return nil
				}
				return ending()
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"servicecidrs"},
				Verbs: []string{"create", "get", "list", "update", "watch"}},
			{APIGroups: []string{"networking.k8s.io"},
				Resources: []string{"servicecidrs/status", "servicecidrs/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ipaddresses"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"get", "list", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &rangeReconciler{term: t, cidrs: cidrs, cluster: serviceCIDR}
			t.Enqueue(defaultKey)
			return r.reconcileRange
		},
	}
}

// rangeReconciler reconciles ServiceCIDRs during one term of leadership. Every term has a new
// rangeReconciler.
type rangeReconciler struct {
	term    *engine.Term
	cidrs   cache.SharedIndexInformer
	cluster string
}

func (r *rangeReconciler) reconcileRange(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key == defaultKey {
		return defaultCheckPeriod, r.ensureDefaultRange(ctx)
	}
	c, ok := engine.Cached[*networkingv1.ServiceCIDR](r.cidrs, "", key.Name)
	if !ok {
		return 0, nil
	}
	needed := false
	if c.DeletionTimestamp != nil {
		var err error
		if needed, err = r.isRangeNeeded(ctx, c); err != nil {
			return 0, err
		}
	}
	return 0, r.performStep(ctx, c, Next(c, needed))
}

// ensureDefaultRange creates the default ServiceCIDR if it does not exist. If the cluster has
// become dual-stack since, it adds the second range.
func (r *rangeReconciler) ensureDefaultRange(ctx context.Context) error {
	cidrs := strings.Split(r.cluster, ",")
	for i := range cidrs {
		cidrs[i] = strings.TrimSpace(cidrs[i])
	}
	if have, ok := engine.Cached[*networkingv1.ServiceCIDR](r.cidrs, "", networking.DefaultServiceCIDR); ok {
		if len(have.Spec.CIDRs) != 1 || len(cidrs) != 2 || have.Spec.CIDRs[0] != cidrs[0] ||
			have.DeletionTimestamp != nil {
			return nil
		}
		next := have.DeepCopy()
		next.Spec.CIDRs = cidrs
		if _, err := client.Update(ctx, r.term.Client, next); err != nil && !apierrors.IsConflict(err) &&
			!apierrors.IsNotFound(err) {
			return fmt.Errorf("adding range %s to the default ServiceCIDR: %w", cidrs[1], err)
		}
		return nil
	}
	c := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: networking.DefaultServiceCIDR},
		Spec: networkingv1.ServiceCIDRSpec{CIDRs: cidrs}}
	if _, err := client.Create(ctx, r.term.Client, c); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating the default ServiceCIDR %s: %w", r.cluster, err)
	}
	return nil
}

// isRangeNeeded reports whether an address is in ServiceCIDR c, which is being deleted, and in no
// other ServiceCIDR. It lists all objects from the API instead of the cache. No later allocation
// can use c, because an allocation fails if c has changed.
func (r *rangeReconciler) isRangeNeeded(ctx context.Context, c *networkingv1.ServiceCIDR) (bool, error) {
	all, err := client.List[*networkingv1.ServiceCIDR](ctx, r.term.Client, "", metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing ServiceCIDRs: %w", err)
	}
	var used []netip.Addr
	addresses, err := client.List[*networkingv1.IPAddress](ctx, r.term.Client, "", metav1.ListOptions{
		LabelSelector: networkingv1.LabelManagedBy + "=" + networking.IPAllocator})
	if err != nil {
		return false, fmt.Errorf("listing IPAddresses: %w", err)
	}
	for _, a := range addresses {
		if ip, err := netip.ParseAddr(a.Name); err == nil {
			used = append(used, ip)
		}
	}
	services, err := client.List[*corev1.Service](ctx, r.term.Client, "", metav1.ListOptions{})
	if err != nil {
		return false, fmt.Errorf("listing Services: %w", err)
	}
	for _, s := range services { // a Service that a replica of an older release wrote may have no IPAddress yet
		for _, a := range networking.ClusterAddresses(s) {
			used = append(used, netip.MustParseAddr(a))
		}
	}
	return Needed(c, all, used), nil
}

func (r *rangeReconciler) performStep(ctx context.Context, c *networkingv1.ServiceCIDR, step Step) error {
	next := c.DeepCopy()
	var err error
	switch {
	case step.Finalizers != nil && !slices.Equal(step.Finalizers, c.Finalizers):
		next.Finalizers = step.Finalizers
		_, err = client.Update(ctx, r.term.Client, next)
	case step.Ready != nil:
		cond := *step.Ready
		cond.LastTransitionTime = metav1.NewTime(r.term.Now())
		meta.SetStatusCondition(&next.Status.Conditions, cond)
		_, err = client.UpdateStatus(ctx, r.term.Client, next)
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("updating ServiceCIDR %s: %w", c.Name, err)
	}
	return nil
}
