package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// AggregatedAPIs gives access to aggregated APIs: the group versions for which an APIService names
// a Service of the cluster.
type AggregatedAPIs interface {
	// Discover returns the resources of all aggregated APIs. The map contains the group versions
	// for which the API server did not respond, with the error.
	Discover(ctx context.Context) ([]AggregatedResource, map[schema.GroupVersion]error)
	// Call sends a request for an escaped path to the API server of that path and returns the JSON
	// body of the response. An unsuccessful response is returned as an error of package apierrors
	// with the status code of the response. The body of a PATCH is a JSON merge patch. The API
	// server cannot recognize that a replica has lost the leadership: the caller must call
	// Term.ConfirmLeadership before every call that changes an object.
	Call(ctx context.Context, method, path string, query url.Values, body []byte) ([]byte, error)
}

// AggregatedResource is a resource of an aggregated API. Subresources are not included.
type AggregatedResource struct {
	schema.GroupVersionResource
	metav1.APIResource
}

// Limits of one list of the objects of an aggregated resource.
const (
	aggregatedPage     = 500
	maxAggregatedPages = 1000 // a server may return pages smaller than requested
	maxAggregatedList  = 50000

	// objectMemory is the estimated memory of a listed object in bytes, not counting its strings.
	objectMemory = 400
)

// Path returns the escaped URL path of one object. If name is empty, it returns the path of the
// list of a namespace. If namespace and name are empty, it returns the path of the list of all
// objects.
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

// Supports reports whether the resource supports all of these verbs.
func (r AggregatedResource) Supports(verbs ...string) bool {
	return !slices.ContainsFunc(verbs, func(v string) bool { return !slices.Contains(r.Verbs, v) })
}

// ListAggregated returns the objects of a resource in a namespace, and their estimated memory in
// bytes. The objects contain only the metadata that deletionMetadata keeps. An empty namespace
// selects all namespaces. ListAggregated never returns a partial list: it returns an error if the
// metadata exceeds maxBytes, or if there are too many objects or pages.
func ListAggregated(
	ctx context.Context, a AggregatedAPIs, r AggregatedResource, namespace string, maxBytes int,
) (objs []api.Object, size int, err error) {
	path, query := r.Path(namespace, ""), url.Values{"limit": {strconv.Itoa(aggregatedPage)}}
	for range maxAggregatedPages {
		before := len(objs)
		next, err := listPage(ctx, a, path, query, func(o *metav1.PartialObjectMetadata) error {
			o = deletionMetadata(o)
			size += estimateMemory(o)
			if len(objs) == maxAggregatedList || size > maxBytes {
				return fmt.Errorf("there are more than %d objects with %d bytes of metadata", len(objs), maxBytes)
			}
			objs = append(objs, o)
			return nil
		})
		switch {
		case err != nil:
			return nil, 0, err
		case next == "":
			return objs, size, nil
		case len(objs) == before:
			return nil, 0, fmt.Errorf("listing %s: a page without objects has a continue token", path)
		}
		query.Set("continue", next)
	}
	return nil, 0, fmt.Errorf("listing %s: there are more than %d pages with %d objects", path,
		maxAggregatedPages, len(objs))
}

// errPageLimit is returned by the callback of listPage to stop after aggregatedPage objects.
var errPageLimit = errors.New("there are more objects")

// ListAggregatedPage returns the first objects in the list at path, at most aggregatedPage. The
// objects contain only the metadata that deletionMetadata keeps.
func ListAggregatedPage(ctx context.Context, a AggregatedAPIs, path string) ([]api.Object, error) {
	var objs []api.Object
	_, err := listPage(ctx, a, path, url.Values{"limit": {strconv.Itoa(aggregatedPage)}},
		func(o *metav1.PartialObjectMetadata) error {
			if len(objs) == aggregatedPage {
				return errPageLimit
			}
			objs = append(objs, deletionMetadata(o))
			return nil
		})
	if err != nil && !errors.Is(err, errPageLimit) {
		return nil, err
	}
	return objs, nil
}

// listPage reads one page of a list and calls add with each object until add returns an error. It
// returns the continue token of the next page.
func listPage(
	ctx context.Context, a AggregatedAPIs, path string, query url.Values, add func(*metav1.PartialObjectMetadata) error,
) (next string, err error) {
	body, err := a.Call(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return "", fmt.Errorf("listing %s: %w", path, err)
	}
	if next, err = decodeList(json.NewDecoder(bytes.NewReader(body)), add); err != nil {
		return "", fmt.Errorf("listing %s: %w", path, err)
	}
	return next, nil
}

// decodeList decodes a list and calls add with each object. It decodes one object at a time,
// because a short JSON text may contain very many objects. It returns the continue token of the
// list.
func decodeList(dec *json.Decoder, add func(*metav1.PartialObjectMetadata) error) (next string, err error) {
	if err := expectDelim(dec, '{'); err != nil {
		return "", err
	}
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return "", err
		}
		switch key {
		case "items":
			err = decodeItems(dec, add)
		case "metadata":
			var meta metav1.ListMeta
			err = dec.Decode(&meta)
			next = meta.Continue
		default:
			var other json.RawMessage
			err = dec.Decode(&other)
		}
		if err != nil {
			return "", err
		}
	}
	return next, expectDelim(dec, '}')
}

func decodeItems(dec *json.Decoder, add func(*metav1.PartialObjectMetadata) error) error {
	first, err := dec.Token()
	if err != nil || first == nil { // the items are null
		return err
	}
	if first != json.Delim('[') {
		return fmt.Errorf("the items of the list start with %v instead of [", first)
	}
	for dec.More() {
		var o metav1.PartialObjectMetadata
		if err := dec.Decode(&o); err != nil {
			return err
		}
		if err := add(&o); err != nil {
			return err
		}
	}
	return expectDelim(dec, ']')
}

func expectDelim(dec *json.Decoder, want json.Delim) error {
	got, err := dec.Token()
	if err == nil && got != want {
		err = fmt.Errorf("the list has %v instead of %v", got, want)
	}
	return err
}

// deletionMetadata returns a new object with the metadata of o that garbage collection and the
// deletion of namespaces need.
func deletionMetadata(o *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion,
		DeletionTimestamp: o.DeletionTimestamp, Finalizers: o.Finalizers, OwnerReferences: o.OwnerReferences,
	}}
}

func estimateMemory(o *metav1.PartialObjectMetadata) int {
	n := objectMemory + len(o.Namespace) + len(o.Name) + len(o.UID) + len(o.ResourceVersion)
	for _, f := range o.Finalizers {
		n += 16 + len(f)
	}
	for _, r := range o.OwnerReferences {
		n += 96 + len(r.APIVersion) + len(r.Kind) + len(r.Name) + len(r.UID)
	}
	return n
}
