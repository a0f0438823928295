// Package framelimit bounds what the frames of one HTTP/2 connection cost a server. It reads the heads of frames as they
// pass: streams that the client resets count against a rate, and a client that has not proven who it is has few requests
// at a time, of which those it has reset count until their handlers have returned.
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

// Limits of one connection. Zero values mean the defaults.
type Limits struct {
	// Requests of an unauthenticated client whose handlers have not returned or whose answers are not sent. Default 1: its next requests wait, until it
	// has proven who it is.
	Requests int
	// Wait is how long the next request of such a client waits for one of these to end. Default 5 s.
	Wait time.Duration
	// Resets and Control are how many resets, and how many frames that carry neither a request nor data, an
	// unauthenticated client may send at once, and a tenth of it each second. Defaults 20 and 1000.
	// A reset counts once more for each 256 encoded bytes of the latest request's headers, which
	// can be as many fields. The first reset always passes: the budget may become negative.
	Resets, Control float64
	// KnownResets is Resets of an authenticated client. Default 2000.
	KnownResets float64
	// Exceeded, if not nil, is called when a connection exceeds a limit, once for each connection.
	Exceeded func()
}

func (l Limits) complete() Limits {
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
	set(&l.KnownResets, 2000)
	return l
}

// Types, flags and sizes of RFC 9113.
const (
	frameData    = 0
	frameHeaders = 1
	frameReset   = 3
	frameMore    = 9 // CONTINUATION
	flagEnd      = 1
	frameHead    = 9
	prefaceBytes = 24
)

// headerBytes is the size of encoded headers for which a reset of an unauthenticated client counts
// once more.
const headerBytes = 256

// pollKnown is how often a waiting request checks whether its client has proven who it is.
const pollKnown = 10 * time.Millisecond

// Conn is a connection of HTTP/2 whose frames are counted while they are read.
type Conn struct {
	net.Conn
	limits Limits
	known  func() bool
	now    func() time.Time

	// The reader's state; reads of a connection do not overlap.
	skip        int // bytes of the preface or of a payload that are left
	head        [frameHead]byte
	have        int
	last        uint32 // highest stream of the client
	block       int    // encoded bytes of the latest headers
	resets      bucket
	control     bucket
	over        bool
	wasKnown    bool
	closedEarly chan struct{} // closed by Close
	closing     sync.Once

	running atomic.Int64
	ended   chan struct{} // has room for one signal
}

// TLSConn is a Conn over TLS. An HTTP/2 server reads the state of TLS from it.
type TLSConn struct {
	*Conn
	over *tls.Conn
}

// ConnectionState returns the state of TLS.
func (c *TLSConn) ConnectionState() tls.ConnectionState { return c.over.ConnectionState() }

// New returns the connection with its limits. known reports whether the client has proven who it is.
func New(c *tls.Conn, known func() bool, l Limits) *TLSConn {
	limited := NewWithoutTLS(c, known, l)
	limited.skip = prefaceBytes
	return &TLSConn{Conn: limited, over: c}
}

// NewWithoutTLS returns a connection without TLS, of which net/http has read the preface of HTTP/2, with its limits.
func NewWithoutTLS(c net.Conn, known func() bool, l Limits) *Conn {
	l = l.complete()
	return &Conn{Conn: c, limits: l, known: known, now: time.Now, resets: bucket{left: l.Resets},
		control: bucket{left: l.Control}, ended: make(chan struct{}, 1), closedEarly: make(chan struct{})}
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.closing.Do(func() { close(c.closedEarly) })
	return c.Conn.Close()
}

