// Package clusterobjects creates and updates the objects of the cluster itself: the default objects
// (namespaces, roles, DNS and others), Service default/kubernetes, and the APIServices.
package clusterobjects

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

// Keeper creates and updates the objects of the cluster itself. Its methods run while this replica
// is the leader. All fields are required.
type Keeper struct {
	Replica   string // name of this replica
	Cluster   datadir.Cluster
	API       *apiserver.Server
	Informers *client.Informers
	Kinds     *api.Kinds
	CA        *pki.ClusterCA
	// ReadyAPIs returns the API addresses of the ready replicas, and a channel that is closed when
	// they change.
	ReadyAPIs func() ([]netip.AddrPort, <-chan struct{})
	Log       *slog.Logger
}

// defaultsPeriod is the interval at which KeepDefaults checks the default objects. defaultsPatience
// is the timeout of WriteFirstDefaults.
const (
	defaultsPeriod   = time.Minute
	defaultsPatience = 10 * time.Second
)

// WriteFirstDefaults tries once to write all default objects. It returns after defaultsPatience at
// the latest, and logs a failure.
func (o *Keeper) WriteFirstDefaults(ctx context.Context, term uint64) {
	ctx, cancel := context.WithTimeout(ctx, defaultsPatience)
	defer cancel()
	if err := o.writeDefaults(ctx, term); err != nil && ctx.Err() == nil {
		o.Log.Warn("not all default objects are written yet", "err", err)
	}
}

// writeDefaults writes the default objects. It writes the DNS Service last: if that Service exists,
// writeDefaults has tried to write all other objects.
func (o *Keeper) writeDefaults(ctx context.Context, term uint64) error {
	return errors.Join(o.API.Bootstrap().EnsureBootstrap(ctx, term), o.API.Bootstrap().EnsureStorage(ctx, term),
		o.API.Bootstrap().EnsureDNSService(ctx, term, o.Cluster.DNSServiceIP()))
}

// HasDefaults reports whether the default objects have been written. It checks for the DNS Service,
// which is written last.
func (o *Keeper) HasDefaults() bool {
	_, found, err := client.Informer[*v1.Service](o.Informers).GetStore().GetByKey(metav1.NamespaceSystem + "/" +
		bootstrap.DNSServiceName)
	return found && err == nil
}

// KeepDefaults writes all default objects once. Then it periodically restores the system
// namespaces, storage classes, flow schemas and the DNS Service, until ctx ends.
func (o *Keeper) KeepDefaults(ctx context.Context, term uint64) error {
	if err := o.writeDefaults(ctx, term); err != nil {
		return fmt.Errorf("writing the default objects: %w", err)
	}
	for {
		if err := wait.Delay(ctx, defaultsPeriod); err != nil {
			return err
		}
		if err := errors.Join(o.API.Bootstrap().EnsureSystemObjects(ctx, term),
			o.API.Bootstrap().EnsureStorage(ctx, term), o.API.Bootstrap().EnsureFlowControl(ctx, term),
			o.API.Bootstrap().EnsureDNSService(ctx, term, o.Cluster.DNSServiceIP())); err != nil {
			return fmt.Errorf("writing the default objects: %w", err)
		}
	}
}

// KeepKubernetesService updates Service default/kubernetes and its endpoints whenever the ready
// replicas or these objects change, until ctx ends.
func (o *Keeper) KeepKubernetesService(ctx context.Context, system *client.Client, term uint64) error {
	touched, stop, err := o.watchKubernetesService()
	if err != nil {
		return err
	}
	defer stop()
	for {
		ready, changed := o.ReadyAPIs()
		if len(ready) > 0 {
			if err := o.API.Bootstrap().EnsureKubernetesService(ctx, term, o.Cluster.APIServiceIP(), ready); err !=
				nil {
				if errors.Is(err, bootstrap.ErrAddressTaken) {
					o.emitAddressTaken(ctx, system, err)
				}
				return fmt.Errorf("writing Service default/kubernetes: %w", err)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-touched:
		}
	}
}

// watchKubernetesService returns a channel that is signaled when Service default/kubernetes, its
// EndpointSlice or its Endpoints change. The function stop ends the watch.
func (o *Keeper) watchKubernetesService() (touched <-chan struct{}, stop func(), err error) {
	ch := wakeup.New()
	notify := func(object any) {
		if gone, ok := object.(cache.DeletedFinalStateUnknown); ok {
			object = gone.Obj
		}
		if obj, ok := object.(api.Object); ok && obj.GetNamespace() == "default" && obj.GetName() == "kubernetes" {
			ch.Send()
		}
	}
	var undo []func()
	stop = func() {
		for _, u := range undo {
			u()
		}
	}
	for _, inf := range []cache.SharedIndexInformer{
		client.Informer[*v1.Service](o.Informers), client.Informer[*discoveryv1.EndpointSlice](o.Informers),
		client.Informer[*v1.Endpoints](o.Informers),
	} {
		reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: notify, UpdateFunc: func(_, object any) { notify(object) }, DeleteFunc: notify,
		})
		if err != nil {
			stop()
			return nil, nil, fmt.Errorf("watching Service default/kubernetes: %w", err)
		}
		undo = append(undo, func() { _ = inf.RemoveEventHandler(reg) })
	}
	return ch, stop, nil
}

