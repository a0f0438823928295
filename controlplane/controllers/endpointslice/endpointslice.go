package endpointslice

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// serviceIndex indexes the EndpointSlices of this controller by the Service, as namespace/name.
const serviceIndex = "keelson.service"

// New returns the EndpointSlice controller for Services with a selector.
func New(d engine.Deps) *engine.Descriptor {
	services := client.Informer[*corev1.Service](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	ranges := client.Informer[*networkingv1.ServiceCIDR](d.Informers)
	objects := client.Informer[*discoveryv1.EndpointSlice](d.Informers)
	engine.Index(pods, engine.PodNodeIndex, engine.PodNodeKeys)
	engine.Index(objects, serviceIndex, managedBy(ManagedBy))
	engine.Index(services, spreadIndex, spreadKey)
	stale := &atomic.Bool{}
	return &engine.Descriptor{
		Name:    "endpointslice-controller",
		Workers: 8,
		Watches: []engine.Watch{
			engine.OnInformer(services, engine.Self[*corev1.Service]),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				return engine.ServicesOf(services, c)
			}),
			engine.OnInformer(objects, func(c engine.Change[*discoveryv1.EndpointSlice]) []engine.Key {
				return []engine.Key{{Namespace: c.New.Namespace, Name: c.New.Labels[discoveryv1.LabelServiceName]}}
			}),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				return slices.Concat(ofNode(services, pods, c), ofCapacity(services, stale, c),
					engine.ServicesOfNode(services, pods, d.PodAddresses, c))
			}),
			engine.OnInformer(ranges, func(c engine.Change[*networkingv1.ServiceCIDR]) []engine.Key {
				return engine.ServicesOfRange(services, d.PodAddresses, c)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "pods", "nodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"services/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, services: services, pods: pods, nodes: nodes,
				slices:   engine.ViewOf[*discoveryv1.EndpointSlice](t, objects),
				topology: newTopology(nodes, stale), addresses: d.PodAddresses}
			return r.reconcileService
		},
	}
}

// managedBy returns an index function for EndpointSlices that have value manager in their
// managed-by label. The index values are namespace/service.
func managedBy(manager string) func(o api.Object) []string {
	return func(o api.Object) []string {
		l := o.GetLabels()
		if l[discoveryv1.LabelManagedBy] != manager {
			return nil
		}
		return []string{o.GetNamespace() + "/" + l[discoveryv1.LabelServiceName]}
	}
}

// ofNode returns the keys of the Services with pods on a node if the zone of the node has changed.
func ofNode(services, pods cache.SharedIndexInformer, c engine.Change[*corev1.Node]) []engine.Key {
	zone := c.New.Labels[corev1.LabelTopologyZone]
	if c.Type == engine.Updated && c.Old != nil && zone == c.Old.Labels[corev1.LabelTopologyZone] ||
		c.Type != engine.Updated && zone == "" {
		return nil
	}
	var keys []engine.Key
	for _, p := range engine.CachedBy[*corev1.Pod](pods, engine.PodNodeIndex, c.New.Name) {
		keys = append(keys, engine.ServicesOf(services, engine.Change[*corev1.Pod]{Type: engine.Added, New: p})...)
	}
	return keys
}

// reconciler reconciles Services during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term                  *engine.Term
	services, pods, nodes cache.SharedIndexInformer
	slices                *engine.View[*discoveryv1.EndpointSlice]
	topology              *topology
	addresses             *podaddress.Index
}

func (r *reconciler) reconcileService(ctx context.Context, key engine.Key) (time.Duration, error) {
	svc, ok := engine.Cached[*corev1.Service](r.services, key.Namespace, key.Name)
	if !ok || svc.DeletionTimestamp != nil {
		r.topology.isNewEvent(key, "")
		return 0, nil // the garbage collector deletes the slices of a deleted Service
	}
	if len(svc.Spec.Selector) == 0 || svc.Spec.Type == corev1.ServiceTypeExternalName {
		return 0, nil // another controller or a user manages the slices of this Service
	}
	pods := r.addresses.PeerPods(engine.ListSelectedPods(r.pods, svc))
	have := activeSlices(r.slices, serviceIndex, key.Namespace+"/"+key.Name)
	nodes := Nodes{Zone: r.nodeZones(pods)}
	if wantsTopologyHints(svc) {
		nodes.CPU = r.topology.zoneCPUs()
	}
	plan := Reconcile(svc, pods, have, nodes)
	err := r.performPlan(ctx, svc, plan, pods, have)
	if err == nil {
		r.recordHintEvents(key, svc, plan.HintEvents)
	}
	return 0, err
}

