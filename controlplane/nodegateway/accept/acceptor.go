package accept

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/clusterid"
	"keelson.dev/keelson/internal/connlimit"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Limits of a connection without a node certificate, on which a client can only enroll.
const (
	handshakeTimeout = 5 * time.Second // from the accepted connection to the end of the TLS handshake
	enrollTimeout    = 5 * time.Second // from the end of the handshake until the connection is closed
	enrollMessage    = 16 << 10        // size of a message: a token, names, and a signing request of 1 or 2 KiB
	enrollStreams    = 2
	enrollWindow     = 64 << 10
	enrollBuffer     = 4 << 10
)

const (
	maxHeaders = 8 << 10 // maximum size of the headers of any stream, including those of an authenticated node
	// streamWindow is the HTTP/2 flow-control window of one stream, for example for exec output.
	// connWindow is the window of all streams of a connection together.
	streamWindow = 1 << 20
	connWindow   = 4 << 20
	// sessionBuffer is the size of a connection's read buffer. It is small because reports are
	// small and thousands of connections are idle.
	sessionBuffer = 4 << 10
)

// DefaultLimits returns the default connection limits of the listener for agents. They allow a
// share of the process's open-file limit, and few unauthenticated clients.
func DefaultLimits() connlimit.Limits {
	return connlimit.Limits{Total: connlimit.OpenFilesShare(3, 8), Unauthenticated: 256, UnauthenticatedPerSource: 64}
}

// Services are the gRPC services of the node gateway.
type Services interface {
	fleetv1.FleetServer
	fleetv1.EnrollmentServer
}

// AcceptorConfig is the configuration of an Acceptor. All fields are required, except Identity.
type AcceptorConfig struct {
	Listener net.Listener // ServeAgents closes it
	Limits   connlimit.Limits
	// TLS must request a client certificate and verify one that is given (VerifyClientCertIfGiven).
	// The presented chain must include the CA certificate itself, because a joining agent has only
	// the CA's hash.
	TLS         *tls.Config
	CA          Authorities
	Lifetime    *wire.Lifetime // ServeAgents stops it when its context ends
	Connections *NodeConnections
	Revocations *Revocations
	// Identity returns the cluster ID and incarnation of this replica, which agents compare with
	// theirs. It returns false while they are not known. If it is nil, identities are not compared.
	Identity func() (clusterid.Identity, bool)
	Log      *slog.Logger
}

// Acceptor accepts the connections of agents. After the TLS handshake, it passes each to one of two
// gRPC services: that for authenticated nodes (Fleet) or that for all other clients (Enrollment).
// The services share only the port, so unauthenticated clients cannot exhaust the resources of
// agents.
type Acceptor struct {
	cfg         AcceptorConfig
	openStreams operationLimiter[nodeMethod] // open streams and unary calls, by node and method
}

// NewAcceptor returns an acceptor. It starts nothing until ServeAgents is called.
func NewAcceptor(cfg AcceptorConfig) *Acceptor { return &Acceptor{cfg: cfg} }

// ServeAgents serves the gRPC services until ctx ends or the listener fails. It returns when all
// handlers have returned.
func (a *Acceptor) ServeAgents(ctx context.Context, services Services) error {
	limiter := connlimit.New(a.cfg.Listener, a.cfg.Limits)
	nodes, unauthenticated := newConnQueue(limiter.Addr()), newConnQueue(limiter.Addr())
	conf := a.cfg.TLS.Clone()
	conf.NextProtos = []string{"h2"}

	fleet, enrollment := a.newFleetService(services), a.newEnrollmentService(services)
	stop := context.AfterFunc(ctx, func() {
		a.cfg.Lifetime.Stop()
		limiter.Close()
		fleet.Stop()
		enrollment.Stop()
	})
	defer stop()
	ended := make(chan error, 2)
	go func() { ended <- fleet.Serve(nodes) }()
	go func() { ended <- enrollment.Serve(unauthenticated) }()

	err := a.acceptConnections(ctx, limiter, conf, nodes, unauthenticated)
	nodes.Close()
	unauthenticated.Close()
	limiter.Close()
	fleet.Stop()
	enrollment.Stop()
	<-ended
	<-ended
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("serve agents on %s: %w", a.cfg.Listener.Addr(), err)
}

