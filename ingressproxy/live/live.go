// Package live keeps a proxy's table what the objects of the cluster say. It watches the API with the rights of its pod's
// ServiceAccount; while the API cannot be reached, the last table is served. Key pairs are files that the control plane
// has put there: no right to any Secret is needed.
package live

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
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
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/ingressproxy/route"
	"keelson.dev/keelson/internal/filewatch"
)

// Config of Run.
type Config struct {
	API    *rest.Config
	Source Source
	// Certificates is the folder of the files that pairs.Files names.
	Certificates string
	Swap         func(*route.Table) []error
	Log          *slog.Logger
}

// Source is what tables are made of, and how: Ingresses or Gateway.
type Source struct {
	kinds []kind
	// table makes one of all that is known; nil while too little is.
	table func(*Objects) *route.Table
}

// kind is what is watched of the API. Kinds of Gateway API may be missing, and may be served in an older version only.
type kind struct {
	name     string
	versions []schema.GroupVersion
	of       runtime.Object
}

// services and slices are what every table is made of.
var (
	services = kind{"services", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Service{}}
	slices   = kind{"endpointslices", []schema.GroupVersion{discoveryv1.SchemeGroupVersion}, &discoveryv1.EndpointSlice{}}
)

const (
	// settle is how long changes are gathered before they become one table.
	settle = 50 * time.Millisecond
	// look is how often it is looked whether the cluster has kinds by now that it did not have.
	look = 10 * time.Second
	// bySlice is the index of EndpointSlices by their Service.
	bySlice = "service"
)

// Objects are what is known of the cluster. They are an ingress.World.
type Objects struct {
	by    map[string]cache.SharedIndexInformer // of kinds that are served
	files *files
}

// follower has the informers.
type follower struct {
	Config
	Objects
	scheme  *runtime.Scheme
	changed chan struct{}
	running sync.WaitGroup
}

// Run gives Swap a table when all objects are known, and another after each change, until ctx ends.
func Run(ctx context.Context, c Config) error {
	f := &follower{Config: c, scheme: runtime.NewScheme(), changed: make(chan struct{}, 1),
		Objects: Objects{by: map[string]cache.SharedIndexInformer{}, files: &files{folder: c.Certificates}}}
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, networkingv1.AddToScheme, gw.Install} {
		if err := add(f.scheme); err != nil {
			return fmt.Errorf("registering types: %w", err)
		}
	}
	f.scheme.AddKnownTypes(beta, &gw.ReferenceGrant{}, &gw.ReferenceGrantList{})
	metav1.AddToGroupVersion(f.scheme, beta)
	ctx, cancel := context.WithCancel(ctx)
	defer f.running.Wait()
	defer cancel()
	seen := filewatch.TakeSnapshot(f.Certificates, filepath.Join(f.Certificates, "..data"))
	f.running.Go(func() {
		_ = filewatch.Follow(ctx, filewatch.PollInterval, seen, func() { f.files.forget(); f.tell() })
	})
	looked := time.NewTicker(look)
	defer looked.Stop()
	for {
		whole, err := f.watch(ctx)
		if err != nil && ctx.Err() == nil {
			f.Log.Warn("the kinds of the cluster are not known", "err", err)
		}
		if err == nil && f.synced(ctx) {
			if table := f.Source.table(&f.Objects); table != nil {
				for _, err := range f.Swap(table) {
					f.Log.Warn("a part of the table is not served", "err", err)
				}
			}
		}
		again := looked.C
		if whole {
			again = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-again:
		case <-f.changed:
		}
		select { // what is applied together comes one after the other
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(settle):
		}
		select {
		case <-f.changed:
		default:
		}
	}
}

func (f *follower) tell() {
	select {
	case f.changed <- struct{}{}:
	default:
	}
}

// watch begins to follow the kinds that are served; whole says that none is missing.
func (f *follower) watch(ctx context.Context) (whole bool, err error) {
	whole = true
	served := map[schema.GroupVersion]map[string]bool{}
	for _, k := range f.Source.kinds {
		if f.by[k.name] != nil {
			continue
		}
		found := false
		for _, gv := range k.versions {
			if served[gv] == nil && gv.Group == gw.GroupName {
				if served[gv], err = f.served(ctx, gv); err != nil {
					return false, err
				}
			}
			if gv.Group == gw.GroupName && !served[gv][k.name] {
				continue
			}
			if err := f.follow(ctx, k.name, gv, k.of); err != nil {
				return false, err
			}
			found = true
			break
		}
		whole = whole && found
	}
	return whole, nil
}

// client is one for a version of a group.
func (f *follower) client(gv schema.GroupVersion) (*rest.RESTClient, error) {
	c := rest.CopyConfig(f.API)
	c.GroupVersion, c.APIPath, c.NegotiatedSerializer = &gv, "/apis", serializer.NewCodecFactory(f.scheme).WithoutConversion()
	if gv.Group == "" {
		c.APIPath = "/api"
	}
	if gv.Group != gw.GroupName {
		c.ContentType = runtime.ContentTypeProtobuf
	}
	client, err := rest.RESTClientFor(c)
	if err != nil {
		return nil, fmt.Errorf("a client for %s: %w", gv, err)
	}
	return client, nil
}

// served are the resources of a version, none where it is not served.
func (f *follower) served(ctx context.Context, gv schema.GroupVersion) (map[string]bool, error) {
	client, err := f.client(gv)
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	list := &metav1.APIResourceList{}
	result := client.Get().AbsPath("/apis", gv.Group, gv.Version).Timeout(look).Do(ctx)
	var code int
	if result.StatusCode(&code); code == 404 {
		return out, nil
	}
	if err := result.Into(list); err != nil {
		return nil, fmt.Errorf("asking what %s has: %w", gv, err)
	}
	for _, r := range list.APIResources {
		out[r.Name] = true
	}
	return out, nil
}

func (f *follower) follow(ctx context.Context, name string, gv schema.GroupVersion, of runtime.Object) error {
	client, err := f.client(gv)
	if err != nil {
		return err
	}
	source := cache.NewFilteredListWatchFromClient(client, name, metav1.NamespaceAll, func(*metav1.ListOptions) {})
	i := cache.NewSharedIndexInformer(source, of, 0, cache.Indexers{bySlice: func(o any) ([]string, error) {
		s, ok := o.(*discoveryv1.EndpointSlice)
		if !ok || s.Labels[discoveryv1.LabelServiceName] == "" {
			return nil, nil
		}
		return []string{s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName]}, nil
	}})
	err = i.SetTransform(func(o any) (any, error) {
		if m, err := meta.Accessor(o); err == nil {
			m.SetManagedFields(nil)
		}
		return o, nil
	})
	if err != nil {
		return fmt.Errorf("following %s: %w", name, err)
	}
	tell := func(any) { f.tell() }
	if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, UpdateFunc: func(_, o any) { tell(o) }, DeleteFunc: tell}); err != nil {
		return fmt.Errorf("following %s: %w", name, err)
	}
	f.by[name] = i
	f.running.Go(func() { i.RunWithContext(ctx) })
	return nil
}

// synced waits until what is followed is known.
func (f *follower) synced(ctx context.Context) bool {
	all := make([]cache.InformerSynced, 0, len(f.by))
	for _, i := range f.by {
		all = append(all, i.HasSynced)
	}
	return cache.WaitForCacheSync(ctx.Done(), all...)
}
