// Package ingress is the controller of Ingresses with a class of controller keelson.dev/ingress. It
// runs proxy pods for each IngressClass, writes the proxies' addresses to the status of Ingresses,
// and records problems of Ingresses as events. Package ingressproxy/ingress interprets Ingresses;
// the proxies use it too.
package ingress

import (
	"context"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/ingressproxy/ingress"
	"keelson.dev/keelson/ingressproxy/pairs"
)

// DefaultImage is the proxy image of a development build. A release contains it in
// bin/images/entry.tar.
const DefaultImage = "keelson.dev/entry:dev"

// Options configures New.
type Options struct {
	Image string // image of the proxies; "" means DefaultImage
}

// Kinds of keys in the controller's queue.
const (
	classKey   = "IngressClass"
	ingressKey = "Ingress"
)

// problemDelay is how long a problem of an Ingress must last before an event reports it. Objects
// that are applied together are created one after the other.
const problemDelay = 3 * time.Second

type controller struct {
	image                                string
	classes, ingresses, services, slices cache.SharedIndexInformer
	secrets, deployments, budgets, nodes cache.SharedIndexInformer
	accounts                             cache.SharedIndexInformer

	mu       sync.Mutex
	reported map[engine.Key]problemRecord
	left     map[string]map[string]bool // by IngressClass: Secrets with key pairs that its proxies' Secrets cannot hold
	keys     pairs.Cache
}

// problemRecord holds the last known problems of an Ingress, since when they exist, and whether an
// event has reported them.
type problemRecord struct {
	problems string
	since    time.Time
	done     bool
}

// New returns the controller of Ingresses and IngressClasses.
func New(d engine.Deps, o Options) *engine.Descriptor {
	if o.Image == "" {
		o.Image = DefaultImage
	}
	c := &controller{
		image:       o.Image,
		classes:     client.Informer[*networkingv1.IngressClass](d.Informers),
		ingresses:   client.Informer[*networkingv1.Ingress](d.Informers),
		services:    client.Informer[*corev1.Service](d.Informers),
		slices:      client.Informer[*discoveryv1.EndpointSlice](d.Informers),
		secrets:     client.Informer[*corev1.Secret](d.Informers),
		deployments: client.Informer[*appsv1.Deployment](d.Informers),
		budgets:     client.Informer[*policyv1.PodDisruptionBudget](d.Informers),
		nodes:       client.Informer[*corev1.Node](d.Informers),
		accounts:    client.Informer[*corev1.ServiceAccount](d.Informers),
	}
	engine.Index(c.slices, sliceIndex, func(o api.Object) []string {
		if name := o.GetLabels()[discoveryv1.LabelServiceName]; name != "" {
			return []string{o.GetNamespace() + "/" + name}
		}
		return nil
	})
	read := []string{"get", "list", "watch"}
	write := []string{"create", "delete", "get", "list", "update", "watch"}
	return &engine.Descriptor{
		Name: "ingress-controller", Workers: 1, Watches: c.allWatches(),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingressclasses", "ingresses"}, Verbs: read},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingressclasses/finalizers"},
				Verbs: []string{"update"}},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingresses/status"},
				Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: write},
			{APIGroups: []string{""}, Resources: []string{"serviceaccounts"},
				Verbs: []string{"create", "get", "list", "watch"}},
			{APIGroups: []string{""}, Resources: []string{"nodes"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"secrets"}, Verbs: write},
			{APIGroups: []string{""}, Resources: []string{"namespaces"}, Verbs: []string{"create", "get"}},
			{APIGroups: []string{"apps"}, Resources: []string{"deployments"}, Verbs: write},
			{APIGroups: []string{"policy"}, Resources: []string{"poddisruptionbudgets"}, Verbs: write},
			{APIGroups: []string{"discovery.k8s.io"}, Resources: []string{"endpointslices"}, Verbs: read},
			{APIGroups: []string{""}, Resources: []string{"events"}, Verbs: []string{"create", "patch", "update"}},
		},
		Lead: c.leadIngress,
	}
}

// sliceIndex indexes EndpointSlices by their Service, as namespace/name.
const sliceIndex = "ingress/slices-by-service"

