package endpointslice

import (
	"context"
	"maps"
	"net/netip"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// MirroredBy is the value of the managed-by label of EndpointSlices that mirror Endpoints.
const MirroredBy = "endpointslicemirroring-controller.k8s.io"

// MaxMirrored is the maximum number of addresses of one Endpoints subset that are copied to slices.
// Ready addresses are copied first.
const MaxMirrored = 1000

// Label and annotation of Endpoints that are not mirrored, and the index of slices that mirror
// Endpoints by Service.
const (
	endpointsManagedBy = "endpoints.kubernetes.io/managed-by" // set on Endpoints that a controller computes from pods
	leaderAnnotation   = "control-plane.alpha.kubernetes.io/leader"
	mirrorIndex        = "keelson.mirrored-service"
)

// SkippedAddresses counts the addresses of Endpoints that are not copied to a slice, by reason.
type SkippedAddresses struct{ TooMany, Invalid int }

// isMirrored reports whether Endpoints e of a Service are copied to slices. Only Endpoints that a
// user manages, of a Service without a selector, are copied.
func isMirrored(svc *corev1.Service, e *corev1.Endpoints) bool {
	_, ours := e.Labels[endpointsManagedBy]
	_, election := e.Annotations[leaderAnnotation]
	return len(svc.Spec.Selector) == 0 && svc.Spec.Type != corev1.ServiceTypeExternalName &&
		e.DeletionTimestamp == nil &&
		!ours && !election && e.Labels[discoveryv1.LabelSkipMirror] != "true"
}

// Mirror returns the writes after which the existing slices contain the addresses of Endpoints e.
// It also counts the addresses that no slice will contain.
func Mirror(e *corev1.Endpoints, existing []*discoveryv1.EndpointSlice) (Plan, SkippedAddresses) {
	labels, annotations := map[string]string{}, map[string]string{}
	maps.Copy(labels, e.Labels)
	labels[discoveryv1.LabelServiceName] = e.Name
	labels[discoveryv1.LabelManagedBy] = MirroredBy
	maps.Copy(annotations, e.Annotations)
	delete(annotations, corev1.LastAppliedConfigAnnotation)
	delete(annotations, corev1.EndpointsLastChangeTriggerTime)
	src := source{
		namespace: e.Namespace, name: e.Name,
		owner:  *metav1.NewControllerRef(e, corev1.SchemeGroupVersion.WithKind("Endpoints")),
		labels: labels, annotations: annotations,
		families: []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6},
	}
	wanted := addresses{}
	var skipped SkippedAddresses
	for i := range e.Subsets {
		skipped.addSkipped(wanted.addSubset(&e.Subsets[i]))
	}
	return src.planSlices(wanted, existing), skipped
}

func (s *SkippedAddresses) addSkipped(more SkippedAddresses) {
	s.TooMany, s.Invalid = s.TooMany+more.TooMany, s.Invalid+more.Invalid
}

// addSubset adds the addresses of a subset of Endpoints to a, and counts the addresses that it
// skipped.
func (a addresses) addSubset(s *corev1.EndpointSubset) SkippedAddresses {
	ports := make([]discoveryv1.EndpointPort, 0, len(s.Ports))
	for i := range s.Ports {
		p := &s.Ports[i]
		ports = append(ports, discoveryv1.EndpointPort{Name: &p.Name, Port: &p.Port, Protocol: &p.Protocol,
			AppProtocol: p.AppProtocol})
	}
	var skipped SkippedAddresses
	count := 0
	add := func(from *corev1.EndpointAddress, ready bool) {
		ip, err := netip.ParseAddr(from.IP)
		if err != nil {
			skipped.Invalid++
			return
		}
		if count++; count > MaxMirrored {
			skipped.TooMany++
			return
		}
		family := discoveryv1.AddressTypeIPv4
		if ip.Is6() {
			family = discoveryv1.AddressTypeIPv6
		}
		e := discoveryv1.Endpoint{Addresses: []string{from.IP},
			Conditions: discoveryv1.EndpointConditions{Ready: &ready},
			TargetRef:  from.TargetRef, NodeName: from.NodeName}
		if from.Hostname != "" {
			e.Hostname = &from.Hostname
		}
		a.addEndpoint(family, ports, e)
	}
	for i := range s.Addresses {
		add(&s.Addresses[i], true)
	}
	for i := range s.NotReadyAddresses {
		add(&s.NotReadyAddresses[i], false)
	}
	return skipped
}

// NewMirror returns the controller that copies Endpoints that users manage to EndpointSlices.
func NewMirror(d engine.Deps) *engine.Descriptor {
	services := client.Informer[*corev1.Service](d.Informers)
	objects := client.Informer[*corev1.Endpoints](d.Informers)
	slices := client.Informer[*discoveryv1.EndpointSlice](d.Informers)
	engine.Index(slices, mirrorIndex, managedBy(MirroredBy))
	return &engine.Descriptor{
		Name:    "endpointslicemirroring-controller",
		Workers: 2,
		Watches: []engine.Watch{
			engine.OnInformer(services, engine.Self[*corev1.Service]),
			engine.OnInformer(objects, engine.Self[*corev1.Endpoints]),
			engine.OnInformer(slices, func(c engine.Change[*discoveryv1.EndpointSlice]) []engine.Key {
				if c.New.Labels[discoveryv1.LabelManagedBy] != MirroredBy &&
					(c.Old == nil || c.Old.Labels[discoveryv1.LabelManagedBy] != MirroredBy) {
					return nil
				}
				return []engine.Key{{Namespace: c.New.Namespace, Name: c.New.Labels[discoveryv1.LabelServiceName]}}
			}),
		},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{""}, Resources: []string{"services", "endpoints"},
				Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"services/finalizers", "endpoints/finalizers"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices/restricted"},
				Verbs: []string{"create"}},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			m := &mirror{term: t, services: services, objects: objects,
				slices: engine.ViewOf[*discoveryv1.EndpointSlice](t, slices)}
			return m.reconcileMirror
		},
	}
}

// mirror reconciles Endpoints during one term of leadership. Every term has a new mirror.
type mirror struct {
	term              *engine.Term
	services, objects cache.SharedIndexInformer
	slices            *engine.View[*discoveryv1.EndpointSlice]
}

func (m *mirror) reconcileMirror(ctx context.Context, key engine.Key) (time.Duration, error) {
	name := key.Namespace + "/" + key.Name
	have := activeSlices(m.slices, mirrorIndex, name)
	e, ok := engine.Cached[*corev1.Endpoints](m.objects, key.Namespace, key.Name)
	svc, there := engine.Cached[*corev1.Service](m.services, key.Namespace, key.Name)
	if !ok || !there || !isMirrored(svc, e) {
		return 0, writePlan(ctx, m.term, m.slices, name, Plan{Delete: have})
	}
	plan, skipped := Mirror(e, have)
	if len(plan.Create)+len(plan.Update)+len(plan.Delete) == 0 {
		return 0, nil
	}
	if skipped.Invalid > 0 {
		m.term.Events.Eventf(e, corev1.EventTypeWarning, "InvalidIPAddress",
			"%d addresses are not valid IP addresses and are not mirrored to EndpointSlices", skipped.Invalid)
	}
	if skipped.TooMany > 0 {
		m.term.Events.Eventf(e, corev1.EventTypeWarning, "TooManyAddressesToMirror",
			"%d addresses are not mirrored to EndpointSlices: at most %d addresses of a subset are mirrored",
			skipped.TooMany, MaxMirrored)
	}
	return 0, writePlan(ctx, m.term, m.slices, name, plan)
}
