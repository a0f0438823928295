package accept

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"sync"

	"keelson.dev/keelson/controlplane/pki"
)

// Authorities are the CAs that may sign nodes' client certificates.
type Authorities interface {
	// PEM returns the certificates of the CAs, which an enrolling node receives.
	PEM() []byte
	// Changed returns a channel that is closed when the CAs change.
	Changed() <-chan struct{}
	// VerifyClient returns an error unless one of the CAs has signed the client certificate leaf.
	VerifyClient(leaf *x509.Certificate) error
}

// NodeConnections tracks the open connections of nodes to this replica, with their certificates.
// Its methods are safe for concurrent use. Create it with NewNodeConnections.
type NodeConnections struct {
	log *slog.Logger

	mu     sync.Mutex
	byNode map[string]map[*tls.Conn]*x509.Certificate
}

// NewNodeConnections returns an empty set of connections.
func NewNodeConnections(log *slog.Logger) *NodeConnections {
	return &NodeConnections{log: log, byNode: make(map[string]map[*tls.Conn]*x509.Certificate)}
}

func (n *NodeConnections) addConnection(node string, c *tls.Conn, cert *x509.Certificate) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.byNode[node] == nil {
		n.byNode[node] = make(map[*tls.Conn]*x509.Certificate)
	}
	n.byNode[node][c] = cert
}

func (n *NodeConnections) removeConnection(node string, c *tls.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.byNode[node], c)
	if len(n.byNode[node]) == 0 {
		delete(n.byNode, node)
	}
}

// exceedsLimit reports whether a node has more than maxConnections connections.
func (n *NodeConnections) exceedsLimit(node string) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	return len(n.byNode[node]) > maxConnections
}

// closeRevoked closes the connections whose certificates are revoked by r.
func (n *NodeConnections) closeRevoked(r pki.Revocation) {
	var revoked []*tls.Conn
	n.mu.Lock()
	for c, cert := range n.byNode[r.Node] {
		if r.Covers(cert) {
			revoked = append(revoked, c)
		}
	}
	n.mu.Unlock()
	for _, c := range revoked {
		n.log.Info("connection closed: the node's certificate was revoked", "node", r.Node, "address", c.RemoteAddr())
		c.NetConn().Close()
	}
}

// CloseUntrusted closes the connections whose certificate is not signed by a trusted CA. It does so
// now and whenever the CAs change, until ctx ends. Agents with a newer certificate reconnect
// immediately.
func (n *NodeConnections) CloseUntrusted(ctx context.Context, ca Authorities) error {
	for {
		changed := ca.Changed()
		untrusted := n.selectConnections(func(cert *x509.Certificate) bool { return ca.VerifyClient(cert) != nil })
		for _, c := range untrusted {
			n.log.Info("connection closed: the authority of the node's certificate is no longer trusted", "address",
				c.RemoteAddr())
			c.NetConn().Close()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// selectConnections returns the connections for whose certificate matches returns true.
func (n *NodeConnections) selectConnections(matches func(*x509.Certificate) bool) (selected []*tls.Conn) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, connections := range n.byNode {
		for c, cert := range connections {
			if matches(cert) {
				selected = append(selected, c)
			}
		}
	}
	return selected
}

// NewestCertificates returns, for each connected node, the newest certificate of its connections.
func (n *NodeConnections) NewestCertificates() map[string]*x509.Certificate {
	n.mu.Lock()
	defer n.mu.Unlock()
	newest := make(map[string]*x509.Certificate, len(n.byNode))
	for node, connections := range n.byNode {
		for _, cert := range connections {
			if c := newest[node]; c == nil || cert.NotAfter.After(c.NotAfter) {
				newest[node] = cert
			}
		}
	}
	return newest
}