func (c *controller) allWatches() []engine.Watch {
	class := func(name string) []engine.Key { return []engine.Key{{Kind: classKey, Name: name}} }
	ours := func(o api.Object) []engine.Key {
		if o.GetNamespace() != Namespace {
			return nil
		}
		return class(o.GetName())
	}
	return []engine.Watch{
		engine.OnInformer(c.classes, func(ch engine.Change[*networkingv1.IngressClass]) []engine.Key {
			return append(class(ch.New.Name), c.ingressKeys(func(i *networkingv1.Ingress) bool {
				return ingress.ClassOf(i) == ch.New.Name
			})...)
		}),
		engine.OnInformer(c.ingresses, func(ch engine.Change[*networkingv1.Ingress]) []engine.Key {
			// the class too, because its reconciliation passes key pairs to the proxies
			keys := append(class(ingress.ClassOf(ch.New)), keyOf(ch.New))
			if ch.Type == engine.Updated && ingress.ClassOf(ch.Old) != ingress.ClassOf(ch.New) {
				keys = append(keys, class(ingress.ClassOf(ch.Old))...)
			}
			return keys
		}),
		engine.OnInformer(c.services, func(ch engine.Change[*corev1.Service]) []engine.Key {
			if ch.New.Namespace == Namespace {
				return append(ours(ch.New), c.ingressKeys(func(i *networkingv1.Ingress) bool {
					return ingress.ClassOf(i) == ch.New.Name
				})...)
			}
			return c.namespaceKeys(ch.New.Namespace)
		}),
		engine.OnInformer(c.slices, func(ch engine.Change[*discoveryv1.EndpointSlice]) []engine.Key {
			return c.namespaceKeys(ch.New.Namespace)
		}),
		engine.OnInformer(c.secrets, func(ch engine.Change[*corev1.Secret]) []engine.Key {
			if of := ch.New.Labels[classLabel]; of != "" && ch.New.Namespace == Namespace {
				return class(of)
			}
			if ch.New.Type != corev1.SecretTypeTLS {
				return nil
			}
			keys := c.namespaceKeys(ch.New.Namespace)
			for _, i := range c.securedBy(ch.New) {
				keys = append(keys, class(ingress.ClassOf(i))...)
			}
			return keys
		}),
		engine.OnInformer(c.deployments, func(ch engine.Change[*appsv1.Deployment]) []engine.Key {
			return ours(ch.New)
		}),
		engine.OnInformer(c.budgets, func(ch engine.Change[*policyv1.PodDisruptionBudget]) []engine.Key {
			return ours(ch.New)
		}),
		engine.OnInformer(c.nodes, func(ch engine.Change[*corev1.Node]) []engine.Key {
			if ch.Type == engine.Updated {
				return nil
			}
			var keys []engine.Key
			for _, cl := range engine.CachedAll[*networkingv1.IngressClass](c.classes) {
				keys = append(keys, class(cl.Name)...)
			}
			return keys
		}),
	}
}

func keyOf(i *networkingv1.Ingress) engine.Key {
	return engine.Key{Kind: ingressKey, Namespace: i.Namespace, Name: i.Name}
}

func (c *controller) ingressKeys(of func(*networkingv1.Ingress) bool) []engine.Key {
	var keys []engine.Key
	for _, i := range engine.CachedAll[*networkingv1.Ingress](c.ingresses) {
		if of(i) {
			keys = append(keys, keyOf(i))
		}
	}
	return keys
}

// namespaceKeys returns the keys of all Ingresses of a namespace.
func (c *controller) namespaceKeys(namespace string) []engine.Key {
	list, err := c.ingresses.GetIndexer().ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return c.ingressKeys(func(i *networkingv1.Ingress) bool { return i.Namespace == namespace })
	}
	keys := make([]engine.Key, 0, len(list))
	for _, o := range list {
		if i, ok := o.(*networkingv1.Ingress); ok {
			keys = append(keys, keyOf(i))
		}
	}
	return keys
}

// securedBy returns the Ingresses with a TLS entry that names Secret s.
func (c *controller) securedBy(s *corev1.Secret) (out []*networkingv1.Ingress) {
	for _, i := range engine.CachedAll[*networkingv1.Ingress](c.ingresses) {
		if i.Namespace == s.Namespace && slices.ContainsFunc(i.Spec.TLS, func(t networkingv1.IngressTLS) bool {
			return t.SecretName == s.Name
		}) {
			out = append(out, i)
		}
	}
	return out
}

func (c *controller) leadIngress(t *engine.Term) engine.Reconcile {
	c.mu.Lock()
	c.reported, c.left = map[engine.Key]problemRecord{}, map[string]map[string]bool{}
	c.mu.Unlock()
	l := &reconciler{
		controller: c, t: t,
		madeDeployments: engine.ViewOf[*appsv1.Deployment](t, c.deployments),
		madeServices:    engine.ViewOf[*corev1.Service](t, c.services),
		madeBudgets:     engine.ViewOf[*policyv1.PodDisruptionBudget](t, c.budgets),
		madeSecrets:     engine.ViewOf[*corev1.Secret](t, c.secrets),
		seen:            engine.ViewOf[*networkingv1.Ingress](t, c.ingresses),
	}
	return func(ctx context.Context, key engine.Key) (time.Duration, error) {
		if key.Kind == classKey {
			return 0, l.reconcileClass(ctx, key.Name)
		}
		return l.reconcileIngress(ctx, key)
	}
}

