package gateway

import (
	"context"
	"errors"
	"fmt"
	"strings"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/ingressproxy/gateway"
)

// provideProxy creates or updates the objects of the proxy of Gateway g. It deletes them if g has
// no listener that is served.
func (r *reconciler) provideProxy(ctx context.Context, w *gateway.World, g *gateway.Gateway) error {
	ports := g.ServedPorts()
	if len(ports) == 0 {
		return r.removeProxy(ctx, nameOf(g.Object.Namespace, g.Object.Name))
	}
	if _, ok := r.namespaceLabels(Namespace); !ok {
		_, err := client.Create(ctx, r.term.Client, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making namespace %s: %w", Namespace, err)
		}
	}
	var errs []error
	for _, o := range proxyObjects(g, ports, r.options.Image, gateway.Certificates(w, g)) {
		var err error
		switch o := o.(type) {
		case *corev1.ServiceAccount:
			err = ensureObject(ctx, r, r.inf.accounts, o, func(next, _ *corev1.ServiceAccount) {},
				func(*corev1.ServiceAccount) bool { return true })
		case *corev1.Service:
			err = ensureObject(ctx, r, r.inf.services, o, func(next, want *corev1.Service) {
				next.Spec.Type, next.Spec.Selector, next.Spec.Ports, next.Spec.LoadBalancerIP = want.Spec.Type,
					want.Spec.Selector, want.Spec.Ports, want.Spec.LoadBalancerIP
			}, func(have *corev1.Service) bool { return equality.Semantic.DeepDerivative(o.Spec, have.Spec) })
		case *policyv1.PodDisruptionBudget:
			err = ensureObject(ctx, r, r.inf.budgets, o, func(next, want *policyv1.PodDisruptionBudget) {
				next.Spec = want.Spec
			},
				func(have *policyv1.PodDisruptionBudget) bool {
					return equality.Semantic.DeepDerivative(o.Spec, have.Spec)
				})
		case *corev1.Secret:
			err = ensureObject(ctx, r, r.inf.secrets, o, func(next, want *corev1.Secret) { next.Data = want.Data },
				func(have *corev1.Secret) bool { return equality.Semantic.DeepEqual(o.Data, have.Data) })
		case *appsv1.Deployment:
			err = ensureObject(ctx, r, r.inf.deployments, o, func(next, want *appsv1.Deployment) {
				count := next.Spec.Replicas // keep the current number of replicas: users or autoscalers choose it
				next.Spec = want.Spec
				next.Spec.Replicas = count
			}, func(have *appsv1.Deployment) bool {
				return equality.Semantic.DeepDerivative(o.Spec.Template.Spec, have.Spec.Template.Spec)
			})
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// ensureObject creates the object wanted if it does not exist. It updates the existing object if
// isCurrent returns false for it, or the digests in annotation madeOf of the two objects differ.
// copyFields copies the fields of wanted to the object to write. ensureObject returns an error if
// the existing object does not belong to a proxy.
func ensureObject[T api.Object](
	ctx context.Context, r *reconciler, inf cache.SharedIndexInformer, wanted T, copyFields func(next, want T),
	isCurrent func(existing T) bool,
) error {
	existing, ok := engine.Cached[T](inf, wanted.GetNamespace(), wanted.GetName())
	if !ok {
		_, err := client.Create(ctx, r.term.Client, wanted)
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return fmt.Errorf("making %T %s: %w", wanted, engine.KeyOf(wanted), err)
		}
		return nil
	}
	if existing.GetLabels()[ofLabel] != wanted.GetName() {
		return fmt.Errorf("%T %s was not created for Gateways: delete or rename it", wanted, engine.KeyOf(wanted))
	}
	if existing.GetAnnotations()[madeOf] == wanted.GetAnnotations()[madeOf] && isCurrent(existing) {
		return nil
	}
	next := existing.DeepCopyObject().(T)
	copyFields(next, wanted)
	next.SetLabels(wanted.GetLabels())
	notes := wanted.GetAnnotations()
	for k, v := range existing.GetAnnotations() {
		// Keep annotations of other controllers; remove annotations that the Gateway no longer
		// requests.
		if _, ours := notes[k]; !ours &&
			(strings.Contains(k, "kubernetes.io/") || strings.HasPrefix(k, "keelson.dev/")) {
			notes[k] = v
		}
	}
	next.SetAnnotations(notes)
	if _, err := client.Update(ctx, r.term.Client, next); err != nil && !apierrors.IsConflict(err) &&
		!apierrors.IsNotFound(err) {
		return fmt.Errorf("updating %T %s: %w", wanted, engine.KeyOf(wanted), err)
	}
	return nil
}

// removeProxy deletes the objects of the proxy with the given name.
func (r *reconciler) removeProxy(ctx context.Context, name string) error {
	return errors.Join(
		deleteIfOwned[*appsv1.Deployment](ctx, r, r.inf.deployments, name),
		deleteIfOwned[*corev1.Service](ctx, r, r.inf.services, name),
		deleteIfOwned[*policyv1.PodDisruptionBudget](ctx, r, r.inf.budgets, name),
		deleteIfOwned[*corev1.Secret](ctx, r, r.inf.secrets, name),
		deleteIfOwned[*corev1.ServiceAccount](ctx, r, r.inf.accounts, name))
}

func deleteIfOwned[T api.Object](ctx context.Context, r *reconciler, inf cache.SharedIndexInformer, name string) error {
	o, ok := engine.Cached[T](inf, Namespace, name)
	if !ok || o.GetLabels()[ofLabel] != name || o.GetDeletionTimestamp() != nil {
		return nil
	}
	uid := o.GetUID()
	if err := client.Delete[T](ctx, r.term.Client, Namespace, name,
		metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &uid}}); err != nil &&
		!apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
		return fmt.Errorf("removing %T %s/%s: %w", o, Namespace, name, err)
	}
	return nil
}

