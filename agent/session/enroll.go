package session

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/backoff"
	"keelson.dev/keelson/internal/wait"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// identify loads the node's identity or enrols. It waits for a control plane as long as it takes; an error
// is one that no waiting mends.
func (s *Session) identify(ctx context.Context) (*identity, error) {
	id, err := loadIdentity(s.cfg.StateDir, s.cfg.NodeName, time.Now())
	if err == nil || !errors.Is(err, errNoIdentity) {
		return id, err
	}
	token, tokenErr := s.joinToken()
	if tokenErr != nil {
		return nil, fmt.Errorf("node %s: %w: %w", s.cfg.NodeName, err, tokenErr)
	}
	req, err := newRequest(s.cfg.NodeName)
	if err != nil {
		return nil, err
	}
	delay := backoff.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		for _, address := range s.cfg.Servers {
			id, err := s.enroll(ctx, token, req, address)
			if err == nil {
				s.forgetToken()
				return id, nil
			}
			if final(err) {
				return nil, fmt.Errorf("node %s cannot join through %s: %w", s.cfg.NodeName, address, err)
			}
			s.log.Warn("not enrolled yet", "server", address, "err", err)
		}
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return nil, err
		}
	}
}

// enrollAnew is for a node whose certificate was revoked, or that was away while the cluster's CA was exchanged. A new token in the token file brings it back; the one it came
// with does not: that is for the operator to say.
func (s *Session) enrollAnew(ctx context.Context, why error) {
	if s.cfg.TokenFile == "" {
		return
	}
	token, err := s.joinToken()
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	req, err2 := newRequest(s.cfg.NodeName)
	if err := errors.Join(err, err2); err != nil {
		s.log.Warn("the node cannot enrol anew", "err", err)
		return
	}
	for _, address := range s.cfg.Servers {
		id, err := s.enroll(ctx, token, req, address)
		if err == nil {
			s.id.adopt(id)
			s.forgetToken()
			s.log.Info("node enrolled anew", "after", why)
			return
		}
		s.log.Warn("not enrolled anew yet", "server", address, "err", err)
	}
}

// joinToken reads the configured token.
func (s *Session) joinToken() (joinToken, error) {
	text := s.cfg.Token
	if text == "" && s.cfg.TokenFile != "" {
		raw, err := os.ReadFile(s.cfg.TokenFile)
		if err != nil {
			return joinToken{}, fmt.Errorf("reading the join token: %w", err)
		}
		text = string(raw)
	}
	if text == "" {
		return joinToken{}, errors.New("no join token is configured")
	}
	return parseToken(text)
}

// forgetToken removes the token from disk: the node has its certificate.
func (s *Session) forgetToken() {
	if s.cfg.TokenFile == "" {
		return
	}
	if err := os.Remove(s.cfg.TokenFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("the join token could not be removed", "err", err)
	}
}

// final says that asking again would get the same answer.
func final(err error) bool {
	switch status.Code(err) {
	case codes.Unauthenticated, codes.InvalidArgument, codes.PermissionDenied:
		return true
	}
	return false
}

