// Package live keeps a proxy's table what the objects of the cluster say. It watches the API with the rights of its pod's
// ServiceAccount; while the API cannot be reached, the last table is served.
package live

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/entry/ingress"
	"keelson.dev/keelson/entry/route"
)

// Config of Run.
type Config struct {
	API   *rest.Config
	Class string // name of the IngressClass
	Swap  func(*route.Table) []error
	Log   *slog.Logger
}

// settle is how long changes are gathered before they become one table.
const settle = 50 * time.Millisecond

// bySlice is the index of EndpointSlices by their Service.
const bySlice = "service"

// Objects are informers of what a table is made of, as an ingress.World. Each tells changed of every change.
type Objects struct {
	services, slices, secrets, ingresses cache.SharedIndexInformer
	changed                              chan struct{}
}

// Run gives Swap a table when all objects are known, and another after each change, until ctx ends.
func Run(ctx context.Context, c Config) error {
	o, err := watch(c.API)
	if err != nil {
		return err
	}
	all := []cache.SharedIndexInformer{o.services, o.slices, o.secrets, o.ingresses}
	synced := make([]cache.InformerSynced, 0, len(all))
	done := make(chan struct{})
	defer func() {
		for range all {
			<-done
		}
	}()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, i := range all {
		synced = append(synced, i.HasSynced)
		go func() { i.RunWithContext(ctx); done <- struct{}{} }()
	}
	if !cache.WaitForCacheSync(ctx.Done(), synced...) {
		return ctx.Err()
	}
	var pairs ingress.Pairs
	for {
		table := ingress.Translate(c.Class, o.all(), o, &pairs)
		for _, err := range c.Swap(table) {
			c.Log.Warn("a part of the table is not served", "err", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-o.changed:
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settle):
		}
		select {
		case <-o.changed:
		default:
		}
	}
}

func watch(api *rest.Config) (*Objects, error) {
	o := &Objects{changed: make(chan struct{}, 1)}
	known := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme} {
		if err := add(known); err != nil {
			return nil, fmt.Errorf("registering types: %w", err)
		}
	}
	for _, k := range []struct {
		into     *cache.SharedIndexInformer
		group    schema.GroupVersion
		resource string
		selector string
		of       runtime.Object
	}{
		{&o.services, corev1.SchemeGroupVersion, "services", "", &corev1.Service{}},
		{&o.slices, discoveryv1.SchemeGroupVersion, "endpointslices", "", &discoveryv1.EndpointSlice{}},
		{&o.secrets, corev1.SchemeGroupVersion, "secrets", "type=" + string(corev1.SecretTypeTLS), &corev1.Secret{}},
		{&o.ingresses, networkingv1.SchemeGroupVersion, "ingresses", "", &networkingv1.Ingress{}},
	} {
		config := rest.CopyConfig(api)
		config.GroupVersion, config.APIPath, config.NegotiatedSerializer = &k.group, "/apis", serializer.NewCodecFactory(known).WithoutConversion()
		if k.group.Group == "" {
			config.APIPath = "/api"
		}
		config.ContentType = runtime.ContentTypeProtobuf
		client, err := rest.RESTClientFor(config)
		if err != nil {
			return nil, fmt.Errorf("a client for %s: %w", k.resource, err)
		}
		source := cache.NewFilteredListWatchFromClient(client, k.resource, metav1.NamespaceAll, func(l *metav1.ListOptions) { l.FieldSelector = k.selector })
		i := cache.NewSharedIndexInformer(source, k.of, 0, cache.Indexers{cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
		if err := o.follow(i); err != nil {
			return nil, fmt.Errorf("an informer of %s: %w", k.resource, err)
		}
		*k.into = i
	}
	return o, o.slices.AddIndexers(cache.Indexers{bySlice: func(obj any) ([]string, error) {
		s, ok := obj.(*discoveryv1.EndpointSlice)
		if !ok || s.Labels[discoveryv1.LabelServiceName] == "" {
			return nil, nil
		}
		return []string{s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]}, nil
	}})
}

func (o *Objects) follow(i cache.SharedIndexInformer) error {
	err := i.SetTransform(func(obj any) (any, error) {
		if m, err := meta.Accessor(obj); err == nil {
			m.SetManagedFields(nil)
		}
		return obj, nil
	})
	if err != nil {
		return err
	}
	tell := func(any) {
		select {
		case o.changed <- struct{}{}:
		default:
		}
	}
	_, err = i.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, UpdateFunc: func(_, now any) { tell(now) }, DeleteFunc: tell})
	return err
}

func (o *Objects) all() []*networkingv1.Ingress {
	var out []*networkingv1.Ingress
	for _, obj := range o.ingresses.GetStore().List() {
		if i, ok := obj.(*networkingv1.Ingress); ok {
			out = append(out, i)
		}
	}
	return out
}

// get finds an object, or the nil of its type.
func get[T any](i cache.SharedIndexInformer, namespace, name string) (out T) {
	obj, ok, _ := i.GetStore().GetByKey(namespace + "/" + name)
	if ok {
		out, _ = obj.(T)
	}
	return out
}

// Service implements ingress.World.
func (o *Objects) Service(namespace, name string) *corev1.Service {
	return get[*corev1.Service](o.services, namespace, name)
}

// Secret implements ingress.World.
func (o *Objects) Secret(namespace, name string) *corev1.Secret {
	return get[*corev1.Secret](o.secrets, namespace, name)
}

// Slices implements ingress.World.
func (o *Objects) Slices(namespace, service string) []*discoveryv1.EndpointSlice {
	list, _ := o.slices.GetIndexer().ByIndex(bySlice, namespace+"/"+service)
	out := make([]*discoveryv1.EndpointSlice, 0, len(list))
	for _, obj := range list {
		if s, ok := obj.(*discoveryv1.EndpointSlice); ok {
			out = append(out, s)
		}
	}
	return out
}
