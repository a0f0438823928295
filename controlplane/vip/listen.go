package vip

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Listen combines listener with a new listener at the address sharedIP and port. The result accepts
// the connections of both. It works even while this machine does not have the shared address.
func Listen(listener net.Listener, sharedIP string, port int) (net.Listener, error) {
	free := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1)
		}), err)
	}}
	shared, err := free.Listen(context.Background(), "tcp", net.JoinHostPort(sharedIP, strconv.Itoa(port)))
	if err != nil {
		return nil, fmt.Errorf("listening for the API at --api-address-shared: %w", err)
	}
	return newBothListeners(listener, shared), nil
}

// bothListeners is a listener that accepts the connections of two listeners. Its Addr method
// returns the address of the first listener.
type bothListeners struct {
	net.Listener
	other    net.Listener
	accepted chan accepted
	closed   chan struct{}
	close    func() error
}

type accepted struct {
	conn net.Conn
	err  error
}

// newBothListeners returns a listener that accepts the connections of first and second. It stops
// when it is closed, or when one of the two is closed.
func newBothListeners(first, second net.Listener) *bothListeners {
	b := &bothListeners{Listener: first, other: second, accepted: make(chan accepted), closed: make(chan struct{})}
	b.close = sync.OnceValue(func() error {
		close(b.closed)
		return errors.Join(first.Close(), second.Close())
	})
	for _, l := range []net.Listener{first, second} {
		go b.acceptFrom(l)
	}
	return b
}

func (b *bothListeners) acceptFrom(l net.Listener) {
	for {
		c, err := l.Accept()
		select {
		case b.accepted <- accepted{c, err}:
		case <-b.closed:
			if c != nil {
				c.Close()
			}
			return
		}
		if errors.Is(err, net.ErrClosed) {
			return
		}
	}
}

// Accept implements net.Listener.
func (b *bothListeners) Accept() (net.Conn, error) {
	select {
	case a := <-b.accepted:
		return a.conn, a.err
	case <-b.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (b *bothListeners) Close() error { return b.close() }
