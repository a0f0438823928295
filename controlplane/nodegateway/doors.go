package nodegateway

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/keepalive"

	"keelson.dev/keelson/internal/connlimit"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// Limits for a client without a node certificate, which can only enrol.
const (
	handshakePatience = 5 * time.Second // from accept to the end of the TLS handshake
	enrollPatience    = 5 * time.Second // from the end of the handshake to the forced close of the connection
	enrollMessage     = 16 << 10        // a token, names, and a signing request of 1 or 2 KiB
	enrollStreams     = 2
	enrollWindow      = 64 << 10
	enrollBuffer      = 4 << 10
)

const (
	maxHeaders = 8 << 10 // of any stream, also of an authenticated node
	// streamWindow is the flow-control window of one stream, for example for exec output;
	// connWindow is that of all streams of a connection.
	streamWindow = 1 << 20
	connWindow   = 4 << 20
	// sessionBuffer is the read buffer of a connection. It is small because reports are small and
	// thousands of connections are idle.
	sessionBuffer = 4 << 10
)

// Connections returns the default connection limits of the listener for agents: a share of the
// process's open-file limit, and few unauthenticated clients.
func Connections() connlimit.Limits {
	return connlimit.Limits{Total: connlimit.OpenFilesShare(3, 8), Unauthenticated: 256, UnauthenticatedPerSource: 64}
}

// serve accepts connections and passes each to one of two gRPC services after its TLS handshake.
// Authenticated nodes use the fleet service; all other clients use the enrolment service. The
// services share only the port, so unauthenticated clients cannot exhaust the resources of agents.
func (s *Server) serve(ctx context.Context) error {
	d := connlimit.New(s.cfg.Listener, s.cfg.Connections)
	nodes, strangers := newHall(d.Addr()), newHall(d.Addr())
	conf := s.cfg.TLS.Clone()
	conf.NextProtos = []string{"h2"}

	fleet, enrollment := s.fleetService(), s.enrollmentService()
	stop := context.AfterFunc(ctx, func() {
		close(s.stopping)
		d.Close()
		fleet.Stop()
		enrollment.Stop()
	})
	defer stop()
	ended := make(chan error, 2)
	go func() { ended <- fleet.Serve(nodes) }()
	go func() { ended <- enrollment.Serve(strangers) }()

	err := s.admit(ctx, d, conf, nodes, strangers)
	nodes.Close()
	strangers.Close()
	d.Close()
	fleet.Stop()
	enrollment.Stop()
	<-ended
	<-ended
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return fmt.Errorf("serve agents on %s: %w", s.cfg.Listener.Addr(), err)
}

func (s *Server) fleetService() *grpc.Server {
	g := grpc.NewServer(
		grpc.Creds(shown{}), grpc.StreamInterceptor(s.identified), grpc.UnaryInterceptor(s.identifiedCall),
		grpc.MaxRecvMsgSize(maxUp), grpc.MaxSendMsgSize(maxMessage), grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(sessionStreams), grpc.MaxHeaderListSize(maxHeaders), grpc.InTapHandle(s.tap),
		// Static windows: gRPC measures dynamic ones with a ping after received data, which here
		// would follow every heartbeat.
		grpc.StaticStreamWindowSize(streamWindow), grpc.StaticConnWindowSize(connWindow), grpc.ReadBufferSize(sessionBuffer),
		// Keepalive detects hung programs. A vanished node is detected earlier, by missing
		// heartbeats or by TCP keepalive (vanished), which costs much less.
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: 30 * time.Second, Timeout: 5 * time.Second}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: 2 * time.Second, PermitWithoutStream: true}),
	)
	fleetv1.RegisterFleetServer(g, s)
	fleetv1.RegisterEnrollmentServer(g, s) // an authenticated node may also enrol again
	return g
}

func (s *Server) enrollmentService() *grpc.Server {
	g := grpc.NewServer(
		grpc.Creds(shown{}),
		grpc.MaxRecvMsgSize(enrollMessage), grpc.MaxSendMsgSize(maxMessage), grpc.WaitForHandlers(true),
		grpc.MaxConcurrentStreams(enrollStreams), grpc.MaxHeaderListSize(maxHeaders),
		grpc.InitialWindowSize(enrollWindow), grpc.InitialConnWindowSize(enrollWindow),
		grpc.ReadBufferSize(enrollBuffer), grpc.WriteBufferSize(enrollBuffer),
		grpc.ConnectionTimeout(enrollPatience),
		grpc.UnknownServiceHandler(func(_ any, stream grpc.ServerStream) error { return s.unfit(stream.Context()) }),
	)
	fleetv1.RegisterEnrollmentServer(g, s)
	return g
}

