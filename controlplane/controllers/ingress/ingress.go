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
	"keelson.dev/keelson/controlplane/controllers"
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

// calm is how long a problem of an Ingress must last before an event reports it. Objects that are
// applied together are created one after the other.
const calm = 3 * time.Second

type controller struct {
	image                                string
	classes, ingresses, services, slices cache.SharedIndexInformer
	secrets, deployments, budgets, nodes cache.SharedIndexInformer
	accounts                             cache.SharedIndexInformer

	mu       sync.Mutex
	reported map[controllers.Key]problemRecord
	left     map[string]map[string]bool // Secrets with key pairs for which the class has no space, by class
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
func New(d controllers.Deps, o Options) *controllers.Controller {
	if o.Image == "" {
		o.Image = DefaultImage
	}
	c := &controller{
		image:   o.Image,
		classes: client.Informer[*networkingv1.IngressClass](d.Informers), ingresses: client.Informer[*networkingv1.Ingress](d.Informers),
		services: client.Informer[*corev1.Service](d.Informers), slices: client.Informer[*discoveryv1.EndpointSlice](d.Informers),
		secrets: client.Informer[*corev1.Secret](d.Informers), deployments: client.Informer[*appsv1.Deployment](d.Informers),
		budgets: client.Informer[*policyv1.PodDisruptionBudget](d.Informers), nodes: client.Informer[*corev1.Node](d.Informers),
		accounts: client.Informer[*corev1.ServiceAccount](d.Informers),
	}
	controllers.Index(c.slices, sliceIndex, func(o api.Object) []string {
		if name := o.GetLabels()[discoveryv1.LabelServiceName]; name != "" {
			return []string{o.GetNamespace() + "/" + name}
		}
		return nil
	})
	read := []string{"get", "list", "watch"}
	write := []string{"create", "delete", "get", "list", "update", "watch"}
	return &controllers.Controller{
		Name: "ingress-controller", Workers: 1, Watches: c.allWatches(),
		Rules: []rbacv1.PolicyRule{
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingressclasses", "ingresses"}, Verbs: read},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingressclasses/finalizers"}, Verbs: []string{"update"}},
			{APIGroups: []string{"networking.k8s.io"}, Resources: []string{"ingresses/status"}, Verbs: []string{"update"}},
			{APIGroups: []string{""}, Resources: []string{"services"}, Verbs: write},
			{APIGroups: []string{""}, Resources: []string{"serviceaccounts"}, Verbs: []string{"create", "get", "list", "watch"}},
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

func (c *controller) allWatches() []controllers.Watch {
	class := func(name string) []controllers.Key { return []controllers.Key{{Kind: classKey, Name: name}} }
	ours := func(o api.Object) []controllers.Key {
		if o.GetNamespace() != Namespace {
			return nil
		}
		return class(o.GetName())
	}
	return []controllers.Watch{
		controllers.OnInformer(c.classes, func(ch controllers.Change[*networkingv1.IngressClass]) []controllers.Key {
			return append(class(ch.New.Name), c.ingressKeys(func(i *networkingv1.Ingress) bool { return ingress.ClassOf(i) == ch.New.Name })...)
		}),
		controllers.OnInformer(c.ingresses, func(ch controllers.Change[*networkingv1.Ingress]) []controllers.Key {
			keys := append(class(ingress.ClassOf(ch.New)), keyOf(ch.New)) // the class too, because its reconciliation passes key pairs to the proxies
			if ch.Type == controllers.Updated && ingress.ClassOf(ch.Old) != ingress.ClassOf(ch.New) {
				keys = append(keys, class(ingress.ClassOf(ch.Old))...)
			}
			return keys
		}),
		controllers.OnInformer(c.services, func(ch controllers.Change[*corev1.Service]) []controllers.Key {
			if ch.New.Namespace == Namespace {
				return append(ours(ch.New), c.ingressKeys(func(i *networkingv1.Ingress) bool { return ingress.ClassOf(i) == ch.New.Name })...)
			}
			return c.namespaceKeys(ch.New.Namespace)
		}),
		controllers.OnInformer(c.slices, func(ch controllers.Change[*discoveryv1.EndpointSlice]) []controllers.Key {
			return c.namespaceKeys(ch.New.Namespace)
		}),
		controllers.OnInformer(c.secrets, func(ch controllers.Change[*corev1.Secret]) []controllers.Key {
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
		controllers.OnInformer(c.deployments, func(ch controllers.Change[*appsv1.Deployment]) []controllers.Key { return ours(ch.New) }),
		controllers.OnInformer(c.budgets, func(ch controllers.Change[*policyv1.PodDisruptionBudget]) []controllers.Key { return ours(ch.New) }),
		controllers.OnInformer(c.nodes, func(ch controllers.Change[*corev1.Node]) []controllers.Key {
			if ch.Type == controllers.Updated {
				return nil
			}
			var keys []controllers.Key
			for _, cl := range controllers.CachedAll[*networkingv1.IngressClass](c.classes) {
				keys = append(keys, class(cl.Name)...)
			}
			return keys
		}),
	}
}

func keyOf(i *networkingv1.Ingress) controllers.Key {
	return controllers.Key{Kind: ingressKey, Namespace: i.Namespace, Name: i.Name}
}

func (c *controller) ingressKeys(of func(*networkingv1.Ingress) bool) []controllers.Key {
	var keys []controllers.Key
	for _, i := range controllers.CachedAll[*networkingv1.Ingress](c.ingresses) {
		if of(i) {
			keys = append(keys, keyOf(i))
		}
	}
	return keys
}

// namespaceKeys returns the keys of all Ingresses of a namespace.
func (c *controller) namespaceKeys(namespace string) []controllers.Key {
	list, err := c.ingresses.GetIndexer().ByIndex(cache.NamespaceIndex, namespace)
	if err != nil {
		return c.ingressKeys(func(i *networkingv1.Ingress) bool { return i.Namespace == namespace })
	}
	keys := make([]controllers.Key, 0, len(list))
	for _, o := range list {
		if i, ok := o.(*networkingv1.Ingress); ok {
			keys = append(keys, keyOf(i))
		}
	}
	return keys
}

// securedBy returns the Ingresses with a TLS entry that names Secret s.
func (c *controller) securedBy(s *corev1.Secret) (out []*networkingv1.Ingress) {
	for _, i := range controllers.CachedAll[*networkingv1.Ingress](c.ingresses) {
		if i.Namespace == s.Namespace && slices.ContainsFunc(i.Spec.TLS, func(t networkingv1.IngressTLS) bool { return t.SecretName == s.Name }) {
			out = append(out, i)
		}
	}
	return out
}

func (c *controller) leadIngress(t *controllers.Term) controllers.Reconcile {
	c.mu.Lock()
	c.reported, c.left = map[controllers.Key]problemRecord{}, map[string]map[string]bool{}
	c.mu.Unlock()
	l := &leading{
		controller: c, t: t,
		madeDeployments: controllers.ViewOf[*appsv1.Deployment](t, c.deployments),
		madeServices:    controllers.ViewOf[*corev1.Service](t, c.services),
		madeBudgets:     controllers.ViewOf[*policyv1.PodDisruptionBudget](t, c.budgets),
		madeSecrets:     controllers.ViewOf[*corev1.Secret](t, c.secrets),
		seen:            controllers.ViewOf[*networkingv1.Ingress](t, c.ingresses),
	}
	return func(ctx context.Context, key controllers.Key) (time.Duration, error) {
		if key.Kind == classKey {
			return 0, l.reconcileClass(ctx, key.Name)
		}
		return l.reconcileIngress(ctx, key)
	}
}

// leading reconciles Ingresses and their classes during one term of leadership. Every term has a
// new leading.
type leading struct {
	*controller
	t               *controllers.Term
	madeDeployments *controllers.View[*appsv1.Deployment]
	madeServices    *controllers.View[*corev1.Service]
	madeBudgets     *controllers.View[*policyv1.PodDisruptionBudget]
	madeSecrets     *controllers.View[*corev1.Secret]
	seen            *controllers.View[*networkingv1.Ingress]
}

// reconcileClass creates and updates the objects of the proxies of an IngressClass. Garbage
// collection deletes these objects with the class.
func (l *leading) reconcileClass(ctx context.Context, name string) error {
	class, ok := controllers.Cached[*networkingv1.IngressClass](l.classes, "", name)
	if !ok || class.DeletionTimestamp != nil || class.Spec.Controller != ingress.Controller {
		l.mu.Lock()
		delete(l.left, name)
		l.mu.Unlock()
		return nil
	}
	if class.Spec.Parameters != nil {
		l.t.Events.Eventf(class, corev1.EventTypeWarning, "ParametersNotRead", "spec.parameters are not read by controller %s", ingress.Controller)
	}
	if err := l.ensureNamespace(ctx); err != nil {
		return err
	}
	if err := l.givePairs(ctx, class); err != nil {
		return err
	}
	want := PlanProxy(class, l.image, len(controllers.CachedAll[*corev1.Node](l.nodes)))
	if err := ensureObject(ctx, l.t, class, l.madeDeployments, want.Deployment, func(have, want *appsv1.Deployment) { have.Spec = want.Spec }); err != nil {
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
	return ensureObject(ctx, l.t, class, l.madeBudgets, want.Budget, func(have, want *policyv1.PodDisruptionBudget) { have.Spec = want.Spec })
}

// deleteIfOwned deletes the object of this name if an IngressClass owns it and no longer needs it.
func deleteIfOwned[T api.Object](ctx context.Context, t *controllers.Term, class *networkingv1.IngressClass, view *controllers.View[T], name string) error {
	o, ok := view.Get(Namespace, name)
	if !ok || !metav1.IsControlledBy(o, class) || view.IsDeleting(o) {
		return nil
	}
	if err := client.Delete[T](ctx, t.Client, Namespace, name, controllers.DeleteOnlyUID(o)); err != nil && !apierrors.IsNotFound(err) {
		return fmt.Errorf("deleting %T %s/%s: %w", o, Namespace, name, err)
	}
	view.MarkDeleting(o)
	return nil
}

// ensureNamespace creates the namespace and the ServiceAccount of the proxies if they do not exist.
func (l *leading) ensureNamespace(ctx context.Context) error {
	if _, ok := controllers.Cached[*corev1.ServiceAccount](l.accounts, Namespace, Account); ok {
		return nil
	}
	_, err := client.Create(ctx, l.t.Client, &corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: Namespace}})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating namespace %s: %w", Namespace, err)
	}
	_, err = client.Create(ctx, l.t.Client, &corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: Namespace, Name: Account}})
	if err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("creating ServiceAccount %s/%s: %w", Namespace, Account, err)
	}
	return nil
}