// recordHintEvents records the given Events about topology hints of a Service, unless they equal
// the Events that were recorded last for the Service.
func (r *reconciler) recordHintEvents(key engine.Key, svc *corev1.Service, events []HintEvent) {
	text := ""
	for _, n := range events {
		text += n.Message + "\n"
	}
	if !r.topology.isNewEvent(key, text) {
		return
	}
	for _, n := range events {
		r.term.Events.Event(svc, n.Type, n.Reason, n.Message)
	}
}

func (r *reconciler) nodeZones(pods []*corev1.Pod) map[string]string {
	zones := map[string]string{}
	for _, p := range pods {
		if n, ok := engine.Cached[*corev1.Node](r.nodes, "", p.Spec.NodeName); ok {
			zones[n.Name] = n.Labels[corev1.LabelTopologyZone]
		}
	}
	return zones
}

// performPlan writes the slices of plan. existing are the slices before these writes. For each pod
// that plan newly publishes as a ready endpoint, it adds a stage to the pod's startup timeline.
func (r *reconciler) performPlan(
	ctx context.Context, svc *corev1.Service, plan Plan, pods []*corev1.Pod, existing []*discoveryv1.EndpointSlice,
) error {
	start := r.term.Now()
	copyPodTraces(plan, pods, existing)
	err := writePlan(ctx, r.term, r.slices, svc.Namespace+"/"+svc.Name, plan)
	if err == nil {
		r.recordReady(plan, pods, existing, start)
	}
	return err
}

// writePlan writes the slices of plan and records them in view. Slices that gain endpoints are
// written first, and deletions come last. An address that moves between slices is therefore always
// in a slice.
func writePlan(
	ctx context.Context, t *engine.Term, view *engine.View[*discoveryv1.EndpointSlice], service string, plan Plan,
) error {
	var errs []error
	for _, s := range plan.Create {
		s, err := client.Create(ctx, t.Client, s)
		if err != nil {
			if !apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
				errs = append(errs, fmt.Errorf("creating an endpoint slice of service %s: %w", service, err))
			}
			continue
		}
		view.RecordWrite(s)
	}
	for _, s := range plan.Update {
		s, err := client.Update(ctx, t.Client, s)
		if err != nil {
			errs = append(errs, fmt.Errorf("updating an endpoint slice of service %s: %w", service, err))
			continue
		}
		view.RecordWrite(s)
	}
	for _, s := range plan.Delete {
		view.MarkDeleting(s)
		err := client.Delete[*discoveryv1.EndpointSlice](ctx, t.Client, s.Namespace, s.Name, engine.DeleteOnlyUID(s))
		if err != nil && !apierrors.IsNotFound(err) {
			view.UnmarkDeleting(s)
			errs = append(errs, fmt.Errorf("deleting endpoint slice %s/%s: %w", s.Namespace, s.Name, err))
		}
	}
	return errors.Join(errs...)
}

// activeSlices returns the slices with this index value that are not being deleted.
func activeSlices(view *engine.View[*discoveryv1.EndpointSlice], index, key string) []*discoveryv1.EndpointSlice {
	return slices.DeleteFunc(slices.Clone(view.By(index, key)), view.IsDeleting)
}

// copyPodTraces copies the trace context of each pod that plan newly publishes as a ready endpoint
// to the slices that plan writes. A proxy can then record in the pod's timeline when it starts to
// route to the pod.
func copyPodTraces(plan Plan, pods []*corev1.Pod, existing []*discoveryv1.EndpointSlice) {
	was := readyUIDs(existing)
	byUID := make(map[string]*corev1.Pod, len(pods))
	for _, p := range pods {
		byUID[string(p.UID)] = p
	}
	for _, s := range append(slices.Clone(plan.Create), plan.Update...) {
		delete(s.Annotations, api.TraceParentAnnotation) // the trace context of an earlier change
		for uid := range readyUIDs([]*discoveryv1.EndpointSlice{s}) {
			if p := byUID[uid]; p != nil && !was[uid] {
				engine.CopyTrace(s, p)
			}
		}
	}
}

// recordReady adds the stage "in endpointslice" to the startup timeline of each pod that plan newly
// publishes as a ready endpoint. The stage lasts from start until now. existing are the slices
// before the writes of plan.
func (r *reconciler) recordReady(
	plan Plan, pods []*corev1.Pod, existing []*discoveryv1.EndpointSlice, start time.Time,
) {
	if r.term.Timeline == nil {
		return
	}
	was, is := readyUIDs(existing), readyUIDs(append(plan.Create, plan.Update...))
	for _, p := range pods {
		if is[string(p.UID)] && !was[string(p.UID)] {
			r.term.Record("in endpointslice", p, "pod", start, "")
		}
	}
}

func readyUIDs(list []*discoveryv1.EndpointSlice) map[string]bool {
	out := map[string]bool{}
	for _, s := range list {
		for _, e := range s.Endpoints {
			if e.TargetRef != nil && ptr.Deref(e.Conditions.Ready, false) {
				out[string(e.TargetRef.UID)] = true
			}
		}
	}
	return out
}
