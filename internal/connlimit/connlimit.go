// Package connlimit bounds the connections that a server accepts. A connection counts as
// unauthenticated until the server calls MarkAuthenticated. The number of unauthenticated
// connections is bounded, in total and per source address. Above a bound, the oldest
// unauthenticated connection of the source with the most of them is closed, so that one source
// cannot lock out others. The total number of connections is bounded too, which reserves file
// descriptors for the rest of the process.
package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Limits are the limits that a Limiter enforces. Zero values mean the defaults.
type Limits struct {
	Total           int // all connections; default three eighths of the files that the process may open
	PerSource       int // connections of one source address; default half of Total
	Unauthenticated int // unauthenticated connections; default 4096, at most half of Total
	// unauthenticated connections of one source; default a quarter of Unauthenticated, but at least
	// 32 if Unauthenticated allows it
	UnauthenticatedPerSource int
	WriteTimeout             time.Duration // a write that makes no progress for this long fails; default 30 s
}

// unauthenticatedConnMemory is the largest amount of memory that an unauthenticated connection can
// use: for TLS, two goroutines, an HTTP/2 frame, an incomplete header, and garbage that is not
// collected yet.
const unauthenticatedConnMemory = 128 << 10

// UnauthenticatedLimit returns a value for Limits.Unauthenticated in a process with a memory limit
// of limit bytes. The connections may use a sixteenth of the memory. The result is at least 128, so
// that the process stays reachable, and at most 4096.
func UnauthenticatedLimit(limit int64) int {
	return int(min(max(limit/16/unauthenticatedConnMemory, 128), 4096))
}

// OpenFilesShare returns the fraction part/whole of the number of files that this process may have
// open, but at least 16.
func OpenFilesShare(part, whole int) int {
	return max(16, int(maxOpenFiles()*uint64(part)/uint64(whole)))
}

func (l Limits) fillDefaults() Limits {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = max(1, d)
		}
	}
	set(&l.Total, OpenFilesShare(3, 8))
	set(&l.PerSource, l.Total/2)
	set(&l.Unauthenticated, min(4096, l.Total/2))
	set(&l.UnauthenticatedPerSource, max(l.Unauthenticated/4, min(32, l.Unauthenticated)))
	if l.WriteTimeout == 0 {
		l.WriteTimeout = 30 * time.Second
	}
	return l
}

// authGracePeriod is how long a new connection is protected from being closed in favor of a newer
// connection, so that its client can authenticate.
const authGracePeriod = time.Second

// Limiter is a net.Listener that enforces Limits on the connections that it accepts.
type Limiter struct {
	net.Listener
	limits Limits

	mu              sync.Mutex
	total           int
	unauthenticated int
	sources         map[netip.Prefix]*source
	shed            uint64
}

// source is the set of connections from one source: an IPv4 address, or a /64 prefix of IPv6.
type source struct {
	unauthenticated, authenticated list.List // of *Conn, oldest first
}

func (s *source) connCount() int { return s.unauthenticated.Len() + s.authenticated.Len() }

// New returns a Limiter that accepts connections from l within the limits.
func New(l net.Listener, limits Limits) *Limiter {
	return &Limiter{Listener: l, limits: limits.fillDefaults(), sources: map[netip.Prefix]*source{}}
}

// Shed returns how many connections the limiter has closed or refused because of a limit.
func (d *Limiter) Shed() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shed
}

// Len returns the number of open connections, and how many of them are unauthenticated.
func (d *Limiter) Len() (all, unauthenticated int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.total, d.unauthenticated
}

// Accept implements net.Listener. It returns connections of type *Conn. Connections beyond the
// limits are closed.
func (d *Limiter) Accept() (net.Conn, error) {
	for {
		inner, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &Conn{Conn: inner, limiter: d, source: sourcePrefix(inner.RemoteAddr()), since: time.Now()}
		out, ok := d.admitConn(c)
		for _, o := range out {
			o.Close()
		}
		if ok {
			return c, nil
		}
		inner.Close()
	}
}

// admitConn counts the connection c and returns true, or returns false if the limits do not allow
// it. The caller must close the other connections in shed to stay within the limits.
func (d *Limiter) admitConn(c *Conn) (shed []*Conn, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sources[c.source]
	if s == nil {
		s = &source{}
	}
	refuse := func() ([]*Conn, bool) {
		d.shed++
		return shed, false
	}
	if s.unauthenticated.Len() >= d.limits.UnauthenticatedPerSource || s.connCount() >= d.limits.PerSource {
		oldest := s.oldestUnauthenticated()
		if oldest == nil || time.Since(oldest.since) < authGracePeriod {
			return refuse()
		}
		shed = append(shed, d.shedConn(oldest))
	}
	if d.unauthenticated >= d.limits.Unauthenticated {
		oldest := d.largestSource(func(s *source) int { return s.unauthenticated.Len() }).oldestUnauthenticated()
		if d.sources[oldest.source].unauthenticated.Len() == 1 && time.Since(oldest.since) < authGracePeriod {
			return refuse() // many sources with one new connection each: those connections may authenticate first
		}
		shed = append(shed, d.shedConn(oldest))
	}
	if d.total >= d.limits.Total {
		most := d.largestSource((*source).connCount)
		switch {
		case most.unauthenticated.Len() > 0:
			shed = append(shed, d.shedConn(most.oldestUnauthenticated()))
		case most == s || most.connCount() <= s.connCount()+1:
			return refuse()
		default:
			shed = append(shed, d.shedConn(most.authenticated.Back().Value.(*Conn)))
		}
	}
	if s = d.sources[c.source]; s == nil { // the source may have been removed with its last connection just now
		s = &source{}
		d.sources[c.source] = s
	}
	c.element = s.unauthenticated.PushBack(c)
	d.total++
	d.unauthenticated++
	return shed, true
}

// oldestUnauthenticated returns the oldest unauthenticated connection of a source, or nil.
func (s *source) oldestUnauthenticated() *Conn {
	if e := s.unauthenticated.Front(); e != nil {
		return e.Value.(*Conn)
	}
	return nil
}

// largestSource returns the source for which count returns the largest number. The limiter must
// have at least one source.
func (d *Limiter) largestSource(count func(*source) int) (out *source) {
	best := -1
	for _, s := range d.sources {
		if n := count(s); n > best {
			best, out = n, s
		}
	}
	return out
}

// shedConn stops counting a connection that exceeds a limit, and counts it for Shed. It returns the
// connection, which the caller must close. The caller holds d.mu.
func (d *Limiter) shedConn(c *Conn) *Conn {
	d.shed++
	d.removeConn(c)
	return c
}

// removeConn removes a connection from the limiter's counts. It has no effect if the connection was
// removed before. The caller holds d.mu.
func (d *Limiter) removeConn(c *Conn) {
	if c.element == nil {
		return
	}
	s := d.sources[c.source]
	if c.authenticated {
		s.authenticated.Remove(c.element)
	} else {
		s.unauthenticated.Remove(c.element)
		d.unauthenticated--
	}
	c.element = nil
	d.total--
	if s.connCount() == 0 {
		delete(d.sources, c.source)
	}
}

func sourcePrefix(a net.Addr) netip.Prefix {
	t, err := netip.ParseAddrPort(a.String())
	if err != nil {
		return netip.Prefix{}
	}
	ip, bits := t.Addr().Unmap().WithZone(""), 32
	if ip.Is6() {
		bits = 64
	}
	p, _ := ip.Prefix(bits) // the prefix length always fits the address family
	return p
}
