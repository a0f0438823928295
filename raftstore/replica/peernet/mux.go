// Package peernet connects the replicas of a raft cluster: one port for raft and gRPC, TLS, the
// identity of the raft cluster at the start of each raft connection, and the gRPC clients of the
// other replicas.
package peernet

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/hashicorp/raft"
	"google.golang.org/grpc/credentials"
)

// The two protocols of the peer port, selected by ALPN.
const (
	alpnRaft = "keelson-raft"
	alpnGRPC = "h2"
)

const handshakeTimeout = 5 * time.Second

// PeerPort accepts TLS connections of other replicas and passes each to the listener of its
// protocol.
type PeerPort struct {
	listener net.Listener
	tls      *tls.Config
	log      *slog.Logger
	Raft     *QueueListener
	Grpc     *QueueListener
	shaking  sync.WaitGroup
	Callers  inboundConns    // counts the open raft connections from other replicas
	life     context.Context // ends with Run
}

// NewPeerPort returns a port that accepts connections from l. It starts nothing.
func NewPeerPort(l net.Listener, advertise net.Addr, server *tls.Config, log *slog.Logger) *PeerPort {
	return &PeerPort{
		listener: l,
		tls:      withProtocols(server, alpnRaft, alpnGRPC),
		log:      log,
		Raft:     NewQueueListener(advertise),
		Grpc:     NewQueueListener(advertise),
	}
}

// withProtocols returns a copy of the configuration that offers the given ALPN protocols and
// requires TLS 1.3. This also applies to the configurations that GetConfigForClient of the copy
// returns.
func withProtocols(c *tls.Config, protocols ...string) *tls.Config {
	c = c.Clone()
	c.NextProtos = protocols
	c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
	if choose := c.GetConfigForClient; choose != nil {
		c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			chosen, err := choose(h)
			if err != nil || chosen == nil {
				return chosen, err
			}
			chosen = withProtocols(chosen, protocols...)
			if chosen.ClientAuth != tls.RequireAndVerifyClientCert {
				return nil, errors.New("the TLS configuration for this client does not verify its certificate")
			}
			return chosen, nil
		}
	}
	return c
}

// Run accepts connections until ctx ends. It returns nil.
func (p *PeerPort) Run(ctx context.Context) error {
	p.life = ctx
	stop := context.AfterFunc(ctx, p.stopAccepting)
	defer stop()
	defer p.shaking.Wait()
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			p.log.Warn("accepting a peer connection failed", "error", err)
			select { // an error such as a lack of file descriptors may be temporary
			case <-ctx.Done():
				return nil
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		p.shaking.Add(1)
		go func() {
			defer p.shaking.Done()
			p.handshakeConn(ctx, conn)
		}()
	}
}

// handshakeConn performs the TLS handshake and passes the connection to the listener of its
// protocol.
func (p *PeerPort) handshakeConn(ctx context.Context, raw net.Conn) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	conn := tls.Server(raw, p.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		p.log.Debug("peer refused", "address", raw.RemoteAddr(), "error", err)
		raw.Close()
		return
	}
	to := p.Grpc
	switch conn.ConnectionState().NegotiatedProtocol {
	case alpnGRPC:
	case alpnRaft:
		to = p.Raft
	default:
		conn.Close()
		return
	}
	if to == p.Raft {
		// raft's transport does not close the connections that it has accepted
		stop := context.AfterFunc(p.life, func() { conn.Close() })
		hooked := &hookedConn{Conn: conn, hook: stop}
		if names := conn.ConnectionState().PeerCertificates; len(names) > 0 {
			left := p.Callers.addConn(names[0].Subject.CommonName)
			hooked.hook = func() bool { left(); return stop() }
		}
		if !to.enqueueConn(ctx, hooked) {
			hooked.Close()
		}
		return
	}
	if !to.enqueueConn(ctx, conn) {
		conn.Close()
	}
}

// hookedConn is a net.Conn that calls the function hook when it is closed.
type hookedConn struct {
	net.Conn
	hook func() bool
}

func (c *hookedConn) Close() error {
	c.hook()
	return c.Conn.Close()
}

// stopAccepting closes the network listener and the listener for gRPC. raft's transport closes its
// own listener, and would report an error if it were closed before.
func (p *PeerPort) stopAccepting() {
	p.listener.Close()
	p.Grpc.Close()
}

// QueueListener is a net.Listener for connections that are accepted elsewhere and passed to it.
type QueueListener struct {
	address net.Addr
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

// NewQueueListener returns a listener with the given address and no connections yet.
func NewQueueListener(a net.Addr) *QueueListener {
	return &QueueListener{address: a, conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (q *QueueListener) enqueueConn(ctx context.Context, c net.Conn) bool {
	select {
	case q.conns <- c:
		return true
	case <-q.closed:
	case <-ctx.Done():
	}
	return false
}

func (q *QueueListener) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *QueueListener) Addr() net.Addr { return q.address }

func (q *QueueListener) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

// Advertised is the host:port that other replicas use to connect to this replica. Its host may be a
// name.
type Advertised string

func (Advertised) Network() string  { return "tcp" }
func (a Advertised) String() string { return string(a) }

// RaftStreams dials and accepts the raft connections of the peer port. It implements
// raft.StreamLayer.
type RaftStreams struct {
	*QueueListener
	Client  *tls.Config
	DialTCP func(ctx context.Context, address string) (net.Conn, error)
	Life    context.Context // connections are closed when it ends
}

func (s *RaftStreams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(s.Life, timeout)
	defer cancel()
	raw, err := s.DialTCP(ctx, string(address))
	if err != nil {
		return nil, fmt.Errorf("dialing replica at %s: %w", address, err)
	}
	c := s.Client.Clone()
	c.NextProtos = []string{alpnRaft}
	c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
	if c.ServerName == "" {
		if host, _, err := net.SplitHostPort(string(address)); err == nil {
			c.ServerName = host
		}
	}
	conn := tls.Client(raw, c)
	if err := conn.HandshakeContext(ctx); err != nil {
		raw.Close()
		return nil, fmt.Errorf("handshake with replica at %s: %w", address, err)
	}
	if conn.ConnectionState().NegotiatedProtocol != alpnRaft {
		conn.Close()
		return nil, fmt.Errorf("replica at %s does not support protocol %s", address, alpnRaft)
	}
	return &hookedConn{Conn: conn, hook: context.AfterFunc(s.Life, func() { conn.Close() })}, nil
}

// establishedTLS is the transport credentials of gRPC for connections with a complete TLS
// handshake.
type establishedTLS struct{}

func (establishedTLS) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	t, ok := c.(*tls.Conn)
	if !ok {
		return nil, nil, errors.New("connection without TLS")
	}
	return c, credentials.TLSInfo{
		State:          t.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

func (establishedTLS) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("credentials are for servers only")
}
func (establishedTLS) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (establishedTLS) Clone() credentials.TransportCredentials { return establishedTLS{} }
func (establishedTLS) OverrideServerName(string) error         { return nil }
