// Package live builds the route.Table that a proxy serves from the objects of the cluster. It
// watches the API with the rights of the ServiceAccount of the proxy's pod. While the API cannot be
// reached, the last table is served. The control plane provides TLS key pairs as files, so that the
// proxy needs no right to read Secrets.
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
	"keelson.dev/keelson/internal/wakeup"
)

// Config configures Run.
type Config struct {
	API    *rest.Config
	Source Source
	// Certificates is the folder with the TLS key pairs, in files with the names of
	// pairs.FileNames.
	Certificates string
	Swap         func(*route.Table) []error
	Log          *slog.Logger
}

// Source defines which kinds are watched and how a table is built from their objects. Functions
// Ingresses and Gateway return a Source.
type Source struct {
	kinds []kind
	// table returns a table for the current objects, or nil if a required kind is missing.
	table func(*Objects) *route.Table
}

// kind is a kind of objects to watch. A kind of the Gateway API may be missing, or may be served
// only in an older version.
type kind struct {
	name     string
	versions []schema.GroupVersion
	object   runtime.Object
}

// services and endpointSlices are kinds that every Source watches.
var (
	services       = kind{"services", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Service{}}
	endpointSlices = kind{"endpointslices", []schema.GroupVersion{discoveryv1.SchemeGroupVersion},
		&discoveryv1.EndpointSlice{}}
)

const (
	// batchDelay is how long changes of objects are collected before a table is built.
	batchDelay = 50 * time.Millisecond
	// discoveryInterval is the interval at which the API is checked for kinds that were missing.
	discoveryInterval = 10 * time.Second
	// serviceIndex indexes EndpointSlices by their Service.
	serviceIndex = "service"
)

// Objects gives access to the cached objects of the cluster and the key pair files. It implements
// ingress.World.
type Objects struct {
	informers map[string]cache.SharedIndexInformer // by resource; only kinds that the API serves
	files     *certificateFiles
}

// watcher is the state of Run: the informers, and a channel that reports changes of their objects.
type watcher struct {
	Config
	Objects
	scheme  *runtime.Scheme
	changed wakeup.Signal
	running sync.WaitGroup
}

// Run watches the kinds of c.Source and keeps the proxy's table current, until ctx is canceled. It
// calls c.Swap with a new table once all objects are cached, and after each change of an object or
// key pair.
func Run(ctx context.Context, c Config) error {
	f := &watcher{Config: c, scheme: runtime.NewScheme(), changed: wakeup.New(),
		Objects: Objects{informers: map[string]cache.SharedIndexInformer{},
			files: &certificateFiles{folder: c.Certificates}}}
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme,
		networkingv1.AddToScheme, gw.Install} {
		if err := add(f.scheme); err != nil {
			return fmt.Errorf("registering types: %w", err)
		}
	}
	f.scheme.AddKnownTypes(gatewayV1Beta1, &gw.ReferenceGrant{}, &gw.ReferenceGrantList{})
	metav1.AddToGroupVersion(f.scheme, gatewayV1Beta1)
	ctx, cancel := context.WithCancel(ctx)
	defer f.running.Wait()
	defer cancel()
	seen := filewatch.TakeSnapshot(f.Certificates, filepath.Join(f.Certificates, "..data"))
	f.running.Go(func() {
		_ = filewatch.Follow(ctx, filewatch.PollInterval, seen, func() { f.files.clearCache(); f.signalChange() })
	})
	looked := time.NewTicker(discoveryInterval)
	defer looked.Stop()
	for {
		whole, err := f.startMissingInformers(ctx)
		if err != nil && ctx.Err() == nil {
			f.Log.Warn("reading the kinds of the API failed", "err", err)
		}
		if err == nil && f.waitForSync(ctx) {
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
		select { // collect the changes of objects that are applied together
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(batchDelay):
		}
		select {
		case <-f.changed:
		default:
		}
	}
}

func (f *watcher) signalChange() {
	f.changed.Send()
}

// startMissingInformers starts an informer for each kind that the API serves and that has no
// informer. complete reports whether the API serves every kind.
func (f *watcher) startMissingInformers(ctx context.Context) (complete bool, err error) {
	complete = true
	served := map[schema.GroupVersion]map[string]bool{}
	for _, k := range f.Source.kinds {
		if f.informers[k.name] != nil {
			continue
		}
		found := false
		for _, gv := range k.versions {
			if served[gv] == nil && gv.Group == gw.GroupName {
				if served[gv], err = f.servedResources(ctx, gv); err != nil {
					return false, err
				}
			}
			if gv.Group == gw.GroupName && !served[gv][k.name] {
				continue
			}
			if err := f.startInformer(ctx, k.name, gv, k.object); err != nil {
				return false, err
			}
			found = true
			break
		}
		complete = complete && found
	}
	return complete, nil
}

// clientForVersion returns a REST client for a group and version.
func (f *watcher) clientForVersion(gv schema.GroupVersion) (*rest.RESTClient, error) {
	c := rest.CopyConfig(f.API)
	c.GroupVersion, c.APIPath, c.NegotiatedSerializer = &gv, "/apis",
		serializer.NewCodecFactory(f.scheme).WithoutConversion()
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

// servedResources returns the resources of a group and version. It is empty if the version is not
// served.
func (f *watcher) servedResources(ctx context.Context, gv schema.GroupVersion) (map[string]bool, error) {
	client, err := f.clientForVersion(gv)
	if err != nil {
		return nil, err
	}
	out := map[string]bool{}
	list := &metav1.APIResourceList{}
	result := client.Get().AbsPath("/apis", gv.Group, gv.Version).Timeout(discoveryInterval).Do(ctx)
	var code int
	if result.StatusCode(&code); code == 404 {
		return out, nil
	}
	if err := result.Into(list); err != nil {
		return nil, fmt.Errorf("discovering the resources of %s: %w", gv, err)
	}
	for _, r := range list.APIResources {
		out[r.Name] = true
	}
	return out, nil
}

func (f *watcher) startInformer(ctx context.Context, name string, gv schema.GroupVersion, of runtime.Object) error {
	client, err := f.clientForVersion(gv)
	if err != nil {
		return err
	}
	source := cache.NewFilteredListWatchFromClient(client, name, metav1.NamespaceAll, func(*metav1.ListOptions) {})
	i := cache.NewSharedIndexInformer(source, of, 0, cache.Indexers{serviceIndex: func(o any) ([]string, error) {
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
	tell := func(any) { f.signalChange() }
	if _, err := i.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: tell, UpdateFunc: func(_, o any) {
		tell(o)
	}, DeleteFunc: tell}); err != nil {
		return fmt.Errorf("following %s: %w", name, err)
	}
	f.informers[name] = i
	f.running.Go(func() { i.RunWithContext(ctx) })
	return nil
}

// waitForSync waits until all informers have listed their objects. It returns false if ctx is
// canceled.
func (f *watcher) waitForSync(ctx context.Context) bool {
	all := make([]cache.InformerSynced, 0, len(f.informers))
	for _, i := range f.informers {
		all = append(all, i.HasSynced)
	}
	return cache.WaitForCacheSync(ctx.Done(), all...)
}