// reconciler reconciles Ingresses and their classes during one term of leadership. Every term has a
// new reconciler.
type reconciler struct {
	controller      *controller
	t               *engine.Term
	madeDeployments *engine.View[*appsv1.Deployment]
	madeServices    *engine.View[*corev1.Service]
	madeBudgets     *engine.View[*policyv1.PodDisruptionBudget]
	madeSecrets     *engine.View[*corev1.Secret]
	seen            *engine.View[*networkingv1.Ingress]
}

// reconcileClass creates and updates the objects of the proxies of an IngressClass. Garbage
// collection deletes these objects with the class.
func (l *reconciler) reconcileClass(ctx context.Context, name string) error {
	class, ok := engine.Cached[*networkingv1.IngressClass](l.controller.classes, "", name)
	if !ok || class.DeletionTimestamp != nil || class.Spec.Controller != ingress.Controller {
		l.controller.mu.Lock()
		delete(l.controller.left, name)
		l.controller.mu.Unlock()
		return nil
	}
	if class.Spec.Parameters != nil {
		l.t.Events.Eventf(class, corev1.EventTypeWarning, "ParametersNotRead",
			"spec.parameters are not read by controller %s", ingress.Controller)
	}
	if err := l.ensureNamespace(ctx); err != nil {
		return err
	}
	if err := l.writePairs(ctx, class); err != nil {
		return err
	}
	want := PlanProxy(class, l.controller.image, len(engine.CachedAll[*corev1.Node](l.controller.nodes)))
	if err := ensureObject(ctx, l.t, class, l.madeDeployments, want.Deployment, func(have, want *appsv1.Deployment) {
		have.Spec = want.Spec
	}); err != nil {
		return err
	}
	err := ensureObject(ctx, l.t, class, l.madeServices, want.Service, func(have, want *corev1.Service) {
		have.Spec.Type, have.Spec.Selector = want.Spec.Type, want.Spec.Selector
		for i := range want.Spec.Ports { // keep the node ports that were assigned
			for _, p := range have.Spec.Ports {
				if p.Name == want.Spec.Ports[i].Name {
					want.Spec.Ports[i].NodePort = p.NodePort
				}
			}
		}
		have.Spec.Ports = want.Spec.Ports
	})
	if err != nil {
		return err
	}
	if want.Budget == nil {
		return deleteIfOwned(ctx, l.t, class, l.madeBudgets, name)
	}
	return ensureObject(ctx, l.t, class, l.madeBudgets, want.Budget, func(have, want *policyv1.PodDisruptionBudget) {
		have.Spec = want.Spec
	})
}

// deleteIfOwned deletes the object with the given name if an IngressClass owns it and no longer
// needs it.
func deleteIfOwned[T api.Object](
	ctx context.Context, t *engine.Term, class *networkingv1.IngressClass, view *engine.View[T], name string,
) error {
	o, ok := view.Get(Namespace, name)
	if !ok || !metav1.IsControlledBy(o, class) || view.IsDeleting(o) {
		return nil
	}
	if err := client.Delete[T](ctx, t.Client, Namespace, name, engine.DeleteOnlyUID(o)); err != nil &&
		!apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting %T %s/%s: %w", o, Namespace, name, err)
	}
	view.MarkDeleting(o)
	return nil
}

// ensureNamespace creates the namespace and the ServiceAccount of the proxies if they do not exist.
func (l *reconciler) ensureNamespace(ctx context.Context) error {
	if _, ok := engine.Cached[*corev1.ServiceAccount](l.controller.accounts, Namespace, Account); ok {
		return nil
	}
	_, err := client.Create(ctx, l.t.Client, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating namespace %s: %w", Namespace, err)
	}
	_, err = client.Create(ctx, l.t.Client,
		&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: Account}})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating ServiceAccount %s/%s: %w", Namespace, Account, err)
	}
	return nil
}

