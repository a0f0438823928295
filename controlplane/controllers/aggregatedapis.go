package controllers

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
	aggregatedPage     = 500
	maxAggregatedPages = 1000 // a server may return smaller pages
	maxAggregatedList  = 50000

	// objectMemory is what a listed object takes besides its texts.
	objectMemory = 400
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

// ListAggregated returns of all objects of a resource, or of one namespace unless it is empty, the metadata that decides about
// their deletion, and about how much memory it takes. It never returns a part of the objects: a list with more than maxBytes
// of such metadata, or with too many objects or pages, is an error.
func ListAggregated(
	ctx context.Context, a AggregatedAPIs, r AggregatedResource, namespace string, maxBytes int,
) (objs []api.Object, bytes int, err error) {
	path, query := r.Path(namespace, ""), url.Values{"limit": {strconv.Itoa(aggregatedPage)}}
	for range maxAggregatedPages {
		before := len(objs)
		next, err := listPage(ctx, a, path, query, func(o *metav1.PartialObjectMetadata) error {
			o = ownership(o)
			bytes += memoryOf(o)
			if len(objs) == maxAggregatedList || bytes > maxBytes {
				return fmt.Errorf("there are more than %d objects with %d bytes of metadata", len(objs), maxBytes)
			}
			objs = append(objs, o)
			return nil
		})
		switch {
		case err != nil:
			return nil, 0, err
		case next == "":
			return objs, bytes, nil
		case len(objs) == before:
			return nil, 0, fmt.Errorf("listing %s: a page without objects names another page", path)
		}
		query.Set("continue", next)
	}
	return nil, 0, fmt.Errorf("listing %s: there are more than %d pages with %d objects", path, maxAggregatedPages, len(objs))
}

// errEnough ends the decoding of a page.
var errEnough = errors.New("there are more objects")

// ListAggregatedPage returns the metadata of the first objects at the path of a list, at most a page of them.
func ListAggregatedPage(ctx context.Context, a AggregatedAPIs, path string) ([]api.Object, error) {
	var objs []api.Object
	_, err := listPage(ctx, a, path, url.Values{"limit": {strconv.Itoa(aggregatedPage)}}, func(o *metav1.PartialObjectMetadata) error {
		if len(objs) == aggregatedPage {
			return errEnough
		}
		objs = append(objs, ownership(o))
		return nil
	})
	if err != nil && !errors.Is(err, errEnough) {
		return nil, err
	}
	return objs, nil
}

// listPage calls add with each object of one page of a list until add fails, and returns the token of the next page.
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

// decodeList decodes a list one object after the other: a short text may hold very many objects.
func decodeList(dec *json.Decoder, add func(*metav1.PartialObjectMetadata) error) (next string, err error) {
	if err := expect(dec, '{'); err != nil {
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
	return next, expect(dec, '}')
}

func decodeItems(dec *json.Decoder, add func(*metav1.PartialObjectMetadata) error) error {
	first, err := dec.Token()
	if err != nil || first == nil { // null
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
	return expect(dec, ']')
}

func expect(dec *json.Decoder, want json.Delim) error {
	got, err := dec.Token()
	if err == nil && got != want {
		err = fmt.Errorf("the list has %v instead of %v", got, want)
	}
	return err
}

// ownership returns an object with the part of o's metadata that decides about its deletion.
func ownership(o *metav1.PartialObjectMetadata) *metav1.PartialObjectMetadata {
	return &metav1.PartialObjectMetadata{ObjectMeta: metav1.ObjectMeta{
		Namespace: o.Namespace, Name: o.Name, UID: o.UID, ResourceVersion: o.ResourceVersion,
		DeletionTimestamp: o.DeletionTimestamp, Finalizers: o.Finalizers, OwnerReferences: o.OwnerReferences,
	}}
}

func memoryOf(o *metav1.PartialObjectMetadata) int {
	n := objectMemory + len(o.Namespace) + len(o.Name) + len(o.UID) + len(o.ResourceVersion)
	for _, f := range o.Finalizers {
		n += 16 + len(f)
	}
	for _, r := range o.OwnerReferences {
		n += 96 + len(r.APIVersion) + len(r.Kind) + len(r.Name) + len(r.UID)
	}
	return n
}
