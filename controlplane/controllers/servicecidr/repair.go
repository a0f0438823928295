package servicecidr

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/networking"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Kinds of keys in the queue of the repair controller.
const (
	serviceKey = "service"
	addressKey = "address"
	portsKey   = "ports"
)

// addressIndex indexes Services by their cluster IPs.
const addressIndex = "keelson.address"

// NewRepair returns the controller that repairs inconsistencies between the cluster IPs of Services
// and IPAddresses. Usually one commit writes both. Repairs are needed if a Service is older than
// IPAddresses or was written by a replica of an older release, and after manual changes of
// IPAddresses.
func NewRepair(d engine.Deps) *engine.Descriptor {
	cidrs := client.Informer[*networkingv1.ServiceCIDR](d.Informers)
	addresses := client.Informer[*networkingv1.IPAddress](d.Informers)
	services := client.Informer[*corev1.Service](d.Informers)
	engine.Index(services, addressIndex, func(o api.Object) []string {
		return networking.ClusterAddresses(o.(*corev1.Service))
	})
	engine.Index(services, portIndex, nodePorts)
	return &engine.Descriptor{
		Name:    "ipallocator-repair-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(services, func(c engine.Change[*corev1.Service]) []engine.Key {
				keys := []engine.Key{{Kind: serviceKey, Namespace: c.New.Namespace, Name: c.New.Name},
					{Kind: portsKey, Namespace: c.New.Namespace, Name: c.New.Name}}
				if c.Type == engine.Deleted {
					for _, a := range networking.ClusterAddresses(c.New) {
						keys = append(keys, engine.Key{Kind: addressKey, Name: a})
					}
				}
				return keys
			}),
			engine.OnInformer(addresses, func(c engine.Change[*networkingv1.IPAddress]) []engine.Key {
				keys := []engine.Key{{Kind: addressKey, Name: c.New.Name}}
				for _, s := range engine.CachedBy[*corev1.Service](services, addressIndex, c.New.Name) {
					keys = append(keys, engine.Key{Kind: serviceKey, Namespace: s.Namespace, Name: s.Name})
				}
				return keys
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ipaddresses"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"servicecidrs"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &repairer{term: t, cidrs: cidrs, addresses: addresses, services: services}
			return r.reconcileAddress
		},
	}
}

// repairer reconciles Services and IPAddresses during one term of leadership. Every term has a new
// repairer.
type repairer struct {
	term                       *engine.Term
	cidrs, addresses, services cache.SharedIndexInformer
}

func (r *repairer) reconcileAddress(ctx context.Context, key engine.Key) (time.Duration, error) {
	if key.Kind == addressKey {
		return r.removeOrphan(ctx, key.Name)
	}
	svc, ok := engine.Cached[*corev1.Service](r.services, key.Namespace, key.Name)
	if !ok {
		return 0, nil
	}
	if key.Kind == portsKey {
		r.reportNodePorts(svc)
		return 0, nil
	}
	ranges := r.serviceRanges()
	if len(ranges) == 0 {
		return time.Second, nil // the default ServiceCIDR is being created
	}
	var errs []error
	for _, address := range networking.ClusterAddresses(svc) {
		have, _ := engine.Cached[*networkingv1.IPAddress](r.addresses, "", address)
		if f := Judge(svc, address, ranges, have, r.parentService(have)); f != (Fault{}) {
			errs = append(errs, r.repairAddress(ctx, svc, address, ranges))
		}
	}
	return 0, errors.Join(errs...)
}

// reportNodePorts records an Event for each problem of a Service's node ports.
func (r *repairer) reportNodePorts(svc *corev1.Service) {
	for _, f := range JudgePorts(svc, func(port string) []*corev1.Service {
		return engine.CachedBy[*corev1.Service](r.services, portIndex, port)
	}) {
		r.term.Events.Event(svc, corev1.EventTypeWarning, f.Reason, f.Message)
	}
}

