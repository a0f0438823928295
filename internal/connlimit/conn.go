package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// Conn is a connection that a Limiter has accepted and counts until it is closed.
type Conn struct {
	net.Conn
	limiter *Limiter
	source  netip.Prefix
	since   time.Time

	// position in a list of its source; nil after the connection is closed. Guarded by limiter.mu
	element       *list.Element
	authenticated bool // MarkAuthenticated was called; guarded by limiter.mu

	mu           sync.Mutex
	userDeadline time.Time // the write deadline set by the user of the connection
}

// FromConn returns the Conn that c is or wraps, for example if c is a *tls.Conn over a Conn. It
// returns nil if c wraps no Conn.
func FromConn(c net.Conn) *Conn {
	for c != nil {
		if limited, ok := c.(*Conn); ok {
			return limited
		}
		below, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = below.NetConn()
	}
	return nil
}

// MarkAuthenticated records that the client of the connection has authenticated. The connection no
// longer counts toward the limits of unauthenticated connections. It may be called on nil and more
// than once.
func (c *Conn) MarkAuthenticated() {
	if c == nil {
		return
	}
	d := c.limiter
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.authenticated || c.element == nil {
		return
	}
	s := d.sources[c.source]
	s.unauthenticated.Remove(c.element)
	d.unauthenticated--
	c.authenticated, c.element = true, s.authenticated.PushBack(c)
}

// IsAuthenticated reports whether MarkAuthenticated was called on the connection. It returns true
// for nil, a connection without a limiter.
func (c *Conn) IsAuthenticated() bool {
	if c == nil {
		return true
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.authenticated
}

// IsClosed reports whether the connection was closed, by its user or by the limiter.
func (c *Conn) IsClosed() bool {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.element == nil
}

// Close implements net.Conn. The limiter no longer counts the connection.
func (c *Conn) Close() error {
	c.limiter.mu.Lock()
	c.limiter.removeConn(c)
	c.limiter.mu.Unlock()
	return c.Conn.Close()
}

// writeChunk is how many bytes Write passes to the connection at a time. Each chunk must be written
// within Limits.WriteTimeout.
const writeChunk = 32 << 10

// Write implements net.Conn. It fails if the peer accepts no data for Limits.WriteTimeout. The
// timeout applies only during a Write; a connection may be idle forever.
func (c *Conn) Write(p []byte) (n int, err error) {
	for {
		part := p[n:min(n+writeChunk, len(p))]
		if err := c.armWriteDeadline(); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(part)
		n += m
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// armWriteDeadline sets the deadline for the next chunk: the deadline of the connection's user, or
// now plus Limits.WriteTimeout if that is earlier.
func (c *Conn) armWriteDeadline() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now().Add(c.limiter.limits.WriteTimeout)
	if !c.userDeadline.IsZero() && c.userDeadline.Before(at) {
		at = c.userDeadline
	}
	return c.Conn.SetWriteDeadline(at)
}

// SetWriteDeadline implements net.Conn. Limits.WriteTimeout still applies if it ends earlier.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.userDeadline = t
	c.mu.Unlock()
	return c.armWriteDeadline()
}

// SetDeadline implements net.Conn. Limits.WriteTimeout still applies to writes if it ends earlier.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// maxOpenFiles returns how many files this process may have open, at most 1<<20. The Go runtime has
// raised the soft limit to the hard limit at startup.
func maxOpenFiles() uint64 {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return 1024
	}
	return min(lim.Cur, 1<<20)
}
