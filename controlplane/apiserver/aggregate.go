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

// newAggregation sets up what hands requests on to servers in the cluster.
func (s *Server) newAggregation() *aggregation.Layer {
	var certificate func(*tls.CertificateRequestInfo) (*tls.Certificate, error)
	if p := s.cfg.FrontProxy; p != nil {
		certificate = p.Certificate.GetClientCertificate
	}
	return aggregation.New(aggregation.Config{
		Cached: s.cachedAPIService, All: s.cachedAPIServices, Dialer: s.dialer, Certificate: certificate, Clock: s.cfg.Clock,
	})
}

// cachedAPIService reads this replica's cache only: it is asked for with every request.
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

// aggregated answers a request for a group version that a server in the cluster has: false for all others. Stage 2 is
// here; the server asks again, for the same user.
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
		class = flowcontrol.Watch // it lasts as long as both ends want
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

// discover answers a discovery path, with what servers in the cluster have; false when it is none.
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

// describe answers OpenAPI paths, those of the v3 documents of servers in the cluster by asking them.
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

// proxied is what a request takes that is handed on: buffers in both directions, and of the connections.
const proxied = 256 << 10

// remoteAttributes are what authorization is asked about a path whose resources are not known here.
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
