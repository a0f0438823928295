// Package loadbalancer allocates addresses of the configured pools to Services of type LoadBalancer
// (allocate.go), and chooses which node announces them on its link (announce.go). The agents of
// those nodes announce the addresses (agent/l2announce).
package loadbalancer

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/balancer"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Names of informer indexes.
const (
	// serviceIndex indexes Services by the values that serviceKeys returns.
	serviceIndex = "keelson.balanced"
	// heldIndex indexes IPAddresses by the Service for which they are reserved.
	heldIndex = "keelson.balanced-by"
	// nodeAddressIndex indexes Nodes by their addresses.
	nodeAddressIndex = "keelson.node-address"
	// sliceIndex indexes EndpointSlices by their Service.
	sliceIndex = "keelson.slice-of"
)

// Values of serviceIndex that are neither addresses nor nodes.
const (
	allOurs = "ours"    // Services that get their addresses from this controller
	pending = "pending" // Services of this controller that lack addresses
)

func atAddress(a string) string     { return "address/" + a }
func announcerKey(by string) string { return "node/" + by }

// serviceKeys is the index function of serviceIndex. It returns the addresses of a Service. For a
// Service that this controller manages, it also returns allOurs and the announcing node, and
// pending while the Service lacks addresses.
func serviceKeys(o api.Object) []string {
	s := o.(*corev1.Service)
	var out []string
	for _, a := range statusAddresses(s) {
		out = append(out, atAddress(a.String()))
	}
	for _, text := range s.Spec.ExternalIPs {
		if a, err := netip.ParseAddr(text); err == nil {
			out = append(out, atAddress(a.String()))
		}
	}
	if !balancer.IsManaged(s) {
		return out
	}
	out = append(out, allOurs, announcerKey(s.Annotations[balancer.AnnouncedBy]))
	if len(s.Status.LoadBalancer.Ingress) == 0 || isRefused(s) {
		out = append(out, pending)
	}
	return out
}

func isRefused(s *corev1.Service) bool {
	for _, c := range s.Status.Conditions {
		if c.Type == balancer.Condition {
			return c.Status != "True"
		}
	}
	return false
}

// caches holds the informers from which the controller reads.
type caches struct {
	services, addresses, nodes, leases, slices, namespaces, configs cache.SharedIndexInformer
}

func (c caches) keysByIndex(value string) []engine.Key {
	var out []engine.Key
	for _, s := range engine.CachedBy[*corev1.Service](c.services, serviceIndex, value) {
		out = append(out, engine.KeyOf(s))
	}
	return out
}

// unfitReason returns why the node with the given name may not announce addresses, or "" if the
// node may announce them.
func (c caches) unfitReason(node string) string {
	n, ok := engine.Cached[*corev1.Node](c.nodes, "", node)
	if !ok {
		return UnfitReason(nil, nil)
	}
	l, _ := engine.Cached[*coordinationv1.Lease](c.leases, corev1.NamespaceNodeLease, node)
	return UnfitReason(n, l)
}

// misplacedServices returns the keys of the Services that have no announcing node, or have an
// announcing node that may no longer announce addresses.
func (c caches) misplacedServices() []engine.Key {
	var out []engine.Key
	for _, s := range engine.CachedBy[*corev1.Service](c.services, serviceIndex, allOurs) {
		if c.unfitReason(s.Annotations[balancer.AnnouncedBy]) != "" {
			out = append(out, engine.KeyOf(s))
		}
	}
	return out
}

