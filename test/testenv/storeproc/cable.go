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

// Link contains the faults of a connection between two replicas, as one of them applies them. The
// zero value has no faults.
type Link struct {
	HoldSent     bool          // data that this replica sends does not leave
	HoldReceived bool          // data that the peer sends does not arrive
	Delay        time.Duration // of sent data
	Jitter       time.Duration // most additional delay, random for each write of each connection
}

// needsPump reports whether written data must be queued and sent by sendQueued, because of a fault.
func (l Link) needsPump() bool { return l.HoldSent || l.Delay > 0 || l.Jitter > 0 }

// links simulates the network of one replica. As in a real network, a fault is not reported: bytes
// are held back, dials time out, and held data arrives later.
type links struct {
	name string

	mu    sync.Mutex
	peers map[string]Link
	moved chan struct{} // closed and replaced at each change
}

func newLinks(name string, at map[string]Link) *links {
	return &links{name: name, peers: at, moved: make(chan struct{})}
}

func (l *links) setPeers(peers map[string]Link) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.peers = peers
	close(l.moved)
	l.moved = make(chan struct{})
}

// linkTo returns the faults of the link to a peer, and a channel that is closed at the next change
// of any link.
func (l *links) linkTo(peer string) (Link, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.peers[peer], l.moved
}

// dial is replica.Config.Dial. Each side first sends its name to the other. The names pass even
// while the link is cut, but no data after them.
func (l *links) dial(ctx context.Context, address string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
	if err != nil {
		return nil, err
	}
	peer, err := exchangeNames(ctx, conn, l.name)
	if err != nil {
		conn.Close()
		return nil, fmt.Errorf("exchange names with the replica at %s: %w", address, err)
	}
	c := newCable(conn, l)
	c.peer = peer
	return c, nil
}

// exchangeNames sends this replica's name and returns the peer's name.
func exchangeNames(ctx context.Context, conn net.Conn, name string) (string, error) {
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

// listener is a net.Listener that wraps each accepted connection in a cable, which simulates the
// faults.
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
	c.in.nameUnread = true
	return c, nil
}

const (
	// sendBuffer is the number of bytes that a cable queues before a writer blocks, like a socket's
	// send buffer.
	sendBuffer = 256 << 10
	// maxDeliveryTime is how long a closed connection still tries to deliver its queued data.
	maxDeliveryTime = 20 * time.Second
)

// cable is one connection to another replica, with the faults of its link. At most one goroutine
// may read at a time, and one may write.
type cable struct {
	net.Conn
	links  *links
	closed chan struct{} // closed by Close
	gone   chan struct{} // closed when the underlying connection is closed too
	once   sync.Once
	in     receiveState // used by the reader only

	mu      sync.Mutex
	peer    string
	readBy  time.Time
	writeBy time.Time
	out     sendQueue
}

// receiveState is the state of a cable's reader.
type receiveState struct {
	nameUnread bool // the connection was accepted, and the peer's name is not read yet
	held       []byte
	heldErr    error
}

// sendQueue is the data that was written to a cable and is not sent yet.
type sendQueue struct {
	parcels []parcel
	bytes   int // in parcels
	pumping bool
	drained chan struct{} // closed and replaced when a parcel has been sent or sending has stopped
	failed  error
}

// parcel is the data of one Write, not to be sent before it is due.
type parcel struct {
	due time.Time
	b   []byte
}

func newCable(conn net.Conn, l *links) *cable {
	return &cable{Conn: conn, links: l, closed: make(chan struct{}), gone: make(chan struct{}),
		out: sendQueue{drained: make(chan struct{})}}
}

func (c *cable) currentLink() (Link, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.links.linkTo(c.peer)
}

func (c *cable) Read(b []byte) (int, error) {
	if c.in.nameUnread {
		name, err := readName(c.Conn)
		if err == nil {
			err = sendName(c.Conn, c.links.name)
		}
		if err != nil {
			return 0, err
		}
		c.in.nameUnread = false
		c.mu.Lock()
		c.peer = name
		c.mu.Unlock()
	}
	if len(c.in.held) == 0 && c.in.heldErr == nil {
		n, err := c.Conn.Read(b)
		if link, _ := c.currentLink(); !link.HoldReceived || errors.Is(err, os.ErrDeadlineExceeded) {
			return n, c.unlessClosed(err)
		}
		c.in.held, c.in.heldErr = append([]byte(nil), b[:n]...), err
	}
	if err := c.awaitLink(c.readDeadline, func(l Link) bool { return !l.HoldReceived }); err != nil {
		return 0, err
	}
	n := copy(b, c.in.held)
	if c.in.held = c.in.held[n:]; len(c.in.held) > 0 {
		return n, nil
	}
	err := c.in.heldErr
	c.in.held, c.in.heldErr = nil, nil
	return n, c.unlessClosed(err)
}

