package storetest

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// Network simulates the lines between the replicas of a cluster. Each direction of a line can be
// cut or slowed. A cut line behaves like a real one: bytes are lost without an error, and dials
// time out. Lost bytes are resent like TCP does, with doubling delays. After a cut of ten seconds a
// connection may therefore stay dead for another ten seconds, unless the side that dialed closes
// it.
type Network struct {
	mu    sync.Mutex
	names map[string]string // replica by peer address
	ends  map[string]string // replica by local address of a dialed connection
	lines map[line]condition
	moved chan struct{} // closed and replaced when a condition changes
	given map[line]int  // number of connections by the end that abandoned them and the other end
}

// line is one direction between two replicas.
type line struct{ from, to string }

// condition is the fault of a line.
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

// Cut drops all traffic between two replicas; Mend undoes it.
func (n *Network) Cut(a, b string) {
	n.CutOneWay(a, b)
	n.CutOneWay(b, a)
}

// Mend undoes Cut and CutOneWay in both directions.
func (n *Network) Mend(a, b string) {
	n.MendOneWay(a, b)
	n.MendOneWay(b, a)
}

// CutOneWay drops the traffic in one direction only.
func (n *Network) CutOneWay(from, to string) {
	n.changeLine(from, to, func(c *condition) { c.cut = true })
}

// MendOneWay undoes CutOneWay.
func (n *Network) MendOneWay(from, to string) {
	n.changeLine(from, to, func(c *condition) { c.cut = false })
}

// Slow delays the traffic in one direction by delay plus a random time up to jitter. Each
// connection is delayed independently: traffic of two connections may be reordered, traffic of one
// is not. Zeros undo it.
func (n *Network) Slow(from, to string, delay, jitter time.Duration) {
	n.changeLine(from, to, func(c *condition) { c.delay, c.jitter = delay, jitter })
}

// Heal undoes all faults of all lines.
func (n *Network) Heal() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.lines)
	n.notifyChanged()
}

func (n *Network) changeLine(from, to string, how func(*condition)) {
	n.mu.Lock()
	defer n.mu.Unlock()
	c := n.lines[line{from, to}]
	how(&c)
	n.lines[line{from, to}] = c
	n.notifyChanged()
}

func (n *Network) notifyChanged() {
	close(n.moved)
	n.moved = make(chan struct{})
}

// lineCondition returns the condition of a line and a channel that is closed at the next change.
func (n *Network) lineCondition(from, to string) (condition, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lines[line{from, to}], n.moved
}

// GivenUp returns how many connections from one replica to another were closed by the side that
// dialed them because nothing was acknowledged for too long.
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

func (n *Network) hostAt(address string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[address]
}

// Dialer returns the dial function of one replica.
func (n *Network) Dialer(from string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		to := n.hostAt(address)
		if err := n.awaitReachable(ctx, from, to); err != nil {
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

// awaitReachable waits until both directions work, as a dial does, and for their delays.
func (n *Network) awaitReachable(ctx context.Context, from, to string) error {
	for {
		out, moved := n.lineCondition(from, to)
		back, _ := n.lineCondition(to, from)
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

// Listener wraps the listener of one replica, so that its replies on accepted connections pass the
// simulated network too.
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

// socketBuffer is how much a sender may write into a cut or slow line before it blocks.
const socketBuffer = 256 << 10

// resend is the delay before lost bytes are resent for the first time, as in Linux on a fast line.
// It doubles each time.
const resend = 200 * time.Millisecond

// wire is one end of a connection. It holds back what this end sends as long as the line requires.
// The other end does the same for its direction.
type wire struct {
	net.Conn
	net     *Network
	from    string
	to      string // for an accepted connection it is determined at the first write, when the dialer's name is known
	closed  chan struct{}
	once    sync.Once
	onClose func()

	mu       sync.Mutex
	deadline time.Time // deadline of writes; the connection's deadline is used for reads
	waiting  []parcel
	held     int           // number of waiting bytes
	room     chan struct{} // closed when held decreases; nil if no writer waits
	flushing bool

	unheard  time.Duration // how long data may stay unacknowledged; 0 = forever
	watching bool          // whether unacknowledged data is being timed
}

// SetUnheardTimeout makes the connection break if data is not acknowledged for the given time, like
// TCP_USER_TIMEOUT.
func (w *wire) SetUnheardTimeout(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unheard = d
	return nil
}

// parcel is data in transit.
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

// SetWriteDeadline bounds the wait for buffer space. Accepted data is sent even after the deadline.
func (w *wire) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
	return nil
}

// remoteHost returns the name of the other end; "" for an unknown host, to which no fault applies.
func (w *wire) remoteHost() string {
	if w.to == "" {
		w.net.mu.Lock()
		w.to = w.net.ends[w.Conn.RemoteAddr().String()]
		w.net.mu.Unlock()
	}
	return w.to
}

// Write implements net.Conn. Calls must not overlap.
func (w *wire) Write(b []byte) (int, error) {
	select {
	case <-w.closed:
		return 0, net.ErrClosed
	default:
	}
	w.mu.Lock()
	cond, _ := w.net.lineCondition(w.from, w.remoteHost())
	if back, _ := w.net.lineCondition(w.to, w.from); w.unheard > 0 && !w.watching && (cond.cut || back.cut || w.flushing) {
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
		go w.sendQueued()
	}
	return len(b), nil
}

// awaitRoom waits, without w.mu, until some data was sent.
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

// sendQueued sends the waiting data in order, each parcel when it is due and the line works.
func (w *wire) sendQueued() {
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
		if !w.awaitLine(next.due) {
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

// awaitLine waits until the given time and until an attempt to send finds the line working. It
// returns false if the connection was closed.
func (w *wire) awaitLine(due time.Time) bool {
	if wait := time.Until(due); wait > 0 && !w.waitOpen(wait) {
		return false
	}
	for again := resend; ; again *= 2 {
		if cond, _ := w.net.lineCondition(w.from, w.to); !cond.cut {
			return true
		}
		if !w.waitOpen(again) {
			return false
		}
	}
}

// giveUp breaks the connection unless the sent data is acknowledged in time: it has arrived, and an
// attempt to acknowledge it finds the return direction working.
func (w *wire) giveUp() {
	for again, left := resend, w.unheard; ; again *= 2 {
		if !w.waitOpen(min(again, left)) {
			return
		}
		left -= again
		back, _ := w.net.lineCondition(w.to, w.from)
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

// waitOpen waits; it returns false if the connection was closed.
func (w *wire) waitOpen(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-w.closed:
		return false
	}
}

// Close closes the connection. Waiting data is lost.
func (w *wire) Close() error {
	w.once.Do(func() {
		close(w.closed)
		if w.onClose != nil {
			w.onClose()
		}
	})
	return w.Conn.Close()
}
