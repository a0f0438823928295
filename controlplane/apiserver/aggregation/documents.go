package aggregation

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
)

// Limits of the requests that this server itself sends to aggregated API servers: duration, bytes
// of documents, and number of resources.
const (
	requestTimeout   = 5 * time.Second
	maxDiscovery     = 2 << 20
	maxDocumentBytes = 32 << 20 // of all cached discovery documents, as received
	maxIndex         = 1 << 20
	maxResources     = 2000 // of one group version
)

// availabilityUser is the user as which this server requests discovery documents to check
// availability. It is an administrator, so that no RBAC rule makes a server look unavailable.
var availabilityUser = api.User{Name: "system:kube-aggregator", Groups: []string{api.GroupMasters}}

// documentUser is the user as which this server requests OpenAPI documents, which every
// authenticated user may read.
var documentUser = api.User{Name: "system:aggregator", Groups: []string{api.GroupAuthenticated}}

// fetchDocument requests a document as user u. It returns an error if the document is longer than
// limit bytes. If limit is 0, it checks only the status code and returns nil.
func (r *remote) fetchDocument(ctx context.Context, path, accept string, u api.User, limit int64) ([]byte, error) {
	if r.err != nil {
		return nil, r.err
	}
	target := r.base
	target.Path = path
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept", accept)
	setUserHeaders(req.Header, u)
	resp, err := r.pooled.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("failing or missing response from %s: %w", target.String(), err)
	}
	defer resp.Body.Close()
	if ctx.Err() != nil { // the server may have responded because its own deadline expired
		return nil, fmt.Errorf("failing or missing response from %s: %w", target.String(), context.Cause(ctx))
	}
	if resp.StatusCode < 200 || resp.StatusCode >= 300 {
		return nil, fmt.Errorf("failing or missing response from %s: bad status from %s: %d", target.String(),
			target.String(), resp.StatusCode)
	}
	if limit == 0 {
		return nil, nil
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the response of %s: %w", target.String(), err)
	case int64(len(data)) > limit:
		return nil, fmt.Errorf("the response of %s exceeds %d bytes", target.String(), limit)
	}
	return data, nil
}

// isServerAvailable reports whether the server is available: either its Available condition is
// true, or this replica's own last request succeeded.
func (l *Layer) isServerAvailable(ctx context.Context, r *remote) bool {
	s, ok := l.cfg.Cached(ctx, r.name)
	if !ok || isAvailable(s) {
		return ok
	}
	return awaitDocument(ctx, l, r, &r.discovery, s, l.readResources(r)).current
}

func isAvailable(s *apiregistrationv1.APIService) bool {
	for _, c := range s.Status.Conditions {
		if c.Type == apiregistrationv1.Available {
			return c.Status == apiregistrationv1.ConditionTrue
		}
	}
	return false
}

// resources is the content of an API server's discovery document.
type resources struct {
	list []metav1.APIResource
	size int64 // of the document
}

// readResources returns a function that requests and parses the discovery document.
func (l *Layer) readResources(r *remote) func(context.Context) (*resources, error) {
	return func(ctx context.Context) (*resources, error) {
		data, err := r.fetchDocument(ctx, r.discoveryPath(), "application/json", availabilityUser, maxDiscovery)
		if err != nil {
			return nil, err
		}
		var list metav1.APIResourceList
		if err := json.Unmarshal(data, &list); err != nil {
			return nil, fmt.Errorf("decoding the discovery document of %s: %w", r.name, err)
		}
		if len(list.APIResources) > maxResources {
			return nil, fmt.Errorf("the discovery document of %s has more than %d resources", r.name, maxResources)
		}
		if !l.reserveDocument(r, int64(len(data))) {
			return nil,
				fmt.Errorf("the discovery documents of all aggregated APIs exceed %d bytes with the document of %s",
					maxDocumentBytes, r.name)
		}
		return &resources{list.APIResources, int64(len(data))}, nil
	}
}

