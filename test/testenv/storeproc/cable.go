package storeproc

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"time"
)

// Link is what is wrong with one replica's side of the cable to another.
// The zero value is a whole cable.
type Link struct {
	HoldSent     bool          // what this replica sends does not leave
	HoldReceived bool          // what the other sends does not arrive
	Delay        time.Duration // of what is sent
	Jitter       time.Duration // up to that much more, for each write of each connection
}

// holds reports whether what is written has to take the way through the pump.
func (l Link) holds() bool { return l.HoldSent || l.Delay > 0 || l.Jitter > 0 }

// links are the cables of one replica. As on a real network nobody is told of
// a fault: bytes wait, dials time out, and what was sent meanwhile arrives late.
type links struct {
	name string

	mu    sync.Mutex
	peers map[string]Link
	moved chan struct{} // closed and replaced by every change
}

func newLinks(name string, at map[string]Link) *links {
	return &links{name: name, peers: at, moved: make(chan struct{})}
}

func (l *links) set(peers map[string]Link) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peers = peers
	close(l.moved)
	l.moved = make(chan struct{})
}

// to is the state of the cable to a peer, and a channel for its next change.
func (l *links) to(peer string) (Link, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peers[peer], l.moved
}

// dial is replica.Config.Dial. Each side first tells the other its name. While
// the cable is cut that much passes, and nothing after it.
func (l *links) dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	peer, err := greet(ctx, conn, l.name)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("greeting the replica at %s: %w", address, err)
	}
	c := newCable(conn, l)
	c.peer = peer
	return c, nil
}

// greet sends the name of this replica and reads that of the other.
func greet(ctx context.Context, conn net.Conn, name string) (string, error) {
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if err := sendName(conn, name); err != nil {
		return "", err
	}
	return readName(conn)
}

func sendName(w io.Writer, name string) error {
	_, err := w.Write(append([]byte{byte(len(name))}, name...))
	return err
}

func readName(r io.Reader) (string, error) {
	var size [1]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return "", err
	}
	name := make([]byte, size[0])
	_, err := io.ReadFull(r, name)
	return string(name), err
}

// listener wraps what it accepts.
type listener struct {
	net.Listener
	links *links
}

func (l *listener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	c := newCable(conn, l.links)
	c.strange = true
	return c, nil
}

const (
	// sendBuffer is what may be written into a cable before the writer waits, as in a socket.
	sendBuffer = 256 << 10
	// linger is how long a closed connection still tries to deliver what was written before.
	linger = 20 * time.Second
)

// cable is one connection to another replica. One goroutine reads at a time
// and one writes, as TLS does.
type cable struct {
	net.Conn
	links  *links
	closed chan struct{} // by Close
	gone   chan struct{} // the connection below is closed too
	once   sync.Once

	// Of the reader.
	strange bool // accepted, and the peer's name not read yet
	held    []byte
	heldErr error

	mu       sync.Mutex
	peer     string
	readBy   time.Time
	writeBy  time.Time
	queue    []parcel // written and not yet sent
	queued   int      // bytes in it
	pumping  bool
	drained  chan struct{} // closed and replaced when the pump has sent something
	sendFail error
}

// parcel is what one Write wrote, not to be sent before its time.
type parcel struct {
	due time.Time
	b   []byte
}

func newCable(conn net.Conn, l *links) *cable {
	return &cable{Conn: conn, links: l, closed: make(chan struct{}), gone: make(chan struct{}), drained: make(chan struct{})}
}

func (c *cable) link() (Link, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.links.to(c.peer)
}

func (c *cable) Read(b []byte) (int, error) {
	if c.strange {
		name, err := readName(c.Conn)
		if err == nil {
			err = sendName(c.Conn, c.links.name)
		}
		if err != nil {
			return 0, err
		}
		c.strange = false
		c.mu.Lock()
		c.peer = name
		c.mu.Unlock()
	}
	if len(c.held) == 0 && c.heldErr == nil {
		n, err := c.Conn.Read(b)
		if link, _ := c.link(); !link.HoldReceived || errors.Is(err, os.ErrDeadlineExceeded) {
			return n, c.unlessClosed(err)
		}
		c.held, c.heldErr = append([]byte(nil), b[:n]...), err
	}
	if err := c.await(c.readDeadline, func(l Link) bool { return !l.HoldReceived }); err != nil {
		return 0, err
	}
	n := copy(b, c.held)
	if c.held = c.held[n:]; len(c.held) > 0 {
		return n, nil
	}
	err := c.heldErr
	c.held, c.heldErr = nil, nil
	return n, c.unlessClosed(err)
}

