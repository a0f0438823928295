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

// What is read of an aggregated API for a part of this replica, and what is told of its refusal.
const (
	readAggregatedBytes = 4 << 20
	readAggregatedTime  = 10 * time.Second
	refusalBytes        = 256
)

// ErrNotAggregated says that no APIService points the group version of a path to a Service.
var ErrNotAggregated = errors.New("no APIService points it to a Service")

// ReadAggregated reads a path of a server in the cluster, as JSON, for a part of this replica that acts as u: on the
// same road as a client's request, with its authorization and its place among the others. The path is escaped.
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

// CallAggregated sends a request with a JSON body to a server in the cluster for a part of this replica that acts as u, on the
// same road as a client's request, and returns the body and the code of the response. The path is escaped. The body of a
// PATCH is a JSON merge patch. A GET with a limit asks for the metadata of a list.
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

// refusal is what a server says of why not, in a few printable words.
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

// aggregatedAnswer keeps an answer, up to its bound.
type aggregatedAnswer struct {
	header  http.Header
	code    int
	body    bytes.Buffer
	tooLong bool
}

// cut says that less came than was announced.
func (a *aggregatedAnswer) cut() bool {
	n, err := strconv.Atoi(a.header.Get("Content-Length"))
	return err == nil && n != a.body.Len()
}

// Header implements http.ResponseWriter.
func (a *aggregatedAnswer) Header() http.Header { return a.header }

// WriteHeader implements http.ResponseWriter.
func (a *aggregatedAnswer) WriteHeader(code int) {
	if code >= http.StatusOK { // the others come before the answer
		a.code = code
	}
}

// Write implements http.ResponseWriter.
func (a *aggregatedAnswer) Write(p []byte) (int, error) {
	if a.body.Len()+len(p) > readAggregatedBytes {
		a.tooLong = true
		return 0, errors.New("the answer is too long")
	}
	return a.body.Write(p)
}

// DiscoverAggregated returns the resources of the group versions that servers in the cluster have. A group version whose server
// does not answer is stale.
func (s *Server) DiscoverAggregated(ctx context.Context) []discovery.Remote {
	return s.aggregation.Discover(ctx)
}

// aggregatedResources returns the resources, without subresources, of a kind that a server in the cluster serves. If the
// server does not answer, its last answer counts.
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

// Refusal returns the message of a response that is not a success, in a few printable words.
func Refusal(body []byte) string { return refusal(body) }
