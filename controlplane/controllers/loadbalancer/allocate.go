package loadbalancer

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// poolWarningDelay is how long a Service without a loadBalancerClass may wait for an address from
// another controller. After that, an event reports that no address pools are configured.
const poolWarningDelay = 15 * time.Second

// configuredPools returns the address pools that the ConfigMap defines, or nil if it does not
// exist. It returns an error if the ConfigMap is invalid, which admission usually prevents.
func (r *reconciler) configuredPools() ([]*balancer.Pool, error) {
	c, ok := engine.Cached[*corev1.ConfigMap](r.configs, balancer.Namespace, balancer.ConfigMap)
	if !ok {
		return nil, nil
	}
	return balancer.ParsePools(c.Data)
}

// reservedAddresses returns the IPAddresses that are reserved for a Service and that the Service
// may use.
func (r *reservations) reservedAddresses(key engine.Key) []*networkingv1.IPAddress {
	return slices.DeleteFunc(r.removableAddresses(key), r.deletionPending)
}

// removableAddresses returns the IPAddresses that are reserved for a Service and are not being
// deleted. It includes those for which a deletion has failed (see deletionPending).
func (r *reservations) removableAddresses(key engine.Key) []*networkingv1.IPAddress {
	var out []*networkingv1.IPAddress
	for _, a := range r.held.By(heldIndex, key.String()) {
		if !r.held.IsDeleting(a) {
			out = append(out, a)
		}
	}
	return out
}

// deletionPending reports whether the last deletion of IPAddress a returned an error. That deletion
// may still be committed. No Service may use the address before another deletion has succeeded.
func (r *reservations) deletionPending(a *networkingv1.IPAddress) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.unconfirmed[a.Name] == a.UID
}

// isFreeFor reports whether the Service with this key may use address a: neither a node nor another
// Service has it.
func (r *reconciler) isFreeFor(key engine.Key, a netip.Addr) bool {
	if held, ok := r.reservations.held.Get("", a.String()); ok {
		if by, ours := reservingService(held); !ours || by != key || r.reservations.held.IsDeleting(held) ||
			r.reservations.deletionPending(held) {
			return false
		}
	}
	if len(engine.CachedBy[*corev1.Node](r.nodes, nodeAddressIndex, a.String())) > 0 {
		return false
	}
	others := engine.CachedBy[*corev1.Service](r.services, serviceIndex, atAddress(a.String()))
	return !slices.ContainsFunc(others, func(s *corev1.Service) bool { return engine.KeyOf(s) != key })
}

// allocateAddresses allocates addresses for Service s. It reserves them, writes the status, and
// releases addresses that are no longer needed. If it is interrupted, the next call finds the
// reservations, which name the Service. stored is the version of s that was stored last. foreign
// reports that another controller manages the addresses of s.
func (r *reconciler) allocateAddresses(ctx context.Context, s *corev1.Service) (
	stored *corev1.Service, foreign bool, again time.Duration, err error,
) {
	key := engine.KeyOf(s)
	pools, broken := r.configuredPools()
	var labels map[string]string
	if ns, ok := engine.Cached[*corev1.Namespace](r.namespaces, "", s.Namespace); ok {
		labels = ns.Labels
	}
	answer, foreign, err := r.reserveAddresses(ctx, s, pools, labels)
	if err != nil || foreign {
		return s, foreign, 0, err
	}
	if broken != nil && answer.Refusal != nil {
		answer.Refusal = &balancer.Refusal{Reason: balancer.ReasonNone,
			Message: fmt.Sprintf("ConfigMap %s/%s cannot be read: %s", balancer.Namespace, balancer.ConfigMap, broken)}
	}
	if len(pools) == 0 && broken == nil && len(answer.Addresses) == 0 && !balancer.HasClass(s) && !isRefused(s) {
		return s, false, r.warnWithoutPools(s, answer), nil
	}
	next := s.DeepCopy()
	next.Status = ServiceStatus(s, answer, pools, metav1.NewTime(r.term.Now()))
	if !sameStatus(next.Status, s.Status) {
		saved, err := client.UpdateStatus(ctx, r.term.Client, next)
		if err != nil {
			if apierrors.IsNotFound(err) {
				err = engine.RaceError("service %s no longer exists", key)
			}
			return s, false, 0, fmt.Errorf("writing the status of service %s: %w", key, err)
		}
		r.view.RecordWrite(saved)
		if kind, reason, message := statusEvent(s.Status, next.Status); reason != "" {
			r.term.Events.Event(s, kind, reason, message)
		}
		s = saved
	}
	for _, a := range r.reservations.removableAddresses(key) {
		ip, err := netip.ParseAddr(a.Name)
		if err == nil && slices.Contains(answer.Addresses, ip) {
			continue
		}
		if err := r.reservations.deleteReservation(ctx, a); err != nil {
			return s, false, 0, err
		}
	}
	return s, false, 0, nil
}

