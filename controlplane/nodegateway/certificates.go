package nodegateway

import (
	"crypto/x509"
	"regexp"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Uses of a node's certificates.
const (
	UseAgent   = "agent"   // client certificate for connections to replicas
	UseServing = "serving" // serving certificate of the node's HTTPS server
)

// NodeCertificate describes a certificate of a node.
type NodeCertificate struct {
	Use             string
	Key             string // first 16 hex digits of the SHA-256 hash of the public key
	Begins, Expires time.Time
	// Told is true if the agent reported the certificate. Otherwise the certificate is taken from a
	// connection, and a node of an earlier release may have renewed it since.
	Told bool
}

// RenewsAt returns the time of the agent's automatic renewal: after two thirds of the validity.
func (c NodeCertificate) RenewsAt() time.Time { return c.Begins.Add(c.Expires.Sub(c.Begins) / 3 * 2) }

// Certificates returns the certificates of the nodes connected to this replica, one per use. For a
// node with a session here, these are the agent's last report. For other nodes it is the newest
// certificate of any connection. A long-lived connection may have been made with a certificate that
// was renewed since.
func (s *Server) Certificates() map[string][]NodeCertificate {
	out := map[string][]NodeCertificate{}
	for node, c := range s.visitors.certificates() {
		out[node] = []NodeCertificate{{Use: UseAgent, Key: pki.SPKIHash(c)[:16], Begins: c.NotBefore, Expires: c.NotAfter}}
	}
	for _, x := range s.view.everySession() {
		x.mu.Lock()
		said := x.authorities.GetCertificates()
		x.mu.Unlock()
		if len(said) == 0 {
			continue
		}
		told := make([]NodeCertificate, 0, len(said))
		for _, c := range said {
			told = append(told, NodeCertificate{c.Use, c.Key, time.Unix(c.BeginsUnix, 0), time.Unix(c.ExpiresUnix, 0), true})
		}
		if told[0].Use != UseAgent {
			told = append(out[x.node], told...)
		}
		out[x.node] = told
	}
	return out
}

// certificates returns, for each connected node, the newest certificate of its connections.
func (v *visitors) certificates() map[string]*x509.Certificate {
	v.mu.Lock()
	defer v.mu.Unlock()
	out := make(map[string]*x509.Certificate, len(v.byNode))
	for node, connections := range v.byNode {
		for _, cert := range connections {
			if c := out[node]; c == nil || cert.NotAfter.After(c.NotAfter) {
				out[node] = cert
			}
		}
	}
	return out
}

var keyName = regexp.MustCompile(`^[0-9a-f]{16}$`)

// plausible returns the valid entries of a node's report, at most one per use. The limit keeps a
// faulty node from flooding listings that people read.
func plausible(all []*fleetv1.NodeCertificate) (out []*fleetv1.NodeCertificate) {
	for _, use := range []string{UseAgent, UseServing} {
		i := slices.IndexFunc(all, func(c *fleetv1.NodeCertificate) bool {
			return c.GetUse() == use && keyName.MatchString(c.Key) && 0 < c.BeginsUnix && c.BeginsUnix <= c.ExpiresUnix && c.ExpiresUnix < maxUnix
		})
		if i >= 0 {
			out = append(out, all[i])
		}
	}
	return out
}

// maxUnix is the start of the year 10000, which no certificate can encode.
const maxUnix = 253402300800
