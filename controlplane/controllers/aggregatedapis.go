package controllers

import (
	"context"
	"net/url"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// AggregatedAPIs reaches the group versions that servers in the cluster serve: those of APIServices with a Service.
type AggregatedAPIs interface {
	// Discover returns the resources of these group versions, and the group versions whose resources are not known because the
	// server does not answer.
	Discover(ctx context.Context) ([]AggregatedResource, map[schema.GroupVersion]error)
	// Call sends a request to a path, which is escaped, and returns the JSON body of the response. A response that is not a
	// success is an error of package apierrors with its code.
	Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error)
}

// AggregatedResource is a resource, without subresources, of an aggregated API.
type AggregatedResource struct {
	schema.GroupVersionResource
	metav1.APIResource
}
