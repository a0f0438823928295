// Package framelimit bounds the cost that the frames of one HTTP/2 connection cause for a server.
// It reads frame headers as they pass. Streams that the client resets count against a rate. An
// unauthenticated client may have few concurrent requests; requests that it has reset count until
// their handlers have returned.
package framelimit

import (
	"context"
	"crypto/tls"
	"encoding/binary"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"time"
)

// Limits are the limits of one connection. Zero values mean the defaults.
type Limits struct {
	// Requests is how many requests of an unauthenticated client may be unfinished: the handler has
	// not returned or the response is not sent. Default 1. Further requests wait until an earlier
	// request finishes or the client has authenticated.
	Requests int
	// Wait is how long a request of an unauthenticated client waits for an earlier one to finish.
	// Default 5 s.
	Wait time.Duration
	// Resets is how many streams an unauthenticated client may reset at once, and Control how many
	// frames that carry neither a request nor data it may send at once. A tenth of each budget is
	// added every second. Defaults: 20 and 1000. A reset costs one more for each 256 encoded bytes
	// of the latest request's headers, because those bytes can be as many fields. The first reset
	// always passes: the budget may become negative.
	Resets, Control float64
	// AuthenticatedResets is the value of Resets for an authenticated client. Default 2000.
	AuthenticatedResets float64
	// Exceeded, if not nil, is called when a connection exceeds a limit, once for each connection.
	Exceeded func()
}

func (l Limits) fillDefaults() Limits {
	if l.Requests == 0 {
		l.Requests = 1
	}
	if l.Wait == 0 {
		l.Wait = 5 * time.Second
	}
	set := func(v *float64, d float64) {
		if *v == 0 {
			*v = d
		}
	}
	set(&l.Resets, 20)
	set(&l.Control, 1000)
	set(&l.AuthenticatedResets, 2000)
	return l
}

// Frame types, flags and sizes of RFC 9113.
const (
	frameData         = 0
	frameHeaders      = 1
	frameReset        = 3
	frameContinuation = 9 // CONTINUATION
	flagEnd           = 1
	frameHead         = 9
	prefaceBytes      = 24
)

// headerBytes is the size of encoded headers for which a reset of an unauthenticated client counts
// once more.
const headerBytes = 256

// authPollInterval is how often a waiting request checks whether its client has authenticated.
const authPollInterval = 10 * time.Millisecond

// Conn is an HTTP/2 connection that counts frames while they are read.
type Conn struct {
	net.Conn
	limits        Limits
	authenticated func() bool
	now           func() time.Time

	// The following fields belong to the reader; reads of a connection do not overlap.
	bytesToSkip      int // bytes of the preface or of a payload that still pass uncounted
	head             [frameHead]byte
	headRead         int
	lastStream       uint32 // highest stream ID of the client
	latestHeaders    int    // encoded bytes of the latest headers
	resets           bucket
	control          bucket
	exceeded         bool
	wasAuthenticated bool
	closedEarly      chan struct{} // closed by Close
	closing          sync.Once

	runningRequests atomic.Int64
	requestEnded    chan struct{} // has room for one signal
}

// TLSConn is a Conn over TLS. An HTTP/2 server reads the TLS state from it.
type TLSConn struct {
	*Conn
	tlsConn *tls.Conn
}

// ConnectionState returns the TLS state.
func (c *TLSConn) ConnectionState() tls.ConnectionState { return c.tlsConn.ConnectionState() }

// New returns the connection with its limits. authenticated reports whether the client has
// authenticated.
func New(c *tls.Conn, authenticated func() bool, l Limits) *TLSConn {
	limited := NewWithoutTLS(c, authenticated, l)
	limited.bytesToSkip = prefaceBytes
	return &TLSConn{Conn: limited, tlsConn: c}
}

// NewWithoutTLS returns a plaintext connection with its limits. net/http must have read the HTTP/2
// preface already.
func NewWithoutTLS(c net.Conn, authenticated func() bool, l Limits) *Conn {
	l = l.fillDefaults()
	return &Conn{Conn: c, limits: l, authenticated: authenticated, now: time.Now, resets: bucket{remaining: l.Resets},
		control: bucket{remaining: l.Control}, requestEnded: make(chan struct{}, 1), closedEarly: make(chan struct{})}
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.closing.Do(func() { close(c.closedEarly) })
	return c.Conn.Close()
}