// Read implements net.Conn. The frame that exceeds a limit is turned into one that the server answers with GOAWAY.
func (c *Conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	for rest := p[:n]; len(rest) > 0 && !c.over; {
		if c.skip > 0 {
			pass := min(c.skip, len(rest))
			c.skip, rest = c.skip-pass, rest[pass:]
			continue
		}
		took := copy(c.head[c.have:], rest)
		c.have += took
		at := rest[:took]
		rest = rest[took:]
		if c.have < frameHead {
			break
		}
		c.have = 0
		c.skip = int(c.head[0])<<16 | int(c.head[1])<<8 | int(c.head[2])
		if !c.admit() {
			c.over = true
			if c.limits.Exceeded != nil {
				c.limits.Exceeded()
			}
			clear(at[max(0, took-4):]) // a stream frame of stream 0 is a connection error
			if took == frameHead {
				at[3] = frameReset
			}
		}
	}
	return n, err
}

// admit counts the frame whose head was read; false means that the connection has to end.
func (c *Conn) admit() bool {
	known := c.isKnown()
	stream := binary.BigEndian.Uint32(c.head[5:]) &^ (1 << 31)
	switch kind := c.head[3]; {
	case kind == frameHeaders && stream > c.last:
		c.last, c.block = stream, c.skip
		return known || c.wait()
	case kind == frameReset && known:
		return c.resets.take(c.now(), c.limits.KnownResets, 1)
	case kind == frameReset:
		return c.resets.take(c.now(), c.limits.Resets, 1+float64(c.block/headerBytes))
	case kind == frameData && (c.skip > 0 || c.head[4]&flagEnd != 0), known:
		return true
	case kind == frameMore:
		c.block += c.skip
	}
	return c.control.take(c.now(), c.limits.Control, 1)
}

// isKnown reports whether the client has proven who it is, with the larger budget as soon as it has.
func (c *Conn) isKnown() bool {
	if !c.wasKnown && c.known() {
		c.wasKnown = true
		c.resets = bucket{left: c.limits.KnownResets}
	}
	return c.wasKnown
}

// wait blocks the connection's reader until another request may begin.
func (c *Conn) wait() bool {
	if c.begin() {
		return true
	}
	limit := time.NewTimer(c.limits.Wait)
	defer limit.Stop()
	poll := time.NewTicker(pollKnown)
	defer poll.Stop()
	for {
		select {
		case <-c.ended:
			if c.begin() {
				return true
			}
		case <-poll.C:
			if c.isKnown() {
				return true
			}
		case <-limit.C:
			return false
		case <-c.closedEarly:
			return false
		}
	}
}

// begin counts a request if there is room for it.
func (c *Conn) begin() bool {
	if c.running.Load() >= int64(c.limits.Requests) {
		return false
	}
	c.running.Add(1)
	return true
}

// end counts that a request has ended.
func (c *Conn) end() {
	c.running.Add(-1)
	select {
	case c.ended <- struct{}{}:
	default:
	}
}

// connKey is where a request's context has the connection.
type connKey struct{}

// Context returns a context by which Handler finds the connection.
func (c *Conn) Context(ctx context.Context) context.Context {
	return context.WithValue(ctx, connKey{}, c)
}

// Handler counts a request as ended when h has returned, and of an unauthenticated client when the answer has been sent.
// What the client sent is released before: an answer that the client does not read keeps little of it. Deadlines of the
// answer are the matter of h.
func Handler(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		c, _ := r.Context().Value(connKey{}).(*Conn)
		if c == nil {
			h.ServeHTTP(w, r)
			return
		}
		defer func() {
			r.Header, r.Trailer, r.RequestURI = nil, nil, ""
			if !c.known() {
				_ = http.NewResponseController(w).Flush()
			}
			c.end()
		}()
		h.ServeHTTP(w, r)
	})
}

// bucket is a budget that fills up by a tenth of its size each second.
type bucket struct {
	left float64
	at   time.Time
}

// take subtracts cost from the budget, which may become negative. It returns false, and subtracts
// nothing, if less than 1 is left.
func (b *bucket) take(now time.Time, size, cost float64) bool {
	if !b.at.IsZero() {
		b.left = min(size, b.left+now.Sub(b.at).Seconds()*size/10)
	}
	b.at = now
	if b.left < 1 {
		return false
	}
	b.left -= cost
	return true
}
