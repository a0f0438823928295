package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"
)

// Conn is a connection that came through a Door.
type Conn struct {
	net.Conn
	limiter *Limiter
	source  netip.Prefix
	since   time.Time

	element       *list.Element // in the door's book; nil when it left. Guarded by door.mu
	authenticated bool          // guarded by door.mu

	mu           sync.Mutex
	userDeadline time.Time // the write deadline that the user has set
}

// FromConn finds the connection of a Door below c, as below a *tls.Conn; nil when there is none.
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

// MarkAuthenticated says that the other end has proven who it is: it does not count as a
// stranger any more. It may be called on nil and more than once.
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

// IsAuthenticated reports whether Known was called. A nil connection is known.
func (c *Conn) IsAuthenticated() bool {
	if c == nil {
		return true
	}
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.authenticated
}

// IsClosed says whether the connection has left the door's book.
func (c *Conn) IsClosed() bool {
	c.limiter.mu.Lock()
	defer c.limiter.mu.Unlock()
	return c.element == nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.limiter.mu.Lock()
	c.limiter.removeConn(c)
	c.limiter.mu.Unlock()
	return c.Conn.Close()
}

// writeChunk is how much must be taken within one Stall.
const writeChunk = 32 << 10

// Write implements net.Conn. It fails when the other end takes nothing of what is
// written for a Stall; a connection on which nothing is written may be idle for ever.
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

// armWriteDeadline sets the deadline of the next write: that of the user, or a Stall when it is earlier.
func (c *Conn) armWriteDeadline() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now().Add(c.limiter.limits.WriteTimeout)
	if !c.userDeadline.IsZero() && c.userDeadline.Before(at) {
		at = c.userDeadline
	}
	return c.Conn.SetWriteDeadline(at)
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.userDeadline = t
	c.mu.Unlock()
	return c.armWriteDeadline()
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// maxOpenFiles is how many files this process may open. The runtime of Go has raised
// it to the hard limit at the start.
func maxOpenFiles() uint64 {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return 1024
	}
	return min(lim.Cur, 1<<20)
}
