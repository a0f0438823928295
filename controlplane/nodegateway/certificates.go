package nodegateway

import (
	"crypto/x509"
	"regexp"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// What a node's certificates are for.
const (
	UseAgent   = "agent"   // towards replicas
	UseServing = "serving" // of its own HTTPS server
)

// NodeCertificate is a certificate that a node has.
type NodeCertificate struct {
	Use             string
	Key             string // the first 16 characters of the SHA-256 of the public key
	Begins, Expires time.Time
	// Told says that the agent says so itself. Otherwise it is the certificate with which a connection was made: a node of an
	// earlier release may have renewed it since.
	Told bool
}

// RenewsAt is when the agent has the next one signed by itself: two thirds through its life.
func (c NodeCertificate) RenewsAt() time.Time { return c.Begins.Add(c.Expires.Sub(c.Begins) / 3 * 2) }

// Certificates are those of the nodes that are connected to this replica, one for each use: what the agent said last where
// the node has its session here, and of other nodes the newest one that any of their connections was made with. Connections
// outlive the certificates that they were made with, so these say little of a node that has been connected for long.
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

// certificates are those with which the connections of nodes were made, the newest of each node.
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

// plausible are the certificates that a node may say it has: people read them, and one node is not to fill their screens.
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

// maxUnix is the year 10000, which no certificate can name.
const maxUnix = 253402300800