// New returns the controller that allocates and assigns addresses of Services of type LoadBalancer.
func New(d engine.Deps) *engine.Descriptor {
	c := caches{
		services:   client.Informer[*corev1.Service](d.Informers),
		addresses:  client.Informer[*networkingv1.IPAddress](d.Informers),
		nodes:      client.Informer[*corev1.Node](d.Informers),
		leases:     client.Informer[*coordinationv1.Lease](d.Informers),
		slices:     client.Informer[*discoveryv1.EndpointSlice](d.Informers),
		namespaces: client.Informer[*corev1.Namespace](d.Informers),
		configs:    client.Informer[*corev1.ConfigMap](d.Informers),
	}
	engine.Index(c.services, serviceIndex, serviceKeys)
	engine.Index(c.addresses, heldIndex, func(o api.Object) []string {
		if k, ok := reservingService(o.(*networkingv1.IPAddress)); ok {
			return []string{k.String()}
		}
		return nil
	})
	engine.Index(c.nodes, nodeAddressIndex, func(o api.Object) []string { return addressesOf(o.(*corev1.Node)) })
	engine.Index(c.slices, sliceIndex, func(o api.Object) []string {
		return []string{o.GetNamespace() + "/" + o.GetLabels()[discoveryv1.LabelServiceName]}
	})
	return &engine.Descriptor{
		Name:    "load-balancer-controller",
		Workers: 8, // a node that fails may announce many Services
		Watches: c.serviceWatches(),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services"},
				Verbs: []string{"get", "list", "patch", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"services/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"configmaps", "namespaces", "nodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ipaddresses"},
				Verbs: []string{"create", "delete", "get", "list", "watch"}},
			{APIGroups: []string{"coordination.k8s.io"}, Resources: []string{"leases"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{
				term: t, caches: c, view: engine.ViewOf[*corev1.Service](t, c.services),
				reservations: reservations{
					term: t, held: engine.ViewOf[*networkingv1.IPAddress](t, c.addresses),
					after: map[string]netip.Addr{}, unconfirmed: map[string]types.UID{},
				},
				announcers:      announcers{services: c.services, by: map[engine.Key]string{}, load: map[string]int{}},
				reportedNoPools: map[engine.Key]bool{},
			}
			return r.reconcileService
		},
	}
}

// serviceWatches returns the watches of the controller. Each maps a changed object to the Services
// that depend on it.
func (c caches) serviceWatches() []engine.Watch {
	return []engine.Watch{
		engine.OnInformer(c.services, func(n engine.Change[*corev1.Service]) []engine.Key {
			keys := []engine.Key{engine.KeyOf(n.New)}
			if n.Type == engine.Deleted || n.Type == engine.Updated &&
				len(statusAddresses(n.Old)) > len(statusAddresses(n.New)) {
				keys = append(keys, c.keysByIndex(pending)...)
			}
			return keys
		}),
		engine.OnInformer(c.addresses, func(n engine.Change[*networkingv1.IPAddress]) []engine.Key {
			var keys []engine.Key
			if k, ok := reservingService(n.New); ok {
				keys = append(keys, k)
			}
			if n.Type == engine.Deleted {
				keys = append(keys, c.keysByIndex(pending)...)
			}
			return keys
		}),
		engine.OnInformer(c.configs, func(n engine.Change[*corev1.ConfigMap]) []engine.Key {
			if n.New.Namespace != balancer.Namespace || n.New.Name != balancer.ConfigMap {
				return nil
			}
			return c.keysByIndex(allOurs)
		}),
		engine.OnInformer(c.namespaces, func(n engine.Change[*corev1.Namespace]) []engine.Key {
			if n.Type == engine.Deleted {
				return nil
			}
			return c.keysByIndex(pending)
		}),
		engine.OnInformer(c.slices, func(n engine.Change[*discoveryv1.EndpointSlice]) []engine.Key {
			key := engine.Key{Namespace: n.New.Namespace, Name: n.New.Labels[discoveryv1.LabelServiceName]}
			if s, ok := engine.Cached[*corev1.Service](c.services, key.Namespace, key.Name); !ok ||
				!balancer.IsManaged(s) || !isLocalTraffic(s) {
				return nil
			}
			return []engine.Key{key}
		}),
		engine.OnInformer(c.nodes, func(n engine.Change[*corev1.Node]) []engine.Key {
			lease, _ := engine.Cached[*coordinationv1.Lease](c.leases, corev1.NamespaceNodeLease, n.New.Name)
			switch {
			case n.Type == engine.Updated && n.Old != n.New && UnfitReason(n.Old, lease) == UnfitReason(n.New, lease):
				return nil
			case n.Type == engine.Deleted || UnfitReason(n.New, lease) != "":
				return c.keysByIndex(announcerKey(n.New.Name))
			}
			return c.misplacedServices()
		}),
		engine.OnInformer(c.leases, func(n engine.Change[*coordinationv1.Lease]) []engine.Key {
			switch {
			case n.New.Namespace != corev1.NamespaceNodeLease ||
				n.Type == engine.Added && n.New.Annotations[balancer.MissingSince] == "":
				return nil
			case n.Type == engine.Updated && n.Old.Annotations[balancer.MissingSince] ==
				n.New.Annotations[balancer.MissingSince]:
				return nil
			case n.Type != engine.Deleted && n.New.Annotations[balancer.MissingSince] != "":
				return c.keysByIndex(announcerKey(n.New.Name))
			}
			return c.misplacedServices()
		}),
	}
}

// addressesOf returns the IP addresses in the status of node n.
func addressesOf(n *corev1.Node) []string {
	var out []string
	for _, a := range balancer.NodeAddresses(n) {
		out = append(out, a.String())
	}
	return out
}

// reconciler reconciles Services during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	caches
	term         *engine.Term
	view         *engine.View[*corev1.Service]
	reservations reservations

	mu              sync.Mutex
	reportedNoPools map[engine.Key]bool // Services for which warnWithoutPools has recorded an event
	announcers      announcers
}

