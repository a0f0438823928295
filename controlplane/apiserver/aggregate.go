package apiserver

import (
	"context"
	"crypto/tls"
	"net/http"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/forward"
)

var apiServices = apiregistrationv1.SchemeGroupVersion.WithResource("apiservices")

// newAggregation returns the aggregation layer, which proxies requests to the API servers of
// APIServices. The layer authenticates itself with the front-proxy certificate if Config.FrontProxy
// is set.
func (s *Server) newAggregation() *aggregation.Layer {
	var certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	if p := s.cfg.FrontProxy; p != nil {
		certificate = p.Certificate.GetClientCertificate
	}
	return aggregation.New(aggregation.Config{
		Cached: s.cachedAPIService, All: s.cachedAPIServices, Dialer: s.dialer, Certificate: certificate, Clock: s.cfg.Clock,
	})
}

// cachedAPIService returns an APIService from this replica's cache. It never reads the store,
// because it runs for every request.
func (s *Server) cachedAPIService(ctx context.Context, name string) (*apiregistrationv1.APIService, bool) {
	kind := s.cfg.Kinds.ByResource(apiServices)
	if kind == nil {
		return nil, false
	}
	r := &api.Request{Verb: api.VerbGet, Kind: kind, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := s.cfg.Registry.Get(ctx, r)
	if err != nil {
		return nil, false
	}
	out, ok := o.(*apiregistrationv1.APIService)
	return out, ok
}

func (s *Server) cachedAPIServices(ctx context.Context) []*apiregistrationv1.APIService {
	all, err := s.known.List(ctx, apiServices.Resource, "", false)
	if err != nil {
		return nil
	}
	out := make([]*apiregistrationv1.APIService, 0, len(all))
	for _, o := range all {
		if a, ok := o.(*apiregistrationv1.APIService); ok {
			out = append(out, a)
		}
	}
	return out
}

// aggregated authorizes a request and proxies it to the API server of an APIService. It returns
// false and does nothing if no APIService points the group version of the path to a Service.
// Authorization (stage 2) happens here; the aggregated API server authorizes the same user again.
func (s *Server) aggregated(w http.ResponseWriter, r *http.Request, u api.User) bool {
	remote, ok := s.aggregation.Lookup(r.Context(), r.URL.Path)
	if !ok {
		return false
	}
	a := remoteAttributes(r, u)
	if err := s.chain.decide(r.Context(), a, nil); err != nil {
		s.resources.Error(w, r, err)
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
		ctx, cancel = context.WithTimeout(ctx, s.cfg.RequestTimeout)
	}
	defer cancel()
	p, err := s.gate.Enter(ctx, class, callerOf(u), proxied)
	if err != nil {
		s.resources.Error(w, r, noRoom(err, class, callerOf(u)))
		return true
	}
	defer p.Leave()
	s.aggregation.Serve(w, r.WithContext(ctx), remote, u)
	return true
}

// discover serves a discovery path, including the group versions of aggregated API servers. It
// returns false if the path is not a discovery path.
func (s *Server) discover(w http.ResponseWriter, r *http.Request) bool {
	if !strings.HasPrefix(r.URL.Path, "/apis") {
		return s.discovery.Serve(w, r)
	}
	remotes := s.aggregation.Discover(r.Context())
	if len(remotes) == 0 {
		return s.discovery.Serve(w, r)
	}
	orders := map[schema.GroupVersion]discovery.Order{}
	for _, a := range s.cachedAPIServices(r.Context()) {
		gv := schema.GroupVersion{Group: a.Spec.Group, Version: a.Spec.Version}
		orders[gv] = discovery.Order{Group: a.Spec.GroupPriorityMinimum, Version: a.Spec.VersionPriority}
	}
	return s.discovery.ServeMerged(w, r, remotes, orders)
}

// describe serves an OpenAPI path. The v2 document and the v3 index include aggregated API servers.
// A request for the v3 document of an aggregated group version is proxied to its API server. It
// returns false for all other paths.
func (s *Server) describe(w http.ResponseWriter, r *http.Request, u api.User) bool {
	path := strings.TrimSuffix(r.URL.Path, "/")
	if path == "/openapi/v2" {
		if parts := s.aggregation.Swagger(r.Context()); len(parts) > 0 {
			s.openapi.ServeMerged(w, r, parts)
			return true
		}
	}
	if !strings.HasPrefix(path, "/openapi/v3") {
		return s.openapi.Serve(w, r)
	}
	if remote, ok := s.aggregation.Document(r.Context(), path); ok {
		p, err := s.gate.Enter(r.Context(), flowcontrol.Read, callerOf(u), proxied)
		if err != nil {
			s.resources.Error(w, r, noRoom(err, flowcontrol.Read, callerOf(u)))
			return true
		}
		defer p.Leave()
		ctx, cancel := context.WithTimeout(r.Context(), s.cfg.RequestTimeout)
		defer cancel()
		s.aggregation.Serve(w, r.WithContext(ctx), remote, u)
		return true
	}
	if path == "/openapi/v3" {
		if elsewhere := s.aggregation.Index(r.Context()); len(elsewhere) > 0 {
			s.openapi.ServeIndex(w, elsewhere)
			return true
		}
	}
	return s.openapi.Serve(w, r)
}

// proxied is the memory in bytes that a proxied request reserves at the gate: the buffers of both
// directions and of both connections.
const proxied = 256 << 10

// remoteAttributes returns the authorization attributes of a request, derived from its method and
// path only. It does not require that the resource is served here.
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
