package dns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/miekg/dns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/connlimit"
)

// Limits for the clients of the DNS server.
const (
	maxWaiting       = 2000             // queries of all clients that wait for other servers
	maxWaitingEach   = 200              // queries of one client that wait for other servers
	readTime         = 5 * time.Second  // time for reading a query over TCP, after its length was read
	idleTime         = 10 * time.Second // maximum time between two queries of a TCP connection
	writeTime        = 5 * time.Second
	maxOnConnection  = 1000    // queries on one TCP connection
	maxQuestion      = 4096    // bytes of one query
	receiveBuffer    = 1 << 20 // bytes of unread queries per socket
	maxSockets       = 4       // sockets that share an address
	maxConnections   = 256
	connectionsOfOne = 32
)

// waitLimiter limits the queries that wait for upstream servers, in total and per client.
type waitLimiter struct {
	mu        sync.Mutex
	all       int
	perClient map[netip.Addr]int
}

func (w *waitLimiter) acquireSlot(a netip.Addr) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all >= maxWaiting || w.perClient[a] >= maxWaitingEach {
		return false
	}
	w.all++
	w.perClient[a]++
	return true
}

func (w *waitLimiter) releaseSlot(a netip.Addr) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all--
	if w.perClient[a]--; w.perClient[a] == 0 {
		delete(w.perClient, a)
	}
}

// allowedClients are the clients that the DNS server answers: the pods and processes of its node.
// The server's addresses are reachable from other hosts. Answering such hosts would enable
// amplification attacks, because answers are larger than queries and source addresses can be
// forged.
type allowedClients struct {
	prefixes []netip.Prefix
	local    map[netip.Addr]struct{}
}

func (c *allowedClients) isAllowed(a netip.Addr) bool {
	for _, p := range c.prefixes {
		if p.Contains(a) {
			return true
		}
	}
	if a.IsLoopback() {
		return true
	}
	_, ok := c.local[a]
	return ok
}

// addressListener contains the sockets of the DNS server at one address.
type addressListener struct {
	udp         []*net.UDPConn
	tcp         net.Listener
	httpServers map[uint16]*http.Server // HTTP server of each port
	cancel      context.CancelFunc
	done        sync.WaitGroup
}

// listenAt opens the UDP and TCP sockets at an address. The caller must then call startServing,
// which answers queries.
func listenAt(ctx context.Context, address netip.AddrPort) (*addressListener, error) {
	f := &addressListener{}
	lc := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
			// exceeds the system's default limit; without the privilege, the default applies
			_ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, receiveBuffer)
		})
		return errors.Join(err, failed)
	}}
	for range min(runtime.GOMAXPROCS(0), maxSockets) {
		c, err := lc.ListenPacket(ctx, "udp", address.String())
		if err != nil {
			f.shutDown()
			return nil, fmt.Errorf("serving DNS at %s: %w", address, err)
		}
		f.udp = append(f.udp, c.(*net.UDPConn))
		if address.Port() == 0 { // in tests: all sockets share the port of the first one
			address = c.LocalAddr().(*net.UDPAddr).AddrPort()
		}
	}
	l, err := lc.Listen(ctx, "tcp", address.String())
	if err != nil {
		f.shutDown()
		return nil, fmt.Errorf("serving DNS at %s: %w", address, err)
	}
	f.tcp = l
	return f, nil
}

func (f *addressListener) shutDown() {
	if f.cancel != nil {
		f.cancel()
	}
	for _, c := range f.udp {
		c.Close()
	}
	if f.tcp != nil {
		f.tcp.Close()
	}
	for _, s := range f.httpServers {
		s.Close()
	}
	f.done.Wait()
}

