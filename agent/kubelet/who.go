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

// How long verdicts are remembered: as long as kubelet remembers a token, and a refusal. A token that is not
// believed may be believed a moment later, when it was made by a replica that is ahead.
const (
	allowedFor = 2 * time.Minute
	refusedFor = 30 * time.Second
	unknownFor = 5 * time.Second
	// nodeFor is how long a verdict on a node's certificate is cached, which is the longest that a revoked
	// certificate is accepted.
	nodeFor     = 2 * time.Second
	maxIdentity = 256 // groups of a certificate
)

// admit says whether who asks may, and answers those who may not.
func (s *Server) admit(w http.ResponseWriter, r *http.Request) bool {
	q, ok := s.who(r)
	if !ok {
		unauthorized(w, "show a client certificate of the cluster, or a bearer token")
		return false
	}
	q.Verb, q.Subresources = verbs[r.Method], subresources(r.URL.Path)
	if q.Verb == "" {
		http.Error(w, "what this node serves is read with GET", http.StatusMethodNotAllowed)
		return false
	}
	v, err := s.verdict(r.Context(), q)
	switch {
	case errors.Is(err, errCrowd):
		w.Header().Set("Retry-After", "1")
		http.Error(w, err.Error(), http.StatusTooManyRequests)
	case err != nil:
		s.log.Warn("who asks could not be judged", "source", r.RemoteAddr, "err", err)
		w.Header().Set("Retry-After", "5")
		http.Error(w, "who asks, and what they may do, is judged by the control plane, which did not answer this node: try again",
			http.StatusServiceUnavailable)
	case !v.Authenticated:
		unauthorized(w, "the token is not one of this cluster's or has expired, or the certificate was revoked")
	case !v.Allowed:
		http.Error(w, fmt.Sprintf("Forbidden (user=%s, verb=%s, resource=nodes, subresource(s)=%v)", v.User, q.Verb, q.Subresources),
			http.StatusForbidden)
	default:
		return true
	}
	return false
}

func unauthorized(w http.ResponseWriter, why string) {
	w.Header().Set("WWW-Authenticate", "Bearer")
	http.Error(w, "Unauthorized: "+why, http.StatusUnauthorized)
}

var verbs = map[string]string{http.MethodGet: "get", http.MethodHead: "get", http.MethodPost: "create",
	http.MethodPut: "update", http.MethodPatch: "patch", http.MethodDelete: "delete"}

// subresources are those of the Node of which any gives the right to a path, as with kubelet.
func subresources(path string) []string {
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

// who reads who asks from the request: a certificate of the cluster first, then a token.
func (s *Server) who(r *http.Request) (q agent.Review, ok bool) {
	if r.TLS != nil && len(r.TLS.PeerCertificates) > 0 {
		if cas := s.cfg.Trust.Authorities(); cas != nil {
			leaf := r.TLS.PeerCertificates[0]
			between := x509.NewCertPool()
			for _, c := range r.TLS.PeerCertificates[1:] {
				between.AddCert(c)
			}
			_, err := leaf.Verify(x509.VerifyOptions{Roots: cas, Intermediates: between,
				KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
			if user, groups := leaf.Subject.CommonName, leaf.Subject.Organization; err == nil && user != "" && len(groups) <= maxIdentity {
				return agent.Review{User: user, Groups: append(slices.Clone(groups), "system:authenticated"),
					Certificate: leaf.Raw}, true
			}
		}
	}
	kind, token, _ := strings.Cut(r.Header.Get("Authorization"), " ")
	if token = strings.TrimSpace(token); strings.EqualFold(kind, "Bearer") && token != "" {
		return agent.Review{Token: token}, true
	}
	return agent.Review{}, false
}

// nodeUserPrefix begins the user names of nodes, whose certificates can be revoked.
const nodeUserPrefix = "system:node:"

var errCrowd = errors.New("the node has as many reviewed as it does at once: try again")

// verdict asks the control plane, unless it has answered the same lately.
func (s *Server) verdict(ctx context.Context, q agent.Review) (agent.Verdict, error) {
	key := sum(q)
	if v, ok := s.verdicts.Get(key, time.Now()); ok {
		return v, nil
	}
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	select {
	case s.reviews <- struct{}{}:
		defer func() { <-s.reviews }()
	case <-ctx.Done():
		return agent.Verdict{}, errCrowd
	}
	v, err := s.cfg.Trust.Review(ctx, q)
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
	s.verdicts.Put(key, v, int64(len(v.User)+len(v.Reason)), time.Now().Add(life))
	return v, nil
}

// sum tells reviews apart; no token is kept.
func sum(q agent.Review) (out [32]byte) {
	h := sha256.New()
	for _, part := range slices.Concat([]string{q.Token, q.User, string(q.Certificate), q.Verb, strings.Join(q.Subresources, ",")}, q.Groups) {
		fmt.Fprintf(h, "%d:%s", len(part), part)
	}
	h.Sum(out[:0])
	return out
}
