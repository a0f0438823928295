package nodegateway

import (
	"context"
	"crypto/x509"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Authorities are whom nodes are to believe: the cluster's CA, and while it is exchanged another one beside it.
type Authorities interface {
	// PEM is what a node that enrols is given.
	PEM() []byte
	// Told is what nodes are told: the same, the id of the CA that signs, and what orders it in time.
	Told() (pem []byte, signs string, since int64)
	// Changed is closed when Told is other than at the time of the call.
	Changed() <-chan struct{}
	// Verifies says why a node's certificate is not good now.
	Verifies(leaf *x509.Certificate) error
}

// NodeAuthorities is what an agent says of the authorities by which it goes, by their ids.
type NodeAuthorities struct {
	Silent   bool // its release does not say it
	Believes []string
	Shows    []string // by which its certificates are
}

// maxAuthorities is how many an agent may name: there are two at most.
const maxAuthorities = 8

// NodeAuthorities are those of the nodes that have their session with this replica.
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

// setAuthorities takes what the agent says; nil is nothing.
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

// trust is what the agent is told of the authorities; nil when it would not understand it.
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

// keepTrust tells every session when the authorities change, and cuts the connections of those who are certified by one
// that is believed no more. Agents that have another certificate come back at once.
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
