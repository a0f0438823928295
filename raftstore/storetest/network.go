package storetest

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// Network is the cables between the replicas of a cluster. Every cable has two
// directions, which can be cut or slowed by themselves. A cut one behaves as in
// life: bytes vanish from sight, nobody is told, dials time out. What was sent
// meanwhile is sent again as TCP does it, at times that double: after a cut of
// ten seconds a connection may stay dead for another ten, unless whoever has
// dialed gives it up.
type Network struct {
	mu    sync.Mutex
	names map[string]string // peer address → replica
	ends  map[string]string // local address of a dialed connection → replica
	lines map[line]condition
	moved chan struct{} // closed and replaced when a condition changes
	given map[line]int  // connections that were given up, by who did and to whom
}

// line is one direction of a cable.
type line struct{ from, to string }

// condition is what is wrong with a line.
type condition struct {
	cut           bool
	delay, jitter time.Duration
}

func newNetwork() *Network {
	return &Network{
		names: make(map[string]string), ends: make(map[string]string),
		lines: make(map[line]condition), moved: make(chan struct{}), given: make(map[line]int),
	}
}

// Cut stops all traffic between two replicas; Mend lets it pass again.
func (n *Network) Cut(a, b string) {
	n.CutOneWay(a, b)
	n.CutOneWay(b, a)
}

// Mend undoes Cut and CutOneWay in both directions.
func (n *Network) Mend(a, b string) {
	n.MendOneWay(a, b)
	n.MendOneWay(b, a)
}

// CutOneWay stops what one replica sends to another, and no more.
func (n *Network) CutOneWay(from, to string) {
	n.change(from, to, func(c *condition) { c.cut = true })
}

// MendOneWay undoes CutOneWay.
func (n *Network) MendOneWay(from, to string) {
	n.change(from, to, func(c *condition) { c.cut = false })
}

// Slow delays what one replica sends to another by delay and up to jitter more.
// Connections are delayed each by itself: what is sent on two may change places,
// what is sent on one does not. Zeros undo it.
func (n *Network) Slow(from, to string, delay, jitter time.Duration) {
	n.change(from, to, func(c *condition) { c.delay, c.jitter = delay, jitter })
}

// Heal mends and quickens every cable.
func (n *Network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.lines)
	n.announce()
}

func (n *Network) change(from, to string, how func(*condition)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.lines[line{from, to}]
	how(&c)
	n.lines[line{from, to}] = c
	n.announce()
}

func (n *Network) announce() {
	close(n.moved)
	n.moved = make(chan struct{})
}

// condition reports on a line, and gives a channel for the next change.
func (n *Network) condition(from, to string) (condition, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lines[line{from, to}], n.moved
}

// GivenUp is how many connections from one replica to another were given up by
// the one that had dialed them, because the other was unheard for too long.
func (n *Network) GivenUp(from, to string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.given[line{from, to}]
}

func (n *Network) noteGivenUp(from, to string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.given[line{from, to}]++
}

func (n *Network) addHost(address, name string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.names[address] = name
}

func (n *Network) host(address string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[address]
}

// Dialer returns the dial function of one replica.
func (n *Network) Dialer(from string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		to := n.host(address)
		if err := n.reach(ctx, from, to); err != nil {
			return nil, err
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		end := conn.LocalAddr().String()
		n.mu.Lock()
		n.ends[end] = from
		n.mu.Unlock()
		return &wire{Conn: conn, net: n, from: from, to: to, closed: make(chan struct{}), onClose: func() {
			n.mu.Lock()
			delete(n.ends, end)
			n.mu.Unlock()
		}}, nil
	}
}