// admit accepts connections until the listener fails, and runs their handshakes concurrently. A
// connection of a valid node goes to nodes, any other to strangers.
func (s *Server) admit(ctx context.Context, d *connlimit.Limiter, conf *tls.Config, nodes, strangers *hall) error {
	for {
		c, err := d.Accept()
		if err != nil {
			return err
		}
		s.children.Go(func() {
			noticeVanished(c)
			t := tls.Server(c, conf)
			limit, cancel := context.WithTimeout(ctx, handshakePatience)
			defer cancel()
			if err := t.HandshakeContext(limit); err != nil {
				t.Close()
				return
			}
			if node, cert, ok := nodeOfConnection(t.ConnectionState()); ok {
				s.visitors.enter(node, t, cert) // before the check, so that a concurrent revocation closes this connection
				leave := func() { s.visitors.leave(node, t) }
				if s.visitors.many(node) {
					s.cfg.Log.Warn("connection refused: the node has too many", "node", node, "address", c.RemoteAddr(), "most", maxConnections)
					leave()
					t.Close()
					return
				}
				if !s.revoked(node, cert) && s.cfg.CA.Verifies(cert) == nil {
					connlimit.FromConn(t).MarkAuthenticated()
					s.cfg.Log.Debug("agent connected", "node", node, "address", c.RemoteAddr())
					nodes.enter(shownConn{Conn: t, left: leave})
					return
				}
				leave()
			}
			// The connection is closed after enrollPatience, whatever the client does.
			end := time.AfterFunc(enrollPatience, func() { c.Close() })
			strangers.enter(shownConn{Conn: t, end: end})
		})
	}
}

// vanished is the TCP keepalive configuration that detects a lost peer within five seconds.
var vanished = net.KeepAliveConfig{Enable: true, Idle: 2 * time.Second, Interval: time.Second, Count: 3}

func noticeVanished(c net.Conn) {
	if d := connlimit.FromConn(c); d != nil {
		c = d.Conn
	}
	if k, ok := c.(interface {
		SetKeepAliveConfig(net.KeepAliveConfig) error
	}); ok {
		_ = k.SetKeepAliveConfig(vanished) // an error means that the connection is closed; the next read returns it
	}
}

func nodeOfConnection(cs tls.ConnectionState) (string, *x509.Certificate, bool) {
	if len(cs.VerifiedChains) == 0 {
		return "", nil, false
	}
	cert := cs.VerifiedChains[0][0]
	node, ok := nodeOfCertificate(cert)
	return node, cert, ok
}

// shownConn is a connection after its TLS handshake, with clean-up on Close.
type shownConn struct {
	*tls.Conn
	end  *time.Timer // closes the connection after its time limit; may be nil
	left func()      // unregisters the connection; may be nil
}

// Close implements net.Conn. It also stops the timer and unregisters the connection.
func (c shownConn) Close() error {
	if c.end != nil {
		c.end.Stop()
	}
	if c.left != nil {
		c.left()
	}
	return c.Conn.Close()
}

// shown provides gRPC transport credentials for connections after their TLS handshake.
type shown struct{}

var errServesOnly = errors.New("fleet: these credentials are for serving")

// ServerHandshake implements credentials.TransportCredentials. It accepts only a shownConn and does
// no handshake.
func (shown) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	t, ok := c.(shownConn)
	if !ok {
		return nil, nil, fmt.Errorf("fleet: %T has not been through the door", c)
	}
	return c, credentials.TLSInfo{
		State:          t.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

// ClientHandshake implements credentials.TransportCredentials. It always fails: the credentials are
// for servers.
func (shown) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errServesOnly
}

// Info implements credentials.TransportCredentials.
func (shown) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

// Clone implements credentials.TransportCredentials.
func (s shown) Clone() credentials.TransportCredentials { return s }

// OverrideServerName implements credentials.TransportCredentials. It always fails.
func (shown) OverrideServerName(string) error { return errServesOnly }

// hall is an in-memory net.Listener; enter passes accepted connections to it.
type hall struct {
	addr   net.Addr
	conns  chan net.Conn
	closed chan struct{}
	once   sync.Once
}

func newHall(addr net.Addr) *hall {
	return &hall{addr: addr, conns: make(chan net.Conn), closed: make(chan struct{})}
}

// enter passes a connection to Accept, or closes it if the listener is closed.
func (h *hall) enter(c net.Conn) {
	select {
	case h.conns <- c:
	case <-h.closed:
		c.Close()
	}
}

// Accept implements net.Listener.
func (h *hall) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (h *hall) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

// Addr implements net.Listener.
func (h *hall) Addr() net.Addr { return h.addr }
