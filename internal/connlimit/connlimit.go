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
	All       int // connections; default three eighths of the files that the process may open
	PerSource int // connections of one source; default half of All
	Strangers int // strangers; default 4096, at most half of All
	// strangers of one source; default a quarter of Strangers, and 32 at least where there are so many
	PerUnsure int
	Stall     time.Duration // a write that moves nothing for so long fails; default 30 s
}

// strangerMemory is what a stranger's connection may take that does the most which is possible before it says who it
// is: TLS, two goroutines, a frame of HTTP/2 and half a header, with what the collector has not freed yet.
const strangerMemory = 128 << 10

// Strangers is how many of them a process lets in that may take limit bytes in all: a sixteenth of these, but always
// some, so that it can be reached, and no more than ever come of good will.
func Strangers(limit int64) int { return int(min(max(limit/16/strangerMemory, 128), 4096)) }

// Share is a part of the files that the process may open.
func Share(part, whole int) int { return max(16, int(openFiles()*uint64(part)/uint64(whole))) }

func (l Limits) complete() Limits {
	set := func(v *int, d int) {
		if *v == 0 {
			*v = max(1, d)
		}
	}
	set(&l.All, Share(3, 8))
	set(&l.PerSource, l.All/2)
	set(&l.Strangers, min(4096, l.All/2))
	set(&l.PerUnsure, max(l.Strangers/4, min(32, l.Strangers)))
	if l.Stall == 0 {
		l.Stall = 30 * time.Second
	}
	return l
}

// youth is how long a stranger does not have to make way for another of its own
// source: time enough to say who it is.
const youth = time.Second

// Door is a listener that keeps the limits.
type Door struct {
	net.Listener
	limits Limits

	mu        sync.Mutex
	all       int
	strangers int
	sources   map[netip.Prefix]*source
	shed      uint64
}

// source is where connections come from: an IPv4 address, or a /64 of IPv6.
type source struct {
	strangers, known list.List // of *Conn, oldest first
}

func (s *source) len() int { return s.strangers.Len() + s.known.Len() }

// New puts a door before a listener.
func New(l net.Listener, limits Limits) *Door {
	return &Door{Listener: l, limits: limits.complete(), sources: map[netip.Prefix]*source{}}
}

// Shed is how many connections were closed, or not taken, for the limits.
func (d *Door) Shed() uint64 {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.shed
}

// Len is how many connections there are, and how many of these are strangers'.
func (d *Door) Len() (all, strangers int) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.all, d.strangers
}

// Accept implements net.Listener. The connections are *Conn.
func (d *Door) Accept() (net.Conn, error) {
	for {
		inner, err := d.Listener.Accept()
		if err != nil {
			return nil, err
		}
		c := &Conn{Conn: inner, door: d, source: sourceOf(inner.RemoteAddr()), since: time.Now()}
		out, ok := d.admit(c)
		for _, o := range out {
			o.Close()
		}
		if ok {
			return c, nil
		}
		inner.Close()
	}
}

// admit takes a connection into the book; out are those that make way for it.
func (d *Door) admit(c *Conn) (out []*Conn, ok bool) {
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
	if s.strangers.Len() >= d.limits.PerUnsure || s.len() >= d.limits.PerSource {
		oldest := s.oldest()
		if oldest == nil || time.Since(oldest.since) < youth {
			return refuse()
		}
		out = append(out, d.drop(oldest))
	}
	if d.strangers >= d.limits.Strangers {
		oldest := d.most(func(s *source) int { return s.strangers.Len() }).oldest()
		if d.sources[oldest.source].strangers.Len() == 1 && time.Since(oldest.since) < youth {
			return refuse() // a crowd, each from a place of its own: those who are there finish first
		}
		out = append(out, d.drop(oldest))
	}
	if d.all >= d.limits.All {
		most := d.most((*source).len)
		switch {
		case most.strangers.Len() > 0:
			out = append(out, d.drop(most.oldest()))
		case most == s || most.len() <= s.len()+1:
			return refuse()
		default:
			out = append(out, d.drop(most.known.Back().Value.(*Conn)))
		}
	}
	if s = d.sources[c.source]; s == nil { // also when its last one has just made way
		s = &source{}
		d.sources[c.source] = s
	}
	c.place = s.strangers.PushBack(c)
	d.all++
	d.strangers++
	return out, true
}

// oldest is the oldest stranger of a source, or nil.
func (s *source) oldest() *Conn {
	if e := s.strangers.Front(); e != nil {
		return e.Value.(*Conn)
	}
	return nil
}

// most is the source with the most of something; there is one.
func (d *Door) most(of func(*source) int) (out *source) {
	best := -1
	for _, s := range d.sources {
		if n := of(s); n > best {
			best, out = n, s
		}
	}
	return out
}

// drop takes a connection out of the book to make room.
func (d *Door) drop(c *Conn) *Conn {
	d.shed++
	d.forget(c)
	return c
}

// forget takes a connection out of the book; d.mu is held.
func (d *Door) forget(c *Conn) {
	if c.place == nil {
		return
	}
	s := d.sources[c.source]
	if c.known {
		s.known.Remove(c.place)
	} else {
		s.strangers.Remove(c.place)
		d.strangers--
	}
	c.place = nil
	d.all--
	if s.len() == 0 {
		delete(d.sources, c.source)
	}
}

func sourceOf(a net.Addr) netip.Prefix {
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