// reach waits until both directions are whole, as a dial does, and for as long
// as they are slow.
func (n *Network) reach(ctx context.Context, from, to string) error {
	for {
		out, moved := n.condition(from, to)
		back, _ := n.condition(to, from)
		var there <-chan time.Time
		if !out.cut && !back.cut {
			if out.delay+back.delay == 0 {
				return nil
			}
			there = time.After(out.delay + back.delay)
			moved = nil
		}
		select {
		case <-there:
			return nil
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Listener wraps the listener of one replica, so that what it sends on the
// connections that it accepts is subject to the network as well.
func (n *Network) Listener(name string, l net.Listener) net.Listener {
	return &tappedListener{Listener: l, net: n, name: name}
}

type tappedListener struct {
	net.Listener
	net  *Network
	name string
}

func (l *tappedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	return &wire{Conn: conn, net: l.net, from: l.name, closed: make(chan struct{})}, nil
}

// socketBuffer is how much a sender may write into a cut or slow line before it
// has to wait.
const socketBuffer = 256 << 10

// resend is how long after bytes were lost they are sent again for the first
// time, as Linux does it on a quick line; each further time waits twice as long.
const resend = 200 * time.Millisecond

// wire is one end of a connection: it holds back what this end sends for as
// long as the line asks. The other end does the same for its direction.
type wire struct {
	net.Conn
	net     *Network
	from    string
	to      string // of an accepted connection found at the first write: the dialer has named itself by then
	closed  chan struct{}
	once    sync.Once
	onClose func()

	mu       sync.Mutex
	deadline time.Time // of writes; the one of the connection is for reads
	waiting  []parcel
	held     int           // bytes in waiting
	room     chan struct{} // closed when held has shrunk; nil when nobody waits
	flushing bool

	unheard  time.Duration // for how long nothing may be acknowledged; 0 = for ever
	watching bool          // whether anything is
}

// SetUnheardTimeout makes the connection break when what was sent is not
// acknowledged for so long, as TCP_USER_TIMEOUT does to one of the kernel.
func (w *wire) SetUnheardTimeout(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unheard = d
	return nil
}

// parcel is bytes on their way.
type parcel struct {
	due  time.Time
	data []byte
}

func (w *wire) SetDeadline(t time.Time) error {
	if err := w.SetWriteDeadline(t); err != nil {
		return err
	}
	return w.Conn.SetReadDeadline(t)
}

// SetWriteDeadline bounds the wait for room. What was taken is sent even after it.
func (w *wire) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
	return nil
}

// target names the other end; "" for a stranger, whom no fault concerns.
func (w *wire) target() string {
	if w.to == "" {
		w.net.mu.Lock()
		w.to = w.net.ends[w.Conn.RemoteAddr().String()]
		w.net.mu.Unlock()
	}
	return w.to
}

// Write implements net.Conn. As with any connection, calls follow one another.
func (w *wire) Write(b []byte) (int, error) {
	select {
	case <-w.closed:
		return 0, net.ErrClosed
	default:
	}
	w.mu.Lock()
	cond, _ := w.net.condition(w.from, w.target())
	if back, _ := w.net.condition(w.to, w.from); w.unheard > 0 && !w.watching && (cond.cut || back.cut || w.flushing) {
		w.watching = true
		go w.giveUp()
	}
	if cond == (condition{}) && !w.flushing {
		deadline := w.deadline
		w.mu.Unlock()
		if err := w.Conn.SetWriteDeadline(deadline); err != nil {
			return 0, err
		}
		return w.Conn.Write(b)
	}
	defer w.mu.Unlock()
	for w.held > 0 && w.held+len(b) > socketBuffer {
		if err := w.awaitRoom(); err != nil {
			return 0, err
		}
	}
	due := time.Now().Add(cond.delay)
	if cond.jitter > 0 {
		due = due.Add(rand.N(cond.jitter))
	}
	w.waiting = append(w.waiting, parcel{due, append([]byte(nil), b...)})
	w.held += len(b)
	if !w.flushing {
		w.flushing = true
		go w.flush()
	}
	return len(b), nil
}

// awaitRoom waits, without w.mu, until something was sent.
func (w *wire) awaitRoom() error {
	if w.room == nil {
		w.room = make(chan struct{})
	}
	room, deadline := w.room, w.deadline
	w.mu.Unlock()
	defer w.mu.Lock()
	var expired <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
		defer t.Stop()
		expired = t.C
	}
	select {
	case <-room:
		return nil
	case <-expired:
		return os.ErrDeadlineExceeded
	case <-w.closed:
		return net.ErrClosed
	}
}

// flush sends what waits, in order, each parcel when it is due and the line whole.
func (w *wire) flush() {
	if w.Conn.SetWriteDeadline(time.Time{}) != nil {
		return
	}
	for {
		w.mu.Lock()
		if len(w.waiting) == 0 {
			w.flushing = false
			w.mu.Unlock()
			return
		}
		next := w.waiting[0]
		w.mu.Unlock()
		if !w.pass(next.due) {
			return
		}
		if _, err := w.Conn.Write(next.data); err != nil {
			return
		}
		w.mu.Lock()
		w.waiting = w.waiting[1:]
		w.held -= len(next.data)
		if w.room != nil {
			close(w.room)
			w.room = nil
		}
		w.mu.Unlock()
	}
}

// pass waits until the time has come and an attempt to send finds the line
// whole; false when closed.
func (w *wire) pass(due time.Time) bool {
	if wait := time.Until(due); wait > 0 && !w.wait(wait) {
		return false
	}
	for again := resend; ; again *= 2 {
		if cond, _ := w.net.condition(w.from, w.to); !cond.cut {
			return true
		}
		if !w.wait(again) {
			return false
		}
	}
}

// giveUp breaks the connection unless what was sent is acknowledged in time:
// it has arrived, and one of the attempts to send it finds the way back whole.
func (w *wire) giveUp() {
	for again, left := resend, w.unheard; ; again *= 2 {
		if !w.wait(min(again, left)) {
			return
		}
		left -= again
		back, _ := w.net.condition(w.to, w.from)
		w.mu.Lock()
		heard := w.held == 0 && !back.cut
		if heard {
			w.watching = false
		}
		w.mu.Unlock()
		if heard {
			return
		}
		if left <= 0 {
			w.net.noteGivenUp(w.from, w.to)
			w.Close()
			return
		}
	}
}

// wait is false when the connection was closed meanwhile.
func (w *wire) wait(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-w.closed:
		return false
	}
}

// Close closes the connection; what still waits is lost.
func (w *wire) Close() error {
	w.once.Do(func() {
		close(w.closed)
		if w.onClose != nil {
			w.onClose()
		}
	})
	return w.Conn.Close()
}
