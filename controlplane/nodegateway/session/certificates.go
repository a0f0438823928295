package session

import (
	"crypto/x509"
	"regexp"
	"slices"
	"time"

	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// The uses of a node's certificates.
const (
	UseAgent   = "agent"   // client certificate for connections to replicas
	UseServing = "serving" // serving certificate of the node's HTTPS server
)

// NodeCertificate describes a certificate of a node.
type NodeCertificate struct {
	Use                 string
	Key                 string // first 16 hex digits of the SHA-256 hash of the public key
	NotBefore, NotAfter time.Time
	// Reported is true if the agent reported the certificate. Otherwise the certificate was
	// observed on a connection, and a node of an earlier release may have renewed it since.
	Reported bool
}

// RenewsAt returns when the agent renews the certificate: when two thirds of its lifetime have
// passed.
func (c NodeCertificate) RenewsAt() time.Time {
	return c.NotBefore.Add(c.NotAfter.Sub(c.NotBefore) / 3 * 2)
}

// NodeCertificates returns the certificates of the nodes that are connected to this replica, one
// for each use. For a node with a session on this replica, they are those in the agent's last
// report. For other nodes, connected contains the newest certificate of their connections. Such a
// node may have renewed its certificate since it connected.
func (s *Server) NodeCertificates(connected map[string]*x509.Certificate) map[string][]NodeCertificate {
	all := map[string][]NodeCertificate{}
	for node, c := range connected {
		all[node] = []NodeCertificate{{Use: UseAgent, Key: pki.SPKIHash(c)[:16], NotBefore: c.NotBefore,
			NotAfter: c.NotAfter}}
	}
	for _, n := range s.sessions.allSessions() {
		n.mu.Lock()
		certificates := n.authorities.GetCertificates()
		n.mu.Unlock()
		if len(certificates) == 0 {
			continue
		}
		reported := make([]NodeCertificate, 0, len(certificates))
		for _, c := range certificates {
			reported = append(reported, NodeCertificate{c.Use, c.Key, time.Unix(c.BeginsUnix, 0),
				time.Unix(c.ExpiresUnix, 0), true})
		}
		if reported[0].Use != UseAgent {
			reported = append(all[n.node], reported...)
		}
		all[n.node] = reported
	}
	return all
}

var keyPattern = regexp.MustCompile(`^[0-9a-f]{16}$`)

// validCertificates returns the valid entries of a node's report, at most one for each use. The
// limit prevents a faulty node from filling the lists that people read.
func validCertificates(all []*fleetv1.NodeCertificate) (out []*fleetv1.NodeCertificate) {
	for _, use := range []string{UseAgent, UseServing} {
		i := slices.IndexFunc(all, func(c *fleetv1.NodeCertificate) bool {
			return c.GetUse() == use && keyPattern.MatchString(c.Key) && 0 < c.BeginsUnix &&
				c.BeginsUnix <= c.ExpiresUnix && c.ExpiresUnix < maxUnix
		})
		if i >= 0 {
			out = append(out, all[i])
		}
	}
	return out
}

// maxUnix is the start of the year 10000, which no certificate can encode.
const maxUnix = 253402300800