// unlessClosed hides how a Close wakes the reader.
func (c *cable) unlessClosed(err error) error {
	select {
	case <-c.closed:
		return net.ErrClosed
	default:
		return err
	}
}

func (c *cable) readDeadline() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.readBy
}

// await waits until the cable is as wanted, the deadline or the close.
func (c *cable) await(deadline func() time.Time, wanted func(Link) bool) error {
	for {
		link, moved := c.link()
		if wanted(link) {
			return nil
		}
		var late <-chan time.Time
		if by := deadline(); !by.IsZero() {
			t := time.NewTimer(time.Until(by))
			defer t.Stop()
			late = t.C
		}
		select {
		case <-moved:
		case <-late:
			return os.ErrDeadlineExceeded
		case <-c.closed:
			return net.ErrClosed
		}
	}
}

func (c *cable) Write(b []byte) (int, error) {
	link, _ := c.link()
	c.mu.Lock()
	if !c.pumping && !link.holds() && c.sendFail == nil {
		c.mu.Unlock()
		return c.Conn.Write(b)
	}
	for c.queued+len(b) > sendBuffer && len(c.queue) > 0 && c.sendFail == nil {
		drained, by := c.drained, c.writeBy
		c.mu.Unlock()
		if err := c.room(drained, by); err != nil {
			return 0, err
		}
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	if c.sendFail != nil {
		return 0, c.sendFail
	}
	due := time.Now().Add(link.Delay)
	if link.Jitter > 0 {
		due = due.Add(rand.N(link.Jitter))
	}
	c.queue = append(c.queue, parcel{due: due, b: append([]byte(nil), b...)})
	c.queued += len(b)
	if !c.pumping {
		c.pumping = true
		// The kernel sends what it has taken whatever becomes of the writer's deadline.
		c.Conn.SetWriteDeadline(time.Time{})
		go c.pump()
	}
	return len(b), nil
}

// room waits until the pump has sent something.
func (c *cable) room(drained <-chan struct{}, by time.Time) error {
	var late <-chan time.Time
	if !by.IsZero() {
		t := time.NewTimer(time.Until(by))
		defer t.Stop()
		late = t.C
	}
	select {
	case <-drained:
		return nil
	case <-late:
		return os.ErrDeadlineExceeded
	case <-c.closed:
		return net.ErrClosed
	}
}

// pump sends what was written while the cable was not whole, in order, each
// parcel when its time has come, until nothing is left.
func (c *cable) pump() {
	for {
		c.mu.Lock()
		if len(c.queue) == 0 || c.sendFail != nil {
			c.pumping = false
			c.Conn.SetWriteDeadline(c.writeBy)
			c.wake()
			c.mu.Unlock()
			return
		}
		next := c.queue[0]
		c.mu.Unlock()
		err := c.carry(next)
		c.mu.Lock()
		c.queue, c.queued = c.queue[1:], c.queued-len(next.b)
		c.sendFail = err
		c.wake()
		c.mu.Unlock()
	}
}

func (c *cable) wake() {
	close(c.drained)
	c.drained = make(chan struct{})
}

// carry sends one parcel when it is due and nothing holds it.
func (c *cable) carry(p parcel) error {
	select {
	case <-time.After(time.Until(p.due)):
	case <-c.gone:
		return net.ErrClosed
	}
	for {
		link, moved := c.link()
		if !link.HoldSent {
			break
		}
		select {
		case <-moved:
		case <-c.gone:
			return net.ErrClosed
		}
	}
	_, err := c.Conn.Write(p.b)
	return err
}

func (c *cable) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}

func (c *cable) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.readBy = t
	return c.Conn.SetReadDeadline(t)
}

func (c *cable) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.writeBy = t
	if c.pumping {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}

// Close closes this end at once. The other end learns of it like of all else:
// when the cable lets it through, after what was written before.
func (c *cable) Close() error {
	c.once.Do(func() {
		close(c.closed)
		link, _ := c.link()
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.pumping && !link.HoldSent {
			c.hangUp()
			return
		}
		c.Conn.SetReadDeadline(time.Unix(1, 0)) // wakes the reader
		go c.lingering()
	})
	return nil
}

func (c *cable) hangUp() {
	close(c.gone)
	c.Conn.Close()
}

// lingering closes the connection once all is sent and the cable is whole.
func (c *cable) lingering() {
	defer c.hangUp()
	late := time.NewTimer(linger)
	defer late.Stop()
	for {
		link, moved := c.link()
		c.mu.Lock()
		idle, drained := !c.pumping, c.drained
		c.mu.Unlock()
		if idle && !link.HoldSent {
			return
		}
		select {
		case <-moved:
		case <-drained:
		case <-late.C:
			return
		}
	}
}
