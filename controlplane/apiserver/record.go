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

// auditOrigin returns the origin of an HTTP request for its audit record: audit ID, URI, source
// address and user agent.
func auditOrigin(r *http.Request, received time.Time) audit.Origin {
	source, _, err := net.SplitHostPort(r.RemoteAddr)
	if err != nil {
		source = r.RemoteAddr
	}
	return audit.Origin{ID: r.Header.Get("Audit-Id"), URI: r.URL.RequestURI(), Source: source, UserAgent: r.UserAgent(),
		Received: received}
}

// startRequestRecord sets the attributes of an HTTP request in its audit record. It returns an
// error if the request must be recorded and this is not possible.
func (s *Server) startRequestRecord(record *audit.Record, r *http.Request, u, sender api.User) error {
	if record == nil {
		return nil
	}
	return auditFailure(record.SetRequest(s.auditAttributes(r, u, sender)))
}

// auditFailure converts the error of an audit write to a 500 error, with which the request is
// rejected. It returns nil for nil.
func auditFailure(err error) error {
	if err == nil {
		return nil
	}
	return apierrors.NewInternalError(fmt.Errorf("the request was not performed, because it cannot be recorded: %w",
		err))
}

// auditAttributes returns the audit attributes of an HTTP request.
func (s *Server) auditAttributes(r *http.Request, u, sender api.User) audit.Attributes {
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
	a.Group, a.Version, a.Resource, a.Subresource, a.Namespace, a.Name = t.GVR.Group, t.GVR.Version, t.GVR.Resource,
		t.Subresource, t.Namespace, t.Name
	if isProxy(t) {
		a.Subresource, a.Stream = proxySubresource, true
	}
	if t.GVR.Group == "" && t.GVR.Resource == "namespaces" {
		a.Namespace = t.Name
	}
	kind := s.cfg.Kinds.ByResource(t.GVR)
	s.pipeline.describeVerb(&a, verb, kind != nil && isQuery(kind))
	if verb == "" {
		a.Verb = strings.ToLower(r.Method)
		a.Changes = r.Method != http.MethodGet && r.Method != http.MethodHead
	}
	return a
}

// isQuery reports whether the kind is a query, such as an access review: creating an object of the
// kind changes nothing.
func isQuery(k *api.Kind) bool { return k.Serving.Virtual && !k.Serving.Acts }

// describeVerb sets the verb of the audit attributes, and whether the request changes something or
// streams its response. query is true for a create that changes nothing (see isQuery).
func (c *pipeline) describeVerb(a *audit.Attributes, verb api.Verb, query bool) {
	a.Verb = string(verb)
	switch verb {
	case api.VerbCreate, api.VerbUpdate, api.VerbPatch, api.VerbDelete, api.VerbDeleteCollection:
		a.Changes = !query
	case api.VerbWatch:
		a.Stream = true
	case api.VerbConnect:
		a.Stream, a.Changes, a.Verb = true, a.Subresource != "log", string(api.VerbCreate)
		if a.Subresource == "log" {
			a.Verb = string(api.VerbGet)
		}
	}
}

// startAuditRecord starts the audit record of a request from within this process. The returned
// context contains the record; done completes it. It returns an error if the request must be
// recorded and this is not possible.
func (c *pipeline) startAuditRecord(ctx context.Context, r *api.Request) (
	_ context.Context, done func(created bool, err error), err error,
) {
	if c.audit == nil {
		return ctx, func(bool, error) {}, nil
	}
	z := authz.Of(r)
	a := audit.Attributes{
		User: r.User, Sender: r.User, Group: z.APIGroup, Version: z.APIVersion, Resource: z.Resource,
		Subresource: z.Subresource,
		Namespace:   z.Namespace, Name: r.Name,
	}
	c.describeVerb(&a, r.Verb, isQuery(r.Kind))
	a.Path = requestPath(r)
	ctx, record := c.audit.Begin(ctx, audit.Origin{URI: a.Path, UserAgent: r.Client.UserAgent, Received: c.clock()})
	err = auditFailure(record.SetRequest(a))
	return ctx, func(created bool, err error) {
		code := http.StatusOK
		if created {
			code = http.StatusCreated
		}
		if err != nil {
			s := endpoints.StatusOf(err)
			record.SetStatus(s)
			code = int(s.Code)
		}
		record.Finish(code, false)
	}, err
}

// requestPath returns the URL path with which an HTTP client would send the request.
func requestPath(r *api.Request) string {
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

// auditRequestBody adds the body of a request to its audit record if the audit policy requires it.
func auditRequestBody(record *audit.Record, r *api.Request) {
	if record == nil {
		return
	}
	if o, ok := r.Object.(metav1.Object); ok {
		record.SetObject(o)
	}
	if !record.WantsBody(false) {
		return
	}
	switch {
	case r.Verb == api.VerbPatch && r.Patch.Type == types.ApplyYAMLPatchType:
		data, err := yaml.YAMLToJSON(r.Patch.Body)
		record.SetRawBody(false, data, err == nil)
	case r.Verb == api.VerbPatch:
		record.SetRawBody(false, r.Patch.Body, true)
	default:
		record.SetBody(false, r.Object, nil)
	}
}

// auditResponseBody adds the name of a created object to the audit record, and the response body if
// the audit policy requires it.
func auditResponseBody(record *audit.Record, r *api.Request, response runtime.Object) {
	if record == nil || response == nil {
		return
	}
	if o, ok := response.(metav1.Object); ok && r.Verb == api.VerbCreate {
		record.SetObject(o)
	}
	record.SetBody(true, response, r.Kind)
}
