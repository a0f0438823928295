package replica

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

// The two protocols of the peer port, told apart by ALPN.
const (
	alpnRaft = "keelson-raft"
	alpnGRPC = "h2"
)

const handshakeTimeout = 5 * time.Second

// peerPort accepts TLS connections from the other replicas and sorts them by
// protocol.
type peerPort struct {
	listener net.Listener
	tls      *tls.Config
	log      *slog.Logger
	raft     *queueListener
	grpc     *queueListener
	shaking  sync.WaitGroup
	callers  callers         // of raft's connections
	life     context.Context // ends with run
}

func newPeerPort(l net.Listener, advertise net.Addr, server *tls.Config, log *slog.Logger) *peerPort {
	return &peerPort{
		listener: l,
		tls:      offering(server, alpnRaft, alpnGRPC),
		log:      log,
		raft:     newQueueListener(advertise),
		grpc:     newQueueListener(advertise),
	}
}

// offering returns the configuration with the protocols in place, also in
// those that it chooses per client.
func offering(c *tls.Config, protocols ...string) *tls.Config {
	c = c.Clone()
	c.NextProtos = protocols
	c.MinVersion = max(c.MinVersion, tls.VersionTLS13)
	if choose := c.GetConfigForClient; choose != nil {
		c.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
			chosen, err := choose(h)
			if err != nil || chosen == nil {
				return chosen, err
			}
			chosen = offering(chosen, protocols...)
			if chosen.ClientAuth != tls.RequireAndVerifyClientCert {
				return nil, errors.New("configuration for this client would not verify it")
			}
			return chosen, nil
		}
	}
	return c
}

// run accepts until ctx ends.
func (p *peerPort) run(ctx context.Context) error {
	p.life = ctx
	stop := context.AfterFunc(ctx, p.close)
	defer stop()
	defer p.shaking.Wait()
	for {
		conn, err := p.listener.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return nil
			}
			p.log.Warn("accepting a peer failed", "error", err)
			select { // such as out of descriptors: it may pass
			case <-ctx.Done():
				return nil
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		p.shaking.Add(1)
		go func() {
			defer p.shaking.Done()
			p.shake(ctx, conn)
		}()
	}
}

// shake makes the TLS handshake and hands the connection to its protocol.
func (p *peerPort) shake(ctx context.Context, raw net.Conn) {
	ctx, cancel := context.WithTimeout(ctx, handshakeTimeout)
	defer cancel()
	conn := tls.Server(raw, p.tls)
	if err := conn.HandshakeContext(ctx); err != nil {
		p.log.Debug("peer refused", "address", raw.RemoteAddr(), "error", err)
		raw.Close()
		return
	}
	to := p.grpc
	switch conn.ConnectionState().NegotiatedProtocol {
	case alpnGRPC:
	case alpnRaft:
		to = p.raft
	default:
		conn.Close()
		return
	}
	if to == p.raft {
		// raft's transport does not close what it has accepted.
		stop := context.AfterFunc(p.life, func() { conn.Close() })
		hooked := &hookedConn{Conn: conn, hook: stop}
		if names := conn.ConnectionState().PeerCertificates; len(names) > 0 {
			left := p.callers.enter(names[0].Subject.CommonName)
			hooked.hook = func() bool { left(); return stop() }
		}
		if !to.put(ctx, hooked) {
			hooked.Close()
		}
		return
	}
	if !to.put(ctx, conn) {
		conn.Close()
	}
}

// hookedConn calls hook when it is closed.
type hookedConn struct {
	net.Conn
	hook func() bool
}

func (c *hookedConn) Close() error {
	c.hook()
	return c.Conn.Close()
}

// close ends accepting. The raft side is closed by raft's transport, which
// would otherwise take it for a fault.
func (p *peerPort) close() {
	p.listener.Close()
	p.grpc.Close()
}

// queueListener is a net.Listener fed with connections made elsewhere.
type queueListener struct {
	address net.Addr
	conns   chan net.Conn
	closed  chan struct{}
	once    sync.Once
}

func newQueueListener(a net.Addr) *queueListener {
	return &queueListener{address: a, conns: make(chan net.Conn), closed: make(chan struct{})}
}

func (q *queueListener) put(ctx context.Context, c net.Conn) bool {
	select {
	case q.conns <- c:
		return true
	case <-q.closed:
	case <-ctx.Done():
	}
	return false
}

func (q *queueListener) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *queueListener) Addr() net.Addr { return q.address }

func (q *queueListener) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

// advertised is an address as told to others: it may be a name.
type advertised string

func (advertised) Network() string  { return "tcp" }
func (a advertised) String() string { return string(a) }

// raftStreams is the raft side of the peer port as raft.StreamLayer.
type raftStreams struct {
	*queueListener
	client *tls.Config
	dial   func(ctx context.Context, address string) (net.Conn, error)
	life   context.Context // connections end with it
}

func (s *raftStreams) Dial(address raft.ServerAddress, timeout time.Duration) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(s.life, timeout)
	defer cancel()
	raw, err := s.dial(ctx, string(address))
	if err != nil {
		return nil, fmt.Errorf("dialing replica at %s: %w", address, err)
	}
	c := s.client.Clone()
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
		return nil, fmt.Errorf("replica at %s does not speak %s", address, alpnRaft)
	}
	return &hookedConn{Conn: conn, hook: context.AfterFunc(s.life, func() { conn.Close() })}, nil
}

// handshaken gives gRPC connections whose handshake is done already.
type handshaken struct{}

func (handshaken) ServerHandshake(c net.Conn) (net.Conn, credentials.AuthInfo, error) {
	t, ok := c.(*tls.Conn)
	if !ok {
		return nil, nil, errors.New("connection without TLS")
	}
	return c, credentials.TLSInfo{
		State:          t.ConnectionState(),
		CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: credentials.PrivacyAndIntegrity},
	}, nil
}

func (handshaken) ClientHandshake(context.Context, string, net.Conn) (net.Conn, credentials.AuthInfo, error) {
	return nil, nil, errors.New("only for servers")
}
func (handshaken) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}
func (handshaken) Clone() credentials.TransportCredentials { return handshaken{} }
func (handshaken) OverrideServerName(string) error         { return nil }