// announcers records which node announces each Service, and how many Services each node announces.
// It is safe for concurrent use.
type announcers struct {
	services cache.SharedIndexInformer
	mu       sync.Mutex
	by       map[engine.Key]string // the announcing node of each Service, as last written
	load     map[string]int        // number of Services that each node announces
	seeded   bool                  // loadAnnouncers has added the annotations of all Services to by and load
}

// reservations holds the IPAddresses that are reserved for Services, including the writes of this
// term of leadership. It is safe for concurrent use.
type reservations struct {
	term *engine.Term
	mu   sync.Mutex
	held *engine.View[*networkingv1.IPAddress]
	// held while an address is chosen and reserved, so that two workers do not choose the same
	// address
	allocating sync.Mutex
	after      map[string]netip.Addr // the last allocated address of each pool
	// unconfirmed holds the UIDs of IPAddresses, by name, for which the last deletion returned an
	// error. The deletion may still be committed.
	unconfirmed map[string]types.UID
}

func (r *reconciler) reconcileService(ctx context.Context, key engine.Key) (time.Duration, error) {
	s, ok := r.view.Get(key.Namespace, key.Name)
	switch {
	case !ok:
		r.announcers.recordAnnouncer(key, "")
		return 0, r.releaseAddresses(ctx, key)
	case s.DeletionTimestamp != nil:
		return 0, nil // the Service keeps its addresses until it is deleted
	case !balancer.IsManaged(s):
		if err := r.releaseAddresses(ctx, key); err != nil {
			return 0, err
		}
		return 0, r.clearService(ctx, s)
	}
	s, foreign, again, err := r.allocateAddresses(ctx, s)
	if err != nil {
		return 0, err
	}
	if foreign {
		_, err = r.writeAnnouncer(ctx, s, "")
		return again, err
	}
	return again, r.chooseAnnouncer(ctx, s)
}

// clearService removes this controller's condition and annotation from Service s, which no longer
// needs an address.
func (r *reconciler) clearService(ctx context.Context, s *corev1.Service) error {
	if meta.FindStatusCondition(s.Status.Conditions, balancer.Condition) != nil {
		next := s.DeepCopy()
		meta.RemoveStatusCondition(&next.Status.Conditions, balancer.Condition)
		stored, err := client.UpdateStatus(ctx, r.term.Client, next)
		if err != nil && !apierrors.IsNotFound(err) {
			return fmt.Errorf("writing the status of service %s/%s: %w", s.Namespace, s.Name, err)
		}
		if err == nil {
			r.view.RecordWrite(stored)
		}
	}
	_, err := r.writeAnnouncer(ctx, s, "")
	return err
}
