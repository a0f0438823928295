package storetest

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"time"
)

// Network is the cables between the replicas of a cluster. A cut cable behaves
// as a real one: bytes vanish, nobody is told, dials time out.
type Network struct {
	mu    sync.Mutex
	names map[string]string // address → replica
	cut   map[[2]string]bool
	moved chan struct{} // closed and replaced when a cut changes
}

func newNetwork() *Network {
	return &Network{names: make(map[string]string), cut: make(map[[2]string]bool), moved: make(chan struct{})}
}

func cable(a, b string) [2]string {
	if a > b {
		a, b = b, a
	}
	return [2]string{a, b}
}

// Cut stops all traffic between two replicas; Mend lets it pass again.
func (n *Network) Cut(a, b string)  { n.set(a, b, true) }
func (n *Network) Mend(a, b string) { n.set(a, b, false) }

func (n *Network) set(a, b string, cut bool) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.cut[cable(a, b)] = cut
	close(n.moved)
	n.moved = make(chan struct{})
}

// state reports whether a cable is cut, and a channel for the next change.
func (n *Network) state(a, b string) (bool, <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.cut[cable(a, b)], n.moved
}

func (n *Network) name(address string) string {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.names[address]
}

// Dialer returns the dial function of one replica.
func (n *Network) Dialer(from string) func(ctx context.Context, address string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		to := n.name(address)
		for {
			cut, moved := n.state(from, to)
			if !cut {
				break
			}
			select {
			case <-moved:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", address)
		if err != nil {
			return nil, err
		}
		return &wire{Conn: conn, net: n, from: from, to: to, closed: make(chan struct{})}, nil
	}
}

// socketBuffer is how much a sender may write into a cut cable before it has to wait.
const socketBuffer = 256 << 10

// wire is one connection, seen from the end that dialed. While its cable is
// cut nothing arrives, in either direction; what is sent waits.
type wire struct {
	net.Conn
	net      *Network
	from, to string
	closed   chan struct{}
	once     sync.Once

	mu       sync.Mutex
	deadline time.Time
	waiting  []byte // written while the cable was cut
	flushing bool
}

func (w *wire) SetDeadline(t time.Time) error {
	w.setDeadline(t)
	return w.Conn.SetDeadline(t)
}

func (w *wire) SetReadDeadline(t time.Time) error {
	w.setDeadline(t)
	return w.Conn.SetReadDeadline(t)
}

func (w *wire) setDeadline(t time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.deadline = t
}

// pass waits until the cable is whole.
func (w *wire) pass(deadline time.Time) error {
	for {
		cut, moved := w.net.state(w.from, w.to)
		if !cut {
			return nil
		}
		var expired <-chan time.Time
		if !deadline.IsZero() {
			t := time.NewTimer(time.Until(deadline))
			defer t.Stop()
			expired = t.C
		}
		select {
		case <-moved:
		case <-expired:
			return os.ErrDeadlineExceeded
		case <-w.closed:
			return net.ErrClosed
		}
	}
}

func (w *wire) Write(b []byte) (int, error) {
	cut, _ := w.net.state(w.from, w.to)
	w.mu.Lock()
	if (cut || w.flushing) && len(w.waiting)+len(b) <= socketBuffer {
		w.waiting = append(w.waiting, b...)
		if !w.flushing {
			w.flushing = true
			go w.flush()
		}
		w.mu.Unlock()
		return len(b), nil
	}
	deadline := w.deadline
	w.mu.Unlock()
	if err := w.pass(deadline); err != nil {
		return 0, err
	}
	return w.Conn.Write(b)
}

// flush sends what has waited, once the cable is whole.
func (w *wire) flush() {
	for w.pass(time.Time{}) == nil {
		w.mu.Lock()
		b := w.waiting
		w.waiting = nil
		if len(b) == 0 {
			w.flushing = false
			w.mu.Unlock()
			return
		}
		w.mu.Unlock()
		if _, err := w.Conn.Write(b); err != nil {
			return
		}
	}
}

func (w *wire) Read(b []byte) (int, error) {
	n, err := w.Conn.Read(b)
	if err != nil {
		return n, err
	}
	w.mu.Lock()
	deadline := w.deadline
	w.mu.Unlock()
	if err := w.pass(deadline); err != nil {
		return 0, errors.Join(err, w.Conn.Close())
	}
	return n, nil
}

func (w *wire) Close() error {
	w.once.Do(func() { close(w.closed) })
	return w.Conn.Close()
}
