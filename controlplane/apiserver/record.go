package apiserver

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
)

// origin returns the audit origin of an HTTP request: its ID, URI, source address and user agent.
func origin(r *http.Request, received time.Time) audit.Origin {
	source, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		source = r.RemoteAddr
	}
	return audit.Origin{ID: r.Header.Get("Audit-Id"), URI: r.URL.RequestURI(), Source: source, UserAgent: r.UserAgent(),
		Received: received}
}

// recordAsked starts the audit record of an HTTP request. It returns an error if the request must
// be recorded and the record cannot be written.
func (s *Server) recordAsked(record *audit.Record, r *http.Request, u, sender api.User) error {
	if record == nil {
		return nil
	}
	return unrecorded(record.Asked(s.asked(r, u, sender)))
}

// unrecorded converts a failed audit write to a 500 error, which refuses the request. It returns
// nil for nil.
func unrecorded(err error) error {
	if err == nil {
		return nil
	}
	return apierrors.NewInternalError(fmt.Errorf("the request was not performed, because it cannot be recorded: %w", err))
}

// asked returns the audit attributes of an HTTP request.
func (s *Server) asked(r *http.Request, u, sender api.User) audit.Attributes {
	a := audit.Attributes{User: u, Sender: sender, Path: r.URL.Path}
	t, ok := endpoints.ParsePath(r.URL.Path)
	if !ok {
		a.Verb = strings.ToLower(r.Method)
		a.Changes = r.Method != http.MethodGet && r.Method != http.MethodHead && r.Method != http.MethodOptions
		return a
	}
	watching := false
	if strings.Contains(r.URL.RawQuery, "watch") {
		v := r.URL.Query().Get("watch")
		watching = v != "" && v != "false" && v != "0"
	}
	verb := endpoints.VerbOf(r.Method, t, watching)
	a.Group, a.Version, a.Resource, a.Subresource, a.Namespace, a.Name = t.GVR.Group, t.GVR.Version, t.GVR.Resource, t.Subresource, t.Namespace, t.Name
	if isProxy(t) {
		a.Subresource, a.Stream = proxyFacet, true
	}
	if t.GVR.Group == "" && t.GVR.Resource == "namespaces" {
		a.Namespace = t.Name
	}
	kind := s.cfg.Kinds.ByResource(t.GVR)
	s.chain.describe(&a, verb, kind != nil && asks(kind))
	if verb == "" {
		a.Verb = strings.ToLower(r.Method)
		a.Changes = r.Method != http.MethodGet && r.Method != http.MethodHead
	}
	return a
}

// asks reports whether an object of the kind is a query that changes nothing when it is created,
// such as an access review.
func asks(k *api.Kind) bool { return k.Virtual && !k.Acts }

// describe sets the verb of the audit attributes, and whether the request changes something or
// streams its response. question marks a create that changes nothing.
func (c *chain) describe(a *audit.Attributes, verb api.Verb, question bool) {
	a.Verb = string(verb)
	switch verb {
	case api.VerbCreate, api.VerbUpdate, api.VerbPatch, api.VerbDelete, api.VerbDeleteCollection:
		a.Changes = !question
	case api.VerbWatch:
		a.Stream = true
	case api.VerbConnect:
		a.Stream, a.Changes, a.Verb = true, a.Subresource != "log", string(api.VerbCreate)
		if a.Subresource == "log" {
			a.Verb = string(api.VerbGet)
		}
	}
}

// recorded starts the audit record of a request from within this process. The returned context has
// the record; done completes it. It returns an error if the request must be recorded and cannot be.
func (c *chain) recorded(ctx context.Context, r *api.Request) (_ context.Context, done func(created bool, err error), err error) {
	if c.audit == nil {
		return ctx, func(bool, error) {}, nil
	}
	z := authz.Of(r)
	a := audit.Attributes{
		User: r.User, Sender: r.User, Group: z.APIGroup, Version: z.APIVersion, Resource: z.Resource, Subresource: z.Subresource,
		Namespace: z.Namespace, Name: r.Name,
	}
	c.describe(&a, r.Verb, asks(r.Kind))
	a.Path = pathOf(r)
	ctx, record := c.audit.Begin(ctx, audit.Origin{URI: a.Path, UserAgent: r.UserAgent, Received: c.clock()})
	err = unrecorded(record.Asked(a))
	return ctx, func(created bool, err error) {
		code := http.StatusOK
		if created {
			code = http.StatusCreated
		}
		if err != nil {
			s := endpoints.StatusOf(err)
			record.Refused(s)
			code = int(s.Code)
		}
		record.Done(code, false)
	}, err
}

// pathOf returns the URL path that an HTTP client would use for the request.
func pathOf(r *api.Request) string {
	parts := []string{"/apis", r.Kind.GVK.Group, r.Kind.GVK.Version}
	if r.Kind.GVK.Group == "" {
		parts = []string{"/api", r.Kind.GVK.Version}
	}
	if r.Kind.Namespaced && r.Namespace != "" {
		parts = append(parts, "namespaces", r.Namespace)
	}
	parts = append(parts, r.Kind.Resource)
	for _, p := range []string{r.Name, r.Subresource} {
		if p != "" {
			parts = append(parts, p)
		}
	}
	return strings.Join(parts, "/")
}

// recordBody adds the body of a request to its audit record if the audit policy requires it.
func recordBody(record *audit.Record, r *api.Request) {
	if record == nil {
		return
	}
	if o, ok := r.Object.(metav1.Object); ok {
		record.Object(o)
	}
	if !record.Wants(false) {
		return
	}
	switch {
	case r.Verb == api.VerbPatch && r.PatchType == types.ApplyYAMLPatchType:
		data, err := yaml.YAMLToJSON(r.Patch)
		record.Raw(false, data, err == nil)
	case r.Verb == api.VerbPatch:
		record.Raw(false, r.Patch, true)
	default:
		record.Body(false, r.Object, nil)
	}
}

// recordAnswer adds the created object's name to the audit record, and the response if the audit
// policy requires it.
func recordAnswer(record *audit.Record, r *api.Request, answer runtime.Object) {
	if record == nil || answer == nil {
		return
	}
	if o, ok := answer.(metav1.Object); ok && r.Verb == api.VerbCreate {
		record.Object(o)
	}
	record.Body(true, answer, r.Kind)
}