// ensureObject creates object want of an IngressClass if it does not exist. It updates the existing
// object only if want differs from the specification with which the object was last written; change
// copies the fields of want. If the object does not belong to the class, it records an event.
func ensureObject[T api.Object](ctx context.Context, t *controllers.Term, class *networkingv1.IngressClass, view *controllers.View[T], want T, change func(have, want T)) error {
	what := fmt.Sprintf("%T %s/%s", want, want.GetNamespace(), want.GetName())
	what = what[strings.LastIndexByte(what[:strings.IndexByte(what, ' ')], '.')+1:]
	have, ok := view.Get(want.GetNamespace(), want.GetName())
	if !ok {
		made, err := client.Create(ctx, t.Client, want)
		switch {
		case apierrors.IsAlreadyExists(err):
			return controllers.RaceError("creating %s: %w", what, err)
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
		t.Events.Eventf(class, corev1.EventTypeWarning, "NameTaken", "%s is there and does not belong to this class: delete it, or name the class otherwise", what)
		return nil
	}
	made := want.GetAnnotations()[madeAnnotation]
	if have.GetAnnotations()[madeAnnotation] == made {
		return nil
	}
	next := have.DeepCopyObject().(T)
	change(next, want)
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
// event about problems of the Ingress that have lasted for the time calm.
func (l *leading) reconcileIngress(ctx context.Context, key controllers.Key) (again time.Duration, err error) {
	i, ok := l.seen.Get(key.Namespace, key.Name)
	if !ok || i.DeletionTimestamp != nil {
		l.forgetIngress(key)
		return 0, nil
	}
	name := ingress.ClassOf(i)
	class, ok := controllers.Cached[*networkingv1.IngressClass](l.classes, "", name)
	if !ok || class.Spec.Controller != ingress.Controller {
		l.forgetIngress(key)
		return 0, nil
	}
	if service, ok := l.madeServices.Get(Namespace, name); ok {
		if now := Addresses(service); !reflect.DeepEqual(now, i.Status.LoadBalancer.Ingress) && len(now)+len(i.Status.LoadBalancer.Ingress) > 0 {
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

func (l *leading) recordProblems(i *networkingv1.Ingress, key controllers.Key) (again time.Duration) {
	problems := append(ingress.Problems(i, l.controller), l.unplacedKeyPairs(i)...)
	if len(problems) == 0 {
		l.forgetIngress(key)
		return 0
	}
	text := strings.Join(problems, " ")
	l.mu.Lock()
	defer l.mu.Unlock()
	now, was := l.t.Now(), l.reported[key]
	if was.problems != text {
		was = problemRecord{problems: text, since: now}
	}
	if wait := was.since.Add(calm).Sub(now); !was.done && wait > 0 {
		l.reported[key] = was
		return wait
	}
	if !was.done {
		l.t.Events.Event(i, corev1.EventTypeWarning, "NotServed", text)
		was.done = true
	}
	l.reported[key] = was
	return 0
}

func (c *controller) forgetIngress(key controllers.Key) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.reported, key)
}

// Service returns a cached Service, or nil. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Service(namespace, name string) *corev1.Service {
	s, _ := controllers.Cached[*corev1.Service](c.services, namespace, name)
	return s
}

// Slices returns the cached EndpointSlices of a Service. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Slices(namespace, service string) []*discoveryv1.EndpointSlice {
	return controllers.CachedBy[*discoveryv1.EndpointSlice](c.slices, sliceIndex, namespace+"/"+service)
}

// Secret returns a cached Secret, or nil. It implements ingress.World of package
// ingressproxy/ingress.
func (c *controller) Secret(namespace, name string) *corev1.Secret {
	s, _ := controllers.Cached[*corev1.Secret](c.secrets, namespace, name)
	return s
}
