package session

import (
	"context"
	"keelson.dev/keelson/controlplane/nodegateway/wire"

	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Authorities are the CAs that nodes must trust: the cluster CA and, during a rotation, a second
// CA.
type Authorities interface {
	// TrustForNodes returns the certificates of the trusted CAs, the ID of the signing CA, and a
	// number that orders successive results in time.
	TrustForNodes() (pem []byte, signs string, since int64)
	// Changed returns a channel that is closed when the result of TrustForNodes changes.
	Changed() <-chan struct{}
}

// NodeAuthorities contains the IDs of the CAs that an agent trusts, and of those that issued its
// certificates, according to its last report.
type NodeAuthorities struct {
	Unreported bool // the agent's release does not report CAs
	Trusted    []string
	Issuers    []string // CAs that issued the node's own certificates
}

// maxAuthorities is the maximum number of CAs in a report. At most two exist at a time.
const maxAuthorities = 8

// NodeAuthorities returns the CAs that each node with a session on this replica has reported.
func (s *Server) NodeAuthorities() map[string]NodeAuthorities {
	reported := map[string]NodeAuthorities{}
	for _, n := range s.sessions.allSessions() {
		n.mu.Lock()
		a := n.authorities
		n.mu.Unlock()
		reported[n.node] = NodeAuthorities{a == nil, a.GetBelieves(), a.GetShows()}
	}
	return reported
}

// setAuthorities stores the CAs that the agent reported. a is nil if it reported none.
func (n *nodeSession) setAuthorities(a *fleetv1.Authorities) error {
	if err := wire.CheckNameLengths(append(a.GetBelieves(), a.GetShows()...)...); err != nil {
		return err
	}
	if a != nil {
		a.Believes = a.Believes[:min(len(a.Believes), maxAuthorities)]
		a.Shows = a.Shows[:min(len(a.Shows), maxAuthorities)]
		a.Certificates = validCertificates(a.Certificates)
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.authorities = a
	return nil
}

// trustMessage returns the message with the trusted CAs. It returns nil if the agent does not
// support this message.
func (n *nodeSession) trustMessage() *fleetv1.ControlMessage {
	n.mu.Lock()
	supported := n.authorities != nil
	n.mu.Unlock()
	if !supported {
		return nil
	}
	pem, signs, since := n.srv.cfg.CA.TrustForNodes()
	return &fleetv1.ControlMessage{Kind: &fleetv1.ControlMessage_Trust{Trust: &fleetv1.Trust{
		CaPem: pem, Signs: signs, SinceUnixMilli: since}}}
}

// distributeTrust sends the trusted CAs to all sessions, now and whenever they change, until ctx
// ends.
func (s *Server) distributeTrust(ctx context.Context) error {
	for {
		changed := s.cfg.CA.Changed()
		for _, n := range s.sessions.allSessions() {
			if m := n.trustMessage(); m != nil {
				n.QueueMessage(m)
			}
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}