// startServing starts goroutines that answer queries at the address of f until the listener is
// closed.
func (s *Server) startServing(ctx context.Context, f *addressListener) {
	ctx, f.cancel = context.WithCancel(ctx)
	for _, c := range f.udp {
		f.done.Go(func() { s.serveUDP(ctx, c, &f.done) })
	}
	f.done.Go(func() {
		s.acceptTCP(ctx, connlimit.New(f.tcp, connlimit.Limits{Total: maxConnections, PerSource: connectionsOfOne,
			Unauthenticated: maxConnections, UnauthenticatedPerSource: connectionsOfOne}), &f.done)
	})
}

// serveUDP answers the queries of one UDP socket until it is closed. It answers queries that are
// known locally itself, and starts goroutines for all others, which are added to the wait group.
func (s *Server) serveUDP(ctx context.Context, c *net.UDPConn, goroutines *sync.WaitGroup) {
	buf, out, seen := make([]byte, maxQuestion), make([]byte, maxUDP), newAnswerCache()
	for {
		n, from, err := c.ReadFromUDPAddrPort(buf)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // reports a client's closed port
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if !s.clients.Load().isAllowed(from.Addr()) {
			s.dropped.Add(1)
			continue
		}
		in := &clientQuery{receivedAt: time.Now()}
		force, serial := s.chain.Load(), s.index.Serial() // read before the answer is computed from them
		if old := seen.findReply(buf[:n], force, serial); old != nil {
			out = append(out[:0], old.reply...)
			out[0], out[1] = buf[0], buf[1]
			_, _ = c.WriteToUDPAddrPort(out, from)
			old.block.counts.countResponse(old.kind, false, from.Addr().Is6(), old.rcode, n, len(out),
				time.Since(in.receivedAt))
			continue
		}
		reply, later := s.handleMessage(force, buf[:n], false, in)
		if later != nil {
			s.answerLater(ctx, c, from, in, later, goroutines)
			continue
		}
		if reply == nil {
			continue
		}
		if packed := s.packAndCount(in, reply, from.Addr(), out[:cap(out)]); packed != nil {
			_, _ = c.WriteToUDPAddrPort(packed, from) // an error means that the client is gone
			seen.storeReply(buf[:n], packed, in, force, serial, reply.Rcode)
		}
	}
}

// answerLater answers a query over UDP in a new goroutine. It calls later to obtain the reply. If
// too many queries are waiting, it replies SERVFAIL at once.
func (s *Server) answerLater(
	ctx context.Context, c *net.UDPConn, from netip.AddrPort, in *clientQuery, later func(context.Context) *dns.Msg,
	more *sync.WaitGroup,
) {
	if !s.waiting.acquireSlot(from.Addr()) {
		if packed := s.packAndCount(in, in.newReply(response{rcode: dns.RcodeServerFailure}), from.Addr(),
			nil); packed != nil {
			_, _ = c.WriteToUDPAddrPort(packed, from)
		}
		return
	}
	more.Go(func() {
		defer s.waiting.releaseSlot(from.Addr())
		if packed := s.packAndCount(in, s.runRecovering(ctx, in, later), from.Addr(), nil); packed != nil {
			_, _ = c.WriteToUDPAddrPort(packed, from)
		}
	})
}

// handleMessage parses a client's message and returns the reply, or a function that obtains the
// reply. If a panic occurs, only this message is not answered.
func (s *Server) handleMessage(c *serverChain, packet []byte, tcp bool, in *clientQuery) (
	reply *dns.Msg, later func(context.Context) *dns.Msg,
) {
	defer func() {
		if p := recover(); p != nil {
			s.logPanic(p)
			reply, later = nil, nil
		}
	}()
	refused, ok := c.parseQuery(packet, tcp, in)
	if !ok {
		return nil, nil
	}
	if refused != nil {
		return refused, nil
	}
	return c.answerMessage(in)
}

// runRecovering calls later to obtain a reply. It converts a panic into a SERVFAIL reply.
func (s *Server) runRecovering(ctx context.Context, in *clientQuery, later func(context.Context) *dns.Msg) (
	reply *dns.Msg,
) {
	defer func() {
		if p := recover(); p != nil {
			s.logPanic(p)
			reply = in.newReply(response{rcode: dns.RcodeServerFailure})
		}
	}()
	return later(ctx)
}