func (a *Acceptor) newFleetService(services Services) *grpc.Server {
	g := grpc.NewServer(
		grpc.Creds(handshakeCredentials{}),
		grpc.StreamInterceptor(a.interceptStream), grpc.UnaryInterceptor(a.interceptCall),
		grpc.MaxRecvMsgSize(maxAgentMessage), grpc.MaxSendMsgSize(wire.MaxMessage), grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(maxTunnels), grpc.MaxHeaderListSize(maxHeaders), grpc.InTapHandle(a.limitStream),
		// The windows are static: to compute dynamic windows, gRPC sends a ping after received
		// data, here after every heartbeat.
		grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow),
		grpc.ReadBufferSize(sessionBuffer),
		// Keepalive detects processes that hang. A lost machine is detected earlier, by missing
		// heartbeats or by TCP keepalive (tcpKeepAlive), which costs much less.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second,
			PermitWithoutStream: true}),
	)
	fleetv1.RegisterFleetServer(g, services)
	fleetv1.RegisterEnrollmentServer(g, services) // an authenticated node may also enroll again
	return g
}

func (a *Acceptor) newEnrollmentService(services Services) *grpc.Server {
	g := grpc.NewServer(
		grpc.Creds(handshakeCredentials{}),
		grpc.MaxRecvMsgSize(enrollMessage), grpc.MaxSendMsgSize(wire.MaxMessage), grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(enrollStreams), grpc.MaxHeaderListSize(maxHeaders),
		grpc.InitialWindowSize(enrollWindow), grpc.InitialConnWindowSize(enrollWindow),
		grpc.ReadBufferSize(enrollBuffer), grpc.WriteBufferSize(enrollBuffer),
		grpc.ConnectionTimeout(enrollTimeout),
		grpc.UnknownServiceHandler(func(_ any,
			stream grpc.ServerStream) error {
			return a.refuseCall(stream.Context())
		}),
	)
	fleetv1.RegisterEnrollmentServer(g, services)
	return g
}

// refuseCall returns the error for a call of the Fleet service on an unauthenticated connection. If
// the client certificate is revoked, the error says so.
func (a *Acceptor) refuseCall(ctx context.Context) error {
	if p, ok := peer.FromContext(ctx); ok {
		if t, ok := p.AuthInfo.(credentials.TLSInfo); ok {
			if node, cert, ok := connectionNode(t.State); ok && a.cfg.Revocations.IsRevoked(node, cert) {
				return wire.RevokedError(node)
			}
		}
	}
	return status.Error(codes.Unauthenticated, "fleet: the client certificate of a node is required")
}

// acceptConnections accepts connections until the listener fails, and performs their TLS handshakes
// concurrently. It pushes a connection with a valid node certificate to the queue nodes, and any
// other to the queue unauthenticated.
func (a *Acceptor) acceptConnections(ctx context.Context, limiter *connlimit.Limiter, conf *tls.Config, nodes,
	unauthenticated *connQueue) error {
	for {
		c, err := limiter.Accept()
		if err != nil {
			return err
		}
		a.cfg.Lifetime.Go(func() { a.acceptConnection(ctx, c, conf, nodes, unauthenticated) })
	}
}

