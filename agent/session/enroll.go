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

// loadOrEnroll returns the node's identity from disk. If the node has no valid certificate, it
// enrolls the node with the join token. It retries without a time limit while no replica is
// reachable. An error other than that of ctx is permanent.
func (n *nodeCredentials) loadOrEnroll(ctx context.Context) (*identity, error) {
	id, err := loadIdentity(n.cfg.StateDir, n.cfg.NodeName, time.Now())
	if err == nil || !errors.Is(err, errNoIdentity) {
		return id, err
	}
	token, tokenErr := n.readJoinToken()
	if tokenErr != nil {
		return nil, fmt.Errorf("node %s: %w: %w", n.cfg.NodeName, err, tokenErr)
	}
	req, err := newSigningRequest(n.cfg.NodeName)
	if err != nil {
		return nil, err
	}
	delay := backoff.Backoff{Min: 200 * time.Millisecond, Max: 5 * time.Second, Jitter: 0.5}
	for {
		for _, address := range n.cfg.Join.Servers {
			id, err := n.enrollThrough(ctx, token, req, address)
			if err == nil {
				n.removeTokenFile()
				return id, nil
			}
			if isPermanentRefusal(err) {
				return nil, fmt.Errorf("node %s cannot join through %s: %w", n.cfg.NodeName, address, err)
			}
			n.log.Warn("the node could not enroll, will retry", "server", address, "err", err)
		}
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return nil, err
		}
	}
}

// enrollAgain enrolls the node again if Join.TokenFile contains a join token, and logs failures. It
// is for a node with a revoked certificate, and for a node that was disconnected while the CA was
// rotated. An operator must provide a new token, because the first token was removed after
// enrollment. reason is logged.
func (n *nodeCredentials) enrollAgain(ctx context.Context, reason error) {
	if n.cfg.Join.TokenFile == "" {
		return
	}
	token, err := n.readJoinToken()
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	req, err2 := newSigningRequest(n.cfg.NodeName)
	if err := errors.Join(err, err2); err != nil {
		n.log.Warn("the node cannot enroll again", "err", err)
		return
	}
	for _, address := range n.cfg.Join.Servers {
		id, err := n.enrollThrough(ctx, token, req, address)
		if err == nil {
			n.id.adoptIdentity(id)
			n.removeTokenFile()
			n.log.Info("node enrolled again", "after", reason)
			return
		}
		n.log.Warn("the node could not enroll again, will retry", "server", address, "err", err)
	}
}

// readJoinToken returns the configured join token. If no join token is configured, it returns the
// join token in Join.TokenFile.
func (n *nodeCredentials) readJoinToken() (joinToken, error) {
	text := n.cfg.Join.Token
	if text == "" && n.cfg.Join.TokenFile != "" {
		raw, err := os.ReadFile(n.cfg.Join.TokenFile)
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

// removeTokenFile removes Join.TokenFile. It must be called only when the node has a certificate
// and no longer needs the join token.
func (n *nodeCredentials) removeTokenFile() {
	if n.cfg.Join.TokenFile == "" {
		return
	}
	if err := os.Remove(n.cfg.Join.TokenFile); err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.log.Warn("the join token could not be removed", "err", err)
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

func (n *nodeCredentials) enrollThrough(ctx context.Context, token joinToken, req signingRequest, address string) (
	*identity, error,
) {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return nil, status.Errorf(codes.InvalidArgument, "server address %q: %v", address, err)
	}
	conn, err := n.dial(address, credentials.NewTLS(token.pinnedTLSConfig(host)))
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	got, err := fleetv1.NewEnrollmentClient(conn).Enroll(ctx,
		&fleetv1.EnrollRequest{Token: token.text, NodeName: n.cfg.NodeName, CsrDer: req.der})
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
	if err := writeFile(filepath.Join(n.cfg.StateDir, caFile), got.CaPem); err != nil {
		return nil, err
	}
	if err := writeFile(filepath.Join(n.cfg.StateDir, nodeFile), both); err != nil {
		return nil, err
	}
	n.log.Info("node enrolled", "server", address)
	n.replicas.recordReplicas(nil, got.Replicas)
	return id, nil
}

// replicaDialer dials replicas. It sets a firewall mark (SO_MARK) on the connections, which exempts
// them from Service rules.
var replicaDialer = net.Dialer{KeepAliveConfig: tcpKeepAlive, Control: agent.MarkReplicaConn}

// dialReplica returns a gRPC connection to the replica at address. gRPC connects when the
// connection is first used.
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

// runRenewals renews the certificate of id with renew, at its renewal time and when requestRenewal
// is called, until ctx ends. It retries failed renewals. now returns the current time.
func (n *nodeCredentials) runRenewals(
	ctx context.Context, id *identity, now func() time.Time, renew func(context.Context, *identity) error,
) error {
	delay := backoff.Backoff{Min: time.Second, Max: 5 * time.Minute, Jitter: 0.5}
	// minimum delay to the next renewal, so that a signer that issues old certificates is not
	// called in a loop
	var atLeast time.Duration
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
			n.log.Info("certificate renewed", "until", id.currentCertificate().Leaf.NotAfter)
			n.wake() // reports the issuing CA
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
		n.log.Warn("the certificate could not be renewed, will retry", "expires",
			id.currentCertificate().Leaf.NotAfter, "err", err)
		if err := wait.Delay(ctx, delay.Next()); err != nil {
			return err
		}
	}
}

// renewCertificate generates a new key, requests a certificate for it from any replica, and stores
// the key and the certificate in id and on disk.
func (n *nodeCredentials) renewCertificate(ctx context.Context, id *identity) error {
	req, err := newSigningRequest(n.cfg.NodeName)
	if err != nil {
		return err
	}
	err = errors.New("no replica is known")
	for _, l := range n.replicas.allLinks() {
		call, cancel := context.WithTimeout(ctx, 10*time.Second)
		var got *fleetv1.RenewResponse
		got, err = fleetv1.NewFleetClient(l.conn).RenewCertificate(call, &fleetv1.RenewRequest{CsrDer: req.der})
		cancel()
		if err == nil {
			return id.replaceCertificate(n.cfg.StateDir, append(append([]byte(nil), got.CertificatePem...), req.key...))
		}
	}
	return fmt.Errorf("renew certificate of node %s: %w", n.cfg.NodeName, err)
}