// unlessClosed returns net.ErrClosed if Close was called, and err otherwise. Close interrupts the
// reader with a deadline error.
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

// awaitLink waits until wanted returns true for the link. It returns an error at the deadline or at
// Close.
func (c *cable) awaitLink(deadline func() time.Time, wanted func(Link) bool) error {
	for {
		link, moved := c.currentLink()
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
	link, _ := c.currentLink()
	c.mu.Lock()
	if !c.out.pumping && !link.needsPump() && c.out.failed == nil {
		c.mu.Unlock()
		return c.Conn.Write(b)
	}
	for c.out.bytes+len(b) > sendBuffer && len(c.out.parcels) > 0 && c.out.failed == nil {
		drained, by := c.out.drained, c.writeBy
		c.mu.Unlock()
		if err := c.awaitSpace(drained, by); err != nil {
			return 0, err
		}
		c.mu.Lock()
	}
	defer c.mu.Unlock()
	if c.out.failed != nil {
		return 0, c.out.failed
	}
	due := time.Now().Add(link.Delay)
	if link.Jitter > 0 {
		due = due.Add(rand.N(link.Jitter))
	}
	c.out.parcels = append(c.out.parcels, parcel{due: due, b: append([]byte(nil), b...)})
	c.out.bytes += len(b)
	if !c.out.pumping {
		c.out.pumping = true
		// Data accepted by Write is sent regardless of the writer's deadline, as a kernel does.
		c.Conn.SetWriteDeadline(time.Time{})
		go c.sendQueued()
	}
	return len(b), nil
}

// awaitSpace waits until a parcel has been sent, so that the queue has space. It returns an error
// at the deadline or at Close.
func (c *cable) awaitSpace(drained <-chan struct{}, deadline time.Time) error {
	var late <-chan time.Time
	if !deadline.IsZero() {
		t := time.NewTimer(time.Until(deadline))
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

// sendQueued sends the queued parcels in order, each when it is due, until the queue is empty.
func (c *cable) sendQueued() {
	for {
		c.mu.Lock()
		if len(c.out.parcels) == 0 || c.out.failed != nil {
			c.out.pumping = false
			c.Conn.SetWriteDeadline(c.writeBy)
			c.signalDrained()
			c.mu.Unlock()
			return
		}
		next := c.out.parcels[0]
		c.mu.Unlock()
		err := c.sendParcel(next)
		c.mu.Lock()
		c.out.parcels, c.out.bytes = c.out.parcels[1:], c.out.bytes-len(next.b)
		c.out.failed = err
		c.signalDrained()
		c.mu.Unlock()
	}
}

func (c *cable) signalDrained() {
	close(c.out.drained)
	c.out.drained = make(chan struct{})
}

// sendParcel sends one parcel when it is due and the link does not hold it back.
func (c *cable) sendParcel(p parcel) error {
	select {
	case <-time.After(time.Until(p.due)):
	case <-c.gone:
		return net.ErrClosed
	}
	for {
		link, moved := c.currentLink()
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
	if c.out.pumping {
		return nil
	}
	return c.Conn.SetWriteDeadline(t)
}

// Close closes this end at once. The other end observes it when the link lets it through, after the
// queued data.
func (c *cable) Close() error {
	c.once.Do(func() {
		close(c.closed)
		link, _ := c.currentLink()
		c.mu.Lock()
		defer c.mu.Unlock()
		if !c.out.pumping && !link.HoldSent {
			c.closeConn()
			return
		}
		c.Conn.SetReadDeadline(time.Unix(1, 0)) // wakes the reader
		go c.closeWhenDrained()
	})
	return nil
}

func (c *cable) closeConn() {
	close(c.gone)
	c.Conn.Close()
}

// closeWhenDrained closes the connection when the queue is empty and the link is not cut, or after
// maxDeliveryTime.
func (c *cable) closeWhenDrained() {
	defer c.closeConn()
	late := time.NewTimer(maxDeliveryTime)
	defer late.Stop()
	for {
		link, moved := c.currentLink()
		c.mu.Lock()
		idle, drained := !c.out.pumping, c.out.drained
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
