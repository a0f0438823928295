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

// Limits of CallAggregated: bytes of a response body, time of a request, and bytes of an error
// message.
const (
	readAggregatedBytes = 4 << 20
	readAggregatedTime  = 10 * time.Second
	refusalBytes        = 256
)

// ErrNotAggregated reports that no APIService points the group version of a path to a Service.
var ErrNotAggregated = errors.New("no APIService points it to a Service")

// ReadAggregated sends a GET for a path to an aggregated API server as user u and returns the JSON
// body. Like a client's request, it is authorized and subject to flow control. path must be
// escaped. A status other than 200 is an error.
func (s *Server) ReadAggregated(ctx context.Context, u api.User, path string, query url.Values) ([]byte, error) {
	body, code, err := s.CallAggregated(ctx, u, http.MethodGet, path, query, nil)
	if err == nil && code != http.StatusOK {
		err = fmt.Errorf("the server answered %d: %s", code, refusal(body))
	}
	if err != nil {
		return nil, err
	}
	return body, nil
}

// CallAggregated sends a request to an aggregated API server as user u and returns the body and
// status code of the response. Like a client's request, it is authorized and subject to flow
// control. path must be escaped. body is JSON, for a PATCH a JSON merge patch. A GET with a limit
// parameter requests PartialObjectMetadata. Without a matching APIService it returns
// ErrNotAggregated.
func (s *Server) CallAggregated(ctx context.Context, u api.User, method, path string, query url.Values, body []byte) ([]byte, int, error) {
	ctx, cancel := context.WithTimeout(ctx, readAggregatedTime)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, method, "https://aggregated"+path+"?"+query.Encode(), bytes.NewReader(body))
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
	a := &aggregatedAnswer{header: http.Header{}, code: http.StatusOK}
	switch served := s.aggregated(a, r, u); {
	case !served:
		return nil, 0, ErrNotAggregated
	case ctx.Err() != nil:
		return nil, 0, fmt.Errorf("the server did not answer in time: %w", ctx.Err())
	case a.tooLong:
		return nil, 0, fmt.Errorf("the server answered more than %d bytes", readAggregatedBytes)
	case a.cut():
		return nil, 0, errors.New("the server's answer was cut off")
	case a.code/100 != 2:
		return a.body.Bytes(), a.code, nil
	}
	if err := decodelimits.CheckJSON(a.body.Bytes(), nil); err != nil {
		return nil, 0, fmt.Errorf("the server's answer: %w", err)
	}
	return a.body.Bytes(), a.code, nil
}

// refusal returns the message of an error response as at most refusalBytes of printable text.
func refusal(body []byte) string {
	text := string(body)
	var status metav1.Status
	if len(body) < 64<<10 && json.Unmarshal(body, &status) == nil && status.Message != "" {
		text = status.Message
	}
	text = strings.ToValidUTF8(text[:min(len(text), refusalBytes)], "")
	return strings.TrimSpace(strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, text))
}

// aggregatedAnswer is an http.ResponseWriter that buffers a response of at most
// readAggregatedBytes.
type aggregatedAnswer struct {
	header  http.Header
	code    int
	body    bytes.Buffer
	tooLong bool
}

// cut reports whether the body has a different length than its Content-Length header.
func (a *aggregatedAnswer) cut() bool {
	n, err := strconv.Atoi(a.header.Get("Content-Length"))
	return err == nil && n != a.body.Len()
}

// Header returns the response headers.
func (a *aggregatedAnswer) Header() http.Header { return a.header }

// WriteHeader stores the status code. It ignores 1xx codes.
func (a *aggregatedAnswer) WriteHeader(code int) {
	if code >= http.StatusOK { // 1xx codes precede the final status
		a.code = code
	}
}

// Write appends to the buffered body. It fails if the body would exceed readAggregatedBytes.
func (a *aggregatedAnswer) Write(p []byte) (int, error) {
	if a.body.Len()+len(p) > readAggregatedBytes {
		a.tooLong = true
		return 0, errors.New("the answer is too long")
	}
	return a.body.Write(p)
}

// DiscoverAggregated returns the resources of all aggregated group versions. A group version is
// marked stale if its API server does not respond.
func (s *Server) DiscoverAggregated(ctx context.Context) []discovery.Remote {
	return s.aggregation.Discover(ctx)
}

// aggregatedResources returns the resources, without subresources, of a kind that an aggregated API
// server serves. If the server does not respond, its last known discovery document is used.
func (s *Server) aggregatedResources(ctx context.Context, gvk schema.GroupVersionKind) []metav1.APIResource {
	var found []metav1.APIResource
	for _, remote := range s.aggregation.Discover(ctx) {
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

// Refusal returns the message of an error response as at most 256 bytes of printable text.
func Refusal(body []byte) string { return refusal(body) }