// ensureObject creates the object wanted of an IngressClass if it does not exist. It updates the
// existing object only if wanted differs from the specification with which the object was last
// written. copyFields then copies the fields of wanted to the object. If the existing object does
// not belong to the class, ensureObject records an event.
func ensureObject[T api.Object](
	ctx context.Context, t *engine.Term, class *networkingv1.IngressClass, view *engine.View[T], wanted T,
	copyFields func(have, want T),
) error {
	what := fmt.Sprintf("%T %s/%s", wanted, wanted.GetNamespace(), wanted.GetName())
	what = what[strings.LastIndexByte(what[:strings.IndexByte(what, ' ')], '.')+1:]
	have, ok := view.Get(wanted.GetNamespace(), wanted.GetName())
	if !ok {
		made, err := client.Create(ctx, t.Client, wanted)
		switch {
		case apierrors.IsAlreadyExists(err):
			return engine.RaceError("creating %s: %w", what, err)
		case err != nil:
			t.Events.Eventf(class, corev1.EventTypeWarning, "FailedCreate", "%s: %v", what, err)
			return fmt.Errorf("creating %s: %w", what, err)
		}
		view.RecordWrite(made)
		return nil
	}
	if view.IsDeleting(have) {
		return nil // the deletion of the object queues the class again
	}
	if !metav1.IsControlledBy(have, class) {
		t.Events.Eventf(class, corev1.EventTypeWarning, "NameTaken",
			"%s exists and does not belong to this class: delete it, or rename the class", what)
		return nil
	}
	made := wanted.GetAnnotations()[madeAnnotation]
	if have.GetAnnotations()[madeAnnotation] == made {
		return nil
	}
	next := have.DeepCopyObject().(T)
	copyFields(next, wanted)
	annotations := next.GetAnnotations()
	if annotations == nil {
		annotations = map[string]string{}
	}
	annotations[madeAnnotation] = made
	next.SetAnnotations(annotations)
	stored, err := client.Update(ctx, t.Client, next)
	if err != nil {
		return fmt.Errorf("updating %s: %w", what, err)
	}
	view.RecordWrite(stored)
	return nil
}

// reconcileIngress writes the addresses of the proxies to the status of an Ingress. It records an
// event about problems of the Ingress that have lasted for problemDelay.
func (l *reconciler) reconcileIngress(ctx context.Context, key engine.Key) (again time.Duration, err error) {
	i, ok := l.seen.Get(key.Namespace, key.Name)
	if !ok || i.DeletionTimestamp != nil {
		l.controller.forgetIngress(key)
		return 0, nil
	}
	name := ingress.ClassOf(i)
	class, ok := engine.Cached[*networkingv1.IngressClass](l.controller.classes, "", name)
	if !ok || class.Spec.Controller != ingress.Controller {
		l.controller.forgetIngress(key)
		return 0, nil
	}
	if service, ok := l.madeServices.Get(Namespace, name); ok {
		if now := Addresses(service); !reflect.DeepEqual(now, i.Status.LoadBalancer.Ingress) &&
			len(now)+len(i.Status.LoadBalancer.Ingress) > 0 {
			next := i.DeepCopy()
			next.Status.LoadBalancer.Ingress = now
			stored, err := client.UpdateStatus(ctx, l.t.Client, next)
			if err != nil && !apierrors.IsNotFound(err) {
				return 0, fmt.Errorf("writing the status of Ingress %s: %w", key, err)
			}
			if err == nil {
				l.seen.RecordWrite(stored)
			}
		}
	}
	return l.recordProblems(i, key), nil
}

func (l *reconciler) recordProblems(i *networkingv1.Ingress, key engine.Key) (again time.Duration) {
	problems := append(ingress.Problems(i, l.controller), l.unplacedKeyPairs(i)...)
	if len(problems) == 0 {
		l.controller.forgetIngress(key)
		return 0
	}
	text := strings.Join(problems, " ")
	l.controller.mu.Lock()
	defer l.controller.mu.Unlock()
	now, was := l.t.Now(), l.controller.reported[key]
	if was.problems != text {
		was = problemRecord{problems: text, since: now}
	}
	if wait := was.since.Add(problemDelay).Sub(now); !was.done && wait > 0 {
		l.controller.reported[key] = was
		return wait
	}
	if !was.done {
		l.t.Events.Event(i, corev1.EventTypeWarning, "NotServed", text)
		was.done = true
	}
	l.controller.reported[key] = was
	return 0
}

func (c *controller) forgetIngress(key engine.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.reported, key)
}

// Service returns a cached Service, or nil. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Service(namespace, name string) *corev1.Service {
	s, _ := engine.Cached[*corev1.Service](c.services, namespace, name)
	return s
}

// Slices returns the cached EndpointSlices of a Service. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Slices(namespace, service string) []*discoveryv1.EndpointSlice {
	return engine.CachedBy[*discoveryv1.EndpointSlice](c.slices, sliceIndex, namespace+"/"+service)
}

// Secret returns a cached Secret, or nil. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Secret(namespace, name string) *corev1.Secret {
	s, _ := engine.Cached[*corev1.Secret](c.secrets, namespace, name)
	return s
}
