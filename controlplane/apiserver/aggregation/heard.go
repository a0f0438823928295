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

// Limits of this server's own requests to API servers: time, and bytes of documents.
const (
	askTime      = 5 * time.Second
	maxDiscovery = 2 << 20
	maxKept      = 32 << 20 // of all cached discovery documents, as received
	maxIndex     = 1 << 20
	maxResources = 2000 // of one group version
)

// itself is the user of availability checks. It is an administrator, so that no RBAC rule makes a
// server look unavailable.
var itself = api.User{Name: "system:kube-aggregator", Groups: []string{api.GroupMasters}}

// reader is the user of requests for documents that every authenticated user may read.
var reader = api.User{Name: "system:aggregator", Groups: []string{api.GroupAuthenticated}}

// get requests a document as user u and returns at most limit bytes. A longer document is an error.
// With limit 0, it checks the status code only.
func (r *remote) get(ctx context.Context, path, accept string, u api.User, limit int64) ([]byte, error) {
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
	identify(req.Header, u)
	resp, err := r.many.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("failing or missing response from %s: %w", target.String(), err)
	}
	defer resp.Body.Close()
	if ctx.Err() != nil { // the server may have responded because its own deadline expired
		return nil, fmt.Errorf("failing or missing response from %s: %w", target.String(), context.Cause(ctx))
	}
	if resp.StatusCode < 200 || resp.StatusCode >= 300 {
		return nil, fmt.Errorf("failing or missing response from %s: bad status from %s: %d", target.String(), target.String(), resp.StatusCode)
	}
	if limit == 0 {
		return nil, nil
	}
	data, err := io.ReadAll(io.LimitReader(resp.Body, limit+1))
	switch {
	case err != nil:
		return nil, fmt.Errorf("reading the answer from %s: %w", target.String(), err)
	case int64(len(data)) > limit:
		return nil, fmt.Errorf("the answer from %s is larger than %d bytes", target.String(), limit)
	}
	return data, nil
}

// available reports whether the server is available: according to the Available condition, or else
// according to this replica's own last request.
func (l *Layer) available(ctx context.Context, r *remote) bool {
	s, ok := l.cfg.Cached(ctx, r.name)
	if !ok || isAvailable(s) {
		return ok
	}
	return known(ctx, l, r, &r.discovery, s, l.readResources(r)).current
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
		data, err := r.get(ctx, r.path(), "application/json", itself, maxDiscovery)
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
		if !l.keep(r, int64(len(data))) {
			return nil, fmt.Errorf("the discovery documents of all aggregated APIs have more than %d bytes with that of %s", maxKept, r.name)
		}
		return &resources{list.APIResources, int64(len(data))}, nil
	}
}

// keep reserves size bytes for the server's discovery document, in place of its previous document.
// It returns false if the total would exceed maxKept.
func (l *Layer) keep(r *remote, size int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remotes[r.name] != r || l.kept-r.kept+size > maxKept {
		return false
	}
	l.kept, r.kept = l.kept-r.kept+size, size
	return true
}

// Discover returns the resources of all aggregated group versions. For a server that does not
// respond, it returns the last known resources and marks them stale.
func (l *Layer) Discover(ctx context.Context) []discovery.Remote {
	remotes := l.Remotes(ctx)
	out := make([]discovery.Remote, len(remotes))
	l.settle(ctx, remotes, func(i int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		is := look(l, r, &r.discovery, s, l.readResources(r))
		// A condition that is not True counts until this replica has received a response since.
		out[i] = discovery.Remote{GV: r.gv(), Stale: !is.current || !isAvailable(s) && is.version != s.ResourceVersion}
		if is.good {
			out[i].Resources = is.value.list
		}
		return is.soon
	})
	return out
}

// Index returns the URLs of the aggregated OpenAPI v3 documents by "apis/GROUP/VERSION". Servers
// that do not respond are omitted. A server's entries for group versions of other servers are
// ignored.
func (l *Layer) Index(ctx context.Context) map[string]string {
	remotes := l.Remotes(ctx)
	out := make(map[string]string, len(remotes))
	l.settle(ctx, remotes, func(_ int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		if !isAvailable(s) {
			if is := look(l, r, &r.discovery, s, l.readResources(r)); !is.current {
				return is.soon
			}
		}
		is := look(l, r, &r.index, s, r.readIndex)
		where := strings.TrimPrefix(r.path(), "/")
		if url, ok := is.value[where]; is.good && ok {
			out[where] = url
		}
		return is.soon
	})
	return out
}

// readIndex requests the server's OpenAPI v3 index. It returns the URL of the document of the
// server's group version, with the hash in its query.
func (r *remote) readIndex(ctx context.Context) (map[string]string, error) {
	data, err := r.get(ctx, openAPI, "application/json", reader, maxIndex)
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
	where := strings.TrimPrefix(r.path(), "/")
	one, ok := index.Paths[where]
	if !ok {
		return nil, nil
	}
	u, err := url.Parse(one.URL)
	if err != nil || len(u.RawQuery) > maxQuery {
		return nil, fmt.Errorf("the OpenAPI index of %s: %q is no URL", r.name, api.Clip(one.URL, maxQuery))
	}
	return map[string]string{where: (&url.URL{Path: openAPI + "/" + where, RawQuery: u.RawQuery}).String()}, nil
}

const (
	openAPI  = "/openapi/v3"
	maxQuery = 512
)

// Document returns the API server for the path of an OpenAPI v3 document, or false if no API server
// has it.
func (l *Layer) Document(ctx context.Context, path string) (*remote, bool) {
	where, ok := strings.CutPrefix(path, openAPI+"/")
	if !ok || strings.Count(where, "/") > 2 {
		return nil, false
	}
	return l.Lookup(ctx, "/"+where)
}
