package storetest

import (
	"context"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// Network simulates the network between the replicas of a cluster. Each direction between two
// replicas is a line, which can be cut or slowed. A cut line behaves like a real network failure:
// bytes are lost without an error, and dials time out. As with TCP, lost bytes are sent again, with
// doubling delays. After a cut of ten seconds a connection may therefore be unusable for another
// ten seconds, unless the side that dialed closes it.
type Network struct {
	mu    sync.Mutex
	names map[string]string // replica name by peer address
	ends  map[string]string // name of the replica that dialed, by the local address of its connection
	lines map[line]condition
	moved chan struct{} // closed and replaced when a condition changes
	// number of connections that the dialing side has closed for lack of acknowledgment, by their
	// line
	given map[line]int
}

// line is one direction of traffic between two replicas, by their names.
type line struct{ from, to string }

// condition is the state of a line: cut or delayed. The zero value means that the line works
// without delay.
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

// CutOneWay drops the traffic from one replica to another. Traffic in the opposite direction still
// passes. MendOneWay undoes it.
func (n *Network) CutOneWay(from, to string) {
	n.changeLine(from, to, func(c *condition) { c.cut = true })
}

// MendOneWay undoes CutOneWay.
func (n *Network) MendOneWay(from, to string) {
	n.changeLine(from, to, func(c *condition) { c.cut = false })
}

// Slow delays the traffic in one direction by delay plus a random time up to jitter. Each
// connection is delayed independently: data of two connections may be reordered, data of one
// connection is not. If both are 0, the delay is removed.
func (n *Network) Slow(from, to string, delay, jitter time.Duration) {
	n.changeLine(from, to, func(c *condition) { c.delay, c.jitter = delay, jitter })
}

// Heal undoes all cuts and delays between all replicas.
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

// lineCondition returns the condition of the line between two replicas, and a channel that is
// closed when the condition of any line changes.
func (n *Network) lineCondition(from, to string) (condition, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.lines[line{from, to}], n.moved
}

// GivenUp returns how many connections between two replicas the dialing side has closed, because
// sent data was not acknowledged in time (see SetUnheardTimeout). from is the replica that dialed.
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

// Dialer returns the function with which a replica dials the other replicas through the simulated
// network. dialer is the name of the replica.
func (n *Network) Dialer(dialer string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		to := n.hostAt(address)
		if err := n.awaitReachable(ctx, dialer, to); err != nil {
			return nil, err
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		end := conn.LocalAddr().String()
		n.mu.Lock()
		n.ends[end] = dialer
		n.mu.Unlock()
		return &wire{Conn: conn, net: n, from: dialer, to: to, closed: make(chan struct{}), onClose: func() {
			n.mu.Lock()
			delete(n.ends, end)
			n.mu.Unlock()
		}}, nil
	}
}

// awaitReachable waits until neither direction between two replicas is cut, because a dial needs
// both, and then for the delays of both directions. It returns an error if ctx ends before.
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

// Listener wraps the listener l of the replica with the given name. The data that the replica sends
// on accepted connections then passes through the simulated network, too.
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

// socketBuffer is how many bytes a sender may write into a cut or slow line before Write blocks.
const socketBuffer = 256 << 10

// resend is the delay before lost bytes are resent for the first time, as in Linux on a network
// with low latency. The delay doubles each time.
const resend = 200 * time.Millisecond

// wire is one end of a simulated connection. It delays the data that this end sends, according to
// the condition of its line. The other end does the same for the opposite direction.
type wire struct {
	net.Conn
	net  *Network
	from string
	// name of the other end; for an accepted connection it is determined at the first write, when
	// the dialer's name is known
	to      string
	closed  chan struct{}
	once    sync.Once
	onClose func()

	mu       sync.Mutex
	deadline time.Time // deadline of writes; the connection's deadline is used for reads
	waiting  []parcel
	held     int           // number of waiting bytes
	room     chan struct{} // closed when the number of waiting bytes decreases; nil if no Write waits
	flushing bool

	unheard  time.Duration // how long data may stay unacknowledged; 0 = forever
	watching bool          // whether unacknowledged data is being timed
}

// SetUnheardTimeout makes the connection close if sent data is not acknowledged for the given time,
// like TCP_USER_TIMEOUT; 0 = never.
func (w *wire) SetUnheardTimeout(d time.Duration) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.unheard = d
	return nil
}

// parcel is the data of one Write. It is not sent before the time due.
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

// SetWriteDeadline bounds how long Write waits for buffer space. Data that Write has accepted is
// sent even after the deadline.
func (w *wire) SetWriteDeadline(t time.Time) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
	return nil
}

// remoteHost returns the name of the replica at the other end of the connection, or "" if it is
// unknown. Faults do not apply to a connection with an unknown other end. The caller holds w.mu.
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
	if back, _ := w.net.lineCondition(w.to, w.from); w.unheard > 0 && !w.watching &&
		(cond.cut || back.cut || w.flushing) {
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

// awaitRoom waits until some of the buffered data has been sent. It returns an error after the
// write deadline or if the connection is closed. The caller holds w.mu, which is released during
// the wait.
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

// sendQueued sends the buffered data in order. Each parcel is sent after its due time, as soon as
// the line is not cut. It returns when all data is sent, or when the connection fails.
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

// awaitLine waits until the time due, and then until the line is not cut, which it checks with
// doubling delays like a TCP sender. It returns false if the connection was closed.
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

// giveUp closes the connection unless all sent data is acknowledged within the timeout that was set
// with SetUnheardTimeout. Data counts as acknowledged when it has been delivered and the opposite
// direction is not cut. giveUp checks this with doubling delays.
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

// waitOpen waits for d and returns true. It returns false if the connection is closed first.
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

// Close closes the connection. Buffered data that has not been sent is lost.
func (w *wire) Close() error {
	w.once.Do(func() {
		close(w.closed)
		if w.onClose != nil {
			w.onClose()
		}
	})
	return w.Conn.Close()
}
