package apiserver

import (
	"context"
	"crypto/tls"
	"net/http"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/forward"
	"keelson.dev/keelson/controlplane/apiserver/openapi"
)

// Aggregated serves the API servers of APIServices, and the documents that include them.
type Aggregated struct {
	layer     *aggregation.Layer
	pipeline  *pipeline
	resources *endpoints.Handler
	gate      *gate
	timeout   time.Duration // for proxied requests other than watches and byte streams
	services  cachedAPIServices
	discovery *discovery.Documents
	openapi   *openapi.Spec
}

// newAggregationLayer returns the aggregation layer, which proxies requests to the API servers of
// APIServices. The layer authenticates itself with the front-proxy certificate if Config.FrontProxy
// is set.
func newAggregationLayer(cfg *Config, services cachedAPIServices, d *dialer.Dialer) *aggregation.Layer {
	var certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	if p := cfg.Outbound.FrontProxy; p != nil {
		certificate = p.Certificate.GetClientCertificate
	}
	return aggregation.New(aggregation.Config{
		Cached: services.getOne, All: services.listAll, Dialer: d, Certificate: certificate, Clock: cfg.Clock,
	})
}

// cachedAPIServices reads APIServices from this replica's cache. It never reads the store, because
// it runs for every request.
type cachedAPIServices struct{ cluster *clusterReader }

func (c cachedAPIServices) getOne(ctx context.Context, name string) (*apiregistrationv1.APIService, bool) {
	kind := c.cluster.pipeline.kinds.ByResource(aggregation.APIServices)
	if kind == nil {
		return nil, false
	}
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := c.cluster.pipeline.registry.GetObject(ctx, r)
	if err != nil {
		return nil, false
	}
	service, ok := o.(*apiregistrationv1.APIService)
	return service, ok
}

func (c cachedAPIServices) listAll(ctx context.Context) []*apiregistrationv1.APIService {
	all, err := c.cluster.List(ctx, aggregation.APIServices.Resource, "", false)
	if err != nil {
		return nil
	}
	services := make([]*apiregistrationv1.APIService, 0, len(all))
	for _, o := range all {
		if a, ok := o.(*apiregistrationv1.APIService); ok {
			services = append(services, a)
		}
	}
	return services
}

// serveAggregated authorizes a request and proxies it to the API server of an APIService. It
// returns false and does nothing if no APIService routes the group version of the path to a
// Service. Authorization, which is stage 2 of the request pipeline, happens here. The aggregated
// API server authorizes the same user again.
func (g *Aggregated) serveAggregated(w http.ResponseWriter, r *http.Request, u api.User) bool {
	remote, ok := g.layer.Lookup(r.Context(), r.URL.Path)
	if !ok {
		return false
	}
	a := remoteAttributes(r, u)
	if err := g.pipeline.authorizeAttributes(r.Context(), a, nil); err != nil {
		g.resources.WriteError(w, r, err)
		return true
	}
	class, ctx, cancel := flowcontrol.Write, r.Context(), func() {}
	switch a.Verb {
	case "watch":
		class = flowcontrol.Watch
	case "get", "list":
		class = flowcontrol.Read
	}
	if forward.Upgrades(r) {
		class = flowcontrol.Watch // an upgraded connection lasts until one of its ends closes it
	}
	if class != flowcontrol.Watch {
		ctx, cancel = context.WithTimeout(ctx, g.timeout)
	}
	defer cancel()
	p, err := g.gate.Enter(ctx, class, callerOf(u), proxiedRequestBytes)
	if err != nil {
		g.resources.WriteError(w, r, tooManyRequests(err, class, callerOf(u)))
		return true
	}
	defer p.Leave()
	g.layer.Serve(w, r.WithContext(ctx), remote, u)
	return true
}