func (r *repairer) serviceRanges() []netip.Prefix {
	var out []netip.Prefix
	for _, c := range engine.CachedAll[*networkingv1.ServiceCIDR](r.cidrs) {
		out = append(out, networking.ParseRanges(c)...)
	}
	return out
}

// parentService returns the cached Service that an IPAddress names, or nil.
func (r *repairer) parentService(a *networkingv1.IPAddress) *corev1.Service {
	if a == nil || a.Spec.ParentRef == nil || a.Spec.ParentRef.Group != "" || a.Spec.ParentRef.Resource != "services" {
		return nil
	}
	svc, ok := engine.Cached[*corev1.Service](r.services, a.Spec.ParentRef.Namespace, a.Spec.ParentRef.Name)
	if !ok {
		return nil
	}
	return svc
}

// repairAddress repairs the IPAddress for a cluster IP of a Service. It reads both objects from the
// API and calls Judge again, because the caches of the two kinds may have different revisions.
// cached is the Service in the cache.
func (r *repairer) repairAddress(
	ctx context.Context, cached *corev1.Service, address string, ranges []netip.Prefix,
) error {
	svc, err := client.Get[*corev1.Service](ctx, r.term.Client, cached.Namespace, cached.Name)
	if apierrors.IsNotFound(err) || err == nil && !slices.Contains(networking.ClusterAddresses(svc), address) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("reading service %s/%s: %w", cached.Namespace, cached.Name, err)
	}
	have, err := client.Get[*networkingv1.IPAddress](ctx, r.term.Client, "", address)
	if apierrors.IsNotFound(err) {
		have = nil
	} else if err != nil {
		return fmt.Errorf("reading IPAddress %s: %w", address, err)
	}
	f := Judge(svc, address, ranges, have, r.parentService(have))
	if f.Reason != "" {
		r.term.Events.Event(svc, corev1.EventTypeWarning, f.Reason, f.Message)
	}
	if f.Replace {
		if err := r.deleteAddress(ctx, have); err != nil {
			return err
		}
	}
	if !f.Create && !f.Replace {
		return nil
	}
	if _, err := client.Create(ctx, r.term.Client, networking.NewServiceIPAddress(svc, address)); err != nil &&
		!apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating IPAddress %s of service %s/%s: %w", address, svc.Namespace, svc.Name, err)
	}
	return nil
}

func (r *repairer) deleteAddress(ctx context.Context, a *networkingv1.IPAddress) error {
	err := client.Delete[*networkingv1.IPAddress](ctx, r.term.Client, "", a.Name, engine.DeleteOnlyUID(a))
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("deleting IPAddress %s: %w", a.Name, err)
	}
	return nil
}

// removeOrphan deletes the IPAddress of this name if the Service that it names does not exist or
// does not have the address. The IPAddress must be older than grace; until then, removeOrphan
// returns the remaining time, after which it must be called again.
func (r *repairer) removeOrphan(ctx context.Context, address string) (time.Duration, error) {
	a, ok := engine.Cached[*networkingv1.IPAddress](r.addresses, "", address)
	if !ok || a.Labels[networkingv1.LabelManagedBy] != networking.IPAllocator || a.DeletionTimestamp != nil {
		return 0, nil
	}
	ref := a.Spec.ParentRef
	if ref == nil || ref.Group != "" || ref.Resource != "services" {
		return 0, nil
	}
	if svc := r.parentService(a); svc != nil && slices.Contains(networking.ClusterAddresses(svc), address) {
		return 0, nil
	}
	if left := grace - r.term.Now().Sub(a.CreationTimestamp.Time); left > 0 {
		return left, nil
	}
	svc, err := client.Get[*corev1.Service](ctx, r.term.Client, ref.Namespace, ref.Name)
	if err == nil && slices.Contains(networking.ClusterAddresses(svc), address) {
		return 0, nil
	}
	if err != nil && !apierrors.IsNotFound(err) {
		return 0, fmt.Errorf("reading service %s/%s: %w", ref.Namespace, ref.Name, err)
	}
	return 0, r.deleteAddress(ctx, a)
}
