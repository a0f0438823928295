// Package gateway is the controller of Gateways with a GatewayClass of Keelson. It writes the
// results of package ingressproxy/gateway to the statuses of GatewayClasses, Gateways and routes,
// and manages the proxy pods that serve them.
//
// The proxies run in a separate namespace, not in that of the Gateway. A user who can create pods
// in a namespace can use every ServiceAccount there, and a proxy may read Services and routes of
// all namespaces. A proxy may not read Secrets: it gets files with the certificates to which its
// Gateway may refer.
package gateway

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/cache"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/custom"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/ingressproxy/gateway"
	"keelson.dev/keelson/ingressproxy/pairs"
)

// syncRetryDelay is the retry delay while the informer of a new kind is not synced.
// orphanScanInterval is the interval at which the controller searches for proxies of deleted
// Gateways, in case a deletion was not observed.
const (
	syncRetryDelay     = time.Second
	orphanScanInterval = time.Minute
)

// all is the only key of this controller: the status of a Gateway depends on routes and
// ReferenceGrants of all namespaces.
var all = []engine.Key{{Name: "all"}}

// DefaultImage is the proxy image of a development build. A release contains it in
// bin/images/entry.tar.
const DefaultImage = "keelson.dev/entry:dev"

// Options configures New.
type Options struct {
	Image string // image of the proxies; "" means DefaultImage
}

// New returns the controller of Gateways.
func New(d engine.Deps, o Options) *engine.Descriptor {
	inf := informers{
		services: client.Informer[*corev1.Service](d.Informers), secrets: client.Informer[*corev1.Secret](d.Informers),
		namespaces:  client.Informer[*corev1.Namespace](d.Informers),
		deployments: client.Informer[*appsv1.Deployment](d.Informers),
		accounts:    client.Informer[*corev1.ServiceAccount](d.Informers),
		budgets:     client.Informer[*policyv1.PodDisruptionBudget](d.Informers),
		kinds:       client.Every(d.Informers, isGatewayKind, func(cache.SharedIndexInformer) {}),
	}
	if o.Image == "" {
		o.Image = DefaultImage
	}
	asked := &atomic.Bool{}
	return &engine.Descriptor{
		Name: "gateway-controller",
		Watches: []engine.Watch{
			watchIfUsed[*corev1.Service](asked, inf.services), watchIfUsed[*corev1.Secret](asked, inf.secrets),
			watchIfUsed[*corev1.Namespace](asked, inf.namespaces),
			watchIfUsed[*appsv1.Deployment](asked, inf.deployments),
			watchIfUsed[*corev1.ServiceAccount](asked, inf.accounts),
			watchIfUsed[*policyv1.PodDisruptionBudget](asked, inf.budgets),
		},
		Dynamic: &engine.DynamicWatch{Current: inf.kinds.Now,
			Keys: func(*api.Kind, engine.Change[api.Object]) []engine.Key { return all }},
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{gw.GroupName}, Resources: []string{"gatewayclasses", "gateways", "httproutes",
				"grpcroutes", "referencegrants"}, Verbs: []string{"get", "list", "watch"}},
			{APIGroups: []string{gw.GroupName}, Resources: []string{"gatewayclasses/status", "gateways/status",
				"httproutes/status", "grpcroutes/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"services", "secrets", "serviceaccounts"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"namespaces"},
				Verbs: []string{"create", "get", "list", "watch"}},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets"},
				Verbs: []string{"create", "delete", "get", "list", "update", "watch"}},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			t.Enqueue(all[0])
			r := &reconciler{term: t, inf: inf, options: o, asked: asked, read: map[types.UID]decodedObject{}}
			return r.reconcileGateways
		},
	}
}

// isGatewayKind reports whether k is a kind of the Gateway API that this controller reads.
func isGatewayKind(k *api.Kind) bool {
	if k.GVK.Group != gw.GroupName {
		return false
	}
	switch k.GVK.Kind {
	case "GatewayClass", "Gateway", "HTTPRoute", "GRPCRoute", "ReferenceGrant":
		return true
	}
	return false
}

// watchIfUsed returns a Watch for objects that matter only to Gateways. It queues keys only while
// gatewayExists is true.
func watchIfUsed[T api.Object](gatewayExists *atomic.Bool, inf cache.SharedIndexInformer) engine.Watch {
	return engine.OnInformer(inf, func(engine.Change[T]) []engine.Key {
		if !gatewayExists.Load() {
			return nil
		}
		return all
	})
}

type informers struct {
	services, secrets, namespaces, deployments, accounts, budgets cache.SharedIndexInformer
	kinds                                                         *client.EveryKind
}

// decodedObject caches the conversion of an object of the Gateway API to its Go type, with the
// object's revision.
type decodedObject struct {
	revision string
	object   any
}

// reconciler reconciles all Gateways during one term of leadership. Every term has a new
// reconciler. There is one worker.
type reconciler struct {
	term    *engine.Term
	inf     informers
	options Options
	asked   *atomic.Bool
	keys    pairs.Cache
	read    map[types.UID]decodedObject
}

// gatewayKinds returns the kinds of the Gateway API that the cluster serves, by name. ok is false
// while an informer of these kinds is not synced.
func (r *reconciler) gatewayKinds() (found map[string]client.KindInformer, ok bool) {
	found, ok = map[string]client.KindInformer{}, true
	for _, one := range r.inf.kinds.Now().Kinds {
		ok = ok && one.Informer.HasSynced()
		found[one.Kind.GVK.Kind] = one
	}
	return found, ok
}

