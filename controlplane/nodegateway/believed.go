package nodegateway

import (
	"context"
	"crypto/x509"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Authorities is the set of certificate authorities that nodes must trust: the cluster's CA and,
// during a CA rotation, a second one.
type Authorities interface {
	// PEM returns the CA bundle for a node that enrols.
	PEM() []byte
	// Told returns the CA bundle for connected nodes, the ID of the signing CA, and a time that
	// orders successive values.
	Told() (pem []byte, signs string, since int64)
	// Changed returns a channel that is closed when Told returns a new value.
	Changed() <-chan struct{}
	// Verifies returns an error if a node's certificate is not signed by a trusted authority.
	Verifies(leaf *x509.Certificate) error
}

// NodeAuthorities lists the IDs of the authorities that an agent reports.
type NodeAuthorities struct {
	Silent   bool // the agent's release does not report authorities
	Believes []string
	Shows    []string // issuers of the node's own certificates
}

// maxAuthorities bounds the number of reported authorities; at most two exist at a time.
const maxAuthorities = 8

// NodeAuthorities returns the reported authorities of all nodes with a session on this replica.
func (s *Server) NodeAuthorities() map[string]NodeAuthorities {
	out := map[string]NodeAuthorities{}
	for _, x := range s.view.everySession() {
		x.mu.Lock()
		a := x.authorities
		x.mu.Unlock()
		out[x.node] = NodeAuthorities{a == nil, a.GetBelieves(), a.GetShows()}
	}
	return out
}

// setAuthorities stores the authorities that the agent reported; nil = not reported.
func (x *session) setAuthorities(a *fleetv1.Authorities) error {
	if err := checkNames(append(a.GetBelieves(), a.GetShows()...)...); err != nil {
		return err
	}
	if a != nil {
		a.Believes = a.Believes[:min(len(a.Believes), maxAuthorities)]
		a.Shows = a.Shows[:min(len(a.Shows), maxAuthorities)]
		a.Certificates = plausible(a.Certificates)
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	x.authorities = a
	return nil
}

// trust returns the message with the trusted authorities, or nil if the agent does not support it.
func (x *session) trust() *fleetv1.ControlMessage {
	x.mu.Lock()
	knows := x.authorities != nil
	x.mu.Unlock()
	if !knows {
		return nil
	}
	pem, signs, since := x.srv.cfg.CA.Told()
	return &fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Trust{Trust: &fleetv1.Trust{
		CaPem: pem, Signs: signs, SinceUnixMilli: since}}}
}

// keepTrust sends the trusted authorities to every session when they change. It also closes
// connections with a certificate that is no longer trusted. Agents with another certificate
// reconnect at once.
func (s *Server) keepTrust(ctx context.Context) error {
	for {
		changed := s.cfg.CA.Changed()
		for _, x := range s.view.everySession() {
			if m := x.trust(); m != nil {
				x.post(m)
			}
		}
		for _, c := range s.visitors.such(func(cert *x509.Certificate) bool { return s.cfg.CA.Verifies(cert) != nil }) {
			s.cfg.Log.Info("connection cut: the authority of the node's certificate is believed no more", "address", c.RemoteAddr())
			c.NetConn().Close()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
