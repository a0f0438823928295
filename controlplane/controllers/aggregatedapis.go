package controllers

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// AggregatedAPIs reaches the group versions that servers in the cluster serve: those of APIServices with a Service.
type AggregatedAPIs interface {
	// Discover returns the resources of these group versions, and the group versions whose resources are not known because the
	// server does not answer.
	Discover(ctx context.Context) ([]AggregatedResource, map[schema.GroupVersion]error)
	// Call sends a request to a path, which is escaped, and returns the JSON body of the response. A response that is not a
	// success is an error of package apierrors with its code. The body of a PATCH is a JSON merge patch. No fence stops a
	// call: Term.ConfirmLeadership precedes every call that changes something.
	Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error)
}

// AggregatedResource is a resource, without subresources, of an aggregated API.
type AggregatedResource struct {
	schema.GroupVersionResource
	metav1.APIResource
}

// Bounds of one list of an aggregated resource.
const (
	aggregatedPage    = 500
	maxAggregatedList = 50000
)

// Path returns the escaped path of an object, of all objects of a namespace when name is empty, and of all objects when
// namespace is empty too.
func (r AggregatedResource) Path(namespace, name string) string {
	path := "/apis/" + r.GroupVersionResource.Group + "/" + r.GroupVersionResource.Version
	if r.GroupVersionResource.Group == "" {
		path = "/api/" + r.GroupVersionResource.Version
	}
	if r.Namespaced && namespace != "" {
		path += "/namespaces/" + url.PathEscape(namespace)
	}
	path += "/" + url.PathEscape(r.Resource)
	if name != "" {
		path += "/" + url.PathEscape(name)
	}
	return path
}

// Supports reports whether the resource has all of these verbs.
func (r AggregatedResource) Supports(verbs ...string) bool {
	return !slices.ContainsFunc(verbs, func(v string) bool { return !slices.Contains(r.Verbs, v) })
}

// ListAggregated returns the metadata of all objects of a resource, of one namespace unless it is empty. It never returns a
// part of them: a list that is too long is an error.
func ListAggregated(ctx context.Context, a AggregatedAPIs, r AggregatedResource, namespace string) ([]api.Object, error) {
	path, query := r.Path(namespace, ""), url.Values{"limit": {strconv.Itoa(aggregatedPage)}}
	var out []api.Object
	for {
		body, err := a.Call(ctx, http.MethodGet, path, query, nil)
		if err != nil {
			return nil, fmt.Errorf("listing %s: %w", path, err)
		}
		var page metav1.PartialObjectMetadataList
		if err := json.Unmarshal(body, &page); err != nil {
			return nil, fmt.Errorf("decoding the list %s: %w", path, err)
		}
		for i := range page.Items {
			out = append(out, &page.Items[i])
		}
		if page.Continue == "" {
			return out, nil
		}
		if len(out) >= maxAggregatedList || len(page.Items) == 0 {
			return nil, fmt.Errorf("listing %s: there are more than %d objects", path, len(out))
		}
		query.Set("continue", page.Continue)
	}
}