// removeOrphanedProxies deletes the proxies of Gateways that no longer exist. It reads each Gateway
// from the API first, because a kind has no cached objects before its informer has started.
func (r *reconciler) removeOrphanedProxies(
	ctx context.Context, j *gateway.Evaluation, kinds map[string]client.KindInformer,
) error {
	wanted := map[string]bool{}
	for _, g := range j.Gateways {
		wanted[nameOf(g.Object.Namespace, g.Object.Name)] = true
	}
	gone := map[string]string{}
	collectOrphans(r.inf.deployments, wanted, gone)
	collectOrphans(r.inf.services, wanted, gone)
	collectOrphans(r.inf.secrets, wanted, gone)
	collectOrphans(r.inf.budgets, wanted, gone)
	collectOrphans(r.inf.accounts, wanted, gone)
	var errs []error
	for name, of := range gone {
		if k := r.gatewayKind(); k != nil {
			namespace, object, _ := strings.Cut(of, "/")
			_, err := r.term.Client.Do(ctx,
				&api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: object})
			if err == nil && kinds["Gateway"].Kind == nil {
				continue // the informer of the kind has not started
			}
			if err != nil && !apierrors.IsNotFound(err) {
				errs = append(errs, fmt.Errorf("reading Gateway %s: %w", of, err))
				continue
			}
		}
		errs = append(errs, r.removeProxy(ctx, name))
	}
	return errors.Join(errs...)
}

// gatewayKind returns the kind Gateway, or nil if the cluster does not serve it.
func (r *reconciler) gatewayKind() *api.Kind {
	for _, k := range r.term.Client.Kinds().Table().Stored() {
		if k.GVK.Group == gw.GroupName && k.GVK.Kind == "Gateway" {
			return k
		}
	}
	return nil
}

// collectOrphans adds to orphans the names of the proxies that are in the cache inf but not in
// wanted. Each value in orphans is the Gateway of the proxy, as namespace/name.
func collectOrphans(inf cache.SharedIndexInformer, wanted map[string]bool, orphans map[string]string) {
	list, _ := inf.GetIndexer().ByIndex(cache.NamespaceIndex, Namespace)
	for _, found := range list {
		o, ok := found.(api.Object)
		if name := ""; ok {
			if name = o.GetLabels()[ofLabel]; name != "" && name == o.GetName() && !wanted[name] {
				orphans[name] = o.GetAnnotations()[gatewayNote]
			}
		}
	}
}

// servingState returns the state of the proxy pods of Gateway g for its status. failed is the error
// of creating the proxy, or nil.
func (r *reconciler) servingState(g *gateway.Gateway, failed error) (s gateway.ProxyState) {
	name := nameOf(g.Object.Namespace, g.Object.Name)
	if failed != nil {
		s.Waiting = failed.Error()
	}
	service, ok := engine.Cached[*corev1.Service](r.inf.services, Namespace, name)
	if ok {
		for _, i := range service.Status.LoadBalancer.Ingress {
			a := gw.GatewayStatusAddress{Value: i.IP}
			kind := gw.IPAddressType
			if i.IP == "" {
				a.Value, kind = i.Hostname, gw.HostnameAddressType
			}
			a.Type = &kind
			s.Addresses = append(s.Addresses, a)
		}
	}
	if len(s.Addresses) == 0 {
		s.Unaddressed = fmt.Sprintf("Service %s/%s of type LoadBalancer has no address: check that a pool of "+
			"addresses is configured; for details: kubectl describe service -n %s %s",
			Namespace, name, Namespace, name)
	}
	d, ok := engine.Cached[*appsv1.Deployment](r.inf.deployments, Namespace, name)
	if s.Waiting == "" && (!ok || d.Status.AvailableReplicas == 0) {
		s.Waiting = fmt.Sprintf("no pod of Deployment %s/%s is ready; for the reason: kctl why deployment/%s -n %s",
			Namespace, name, name, Namespace)
	}
	return s
}