func (s *Session) enroll(ctx context.Context, token joinToken, req signingRequest, address string) (*identity, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "server address %q: %v", address, err)
	}
	conn, err := s.dial(address, credentials.NewTLS(token.pinned(host)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	got, err := fleetv1.NewEnrollmentClient(conn).Enroll(ctx,
		&fleetv1.EnrollRequest{Token: token.whole, NodeName: s.cfg.NodeName, CsrDer: req.der})
	if err != nil {
		return nil, err
	}
	if err := token.checkCA(got.CaPem); err != nil {
		return nil, err
	}
	both := append(append([]byte(nil), got.CertificatePem...), req.key...)
	id, err := newIdentity(both, got.CaPem)
	if err != nil {
		return nil, err
	}
	if err := writeFile(filepath.Join(s.cfg.StateDir, caFile), got.CaPem); err != nil {
		return nil, err
	}
	if err := writeFile(filepath.Join(s.cfg.StateDir, nodeFile), both); err != nil {
		return nil, err
	}
	s.log.Info("node enrolled", "server", address)
	s.replicas.learn(nil, got.Replicas)
	return id, nil
}

// replicaDialer connects to replicas. Service rules do not apply to its connections.
var replicaDialer = net.Dialer{KeepAliveConfig: vanished, Control: agent.MarkReplicaConn}

// dial prepares a connection to one replica; it is made when it is first used.
func (s *Session) dial(address string, creds credentials.TransportCredentials) (*grpc.ClientConn, error) {
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithKeepaliveParams(clientKeepalive),
		grpc.WithConnectParams(connectParams),
		grpc.WithStreamInterceptor(s.cluster.stream), grpc.WithUnaryInterceptor(s.cluster.call),
		// Windows that grow are measured with a ping after what is received: with each answer to a heartbeat.
		grpc.WithStaticStreamWindowSize(streamWindow), grpc.WithStaticConnWindowSize(connWindow),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxMessage), grpc.MaxCallSendMsgSize(maxMessage)),
	}
	dial := s.cfg.Dial
	if dial == nil {
		dial = func(ctx context.Context, address string) (net.Conn, error) {
			return replicaDialer.DialContext(ctx, "tcp", address)
		}
	}
	opts = append(opts, grpc.WithContextDialer(dial))
	conn, err := grpc.NewClient("passthrough:///"+address, opts...)
	if err != nil {
		return nil, fmt.Errorf("connect to replica at %s: %w", address, err)
	}
	return conn, nil
}

// keepRenewed renews id in time, again and again, until ctx ends.
func (s *Session) keepRenewed(ctx context.Context, id *identity, now func() time.Time, renew func(context.Context, *identity) error) error {
	delay := backoff.Backoff{Min: time.Second, Max: 5 * time.Minute, Jitter: 0.5}
	var atLeast time.Duration // a signer that hands out old certificates must not be asked without end
	for {
		at, left := id.renewAt(), id.renewAt().Sub(now())
		if left > time.Minute {
			// A little jitter, so that nodes enrolled together do not come together: no more than the certificate's life
			// gives, for by a clock that is years behind there are years left.
			most := min(left, at.Sub(id.current().Leaf.NotBefore)) / 20
			at = at.Add(time.Duration(rand.Int64N(max(int64(most), 1))))
		}
		if soonest := now().Add(atLeast); soonest.After(at) {
			at = soonest
		}
		if err := delayUntil(ctx, at, now, id.hurry); err != nil {
			return err
		}
		err := renew(ctx, id)
		if err == nil {
			s.log.Info("certificate renewed", "until", id.current().Leaf.NotAfter)
			s.reporter.poke() // by which authority it is
			if !id.outdated(id.current().Leaf) {
				delay.Reset()
				atLeast = 10 * time.Second
				continue
			}
			err = errors.New("it was signed by a replica that is behind the others")
		}
		if id.outdated(id.current().Leaf) { // it is not to wait for the end of its life
			id.quicken()
		}
		s.log.Warn("the certificate could not be renewed, will retry", "expires", id.current().Leaf.NotAfter, "err", err)
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return err
		}
	}
}

// renew asks any replica for a fresh certificate of a fresh key.
func (s *Session) renew(ctx context.Context, id *identity) error {
	req, err := newRequest(s.cfg.NodeName)
	if err != nil {
		return err
	}
	err = errors.New("no replica is known")
	for _, l := range s.replicas.links() {
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		var got *fleetv1.RenewResponse
		got, err = fleetv1.NewFleetClient(l.conn).RenewCertificate(call, &fleetv1.RenewRequest{CsrDer: req.der})
		cancel()
		if err == nil {
			return id.replace(s.cfg.StateDir, append(append([]byte(nil), got.CertificatePem...), req.key...))
		}
	}
	return fmt.Errorf("renew certificate of node %s: %w", s.cfg.NodeName, err)
}