func (r *reconciler) reconcileGateways(ctx context.Context, _ engine.Key) (time.Duration, error) {
	kinds, ok := r.gatewayKinds()
	if !ok {
		return syncRetryDelay, nil
	}
	before := r.read
	r.read = make(map[types.UID]decodedObject, len(before))
	w := &gateway.World{Namespace: r.namespaceLabels, Service: r.cachedService, Secret: r.cachedSecret,
		Reserved: []int32{statusPort}, Keys: &r.keys}
	err := errors.Join(
		decodeObjects(r, before, kinds["GatewayClass"], &w.Classes),
		decodeObjects(r, before, kinds["Gateway"], &w.Gateways),
		decodeObjects(r, before, kinds["HTTPRoute"], &w.HTTPRoutes),
		decodeObjects(r, before, kinds["GRPCRoute"], &w.GRPCRoutes),
		decodeObjects(r, before, kinds["ReferenceGrant"], &w.Grants))
	if err != nil {
		return 0, err
	}
	j := gateway.Evaluate(w)
	r.asked.Store(len(j.Gateways) > 0)
	now := metav1.NewTime(r.term.Now())
	var errs []error
	for _, c := range w.Classes {
		if c.Spec.ControllerName == gateway.Controller {
			errs = append(errs, writeStatus(ctx, r, kinds["GatewayClass"], c, c.Status, gateway.ClassStatus(c, now)))
		}
	}
	errs = append(errs, r.removeOrphanedProxies(ctx, j, kinds))
	for _, g := range j.Gateways {
		err := r.provideProxy(ctx, w, g)
		errs = append(errs, err, writeStatus(ctx, r, kinds["Gateway"], g.Object, g.Object.Status,
			g.Status(r.servingState(g, err), now)))
	}
	for _, route := range j.Routes {
		next := route.Status(now)
		switch {
		case route.HTTP != nil:
			errs = append(errs, writeStatus(ctx, r, kinds["HTTPRoute"], route.HTTP, route.HTTP.Status,
				gw.HTTPRouteStatus{RouteStatus: next}))
		case route.GRPC != nil:
			errs = append(errs, writeStatus(ctx, r, kinds["GRPCRoute"], route.GRPC, route.GRPC.Status,
				gw.GRPCRouteStatus{RouteStatus: next}))
		}
	}
	if r.asked.Load() {
		return orphanScanInterval, errors.Join(errs...)
	}
	return 0, errors.Join(errs...)
}

// decodeObjects appends the objects of a kind, converted to their Go type, to out. decodedBefore
// holds the objects that the previous call converted; objects that have not changed since then are
// not converted again.
func decodeObjects[T any](
	r *reconciler, decodedBefore map[types.UID]decodedObject, one client.KindInformer, out *[]*T,
) error {
	if one.Kind == nil {
		return nil
	}
	for _, o := range engine.CachedAll[*custom.Object](one.Informer) {
		entry, ok := decodedBefore[o.UID]
		if !ok || entry.revision != o.ResourceVersion {
			m, err := o.Map()
			if err != nil {
				return fmt.Errorf("reading %s %s: %w", one.Kind.GVK.Kind, engine.KeyOf(o), err)
			}
			object := new(T)
			if err := runtime.DefaultUnstructuredConverter.FromUnstructured(m, object); err != nil {
				// The installed CustomResourceDefinition accepted the object, so it belongs to
				// another version of the Gateway API. It is ignored.
				r.term.Log.Warn("an object cannot be decoded", "kind", one.Kind.GVK.String(), "object",
					engine.KeyOf(o), "err", err)
				continue
			}
			entry = decodedObject{revision: o.ResourceVersion, object: object}
		}
		r.read[o.UID] = entry
		*out = append(*out, entry.object.(*T))
	}
	return nil
}

// writeStatus stores a new status of object o if it differs from current, the status in o. If o has
// changed since it was read, nothing is written; the change queues the key again.
func writeStatus[S any](
	ctx context.Context, r *reconciler, one client.KindInformer, o metav1.Object, current, status S,
) error {
	if equality.Semantic.DeepEqual(current, status) {
		return nil
	}
	stored, ok := engine.Cached[*custom.Object](one.Informer, o.GetNamespace(), o.GetName())
	if !ok || stored.ResourceVersion != o.GetResourceVersion() {
		return nil
	}
	content, err := runtime.DefaultUnstructuredConverter.ToUnstructured(&status)
	if err != nil {
		return fmt.Errorf("converting the status of %s %s: %w", one.Kind.GVK.Kind, engine.KeyOf(stored), err)
	}
	next := stored.DeepCopy()
	next.Set("status", content)
	_, err = r.term.Client.Do(ctx, &api.Request{Verb: api.VerbUpdate, Kind: one.Kind, Subresource: "status",
		Namespace: next.Namespace, Name: next.Name, Object: next})
	if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("writing the status of %s %s: %w", one.Kind.GVK.Kind, engine.KeyOf(stored), err)
	}
	return nil
}

func (r *reconciler) namespaceLabels(name string) (map[string]string, bool) {
	n, ok := engine.Cached[*corev1.Namespace](r.inf.namespaces, "", name)
	if !ok {
		return nil, false
	}
	return n.Labels, true
}

func (r *reconciler) cachedService(namespace, name string) *corev1.Service {
	s, _ := engine.Cached[*corev1.Service](r.inf.services, namespace, name)
	return s
}

func (r *reconciler) cachedSecret(namespace, name string) *corev1.Secret {
	s, _ := engine.Cached[*corev1.Secret](r.inf.secrets, namespace, name)
	return s
}
