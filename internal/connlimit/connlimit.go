// Package connlimit bounds the connections that a server takes. A connection is a
// stranger's until its server calls Known. Strangers are few, in all and per
// source; when there are too many, the oldest of the source that has the most
// goes, so that no source keeps the others out. All connections together have a
// bound as well, by which file descriptors are kept back for the rest of the process.
package connlimit

import (
	"container/list"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Limits of a Door. Zero values mean the defaults.
type Limits struct {
	Total           int // connections; default three eighths of the files that the process may open
	PerSource       int // connections of one source; default half of All
	Unauthenticated int // strangers; default 4096, at most half of All
	// strangers of one source; default a quarter of Strangers, and 32 at least where there are so many
	UnauthenticatedPerSource int
	WriteTimeout             time.Duration // a write that moves nothing for so long fails; default 30 s
}

// unauthenticatedConnMemory is what a stranger's connection may take that does the most which is possible before it says who it
// is: TLS, two goroutines, a frame of HTTP/2 and half a header, with what the collector has not freed yet.
const unauthenticatedConnMemory = 128 << 10

// UnauthenticatedLimit is how many of them a process lets in that may take limit bytes in all: a sixteenth of these, but always
// some, so that it can be reached, and no more than ever come of good will.
func UnauthenticatedLimit(limit int64) int {
	return int(min(max(limit/16/unauthenticatedConnMemory, 128), 4096))
}

// OpenFilesShare is a part of the files that the process may open.
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

// authGracePeriod is how long a stranger does not have to make way for another of its own
// source: time enough to say who it is.
const authGracePeriod = time.Second

// Limiter is a listener that keeps the limits.
type Limiter struct {
	net.Listener
	limits Limits

	mu              sync.Mutex
	total           int
	unauthenticated int
	sources         map[netip.Prefix]*source
	shed            uint64
}

// source is where connections come from: an IPv4 address, or a /64 of IPv6.
type source struct {
	unauthenticated, authenticated list.List // of *Conn, oldest first
}

func (s *source) connCount() int { return s.unauthenticated.Len() + s.authenticated.Len() }

// New puts a door before a listener.
func New(l net.Listener, limits Limits) *Limiter {
	return &Limiter{Listener: l, limits: limits.fillDefaults(), sources: map[netip.Prefix]*source{}}
}

// Shed is how many connections were closed, or not taken, for the limits.
func (d *Limiter) Shed() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shed
}

// Len is how many connections there are, and how many of these are strangers'.
func (d *Limiter) Len() (all, strangers int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.total, d.unauthenticated
}

// Accept implements net.Listener. The connections are *Conn.
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

// admitConn takes a connection into the book; out are those that make way for it.
func (d *Limiter) admitConn(c *Conn) (out []*Conn, ok bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	s := d.sources[c.source]
	if s == nil {
		s = &source{}
	}
	refuse := func() ([]*Conn, bool) {
		d.shed++
		return out, false
	}
	if s.unauthenticated.Len() >= d.limits.UnauthenticatedPerSource || s.connCount() >= d.limits.PerSource {
		oldest := s.oldestUnauthenticated()
		if oldest == nil || time.Since(oldest.since) < authGracePeriod {
			return refuse()
		}
		out = append(out, d.shedConn(oldest))
	}
	if d.unauthenticated >= d.limits.Unauthenticated {
		oldest := d.largestSource(func(s *source) int { return s.unauthenticated.Len() }).oldestUnauthenticated()
		if d.sources[oldest.source].unauthenticated.Len() == 1 && time.Since(oldest.since) < authGracePeriod {
			return refuse() // a crowd, each from a place of its own: those who are there finish first
		}
		out = append(out, d.shedConn(oldest))
	}
	if d.total >= d.limits.Total {
		most := d.largestSource((*source).connCount)
		switch {
		case most.unauthenticated.Len() > 0:
			out = append(out, d.shedConn(most.oldestUnauthenticated()))
		case most == s || most.connCount() <= s.connCount()+1:
			return refuse()
		default:
			out = append(out, d.shedConn(most.authenticated.Back().Value.(*Conn)))
		}
	}
	if s = d.sources[c.source]; s == nil { // also when its last one has just made way
		s = &source{}
		d.sources[c.source] = s
	}
	c.element = s.unauthenticated.PushBack(c)
	d.total++
	d.unauthenticated++
	return out, true
}

// oldestUnauthenticated is the oldest stranger of a source, or nil.
func (s *source) oldestUnauthenticated() *Conn {
	if e := s.unauthenticated.Front(); e != nil {
		return e.Value.(*Conn)
	}
	return nil
}

// largestSource is the source with the most of something; there is one.
func (d *Limiter) largestSource(count func(*source) int) (out *source) {
	best := -1
	for _, s := range d.sources {
		if n := count(s); n > best {
			best, out = n, s
		}
	}
	return out
}

// shedConn takes a connection out of the book to make room.
func (d *Limiter) shedConn(c *Conn) *Conn {
	d.shed++
	d.removeConn(c)
	return c
}

// removeConn takes a connection out of the book; d.mu is held.
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
	p, _ := ip.Prefix(bits) // the bits fit the address
	return p
}
