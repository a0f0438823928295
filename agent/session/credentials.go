package session

import (
	"log/slog"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"

	"keelson.dev/keelson/internal/wakeup"
)

// nodeCredentials are the keys and certificates of this node, and the cluster CAs that it trusts.
// They are obtained by enrollment, stored in Config.StateDir, and renewed before they expire and
// when the signing CA changes.
type nodeCredentials struct {
	cfg      Config
	log      *slog.Logger
	replicas *replicaList
	dial     func(address string, creds credentials.TransportCredentials) (*grpc.ClientConn, error)
	wake     func() // makes the session send an authoritiesReport

	id         *identity // set by Session.Run before anything connects; identified is closed then
	identified chan struct{}
	serving    servingCertificate
}

func newNodeCredentials(s *Session) *nodeCredentials {
	return &nodeCredentials{cfg: s.cfg, log: s.log, replicas: s.replicas, dial: s.dialReplica,
		wake:       s.reports.reporter.wakeSender,
		identified: make(chan struct{}), serving: servingCertificate{renewNow: wakeup.New()}}
}

// setIdentity sets the identity of the node. It must be called exactly once.
func (n *nodeCredentials) setIdentity(id *identity) {
	n.id = id
	close(n.identified)
}
