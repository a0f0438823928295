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

// loadOrEnroll returns the node's identity from disk, or enrolls the node with the join token if it
// has no valid certificate. It retries without a time limit while no replica is reachable. An error
// other than that of ctx is permanent.
func (s *Session) loadOrEnroll(ctx context.Context) (*identity, error) {
	id, err := loadIdentity(s.cfg.StateDir, s.cfg.NodeName, time.Now())
	if err == nil || !errors.Is(err, errNoIdentity) {
		return id, err
	}
	token, tokenErr := s.readJoinToken()
	if tokenErr != nil {
		return nil, fmt.Errorf("node %s: %w: %w", s.cfg.NodeName, err, tokenErr)
	}
	req, err := newSigningRequest(s.cfg.NodeName)
	if err != nil {
		return nil, err
	}
	delay := backoff.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		for _, address := range s.cfg.Servers {
			id, err := s.enrollThrough(ctx, token, req, address)
			if err == nil {
				s.removeTokenFile()
				return id, nil
			}
			if isPermanentRefusal(err) {
				return nil, fmt.Errorf("node %s cannot join through %s: %w", s.cfg.NodeName, address, err)
			}
			s.log.Warn("the node could not enroll, will retry", "server", address, "err", err)
		}
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return nil, err
		}
	}
}

// enrollAgain enrolls the node again if Config.TokenFile holds a join token, and logs failures. why
// is the reason. It is called when a replica refuses the node's certificate as revoked, or when the
// CA was rotated while the node was disconnected. The first token was removed after enrollment, so
// an operator must provide a new token.
func (s *Session) enrollAgain(ctx context.Context, why error) {
	if s.cfg.TokenFile == "" {
		return
	}
	token, err := s.readJoinToken()
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	req, err2 := newSigningRequest(s.cfg.NodeName)
	if err := errors.Join(err, err2); err != nil {
		s.log.Warn("the node cannot enroll again", "err", err)
		return
	}
	for _, address := range s.cfg.Servers {
		id, err := s.enrollThrough(ctx, token, req, address)
		if err == nil {
			s.id.adoptIdentity(id)
			s.removeTokenFile()
			s.log.Info("node enrolled again", "after", why)
			return
		}
		s.log.Warn("the node could not enroll again, will retry", "server", address, "err", err)
	}
}

// readJoinToken returns the configured join token, or else the join token in Config.TokenFile.
func (s *Session) readJoinToken() (joinToken, error) {
	text := s.cfg.Token
	if text == "" && s.cfg.TokenFile != "" {
		raw, err := os.ReadFile(s.cfg.TokenFile)
		if err != nil {
			return joinToken{}, fmt.Errorf("read the join token: %w", err)
		}
		text = string(raw)
	}
	if text == "" {
		return joinToken{}, errors.New("no join token is configured")
	}
	return parseToken(text)
}

// removeTokenFile removes Config.TokenFile. It is called once the node has a certificate, which
// makes the join token useless.
func (s *Session) removeTokenFile() {
	if s.cfg.TokenFile == "" {
		return
	}
	if err := os.Remove(s.cfg.TokenFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.log.Warn("the join token could not be removed", "err", err)
	}
}

// isPermanentRefusal reports whether err means that a replica refused the enrollment and would
// refuse a retry as well.
func isPermanentRefusal(err error) bool {
	switch status.Code(err) {
	case codes.Unauthenticated, codes.InvalidArgument, codes.PermissionDenied:
		return true
	}
	return false
}

func (s *Session) enrollThrough(ctx context.Context, token joinToken, req signingRequest, address string) (*identity, error) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "server address %q: %v", address, err)
	}
	conn, err := s.dialReplica(address, credentials.NewTLS(token.pinnedTLSConfig(host)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	got, err := fleetv1.NewEnrollmentClient(conn).Enroll(ctx,
		&fleetv1.EnrollRequest{Token: token.text, NodeName: s.cfg.NodeName, CsrDer: req.der})
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
	s.replicas.recordReplicas(nil, got.Replicas)
	return id, nil
}

// replicaDialer dials replicas. It sets a firewall mark (SO_MARK) on the connections, which exempts
// them from Service rules.
var replicaDialer = net.Dialer{KeepAliveConfig: tcpKeepAlive, Control: agent.MarkReplicaConn}

// dialReplica returns a gRPC connection to the replica at address. The connection is established
// when it is first used.
func (s *Session) dialReplica(address string, creds credentials.TransportCredentials) (*grpc.ClientConn, error) {
	opts := []grpc.DialOption{
		grpc.WithTransportCredentials(creds),
		grpc.WithKeepaliveParams(clientKeepalive),
		grpc.WithConnectParams(connectParams),
		grpc.WithStreamInterceptor(s.cluster.interceptStream), grpc.WithUnaryInterceptor(s.cluster.interceptUnary),
		// Static windows: with dynamic windows, gRPC would send a ping after each heartbeat
		// response.
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

// runRenewals renews the certificate of id at its renewal time, and when requestRenewal is called,
// until ctx ends. now and renew are replaced by tests.
func (s *Session) runRenewals(ctx context.Context, id *identity, now func() time.Time, renew func(context.Context, *identity) error) error {
	delay := backoff.Backoff{Min: time.Second, Max: 5 * time.Minute, Jitter: 0.5}
	var atLeast time.Duration // minimum delay to the next renewal, so that a signer that issues old certificates is not called in a loop
	for {
		at, left := id.renewalTime(), id.renewalTime().Sub(now())
		if left > time.Minute {
			// A jitter spreads nodes that enrolled together. It is bounded by the certificate's
			// lifetime, because a clock that is years behind leaves years until the renewal time.
			most := min(left, at.Sub(id.currentCertificate().Leaf.NotBefore)) / 20
			at = at.Add(time.Duration(rand.Int64N(max(int64(most), 1))))
		}
		if soonest := now().Add(atLeast); soonest.After(at) {
			at = soonest
		}
		if err := waitUntilTime(ctx, at, now, id.renewNow); err != nil {
			return err
		}
		err := renew(ctx, id)
		if err == nil {
			s.log.Info("certificate renewed", "until", id.currentCertificate().Leaf.NotAfter)
			s.reporter.wakeSender() // reports the issuing CA
			if !id.isIssuedByOldCA(id.currentCertificate().Leaf) {
				delay.Reset()
				atLeast = 10 * time.Second
				continue
			}
			err = errors.New("a replica that lags behind the others signed it with the old CA")
		}
		if id.isIssuedByOldCA(id.currentCertificate().Leaf) { // retry now, not at the renewal time
			id.requestRenewal()
		}
		s.log.Warn("the certificate could not be renewed, will retry", "expires", id.currentCertificate().Leaf.NotAfter, "err", err)
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return err
		}
	}
}

// renewCertificate generates a new key, requests a certificate for it from any replica, and stores
// both in id.
func (s *Session) renewCertificate(ctx context.Context, id *identity) error {
	req, err := newSigningRequest(s.cfg.NodeName)
	if err != nil {
		return err
	}
	err = errors.New("no replica is known")
	for _, l := range s.replicas.allLinks() {
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		var got *fleetv1.RenewResponse
		got, err = fleetv1.NewFleetClient(l.conn).RenewCertificate(call, &fleetv1.RenewRequest{CsrDer: req.der})
		cancel()
		if err == nil {
			return id.replaceCertificate(s.cfg.StateDir, append(append([]byte(nil), got.CertificatePem...), req.key...))
		}
	}
	return fmt.Errorf("renew certificate of node %s: %w", s.cfg.NodeName, err)
}
