package apiserver

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/decodelimits"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
)

// Limits of Aggregated.Call: bytes of a response body, duration of a request, and bytes of an error
// message.
const (
	MaxAggregatedBytes = 4 << 20
	aggregatedTimeout  = 10 * time.Second
	maxErrorText       = 256
)

// ErrNotAggregated is returned if no APIService routes the group version of a path to a Service.
var ErrNotAggregated = errors.New("no APIService routes the group version to a Service")

// Get sends a GET for a path to an aggregated API server as user u and returns the JSON body. The
// request is authorized and subject to flow control, like a request that a client sends. path must
// be escaped. A status other than 200 is an error.
func (g *Aggregated) Get(ctx context.Context, u api.User, path string, query url.Values) ([]byte, error) {
	body, code, err := g.Call(ctx, u, http.MethodGet, path, query, nil)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("the server responded with status %d: %s", code, errorText(body))
	}
	if err != nil {
		return nil, err
	}
	return body, nil
}

// Call sends a request to an aggregated API server as user u and returns the body and status code
// of the response. The request is authorized and subject to flow control, like a request that a
// client sends. path must be escaped. body is JSON; for a PATCH, it is a JSON merge patch. A GET
// with a limit parameter requests PartialObjectMetadata. If no APIService routes the path to a
// Service, Call returns ErrNotAggregated.
func (g *Aggregated) Call(ctx context.Context, u api.User, method, path string, query url.Values, body []byte) (
	[]byte, int, error,
) {
	ctx, cancel := context.WithTimeout(ctx, aggregatedTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "https://aggregated"+path+"?"+query.Encode(),
		bytes.NewReader(body))
	if err != nil {
		return nil, 0, fmt.Errorf("%s of %s: %w", method, path, err)
	}
	r.Header.Set("Accept", "application/json")
	if method == http.MethodGet && query.Has("limit") {
		r.Header.Set("Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json")
	}
	switch {
	case len(body) > 0 && method == http.MethodPatch:
		r.Header.Set("Content-Type", "application/merge-patch+json")
	case len(body) > 0:
		r.Header.Set("Content-Type", "application/json")
	}
	a := &responseBuffer{header: http.Header{}, code: http.StatusOK}
	switch served := g.serveAggregated(a, r, u); {
	case !served:
		return nil, 0, ErrNotAggregated
	case ctx.Err() != nil:
		return nil, 0, fmt.Errorf("the server did not respond in time: %w", ctx.Err())
	case a.tooLong:
		return nil, 0, fmt.Errorf("the response of the server exceeds %d bytes", MaxAggregatedBytes)
	case a.isTruncated():
		return nil, 0, errors.New("the response of the server is incomplete")
	case a.code/100 != 2:
		return a.body.Bytes(), a.code, nil
	}
	if err := decodelimits.CheckJSON(a.body.Bytes(), nil); err != nil {
		return nil, 0, fmt.Errorf("decoding the response of the server: %w", err)
	}
	return a.body.Bytes(), a.code, nil
}

// errorText returns the message of an error response as at most maxErrorText of printable text.
func errorText(body []byte) string {
	text := string(body)
	var status metav1.Status
	if len(body) < 64<<10 && json.Unmarshal(body, &status) == nil && status.Message != "" {
		text = status.Message
	}
	text = strings.ToValidUTF8(text[:min(len(text), maxErrorText)], "")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text))
}

// responseBuffer is an http.ResponseWriter that buffers a response of at most
// MaxAggregatedBytes.
type responseBuffer struct {
	header  http.Header
	code    int
	body    bytes.Buffer
	tooLong bool
}

// isTruncated reports whether the body has a different length than its Content-Length header.
func (a *responseBuffer) isTruncated() bool {
	n, err := strconv.Atoi(a.header.Get("Content-Length"))
	return err == nil && n != a.body.Len()
}

// Header returns the response headers.
func (a *responseBuffer) Header() http.Header { return a.header }

// WriteHeader stores the status code. It ignores 1xx codes.
func (a *responseBuffer) WriteHeader(code int) {
	if code >= http.StatusOK { // 1xx codes precede the final status
		a.code = code
	}
}

// Write appends to the buffered body. It fails if the body would exceed MaxAggregatedBytes.
func (a *responseBuffer) Write(p []byte) (int, error) {
	if a.body.Len()+len(p) > MaxAggregatedBytes {
		a.tooLong = true
		return 0, errors.New("the response is too long")
	}
	return a.body.Write(p)
}

// Discover returns the resources of all aggregated group versions. A group version is
// marked stale if its API server does not respond.
func (g *Aggregated) Discover(ctx context.Context) []discovery.Remote {
	return g.layer.Discover(ctx)
}

// ResourcesOf returns the resources, without subresources, of a kind that an aggregated API
// server serves. If the server does not respond, its last known discovery document is used.
func (g *Aggregated) ResourcesOf(ctx context.Context, gvk schema.GroupVersionKind) []metav1.APIResource {
	var found []metav1.APIResource
	for _, remote := range g.layer.Discover(ctx) {
		if remote.GV != gvk.GroupVersion() {
			continue
		}
		for _, res := range remote.Resources {
			if res.Kind == gvk.Kind && !strings.Contains(res.Name, "/") {
				res.Group, res.Version = gvk.Group, gvk.Version
				found = append(found, res)
			}
		}
	}
	return found
}

// ErrorText returns the message of an error response as at most 256 bytes of printable text.
func ErrorText(body []byte) string { return errorText(body) }