// reserveAddresses chooses the addresses of Service s and creates their IPAddresses. labels are the
// labels of the Service's namespace. The bool result is true if another controller manages the
// addresses of s; no address is then reserved.
func (r *reconciler) reserveAddresses(
	ctx context.Context, s *corev1.Service, pools []*balancer.Pool, labels map[string]string,
) (balancer.ChooseResult, bool, error) {
	key := engine.KeyOf(s)
	r.reservations.allocating.Lock()
	defer r.reservations.allocating.Unlock()
	free := func(a netip.Addr) bool { return r.isFreeFor(key, a) }
	var reserved []netip.Addr
	for _, a := range r.reservations.reservedAddresses(key) {
		if ip, err := netip.ParseAddr(a.Name); err == nil {
			reserved = append(reserved, ip)
		}
	}
	slices.SortFunc(reserved, func(a, b netip.Addr) int {
		// addresses in the status precede reservations that are not in use yet
		in := func(a netip.Addr) int { return slices.Index(append(statusAddresses(s), a), a) }
		return in(a) - in(b)
	})
	had, foreign := currentAddresses(s, reserved, pools, free)
	if foreign {
		return balancer.ChooseResult{}, true, nil
	}
	answer := balancer.ChooseAddresses(balancer.ChooseInput{Service: s, Namespace: labels, Pools: pools, Reserved: had,
		Free: free, After: r.reservations.after})
	for _, a := range answer.Addresses {
		if slices.Contains(reserved, a) {
			continue
		}
		made, err := client.Create(ctx, r.term.Client, Reservation(s, a))
		if apierrors.IsAlreadyExists(err) {
			return balancer.ChooseResult{}, false, engine.RaceError("address %s was reserved concurrently", a)
		}
		if err != nil {
			return balancer.ChooseResult{}, false, fmt.Errorf("reserving address %s for service %s: %w", a, key, err)
		}
		r.reservations.held.RecordWrite(made)
		if p := balancer.FindPool(pools, a); p != nil {
			r.reservations.after[p.Name] = a
		}
	}
	return answer, false, nil
}

// warnWithoutPools records one event of Service s that no address pools are configured. It does so
// only if s is older than poolWarningDelay; before that, it returns the remaining time.
func (r *reconciler) warnWithoutPools(s *corev1.Service, answer balancer.ChooseResult) (again time.Duration) {
	if left := poolWarningDelay - r.term.Now().Sub(s.CreationTimestamp.Time); left > 0 {
		return left
	}
	key := engine.KeyOf(s)
	r.mu.Lock()
	told := r.reportedNoPools[key]
	r.reportedNoPools[key] = true
	r.mu.Unlock()
	if !told && answer.Refusal != nil {
		r.term.Events.Event(s, corev1.EventTypeNormal, answer.Refusal.Reason, answer.Refusal.Message)
	}
	return 0
}

// releaseAddresses deletes the IPAddresses that are reserved for a Service that does not exist or
// needs no address. Before that it reads the Service from the API.
func (r *reconciler) releaseAddresses(ctx context.Context, key engine.Key) error {
	r.mu.Lock()
	delete(r.reportedNoPools, key)
	r.mu.Unlock()
	held := r.reservations.removableAddresses(key)
	if len(held) == 0 {
		return nil
	}
	s, err := client.Get[*corev1.Service](ctx, r.term.Client, key.Namespace, key.Name)
	switch {
	case err == nil && balancer.IsManaged(s):
		return engine.RaceError("service %s needs an address again", key)
	case err != nil && !apierrors.IsNotFound(err):
		return fmt.Errorf("reading service %s: %w", key, err)
	}
	for _, a := range held {
		if err := r.reservations.deleteReservation(ctx, a); err != nil {
			return err
		}
	}
	return nil
}

// deleteReservation deletes IPAddress a. If that fails, the address is not used again for its
// Service until another deletion has succeeded (see deletionPending).
func (r *reservations) deleteReservation(ctx context.Context, a *networkingv1.IPAddress) error {
	r.held.MarkDeleting(a)
	err := client.Delete[*networkingv1.IPAddress](ctx, r.term.Client, "", a.Name, engine.DeleteOnlyUID(a))
	failed := err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err)
	r.mu.Lock()
	delete(r.unconfirmed, a.Name)
	if failed {
		r.unconfirmed[a.Name] = a.UID
	}
	r.mu.Unlock()
	if failed {
		r.held.UnmarkDeleting(a)
		return fmt.Errorf("releasing address %s: %w", a.Name, err)
	}
	return nil
}
