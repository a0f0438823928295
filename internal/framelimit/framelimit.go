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
	"time"
)

// Limits are the limits of one HTTP/2 connection. Zero values mean the defaults.
type Limits struct {
	// Requests is how many requests of an unauthenticated client may be unfinished at once. A
	// request is unfinished until its handler has returned and the response is sent. Default 1.
	// Further requests wait until an earlier request finishes or the client has authenticated.
	Requests int
	// Wait is how long a request of an unauthenticated client waits for an earlier one to finish
	// before the connection is closed. Default 5 s.
	Wait time.Duration
	// Resets is how many streams an unauthenticated client may reset at once. Control is how many
	// frames that carry neither a request nor data it may send at once. A tenth of each budget is
	// added every second. Defaults: 20 and 1000. A reset costs one more token for each 256 bytes of
	// the encoded headers of the latest request, because those bytes can be as many fields. The
	// first reset always passes: the budget may become negative.
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

// headerBytes is the size of encoded request headers that costs one token. When an unauthenticated
// client resets a stream, it pays one token of Conn.resets. It pays one more for each headerBytes
// bytes of the headers of its latest request.
const headerBytes = 256

// authPollInterval is how often awaitRequestSlot checks whether the client has authenticated.
const authPollInterval = 10 * time.Millisecond

// Conn is an HTTP/2 connection that enforces Limits. It counts the frames of the client as the
// server reads them.
type Conn struct {
	net.Conn
	limits        Limits
	authenticated func() bool
	now           func() time.Time

	// The following fields belong to the reader; reads of a connection do not overlap.
	frames           frameScanner
	lastStream       uint32 // highest stream ID of the client
	latestHeaders    int    // encoded bytes of the latest headers
	resets           bucket
	control          bucket
	exceeded         bool
	wasAuthenticated bool

	requests requestSlots
}

// TLSConn is a Conn over TLS. It has the method ConnectionState, which the HTTP/2 server requires.
type TLSConn struct {
	*Conn
	tlsConn *tls.Conn
}

// ConnectionState returns the TLS connection state, which the HTTP/2 server requires.
func (c *TLSConn) ConnectionState() tls.ConnectionState { return c.tlsConn.ConnectionState() }

// New returns a connection that enforces the limits on the TLS connection c. authenticated must
// report whether the client has authenticated.
func New(c *tls.Conn, authenticated func() bool, l Limits) *TLSConn {
	limited := NewWithoutTLS(c, authenticated, l)
	limited.frames.bytesToSkip = prefaceBytes
	return &TLSConn{Conn: limited, tlsConn: c}
}

// NewWithoutTLS returns a connection that enforces the limits on a connection without TLS. net/http
// must already have read the HTTP/2 preface. authenticated must report whether the client has
// authenticated.
func NewWithoutTLS(c net.Conn, authenticated func() bool, l Limits) *Conn {
	l = l.fillDefaults()
	return &Conn{Conn: c, limits: l, authenticated: authenticated, now: time.Now, resets: bucket{remaining: l.Resets},
		control: bucket{remaining: l.Control}, requests: newRequestSlots(l.Requests)}
}

// Close implements net.Conn. It also ends the wait of a request for a slot.
func (c *Conn) Close() error {
	c.requests.closeSlots()
	return c.Conn.Close()
}

// Read implements net.Conn. If a frame exceeds a limit, its header is replaced by an invalid one,
// so that the server closes the connection with GOAWAY.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for rest := p[:n]; len(rest) > 0 && !c.exceeded; {
		var part []byte
		var complete bool
		if part, rest, complete = c.frames.scanHeader(rest); !complete {
			break
		}
		if !c.admitFrame() {
			c.exceeded = true
			if c.limits.Exceeded != nil {
				c.limits.Exceeded()
			}
			clear(part[max(0, len(part)-4):]) // a stream frame of stream 0 is a connection error
			if len(part) == frameHead {
				part[3] = frameReset
			}
		}
	}
	return n, err
}

// admitFrame counts the frame with the header c.frames.head. It returns false if the frame exceeds
// a limit and the connection must be closed. For a new request of an unauthenticated client, it may
// block until the request can start (see awaitRequestSlot).
func (c *Conn) admitFrame() bool {
	authenticated := c.isAuthenticated()
	stream := binary.BigEndian.Uint32(c.frames.head[5:]) &^ (1 << 31)
	switch kind := c.frames.head[3]; {
	case kind == frameHeaders && stream > c.lastStream:
		c.lastStream, c.latestHeaders = stream, c.frames.bytesToSkip
		return authenticated || c.awaitRequestSlot()
	case kind == frameReset && authenticated:
		return c.resets.spend(c.now(), c.limits.AuthenticatedResets, 1)
	case kind == frameReset:
		return c.resets.spend(c.now(), c.limits.Resets, 1+float64(c.latestHeaders/headerBytes))
	case kind == frameData && (c.frames.bytesToSkip > 0 || c.frames.head[4]&flagEnd != 0), authenticated:
		return true
	case kind == frameContinuation:
		c.latestHeaders += c.frames.bytesToSkip
	}
	return c.control.spend(c.now(), c.limits.Control, 1)
}

// isAuthenticated reports whether the client has authenticated. When it returns true for the first
// time, it replaces the budget for resets by the larger one.
func (c *Conn) isAuthenticated() bool {
	if !c.wasAuthenticated && c.authenticated() {
		c.wasAuthenticated = true
		c.resets = bucket{remaining: c.limits.AuthenticatedResets}
	}
	return c.wasAuthenticated
}

// awaitRequestSlot blocks until an unauthenticated client may start another request, or has
// authenticated. Until it returns, no further frames are read. It returns false after Limits.Wait,
// or if the connection is closed.
func (c *Conn) awaitRequestSlot() bool {
	if c.requests.startRequest() {
		return true
	}
	limit := time.NewTimer(c.limits.Wait)
	defer limit.Stop()
	poll := time.NewTicker(authPollInterval)
	defer poll.Stop()
	for {
		select {
		case <-c.requests.ended:
			if c.requests.startRequest() {
				return true
			}
		case <-poll.C:
			if c.isAuthenticated() {
				return true
			}
		case <-limit.C:
			return false
		case <-c.requests.closed:
			return false
		}
	}
}

// connKey is the context key under which Context stores the connection.
type connKey struct{}

// Context returns ctx with the connection as a value, which Handler reads. Use it in
// http.Server.ConnContext.
func (c *Conn) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Handler returns a handler that calls h and then counts the request as finished. For an
// unauthenticated client, it first waits until the response is sent. Before it waits, it releases
// the request's headers, so that a client that does not read the response occupies little memory. h
// must set write deadlines.
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
			c.requests.finishRequest()
		}()
		h.ServeHTTP(w, r)
	})
}

// bucket is a token bucket that is refilled by a tenth of its size each second.
type bucket struct {
	remaining float64
	updated   time.Time
}

// spend subtracts cost from the bucket, which may become negative. If less than 1 token is left, it
// returns false and subtracts nothing. size is the capacity of the bucket.
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