// reserveDocument reserves size bytes for the server's discovery document, in place of its previous
// document. It returns false if the total would exceed maxDocumentBytes.
func (l *Layer) reserveDocument(r *remote, size int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remotes[r.name] != r || l.documentBytes-r.documentBytes+size > maxDocumentBytes {
		return false
	}
	l.documentBytes, r.documentBytes = l.documentBytes-r.documentBytes+size, size
	return true
}

// Discover returns the resources of all aggregated group versions. For a server that does not
// respond, it returns the last known resources and marks them stale.
func (l *Layer) Discover(ctx context.Context) []discovery.Remote {
	remotes := l.Remotes(ctx)
	out := make([]discovery.Remote, len(remotes))
	l.visitDocuments(ctx, remotes, func(i int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		is := lookUpDocument(l, r, &r.discovery, s, l.readResources(r))
		// A condition that is not True applies only until this replica has received a response
		// after it.
		out[i] = discovery.Remote{GV: r.groupVersion(),
			Stale: !is.current || !isAvailable(s) && is.version != s.ResourceVersion}
		if is.hasValue {
			out[i].Resources = is.value.list
		}
		return is.pendingFirst
	})
	return out
}

// OpenAPIIndex returns the URLs of the aggregated OpenAPI v3 documents; the keys are
// "apis/GROUP/VERSION". It omits servers that do not respond. It ignores entries in a server's
// index for other group versions than the server's own.
func (l *Layer) OpenAPIIndex(ctx context.Context) map[string]string {
	remotes := l.Remotes(ctx)
	out := make(map[string]string, len(remotes))
	l.visitDocuments(ctx, remotes, func(_ int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		if !isAvailable(s) {
			if is := lookUpDocument(l, r, &r.discovery, s, l.readResources(r)); !is.current {
				return is.pendingFirst
			}
		}
		is := lookUpDocument(l, r, &r.index, s, r.readIndex)
		where := strings.TrimPrefix(r.discoveryPath(), "/")
		if location, ok := is.value[where]; is.hasValue && ok {
			out[where] = location
		}
		return is.pendingFirst
	})
	return out
}

// readIndex requests the server's OpenAPI v3 index. It returns the URL of the document for the
// server's group version; the query of the URL contains the hash of the document.
func (r *remote) readIndex(ctx context.Context) (map[string]string, error) {
	data, err := r.fetchDocument(ctx, openAPI, "application/json", documentUser, maxIndex)
	if err != nil {
		return nil, err
	}
	var index struct {
		Paths map[string]struct {
			URL string `json:"serverRelativeURL"`
		} `json:"paths"`
	}
	if err := json.Unmarshal(data, &index); err != nil {
		return nil, fmt.Errorf("decoding the OpenAPI index of %s: %w", r.name, err)
	}
	where := strings.TrimPrefix(r.discoveryPath(), "/")
	one, ok := index.Paths[where]
	if !ok {
		return nil, nil
	}
	u, err := url.Parse(one.URL)
	if err != nil || len(u.RawQuery) > maxQuery {
		return nil, fmt.Errorf("the OpenAPI index of %s: %q is not a URL", r.name, api.Truncate(one.URL, maxQuery))
	}
	return map[string]string{where: (&url.URL{Path: openAPI + "/" + where, RawQuery: u.RawQuery}).String()}, nil
}

const (
	openAPI  = "/openapi/v3"
	maxQuery = 512
)

// Document returns the API server that serves an OpenAPI v3 document, given the path of the
// document. It returns false if no aggregated API server serves it.
func (l *Layer) Document(ctx context.Context, path string) (*remote, bool) {
	where, ok := strings.CutPrefix(path, openAPI+"/")
	if !ok || strings.Count(where, "/") > 2 {
		return nil, false
	}
	return l.Lookup(ctx, "/"+where)
}