// serveDiscovery serves a discovery path. The response includes the group versions of aggregated
// API servers. It returns false if the path is not a discovery path.
func (g *Aggregated) serveDiscovery(w http.ResponseWriter, r *http.Request) bool {
	if !strings.HasPrefix(r.URL.Path, "/apis") {
		return g.discovery.Serve(w, r)
	}
	remotes := g.layer.Discover(r.Context())
	if len(remotes) == 0 {
		return g.discovery.Serve(w, r)
	}
	orders := map[schema.GroupVersion]discovery.Order{}
	for _, a := range g.services.listAll(r.Context()) {
		gv := schema.GroupVersion{Group: a.Spec.Group, Version: a.Spec.Version}
		orders[gv] = discovery.Order{Group: a.Spec.GroupPriorityMinimum, Version: a.Spec.VersionPriority}
	}
	return g.discovery.ServeMerged(w, r, remotes, orders)
}

// serveOpenAPI serves an OpenAPI path. The v2 document and the v3 index include aggregated API
// servers. A request for the v3 document of an aggregated group version is proxied to its API
// server. serveOpenAPI returns false if the path is not an OpenAPI path.
func (g *Aggregated) serveOpenAPI(w http.ResponseWriter, r *http.Request, u api.User) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	if path == "/openapi/v2" {
		if parts := g.layer.Swagger(r.Context()); len(parts) > 0 {
			g.openapi.ServeMerged(w, r, parts)
			return true
		}
	}
	if !strings.HasPrefix(path, "/openapi/v3") {
		return g.openapi.Serve(w, r)
	}
	if remote, ok := g.layer.Document(r.Context(), path); ok {
		p, err := g.gate.Enter(r.Context(), flowcontrol.Read, callerOf(u), proxiedRequestBytes)
		if err != nil {
			g.resources.WriteError(w, r, tooManyRequests(err, flowcontrol.Read, callerOf(u)))
			return true
		}
		defer p.Leave()
		ctx, cancel := context.WithTimeout(r.Context(), g.timeout)
		defer cancel()
		g.layer.Serve(w, r.WithContext(ctx), remote, u)
		return true
	}
	if path == "/openapi/v3" {
		if elsewhere := g.layer.OpenAPIIndex(r.Context()); len(elsewhere) > 0 {
			g.openapi.ServeIndex(w, elsewhere)
			return true
		}
	}
	return g.openapi.Serve(w, r)
}

// proxiedRequestBytes is the memory in bytes that a proxied request reserves in the memory budget
// for requests (see gate.go). It covers the buffers of both directions and of both connections.
const proxiedRequestBytes = 256 << 10

// remoteAttributes returns the authorization attributes of a request, derived from its method and
// path only. It works for resources that this server does not serve.
func remoteAttributes(r *http.Request, u api.User) *authz.Attributes {
	t, ok := endpoints.ParsePath(r.URL.Path)
	if !ok {
		return &authz.Attributes{User: u, Verb: strings.ToLower(r.Method), Path: r.URL.Path}
	}
	a := &authz.Attributes{
		User: u, APIGroup: t.GVR.Group, APIVersion: t.GVR.Version, Namespace: t.Namespace, Resource: t.GVR.Resource,
		Subresource: t.Subresource, Name: t.Name,
	}
	sub, _, _ := strings.Cut(t.Subresource, "/")
	a.Subresource = sub
	switch r.Method {
	case http.MethodGet, http.MethodHead:
		watch := r.URL.Query().Get("watch")
		switch {
		case t.Watch || t.Name == "" && watch != "" && watch != "0" && watch != "false":
			a.Verb = "watch"
		case t.Name == "":
			a.Verb = "list"
		default:
			a.Verb = "get"
		}
	case http.MethodPost:
		a.Verb = "create"
	case http.MethodPut:
		a.Verb = "update"
	case http.MethodPatch:
		a.Verb = "patch"
	case http.MethodDelete:
		a.Verb = "delete"
		if t.Name == "" {
			a.Verb = "deletecollection"
		}
	default:
		a.Verb = strings.ToLower(r.Method)
	}
	return a
}