func (s *Server) logPanic(p any) {
	if s.panics.Add(1)%1000 == 1 {
		s.cfg.Log.Error("a query caused a panic of the DNS server and was not answered", "fault", p, "stack",
			string(debug.Stack()))
	}
}

// packAndCount encodes the reply m into buf and counts it. It returns nil if no reply can be sent.
func (s *Server) packAndCount(in *clientQuery, m *dns.Msg, from netip.Addr, buf []byte) []byte {
	size := in.size
	if size == 0 {
		size = maxPlainUDP
	}
	packed, err := packMessage(m, size, buf)
	if err != nil {
		m = in.newReply(response{rcode: dns.RcodeServerFailure})
		if packed, err = m.Pack(); err != nil {
			return nil
		}
	}
	if in.block != nil {
		took := time.Since(in.receivedAt)
		in.block.counts.countResponse(in.query.kind, in.tcp, from.Is6(), m.Rcode, in.bytes, len(packed), took)
		if in.block.cfg.Log {
			s.cfg.Log.LogAttrs(context.Background(), slog.LevelInfo, "answered", slog.String("client", from.String()),
				slog.String("name", in.query.owner),
				slog.String("type", dns.TypeToString[in.query.kind]), slog.String("code", dns.RcodeToString[m.Rcode]),
				slog.Int("bytes", len(packed)), slog.Duration("took", took))
		}
	}
	return packed
}

// acceptTCP accepts and serves TCP connections until the listener is closed.
func (s *Server) acceptTCP(ctx context.Context, l net.Listener, goroutines *sync.WaitGroup) {
	for {
		c, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue
		}
		goroutines.Go(func() {
			defer c.Close()
			stop := context.AfterFunc(ctx, func() { c.Close() })
			defer stop()
			s.serveTCP(ctx, c)
		})
	}
}

// serveTCP answers the queries of one TCP connection, one after the other.
func (s *Server) serveTCP(ctx context.Context, c net.Conn) {
	at, err := netip.ParseAddrPort(c.RemoteAddr().String())
	if err != nil {
		return
	}
	from := at.Addr().Unmap()
	if !s.clients.Load().isAllowed(from) {
		s.dropped.Add(1)
		return
	}
	var size [2]byte
	for range maxOnConnection {
		if c.SetReadDeadline(time.Now().Add(idleTime)) != nil {
			return
		}
		if _, err := io.ReadFull(c, size[:]); err != nil {
			return
		}
		n := int(binary.BigEndian.Uint16(size[:]))
		if n > maxQuestion || c.SetReadDeadline(time.Now().Add(readTime)) != nil {
			return
		}
		packet := make([]byte, n)
		if _, err := io.ReadFull(c, packet); err != nil {
			return
		}
		in := &clientQuery{receivedAt: time.Now()}
		reply, later := s.handleMessage(s.chain.Load(), packet, true, in)
		if later != nil {
			if !s.waiting.acquireSlot(from) {
				reply = in.newReply(response{rcode: dns.RcodeServerFailure})
			} else {
				reply = s.runRecovering(ctx, in, later)
				s.waiting.releaseSlot(from)
			}
		}
		if reply == nil {
			return
		}
		packed := s.packAndCount(in, reply, from, nil)
		if packed == nil || c.SetWriteDeadline(time.Now().Add(writeTime)) != nil {
			return
		}
		if _, err := c.Write(append(binary.BigEndian.AppendUint16(make([]byte, 0, len(packed)+2), uint16(len(packed))),
			packed...)); err != nil {
			return
		}
	}
}

// serverCounters are the counters of a Server.
type serverCounters struct {
	panics, refused, dropped atomic.Uint64
}

// waitingQueries returns the number of queries that currently wait for upstream servers.
func (s *Server) waitingQueries() int {
	s.waiting.mu.Lock()
	defer s.waiting.mu.Unlock()
	return s.waiting.all
}