// emitAddressTaken creates an Event on Service default/kubernetes: another Service has the cluster
// IP of the API. The text of cause is the Event's message. If the Event exists already, nothing
// changes.
func (o *Keeper) emitAddressTaken(ctx context.Context, system *client.Client, cause error) {
	now := metav1.Now()
	e := &v1.Event{
		ObjectMeta: metav1.ObjectMeta{Namespace: metav1.NamespaceDefault, Name: "kubernetes.address-taken"},
		InvolvedObject: v1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: metav1.NamespaceDefault,
			Name: "kubernetes"},
		Type: v1.EventTypeWarning, Reason: "ClusterIPAlreadyAllocated", Message: cause.Error(), Count: 1,
		FirstTimestamp: now, LastTimestamp: now,
		Source: v1.EventSource{Component: "keelson-controlplane", Host: o.Replica},
	}
	if _, err := client.Create(ctx, system, e); err != nil && !apierrors.IsAlreadyExists(err) {
		o.Log.Debug("event not written", "reason", e.Reason, "err", err)
	}
}

// KeepAPIServices writes the APIService objects of the API groups that this API server serves. It
// also writes the ConfigMap by which aggregated API servers authenticate this API server. It writes
// these objects again whenever they, the API groups or the cluster CA change, until ctx ends.
func (o *Keeper) KeepAPIServices(ctx context.Context, term uint64) error {
	touched := wakeup.New()
	stop, err := watchChanges(func(o api.Object) {
		if !bootstrap.ConcernsAPIServices(o) {
			return
		}
		touched.Send()
	}, client.Informer[*apiregistrationv1.APIService](o.Informers), client.Informer[*v1.ConfigMap](o.Informers))
	if err != nil {
		return err
	}
	defer stop()
	for {
		kinds, believed := o.Kinds.Table().Changed(), o.CA.Changed()
		if err := o.API.Bootstrap().EnsureAuthenticationConfig(ctx, term); err != nil {
			return fmt.Errorf("writing the authentication configuration of aggregated APIs: %w", err)
		}
		if err := o.API.Bootstrap().EnsureAPIServices(ctx, term); err != nil {
			return fmt.Errorf("writing APIServices: %w", err)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-kinds:
		case <-believed:
		case <-touched:
		}
	}
}

// KeepConditions updates the status conditions of APIServices until ctx ends. If no APIService
// refers to a Service, it sends no request.
func (o *Keeper) KeepConditions(ctx context.Context, term uint64) error {
	stop, err := watchChanges(o.API.Conditions().Touch, client.Informer[*apiregistrationv1.APIService](o.Informers),
		client.Informer[*v1.Service](o.Informers), client.Informer[*discoveryv1.EndpointSlice](o.Informers))
	if err != nil {
		return err
	}
	defer stop()
	return o.API.Conditions().Run(ctx, term)
}

// watchChanges calls notify for every object that is added, changed or deleted in one of the
// informers, until stop is called.
func watchChanges(notify func(api.Object), informers ...cache.SharedIndexInformer) (stop func(), err error) {
	handle := func(o any) {
		if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		if obj, ok := o.(api.Object); ok {
			notify(obj)
		}
	}
	var undo []func()
	stop = func() {
		for _, u := range undo {
			u()
		}
	}
	for _, inf := range informers {
		reg, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc: handle, UpdateFunc: func(_, o any) { handle(o) }, DeleteFunc: handle,
		})
		if err != nil {
			stop()
			return nil, fmt.Errorf("watching APIServices: %w", err)
		}
		undo = append(undo, func() { _ = inf.RemoveEventHandler(reg) })
	}
	return stop, nil
}