// Read implements net.Conn. A frame that exceeds a limit is changed so that the server answers it
// with GOAWAY.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for rest := p[:n]; len(rest) > 0 && !c.exceeded; {
		if c.bytesToSkip > 0 {
			pass := min(c.bytesToSkip, len(rest))
			c.bytesToSkip, rest = c.bytesToSkip-pass, rest[pass:]
			continue
		}
		copied := copy(c.head[c.headRead:], rest)
		c.headRead += copied
		part := rest[:copied]
		rest = rest[copied:]
		if c.headRead < frameHead {
			break
		}
		c.headRead = 0
		c.bytesToSkip = int(c.head[0])<<16 | int(c.head[1])<<8 | int(c.head[2])
		if !c.admitFrame() {
			c.exceeded = true
			if c.limits.Exceeded != nil {
				c.limits.Exceeded()
			}
			clear(part[max(0, copied-4):]) // a stream frame of stream 0 is a connection error
			if copied == frameHead {
				part[3] = frameReset
			}
		}
	}
	return n, err
}

// admitFrame counts a frame after its header was read. It returns false if the connection must be
// closed.
func (c *Conn) admitFrame() bool {
	authenticated := c.isAuthenticated()
	stream := binary.BigEndian.Uint32(c.head[5:]) &^ (1 << 31)
	switch kind := c.head[3]; {
	case kind == frameHeaders && stream > c.lastStream:
		c.lastStream, c.latestHeaders = stream, c.bytesToSkip
		return authenticated || c.awaitRequestSlot()
	case kind == frameReset && authenticated:
		return c.resets.spend(c.now(), c.limits.AuthenticatedResets, 1)
	case kind == frameReset:
		return c.resets.spend(c.now(), c.limits.Resets, 1+float64(c.latestHeaders/headerBytes))
	case kind == frameData && (c.bytesToSkip > 0 || c.head[4]&flagEnd != 0), authenticated:
		return true
	case kind == frameContinuation:
		c.latestHeaders += c.bytesToSkip
	}
	return c.control.spend(c.now(), c.limits.Control, 1)
}

// isAuthenticated reports whether the client has authenticated. The first time that it has, the
// larger budget applies.
func (c *Conn) isAuthenticated() bool {
	if !c.wasAuthenticated && c.authenticated() {
		c.wasAuthenticated = true
		c.resets = bucket{remaining: c.limits.AuthenticatedResets}
	}
	return c.wasAuthenticated
}

// awaitRequestSlot blocks the connection's reader until another request may start. It returns false
// on timeout or close.
func (c *Conn) awaitRequestSlot() bool {
	if c.startRequest() {
		return true
	}
	limit := time.NewTimer(c.limits.Wait)
	defer limit.Stop()
	poll := time.NewTicker(authPollInterval)
	defer poll.Stop()
	for {
		select {
		case <-c.requestEnded:
			if c.startRequest() {
				return true
			}
		case <-poll.C:
			if c.isAuthenticated() {
				return true
			}
		case <-limit.C:
			return false
		case <-c.closedEarly:
			return false
		}
	}
}

// startRequest counts a request and returns true if the limit allows another one.
func (c *Conn) startRequest() bool {
	if c.runningRequests.Load() >= int64(c.limits.Requests) {
		return false
	}
	c.runningRequests.Add(1)
	return true
}

// finishRequest counts a finished request.
func (c *Conn) finishRequest() {
	c.runningRequests.Add(-1)
	select {
	case c.requestEnded <- struct{}{}:
	default:
	}
}

// connKey is the context key of a request's connection.
type connKey struct{}

// Context returns a context from which Handler gets the connection.
func (c *Conn) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Handler counts a request as finished when h has returned. For an unauthenticated client the
// response must also have been sent. The request's headers are released first, so that a response
// that the client does not read retains little memory. h is responsible for write deadlines.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(connKey{}).(*Conn)
		if c == nil {
			h.ServeHTTP(w, r)
			return
		}
		defer func() {
			r.Header, r.Trailer, r.RequestURI = nil, nil, ""
			if !c.authenticated() {
				_ = http.NewResponseController(w).Flush()
			}
			c.finishRequest()
		}()
		h.ServeHTTP(w, r)
	})
}

// bucket is a budget that regains a tenth of its size each second.
type bucket struct {
	remaining float64
	updated   time.Time
}

// spend subtracts cost from the budget, which may become negative. It returns false, and subtracts
// nothing, if less than 1 is left.
func (b *bucket) spend(now time.Time, size, cost float64) bool {
	if !b.updated.IsZero() {
		b.remaining = min(size, b.remaining+now.Sub(b.updated).Seconds()*size/10)
	}
	b.updated = now
	if b.remaining < 1 {
		return false
	}
	b.remaining -= cost
	return true
}
