package kubelet

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"keelson.dev/keelson/agent"
)

// How long decisions about clients are cached, as in the kubelet: for an allowed, a refused and an
// unauthenticated client. A token that is not authenticated may soon become valid, because a
// replica of the control plane may not have received it yet.
const (
	allowedFor = 2 * time.Minute
	refusedFor = 30 * time.Second
	unknownFor = 5 * time.Second
	// nodeFor is the cache duration of a decision about a node's certificate. It limits how long a
	// revoked certificate is accepted.
	nodeFor     = 2 * time.Second
	maxIdentity = 256 // maximum number of groups in a certificate
)

// authorizeRequest reports whether the client of a request is authorized for its path. Otherwise it
// writes the error response.
func (s *Server) authorizeRequest(w http.ResponseWriter, r *http.Request) bool {
	q, ok := s.identifyClient(r)
	if !ok {
		writeUnauthorized(w, "present a client certificate of the cluster or a bearer token")
		return false
	}
	q.Verb, q.Subresources = verbs[r.Method], requiredSubresources(r.URL.Path)
	if q.Verb == "" {
		http.Error(w, "this node serves GET and HEAD requests only", http.StatusMethodNotAllowed)
		return false
	}
	v, err := s.reviewCached(r.Context(), q)
	switch {
	case errors.Is(err, errTooManyReviews):
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusTooManyRequests)
	case err != nil:
		s.log.Warn("a client could not be authorized", "source", r.RemoteAddr, "err", err)
		w.Header().Set("Retry-After", "5")
		http.Error(w, "the control plane authorizes clients and did not respond to this node: try again",
			http.StatusServiceUnavailable)
	case !v.Authenticated:
		writeUnauthorized(w, "the token was not issued by this cluster or has expired, or the certificate was revoked")
	case !v.Allowed:
		http.Error(w, fmt.Sprintf("Forbidden (user=%s, verb=%s, resource=nodes, subresource(s)=%v)", v.User, q.Verb,
			q.Subresources),
			http.StatusForbidden)
	default:
		return true
	}
	return false
}

func writeUnauthorized(w http.ResponseWriter, why string) {
	w.Header().Set("WWW-Authenticate", "Bearer")
	http.Error(w, "Unauthorized: "+why, http.StatusUnauthorized)
}

var verbs = map[string]string{http.MethodGet: "get", http.MethodHead: "get", http.MethodPost: "create",
	http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}

// requiredSubresources returns the subresources of the Node that authorize access to a URL path, as
// in the kubelet. Access to one of them is sufficient.
func requiredSubresources(path string) []string {
	below := func(root string) bool { return path == root || strings.HasPrefix(path, root+"/") }
	switch {
	case below("/stats"):
		return []string{"stats"}
	case below("/metrics"):
		return []string{"metrics"}
	case below("/logs"):
		return []string{"log"}
	case below("/healthz"):
		return []string{"healthz", "proxy"}
	case below("/configz"):
		return []string{"configz", "proxy"}
	case below("/pods"), below("/runningpods"):
		return []string{"pods", "proxy"}
	}
	return []string{"proxy"}
}

// identifyClient returns an AccessReview with the identity of the request's client. The identity
// comes from the client's certificate, if the cluster issued it, or from a bearer token. ok is
// false if the client presents neither.
func (s *Server) identifyClient(r *http.Request) (q agent.AccessReview, ok bool) {
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		if cas := s.cfg.ServerTrust.ClientCAs(); cas != nil {
			leaf := r.TLS.PeerCertificates[0]
			between := x509.NewCertPool()
			for _, c := range r.TLS.PeerCertificates[1:] {
				between.AddCert(c)
			}
			_, err := leaf.Verify(x509.VerifyOptions{Roots: cas, Intermediates: between,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
			if user, groups := leaf.Subject.CommonName, leaf.Subject.Organization; err == nil && user != "" &&
				len(groups) <= maxIdentity {
				return agent.AccessReview{User: user, Groups: append(slices.Clone(groups), "system:authenticated"),
					Certificate: leaf.Raw}, true
			}
		}
	}
	kind, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); strings.EqualFold(kind, "Bearer") && token != "" {
		return agent.AccessReview{Token: token}, true
	}
	return agent.AccessReview{}, false
}

// nodeUserPrefix is the prefix of the user names of nodes. A node's certificate can be revoked, so
// decisions about it are cached for nodeFor only.
const nodeUserPrefix = "system:node:"

var errTooManyReviews = errors.New("the node performs its maximum number of concurrent reviews: try again")

// reviewCached returns the decision about a review, from the cache or from the control plane.
func (s *Server) reviewCached(ctx context.Context, q agent.AccessReview) (agent.AccessDecision, error) {
	key := reviewKey(q)
	if v, ok := s.decisions.Get(key, time.Now()); ok {
		return v, nil
	}
	ctx, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	select {
	case s.reviewSlots <- struct{}{}:
		defer func() { <-s.reviewSlots }()
	case <-ctx.Done():
		return agent.AccessDecision{}, errTooManyReviews
	}
	v, err := s.cfg.ServerTrust.ReviewAccess(ctx, q)
	if err != nil {
		return v, err
	}
	life := allowedFor
	switch {
	case !v.Authenticated:
		life = unknownFor
	case !v.Allowed:
		life = refusedFor
	}
	if strings.HasPrefix(q.User, nodeUserPrefix) {
		life = min(life, nodeFor)
	}
	s.decisions.Put(key, v, int64(len(v.User)+len(v.Reason)), time.Now().Add(life))
	return v, nil
}

// reviewKey returns the cache key of a review. It is a hash, so that no tokens are stored.
func reviewKey(q agent.AccessReview) (out [32]byte) {
	h := sha256.New()
	for _, part := range slices.Concat([]string{q.Token, q.User, string(q.Certificate), q.Verb,
		strings.Join(q.Subresources, ",")}, q.Groups) {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	h.Sum(out[:0])
	return out
}
