package server

import (
	"context"
	"crypto/tls"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/client-go/tools/cache"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// frontProxy is how this replica shows aggregated APIs who it is.
func (r *Replica) frontProxy(serving *pki.Rotator) (*apiserver.FrontProxy, error) {
	ca, err := r.trust.FrontProxyCA()
	if err != nil {
		return nil, err
	}
	own := pki.Client(pki.FrontProxyUser)
	own.Life = r.cfg.certificateLife
	r.front.Store(ca)
	front := pki.NewRotator(func(now time.Time) (*tls.Certificate, error) {
		issued, err := r.front.Load().Issue(own, now)
		if err != nil {
			return nil, err
		}
		return &issued.TLS, nil
	}, time.Now)
	r.wireCertificates(serving, front)
	return &apiserver.FrontProxy{Certificate: front, CA: func() []byte { return r.front.Load().PEM() }, ClientCA: r.ca.PEM}, nil
}

// keepAPIServices keeps the APIServices of what is served here, and what aggregated APIs read to know this one. Nothing
// is written while nothing changes.
func (r *Replica) keepAPIServices(ctx context.Context, term uint64) error {
	touched := make(chan struct{}, 1)
	stop, err := follow(func(o api.Object) {
		if !apiserver.ConcernsAPIServices(o) {
			return
		}
		select {
		case touched <- struct{}{}:
		default:
		}
	}, client.Informer[*apiregistrationv1.APIService](r.informers), client.Informer[*v1.ConfigMap](r.informers))
	if err != nil {
		return err
	}
	defer stop()
	for {
		kinds, believed := r.kindsServed.Table().Changed(), r.ca.Changed()
		if err := r.api.EnsureAuthenticationConfig(ctx, term); err != nil {
			return fmt.Errorf("writing what aggregated APIs read: %w", err)
		}
		if err := r.api.EnsureAPIServices(ctx, term); err != nil {
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

// keepConditions keeps the conditions of APIServices. Nobody is asked while no APIService has a Service.
func (r *Replica) keepConditions(ctx context.Context, term uint64) error {
	stop, err := follow(r.api.TouchAPIServices, client.Informer[*apiregistrationv1.APIService](r.informers),
		client.Informer[*v1.Service](r.informers), client.Informer[*discoveryv1.EndpointSlice](r.informers))
	if err != nil {
		return err
	}
	defer stop()
	return r.api.KeepConditions(ctx, term)
}

// follow tells of every change of what informers have, until stop.
func follow(tell func(api.Object), informers ...cache.SharedIndexInformer) (stop func(), err error) {
	told := func(o any) {
		if gone, ok := o.(cache.DeletedFinalStateUnknown); ok {
			o = gone.Obj
		}
		if obj, ok := o.(api.Object); ok {
			tell(obj)
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
			AddFunc: told, UpdateFunc: func(_, o any) { told(o) }, DeleteFunc: told,
		})
		if err != nil {
			stop()
			return nil, fmt.Errorf("watching APIServices: %w", err)
		}
		undo = append(undo, func() { _ = inf.RemoveEventHandler(reg) })
	}
	return stop, nil
}
