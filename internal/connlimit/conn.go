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
	door   *Door
	source netip.Prefix
	since  time.Time

	place *list.Element // in the door's book; nil when it left. Guarded by door.mu
	known bool          // guarded by door.mu

	mu    sync.Mutex
	outer time.Time // the write deadline that the user has set
}

// Of finds the connection of a Door below c, as below a *tls.Conn; nil when there is none.
func Of(c net.Conn) *Conn {
	for c != nil {
		if own, ok := c.(*Conn); ok {
			return own
		}
		below, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil
		}
		c = below.NetConn()
	}
	return nil
}

// Known says that the other end has proven who it is: it does not count as a
// stranger any more. It may be called on nil and more than once.
func (c *Conn) Known() {
	if c == nil {
		return
	}
	d := c.door
	d.mu.Lock()
	defer d.mu.Unlock()
	if c.known || c.place == nil {
		return
	}
	s := d.sources[c.source]
	s.strangers.Remove(c.place)
	d.strangers--
	c.known, c.place = true, s.known.PushBack(c)
}

// IsKnown reports whether Known was called. A nil connection is known.
func (c *Conn) IsKnown() bool {
	if c == nil {
		return true
	}
	c.door.mu.Lock()
	defer c.door.mu.Unlock()
	return c.known
}

// Closed says whether the connection has left the door's book.
func (c *Conn) Closed() bool {
	c.door.mu.Lock()
	defer c.door.mu.Unlock()
	return c.place == nil
}

// Close implements net.Conn.
func (c *Conn) Close() error {
	c.door.mu.Lock()
	c.door.forget(c)
	c.door.mu.Unlock()
	return c.Conn.Close()
}

// piece is how much must be taken within one Stall.
const piece = 32 << 10

// Write implements net.Conn. It fails when the other end takes nothing of what is
// written for a Stall; a connection on which nothing is written may be idle for ever.
func (c *Conn) Write(p []byte) (n int, err error) {
	for {
		part := p[n:min(n+piece, len(p))]
		if err := c.arm(); err != nil {
			return n, err
		}
		m, err := c.Conn.Write(part)
		n += m
		if err != nil || n == len(p) {
			return n, err
		}
	}
}

// arm sets the deadline of the next write: that of the user, or a Stall when it is earlier.
func (c *Conn) arm() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := time.Now().Add(c.door.limits.Stall)
	if !c.outer.IsZero() && c.outer.Before(at) {
		at = c.outer
	}
	return c.Conn.SetWriteDeadline(at)
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.outer = t
	c.mu.Unlock()
	return c.arm()
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// openFiles is how many files this process may open. The runtime of Go has raised
// it to the hard limit at the start.
func openFiles() uint64 {
	var lim syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &lim); err != nil {
		return 1024
	}
	return min(lim.Cur, 1<<20)
}