func (a *Acceptor) acceptConnection(ctx context.Context, c net.Conn, conf *tls.Config, nodes,
	unauthenticated *connQueue) {
	enableKeepAlive(c)
	t := tls.Server(c, conf)
	limit, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	if err := t.HandshakeContext(limit); err != nil {
		t.Close()
		return
	}
	if node, cert, ok := connectionNode(t.ConnectionState()); ok {
		// registered before the check, so that a concurrent revocation closes this connection
		a.cfg.Connections.addConnection(node, t, cert)
		remove := func() { a.cfg.Connections.removeConnection(node, t) }
		if a.cfg.Connections.exceedsLimit(node) {
			a.cfg.Log.Warn("connection refused: the node has too many", "node", node, "address", c.RemoteAddr(), "most",
				maxConnections)
			remove()
			t.Close()
			return
		}
		if !a.cfg.Revocations.IsRevoked(node, cert) && a.cfg.CA.VerifyClient(cert) == nil {
			connlimit.FromConn(t).MarkAuthenticated()
			a.cfg.Log.Debug("agent connected", "node", node, "address", c.RemoteAddr())
			nodes.pushConn(handshakedConn{Conn: t, onClose: remove})
			return
		}
		remove()
	}
	// The connection is closed after enrollTimeout, even if the client has not finished.
	deadline := time.AfterFunc(enrollTimeout, func() { c.Close() })
	unauthenticated.pushConn(handshakedConn{Conn: t, deadline: deadline})
}

// tcpKeepAlive configures TCP keepalive so that a lost peer is detected within five seconds.
var tcpKeepAlive = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

func enableKeepAlive(c net.Conn) {
	if d := connlimit.FromConn(c); d != nil {
		c = d.Conn
	}
	if k, ok := c.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}); ok {
		_ = k.SetKeepAliveConfig(tcpKeepAlive) // on an error, the next read of the closed connection fails
	}
}

func connectionNode(cs tls.ConnectionState) (node string, cert *x509.Certificate, ok bool) {
	if len(cs.VerifiedChains) == 0 {
		return "", nil, false
	}
	cert = cs.VerifiedChains[0][0]
	node, ok = wire.CertificateNode(cert)
	return node, cert, ok
}

// handshakedConn is a connection after its TLS handshake. Close also stops its timer and calls
// onClose.
type handshakedConn struct {
	*tls.Conn
	deadline *time.Timer // closes the connection at its time limit; may be nil
	onClose  func()      // unregisters the connection; may be nil
}

// Close implements net.Conn. It also stops the timer and unregisters the connection.
func (c handshakedConn) Close() error {
	if c.deadline != nil {
		c.deadline.Stop()
	}
	if c.onClose != nil {
		c.onClose()
	}
	return c.Conn.Close()
}

// handshakeCredentials implements gRPC transport credentials for connections whose TLS handshake is
// already complete.
type handshakeCredentials struct{}

var errServesOnly = errors.New("fleet: these credentials are for serving")

// ServerHandshake implements credentials.TransportCredentials. It performs no handshake and accepts
// only a handshakedConn.
func (handshakeCredentials) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	t, ok := c.(handshakedConn)
	if !ok {
		return nil, nil, fmt.Errorf("fleet: %T is not a connection after its TLS handshake", c)
	}
	return c, credentials.TLSInfo{
		State:          t.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// ClientHandshake implements credentials.TransportCredentials. It always fails: the credentials are
// only for servers.
func (handshakeCredentials) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errServesOnly
}

// Info implements credentials.TransportCredentials.
func (handshakeCredentials) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (c handshakeCredentials) Clone() credentials.TransportCredentials { return c }

// OverrideServerName implements credentials.TransportCredentials. It always fails.
func (handshakeCredentials) OverrideServerName(string) error { return errServesOnly }

// connQueue is a net.Listener in memory. Its Accept returns the connections that pushConn has
// received.
type connQueue struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newConnQueue(addr net.Addr) *connQueue {
	return &connQueue{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// pushConn passes a connection to Accept. If the listener is closed, it closes the connection.
func (q *connQueue) pushConn(c net.Conn) {
	select {
	case q.conns <- c:
	case <-q.closed:
		c.Close()
	}
}

// Accept implements net.Listener.
func (q *connQueue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (q *connQueue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

// Addr implements net.Listener.
func (q *connQueue) Addr() net.Addr { return q.addr }
