// Package gateways keeps a proxy's table what one Gateway and its routes say. It watches the API with the rights of its
// pod's ServiceAccount; while the API cannot be reached, the last table is served. Certificates are files that the
// control plane has put there: no right to any Secret is needed.
package gateways

import (
	"context"
	"encoding/hex"
	"fmt"
	"hash/fnv"
	"log/slog"
	"path/filepath"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	gw "sigs.k8s.io/gateway-api/apis/v1"

	"keelson.dev/keelson/entry/gateway"
	"keelson.dev/keelson/entry/route"
	"keelson.dev/keelson/internal/filewatch"
)

// Config of Run.
type Config struct {
	API             *rest.Config
	Namespace, Name string // of the Gateway
	// Certificates is the folder of the files that gateway.Certificates names.
	Certificates string
	Reserved     []int32 // ports that are the proxy's own
	Swap         func(*route.Table) []error
	Log          *slog.Logger
}

const (
	// settle is how long changes are gathered before they become one table.
	settle = 50 * time.Millisecond
	// look is how often it is looked whether the cluster has kinds by now that it did not have.
	look = 10 * time.Second
	// mostFile bounds a certificate's file, in bytes: a Secret is not larger.
	mostFile = 1 << 20
	// bySlice is the index of EndpointSlices by their Service.
	bySlice = "service"
)

// resources are what is watched. Those of Gateway API may be missing, and may be served in an older version only.
var resources = []struct {
	name     string
	versions []schema.GroupVersion
	of       runtime.Object
}{
	{"services", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Service{}},
	{"namespaces", []schema.GroupVersion{corev1.SchemeGroupVersion}, &corev1.Namespace{}},
	{"endpointslices", []schema.GroupVersion{discoveryv1.SchemeGroupVersion}, &discoveryv1.EndpointSlice{}},
	{"gatewayclasses", []schema.GroupVersion{v1}, &gw.GatewayClass{}},
	{"gateways", []schema.GroupVersion{v1}, &gw.Gateway{}},
	{"httproutes", []schema.GroupVersion{v1}, &gw.HTTPRoute{}},
	{"grpcroutes", []schema.GroupVersion{v1}, &gw.GRPCRoute{}},
	{"referencegrants", []schema.GroupVersion{v1, beta}, &gw.ReferenceGrant{}},
}

// beta is where ReferenceGrants were before v1, with the same fields.
var (
	v1   = schema.GroupVersion{Group: gw.GroupName, Version: "v1"}
	beta = schema.GroupVersion{Group: gw.GroupName, Version: "v1beta1"}
)

// follower has the informers.
type follower struct {
	Config
	scheme  *runtime.Scheme
	changed chan struct{}
	keys    gateway.Keys
	running sync.WaitGroup
	by      map[string]cache.SharedIndexInformer // of kinds that are served
}

// Run gives Swap a table when all objects are known, and another after each change, until ctx ends.
func Run(ctx context.Context, c Config) error {
	f := &follower{Config: c, scheme: runtime.NewScheme(), changed: make(chan struct{}, 1), by: map[string]cache.SharedIndexInformer{}}
	for _, add := range []func(*runtime.Scheme) error{corev1.AddToScheme, discoveryv1.AddToScheme, gw.Install} {
		if err := add(f.scheme); err != nil {
			return fmt.Errorf("registering types: %w", err)
		}
	}
	f.scheme.AddKnownTypes(beta, &gw.ReferenceGrant{}, &gw.ReferenceGrantList{})
	metav1.AddToGroupVersion(f.scheme, beta)
	ctx, cancel := context.WithCancel(ctx)
	defer f.running.Wait()
	defer cancel()
	f.running.Go(func() {
		paths := []string{f.Certificates, filepath.Join(f.Certificates, "..data")}
		_ = filewatch.Follow(ctx, filewatch.Every, filewatch.MarkOf(paths...), f.tell)
	})
	looked := time.NewTicker(look)
	defer looked.Stop()
	for {
		whole, err := f.watch(ctx)
		if err != nil && ctx.Err() == nil {
			f.Log.Warn("the kinds of the cluster are not known", "err", err)
		}
		if f.synced(ctx) {
			for _, err := range f.Swap(gateway.Judge(f.world()).Table(f.Namespace, f.Name)) {
				f.Log.Warn("a part of the table is not served", "err", err)
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
	for _, k := range resources {
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

// synced waits until what is followed is known. Without the Gateway's own kind nothing can be.
func (f *follower) synced(ctx context.Context) bool {
	all := make([]cache.InformerSynced, 0, len(f.by))
	for _, i := range f.by {
		all = append(all, i.HasSynced)
	}
	return f.by["gateways"] != nil && cache.WaitForCacheSync(ctx.Done(), all...)
}

// world is what the informers know. Of Gateways it has the proxy's own.
func (f *follower) world() *gateway.World {
	w := &gateway.World{
		Classes: list[*gw.GatewayClass](f.by["gatewayclasses"]), HTTPRoutes: list[*gw.HTTPRoute](f.by["httproutes"]),
		GRPCRoutes: list[*gw.GRPCRoute](f.by["grpcroutes"]), Grants: list[*gw.ReferenceGrant](f.by["referencegrants"]),
		Reserved: f.Reserved, Keys: &f.keys, Secret: f.secret,
		Namespace: func(name string) (map[string]string, bool) {
			n := get[*corev1.Namespace](f.by["namespaces"], name)
			if n == nil {
				return nil, false
			}
			return n.Labels, true
		},
		Service: func(namespace, name string) *corev1.Service {
			return get[*corev1.Service](f.by["services"], namespace+"/"+name)
		},
		Slices: func(namespace, service string) (out []*discoveryv1.EndpointSlice) {
			found, _ := f.by["endpointslices"].GetIndexer().ByIndex(bySlice, namespace+"/"+service)
			for _, o := range found {
				out = append(out, o.(*discoveryv1.EndpointSlice))
			}
			return out
		},
	}
	if g := get[*gw.Gateway](f.by["gateways"], f.Namespace+"/"+f.Name); g != nil {
		w.Gateways = []*gw.Gateway{g}
	}
	return w
}

func list[T any](i cache.SharedIndexInformer) (out []T) {
	if i == nil {
		return nil
	}
	for _, o := range i.GetStore().List() {
		if t, ok := o.(T); ok {
			out = append(out, t)
		}
	}
	return out
}

func get[T any](i cache.SharedIndexInformer, key string) (out T) {
	if o, ok, _ := i.GetStore().GetByKey(key); ok {
		out, _ = o.(T)
	}
	return out
}

// secret is the Secret whose certificate the control plane has put into the folder, nil where it has not.
func (f *follower) secret(namespace, name string) *corev1.Secret {
	certificate, key := gateway.CertificateFiles(namespace, name)
	s := &corev1.Secret{Data: map[string][]byte{}}
	sum := fnv.New128a()
	for field, file := range map[string]string{corev1.TLSCertKey: certificate, corev1.TLSPrivateKeyKey: key} {
		data, err := filewatch.Read(filepath.Join(f.Certificates, file), mostFile)
		if err != nil {
			return nil
		}
		s.Data[field] = data
	}
	sum.Write(s.Data[corev1.TLSCertKey])
	sum.Write(s.Data[corev1.TLSPrivateKeyKey])
	s.UID, s.ResourceVersion = types.UID(namespace+"/"+name), hex.EncodeToString(sum.Sum(nil))
	return s
}
