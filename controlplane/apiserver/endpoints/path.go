package endpoints

import (
	"net/http"
	"net/url"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Target is the resource, object or subresource that a URL names.
type Target struct {
	GVR         schema.GroupVersionResource
	Namespace   string
	Name        string
	Subresource string
	Watch       bool // the path has the deprecated form /api/v1/watch/...
}

// ParsePath parses /api/{version}/... and /apis/{group}/{version}/... paths. ok is false if the
// path has neither form. The resource need not exist.
func ParsePath(path string) (t Target, ok bool) {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	switch {
	case slices.Contains(parts, ""):
		return Target{}, false
	case len(parts) >= 3 && parts[0] == "api":
		t.GVR.Version, parts = parts[1], parts[2:]
	case len(parts) >= 4 && parts[0] == "apis":
		t.GVR.Group, t.GVR.Version, parts = parts[1], parts[2], parts[3:]
	default:
		return Target{}, false
	}
	if parts[0] == "watch" && len(parts) > 1 {
		t.Watch, parts = true, parts[1:]
	}
	if parts[0] == "namespaces" && len(parts) > 2 && !slices.Contains(namespaceFacets, parts[2]) {
		t.Namespace, parts = parts[1], parts[2:]
	}
	t.GVR.Resource = parts[0]
	if len(parts) > 1 {
		t.Name = parts[1]
	}
	if len(parts) > 2 {
		t.Subresource = strings.Join(parts[2:], "/")
	}
	return t, true
}

// namespaceFacets are the subresources of a namespace. Any other path element after the name of a
// namespace is a resource in the namespace.
var namespaceFacets = []string{"status", "finalize"}

// connects are the pod subresources that open a byte stream to a container.
var connects = []string{"log", "exec", "attach", "portforward"}

// VerbOf returns the API verb of an HTTP method on a target; "" if the method is not supported.
// watch reports whether the query requests a watch.
func VerbOf(method string, t Target, watch bool) api.Verb {
	if slices.Contains(connects, t.Subresource) {
		if method == http.MethodGet || method == http.MethodPost && t.Subresource != "log" {
			return api.VerbConnect
		}
		return ""
	}
	switch method {
	case http.MethodGet, http.MethodHead:
		switch {
		case t.Watch || watch && t.Name == "":
			return api.VerbWatch
		case t.Name == "":
			return api.VerbList
		}
		return api.VerbGet
	case http.MethodPost:
		if t.Name == "" || t.Subresource != "" {
			return api.VerbCreate
		}
	case http.MethodPut:
		if t.Name != "" {
			return api.VerbUpdate
		}
	case http.MethodPatch:
		if t.Name != "" {
			return api.VerbPatch
		}
	case http.MethodDelete:
		if t.Name == "" {
			return api.VerbDeleteCollection
		}
		if t.Subresource == "" {
			return api.VerbDelete
		}
	}
	return ""
}

// IsWatch reports whether a query asks for a watch.
func IsWatch(q url.Values) bool { return isTrue(q, "watch") }

// IsLongRunning reports whether a request is exempt from the request timeout: a watch, a proxied
// request, a log or a byte stream.
func IsLongRunning(method string, t Target, q url.Values) bool {
	facet, _, _ := strings.Cut(t.Subresource, "/")
	switch facet {
	case "attach", "exec", "log", "portforward", "proxy":
		return true
	}
	return VerbOf(method, t, isTrue(q, "watch")) == api.VerbWatch
}

// hasTarget reports whether the kind has the subresource of the target, and can be in a namespace
// if the target has one. It is false if k is nil or hidden.
func hasTarget(k *api.Kind, t Target) bool {
	return k != nil && !k.Serving.Hidden && (t.Subresource == "" || k.Subresources[t.Subresource] != nil) &&
		(k.Namespaced || t.Namespace == "")
}

// supportsVerb reports whether the kind, or the subresource of the target, supports the verb. For a
// namespaced kind, a target without a namespace supports only list and watch. hasTarget must be
// true.
func supportsVerb(k *api.Kind, t Target, v api.Verb) bool {
	if v == "" {
		return false
	}
	if k.Namespaced && t.Namespace == "" && v != api.VerbList && v != api.VerbWatch {
		return false
	}
	if t.Subresource == "" {
		return len(k.Serving.Verbs) == 0 || slices.Contains(k.Serving.Verbs, string(v))
	}
	if v == api.VerbConnect {
		return true
	}
	return slices.Contains(k.Subresources[t.Subresource].Verbs, string(v))
}
