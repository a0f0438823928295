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

// What is asked of a server on this API's own behalf.
const (
	askTime      = 5 * time.Second
	maxDiscovery = 2 << 20
	maxKept      = 32 << 20 // of all discovery documents together, as they were sent
	maxIndex     = 1 << 20
	maxResources = 2000 // of one group version
)

// itself is as whom servers are asked whether they are there: nobody may be kept from being found available by rules.
var itself = api.User{Name: "system:kube-aggregator", Groups: []string{api.GroupMasters}}

// reader is as whom documents are read that all may read who have authenticated.
var reader = api.User{Name: "system:aggregator", Groups: []string{api.GroupAuthenticated}}

// get asks the server for a document of at most limit bytes.
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
	if ctx.Err() != nil { // what is heard now the server may have said because it saw its time end
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

// available is this replica's own view: what the leader found, or, where that is no, what it sees itself.
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

// resources is what a server says of its group version.
type resources struct {
	list []metav1.APIResource
	size int64 // of the document
}

// readResources asks the server what it has.
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

// keep counts a document of size bytes in the place of the one that was kept of the server; false when all of them
// would be too large.
func (l *Layer) keep(r *remote, size int64) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.remotes[r.name] != r || l.kept-r.kept+size > maxKept {
		return false
	}
	l.kept, r.kept = l.kept-r.kept+size, size
	return true
}

// Discover is what the servers in the cluster say of themselves, those that do not answer by what they said last.
func (l *Layer) Discover(ctx context.Context) []discovery.Remote {
	remotes := l.Remotes(ctx)
	out := make([]discovery.Remote, len(remotes))
	l.settle(ctx, remotes, func(i int, r *remote, s *apiregistrationv1.APIService) <-chan struct{} {
		is := look(l, r, &r.discovery, s, l.readResources(r))
		// The leader's word counts until this replica has heard otherwise since.
		out[i] = discovery.Remote{GV: r.gv(), Stale: !is.current || !isAvailable(s) && is.version != s.ResourceVersion}
		if is.good {
			out[i].Resources = is.value.list
		}
		return is.soon
	})
	return out
}

// Index is where the OpenAPI v3 documents of the servers in the cluster stand, by "apis/GROUP/VERSION"; those that do
// not answer have none. What a server says of versions that are not its own is passed over.
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

// readIndex asks for the index, of which the hash is kept that tells one document from the next.
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

// Document returns the server whose OpenAPI v3 document a path names.
func (l *Layer) Document(ctx context.Context, path string) (*remote, bool) {
	where, ok := strings.CutPrefix(path, openAPI+"/")
	if !ok || strings.Count(where, "/") > 2 {
		return nil, false
	}
	return l.Lookup(ctx, "/"+where)
}
