package nodegateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
)

// A node's certificates are revoked by a record, stored as a Secret. It is written by an
// administrator command, or by this package when a Node is deleted. Every replica watches the
// records. It closes the connections with revoked certificates and accepts new ones for enrolment
// only.

// visitors tracks the open connections of nodes to this replica, with their certificates.
type visitors struct {
	mu     sync.Mutex
	byNode map[string]map[*tls.Conn]*x509.Certificate
}

func (v *visitors) enter(node string, c *tls.Conn, cert *x509.Certificate) {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.byNode[node] == nil {
		v.byNode[node] = make(map[*tls.Conn]*x509.Certificate)
	}
	v.byNode[node][c] = cert
}

func (v *visitors) leave(node string, c *tls.Conn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	delete(v.byNode[node], c)
	if len(v.byNode[node]) == 0 {
		delete(v.byNode, node)
	}
}

// many reports whether a node has more than maxConnections connections.
func (v *visitors) many(node string) bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return len(v.byNode[node]) > maxConnections
}

// covered returns the connections with certificates that are revoked by r.
func (v *visitors) covered(r pki.Revocation) (out []*tls.Conn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for c, cert := range v.byNode[r.Node] {
		if r.Covers(cert) {
			out = append(out, c)
		}
	}
	return out
}

// such returns the connections with certificates that satisfy is.
func (v *visitors) such(is func(*x509.Certificate) bool) (out []*tls.Conn) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for _, connections := range v.byNode {
		for c, cert := range connections {
			if is(cert) {
				out = append(out, c)
			}
		}
	}
	return out
}

// revocation returns the revocation of a node from the informer's store.
func (s *Server) revocation(node string) (pki.Revocation, bool) {
	o, ok, err := s.view.stores[kindSecret].GetByKey(pki.TokenNamespace + "/" + pki.RevocationName(node))
	if err != nil || !ok {
		return pki.Revocation{}, false
	}
	secret, _ := o.(*v1.Secret)
	return pki.RevocationOf(secret)
}

// revoked reports whether a node's certificate is revoked, according to the informer.
func (s *Server) revoked(node string, cert *x509.Certificate) bool {
	r, ok := s.revocation(node)
	return ok && r.Covers(cert)
}

// unfit returns the error for a call of the fleet service on an unauthenticated connection.
func (s *Server) unfit(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			if node, cert, ok := nodeOfConnection(t.State); ok && s.revoked(node, cert) {
				return errRevoked(node)
			}
		}
	}
	return status.Error(codes.Unauthenticated, "fleet: the client certificate of a node is required")
}

func errRevoked(node string) error {
	return status.Errorf(codes.PermissionDenied, "fleet: the certificate of node %s was revoked: enrol it anew with a token of "+
		"'kctl cluster token create --names %s --replace'", node, node)
}

// freshRevocation reads the revocation record of a node from the store.
func (s *Server) freshRevocation(ctx context.Context, node string) (r pki.Revocation, ok bool, err error) {
	secret, err := client.Get[*v1.Secret](ctx, s.cfg.Client.As(s.cfg.System), pki.TokenNamespace, pki.RevocationName(node))
	if apierrors.IsNotFound(err) {
		return r, false, nil
	}
	if err != nil {
		return r, false, status.Errorf(codes.Unavailable, "fleet: read whether node %s was revoked: %v", node, err)
	}
	r, ok = pki.RevocationOf(secret)
	return r, ok, nil
}

// revocationHandler closes the connections with revoked certificates when a record changes.
func (s *Server) revocationHandler() cache.ResourceEventHandlerFuncs {
	cut := func(o any) {
		secret, _ := o.(*v1.Secret)
		r, ok := pki.RevocationOf(secret)
		if !ok {
			return
		}
		for _, c := range s.visitors.covered(r) {
			s.cfg.Log.Info("connection cut: the node's certificate was revoked", "node", r.Node, "address", c.RemoteAddr())
			c.NetConn().Close()
		}
	}
	return cache.ResourceEventHandlerFuncs{AddFunc: cut, UpdateFunc: func(_, now any) { cut(now) }}
}

// nodeHandler queues a revocation of the node's certificates when a Node is deleted.
func (s *Server) nodeHandler() cache.ResourceEventHandlerFuncs {
	return cache.ResourceEventHandlerFuncs{DeleteFunc: func(o any) {
		n, ok := object(o).(*v1.Node)
		if !ok {
			return
		}
		if x := s.view.session(n.Name); x != nil {
			x.end(errRevoked(n.Name)) // immediately, so that the session does not create the Node again
		}
		r := pki.NewRevocation(n.Name, time.Now())
		r.UID = string(n.UID)
		s.deleted.Lock()
		s.deletions = append(s.deletions, r)
		s.deleted.Unlock()
		select {
		case s.deletion <- struct{}{}:
		default:
		}
	}}
}

// revokeDeleted writes the revocation records of deleted Nodes until ctx ends. Every replica does
// so; the first write takes effect.
func (s *Server) revokeDeleted(ctx context.Context) error {
	retry := backoff.Backoff{Min: 100 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		s.deleted.Lock()
		todo := s.deletions
		s.deletions = nil
		s.deleted.Unlock()
		for i, r := range todo {
			err := s.record(ctx, r)
			if err == nil {
				retry.Reset()
				continue
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			s.cfg.Log.Warn("the certificates of a deleted node are not revoked yet", "node", r.Node, "err", err)
			s.deleted.Lock()
			s.deletions = append(todo[i:], s.deletions...)
			s.deleted.Unlock()
			if err := wait.Delay(ctx, retry.Next()); err != nil {
				return err
			}
			break
		}
		s.deleted.Lock()
		left := len(s.deletions)
		s.deleted.Unlock()
		if left > 0 {
			continue
		}
		select {
		case <-s.deletion:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// revokedBy returns the record have, which may be nil, extended by the revocation r. It returns nil
// if the record already contains r.
func revokedBy(have *v1.Secret, r pki.Revocation) *v1.Secret {
	if have == nil {
		return r.Record()
	}
	if was, ok := pki.RevocationOf(have); ok {
		if r.UID != "" && was.UID == r.UID {
			return nil
		}
		r = r.Further(was)
	}
	next := have.DeepCopy()
	next.Type, next.Data = pki.RevocationSecretType, r.Record().Data
	return next
}

// Revoke revokes the certificates issued to a node until now, on behalf of an administrator.
func (s *Server) Revoke(ctx context.Context, node string) error {
	r := pki.NewRevocation(node, time.Now())
	r.Named = true
	return s.record(ctx, r)
}

// record writes a revocation to the node's record. It does nothing if the record already contains
// the revocation of the same deleted Node.
func (s *Server) record(ctx context.Context, r pki.Revocation) error {
	c := s.cfg.Client.As(s.cfg.System).ForClusterVerb()
	for {
		have, err := client.Get[*v1.Secret](ctx, c, pki.TokenNamespace, pki.RevocationName(r.Node))
		switch {
		case apierrors.IsNotFound(err):
			_, err = client.Create(ctx, c, r.Record())
		case err == nil:
			next := revokedBy(have, r)
			if next == nil {
				return nil
			}
			_, err = client.Update(ctx, c, next)
		}
		if err == nil {
			s.cfg.Log.Info("certificates of a node revoked", "node", r.Node, "until", r.At.UTC().Format(time.RFC3339))
			return nil
		}
		if !apierrors.IsConflict(err) && !apierrors.IsAlreadyExists(err) && !apierrors.IsNotFound(err) || ctx.Err() != nil {
			return err
		}
	}
}
