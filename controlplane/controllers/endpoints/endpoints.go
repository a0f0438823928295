// Package endpoints maintains the legacy Endpoints object of every Service with a selector, for
// clients that do not read EndpointSlices.
package endpoints

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// Labels of Endpoints objects, and the annotation of an object that could not contain all
// addresses.
const (
	managedByLabel     = "endpoints.kubernetes.io/managed-by"
	managedBy          = "endpoint-controller"
	overCapacity       = "endpoints.kubernetes.io/over-capacity"
	maxAddresses       = 1000
	overCapacityReason = "truncated"
)

// Desired returns the Endpoints object that Service svc must have. pods are the pods that svc
// selects.
func Desired(svc *corev1.Service, pods []*corev1.Pod) *corev1.Endpoints {
	e := &corev1.Endpoints{ObjectMeta: metav1.ObjectMeta{
		Namespace: svc.Namespace, Name: svc.Name, Labels: map[string]string{}, Annotations: map[string]string{},
	}}
	for k, v := range svc.Labels {
		e.Labels[k] = v
	}
	e.Labels[managedByLabel] = managedBy
	delete(e.Labels, corev1.IsHeadlessService)
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		e.Labels[corev1.IsHeadlessService] = ""
	}
	ipv6 := len(svc.Spec.IPFamilies) > 0 && svc.Spec.IPFamilies[0] == corev1.IPv6Protocol
	subsets := map[string]*corev1.EndpointSubset{}
	addresses := 0
	pods = slices.Clone(pods)
	slices.SortFunc(pods, func(a, b *corev1.Pod) int {
		// If the pods exceed the limit, ready pods have precedence.
		return cmp.Or(-cmp.Compare(podRank(a), podRank(b)), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range pods {
		address, ok := endpointAddress(svc, p, ipv6)
		if !ok {
			continue
		}
		if addresses++; addresses > maxAddresses {
			e.Annotations[overCapacity] = overCapacityReason
			break
		}
		ports, key := endpointPorts(svc, p)
		if len(ports) == 0 && len(svc.Spec.Ports) > 0 {
			continue
		}
		s := subsets[key]
		if s == nil {
			s = &corev1.EndpointSubset{Ports: ports}
			subsets[key] = s
		}
		if api.IsPodReady(p) || svc.Spec.PublishNotReadyAddresses {
			s.Addresses = append(s.Addresses, address)
		} else {
			s.NotReadyAddresses = append(s.NotReadyAddresses, address)
		}
	}
	e.Subsets = sortSubsets(subsets)
	return e
}

func podRank(p *corev1.Pod) int {
	if api.IsPodReady(p) {
		return 1
	}
	return 0
}

// endpointAddress returns the address of pod p for the Endpoints of Service svc. It returns false
// if p is terminal or has no address. It also returns false if p is terminating, unless svc
// publishes not-ready addresses.
func endpointAddress(svc *corev1.Service, p *corev1.Pod, ipv6 bool) (corev1.EndpointAddress, bool) {
	if api.IsPodTerminal(p) || p.DeletionTimestamp != nil && !svc.Spec.PublishNotReadyAddresses {
		return corev1.EndpointAddress{}, false
	}
	ip, ok := engine.PodAddress(p, ipv6)
	if !ok {
		return corev1.EndpointAddress{}, false
	}
	a := corev1.EndpointAddress{IP: ip, TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace,
		Name: p.Name, UID: p.UID}}
	if p.Spec.NodeName != "" {
		a.NodeName = &p.Spec.NodeName
	}
	if p.Spec.Hostname != "" && p.Spec.Subdomain == svc.Name {
		a.Hostname = p.Spec.Hostname
	}
	return a, true
}

// endpointPorts returns the ports of Service svc with the port numbers of pod p, and a string that
// is equal for equal ports.
func endpointPorts(svc *corev1.Service, p *corev1.Pod) ([]corev1.EndpointPort, string) {
	var out []corev1.EndpointPort
	var key strings.Builder
	for i := range svc.Spec.Ports {
		sp := &svc.Spec.Ports[i]
		n, ok := engine.TargetPort(p, sp)
		if !ok {
			continue
		}
		out = append(out, corev1.EndpointPort{Name: sp.Name, Port: n, Protocol: cmp.Or(sp.Protocol, corev1.ProtocolTCP),
			AppProtocol: sp.AppProtocol})
		fmt.Fprintf(&key, "%s/%d/%s ", sp.Name, n, sp.Protocol)
	}
	return out, key.String()
}

func sortSubsets(subsets map[string]*corev1.EndpointSubset) []corev1.EndpointSubset {
	keys := make([]string, 0, len(subsets))
	for k := range subsets {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	byIP := func(a, b corev1.EndpointAddress) int { return cmp.Compare(a.IP, b.IP) }
	var out []corev1.EndpointSubset
	for _, k := range keys {
		slices.SortFunc(subsets[k].Addresses, byIP)
		slices.SortFunc(subsets[k].NotReadyAddresses, byIP)
		out = append(out, *subsets[k])
	}
	return out
}

// New returns the Endpoints controller.
func New(d engine.Deps) *engine.Descriptor {
	services := client.Informer[*corev1.Service](d.Informers)
	pods := client.Informer[*corev1.Pod](d.Informers)
	nodes := client.Informer[*corev1.Node](d.Informers)
	ranges := client.Informer[*networkingv1.ServiceCIDR](d.Informers)
	objects := client.Informer[*corev1.Endpoints](d.Informers)
	engine.Index(pods, engine.PodNodeIndex, engine.PodNodeKeys)
	return &engine.Descriptor{
		Name:    "endpoint-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(services, engine.Self[*corev1.Service]),
			engine.OnInformer(objects, engine.Self[*corev1.Endpoints]),
			engine.OnInformer(pods, func(c engine.Change[*corev1.Pod]) []engine.Key {
				return engine.ServicesOf(services, c)
			}),
			engine.OnInformer(nodes, func(c engine.Change[*corev1.Node]) []engine.Key {
				return engine.ServicesOfNode(services, pods, d.PodAddresses, c)
			}),
			engine.OnInformer(ranges, func(c engine.Change[*networkingv1.ServiceCIDR]) []engine.Key {
				return engine.ServicesOfRange(services, d.PodAddresses, c)
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "pods", "nodes"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"endpoints"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"endpoints/restricted"}, Verbs: []string{"create"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			r := &reconciler{term: t, services: services, pods: pods, addresses: d.PodAddresses,
				objects: engine.ViewOf[*corev1.Endpoints](t, objects)}
			return r.reconcileEndpoints
		},
	}
}

// reconciler reconciles Services during one term of leadership. Every term has a new reconciler.
type reconciler struct {
	term           *engine.Term
	services, pods cache.SharedIndexInformer
	addresses      *podaddress.Index
	objects        *engine.View[*corev1.Endpoints]
}

func (r *reconciler) reconcileEndpoints(ctx context.Context, key engine.Key) (time.Duration, error) {
	have, exists := r.objects.Get(key.Namespace, key.Name)
	svc, ok := engine.Cached[*corev1.Service](r.services, key.Namespace, key.Name)
	if !ok {
		if exists && have.Labels[managedByLabel] == managedBy {
			return 0, r.deleteEndpoints(ctx, have)
		}
		return 0, nil
	}
	if svc.DeletionTimestamp != nil || len(svc.Spec.Selector) == 0 || svc.Spec.Type == corev1.ServiceTypeExternalName {
		return 0, nil
	}
	want := Desired(svc, r.addresses.PeerPods(engine.ListSelectedPods(r.pods, svc)))
	if !exists {
		return 0, r.writeEndpoints(ctx, want, client.Create[*corev1.Endpoints])
	}
	next := have.DeepCopy()
	next.Labels, next.Subsets = want.Labels, want.Subsets
	if next.Annotations[overCapacity] != want.Annotations[overCapacity] {
		next.Annotations = want.Annotations
	}
	if equality.Semantic.DeepEqual(next.Labels, have.Labels) &&
		equality.Semantic.DeepEqual(next.Subsets, have.Subsets) &&
		equality.Semantic.DeepEqual(next.Annotations, have.Annotations) {
		return 0, nil
	}
	return 0, r.writeEndpoints(ctx, next, client.Update[*corev1.Endpoints])
}

func (r *reconciler) writeEndpoints(
	ctx context.Context, e *corev1.Endpoints,
	how func(context.Context, *client.Client, *corev1.Endpoints) (*corev1.Endpoints, error),
) error {
	name := e.Namespace + "/" + e.Name
	e, err := how(ctx, r.term.Client, e)
	if apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("writing endpoints %s: %w", name, err)
	}
	r.objects.RecordWrite(e)
	return nil
}

// deleteEndpoints deletes Endpoints e, because its Service no longer exists.
func (r *reconciler) deleteEndpoints(ctx context.Context, e *corev1.Endpoints) error {
	if err := client.Delete[*corev1.Endpoints](ctx, r.term.Client, e.Namespace, e.Name, engine.DeleteOnlyUID(e)); err !=
		nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting endpoints %s/%s of a service that is gone: %w", e.Namespace, e.Name, err)
	}
	return nil
}
