package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/vip"
)

// sharedAddress is the API's address that the leader has; nil = none is asked for.
func (r *Replica) sharedAddress() *vip.Address {
	if r.cfg.SharedAPI == "" {
		return nil
	}
	return &vip.Address{IP: netip.MustParseAddr(r.cfg.SharedAPI), Own: netip.MustParseAddr(r.cfg.Advertise),
		Peers: r.peerAddresses, Confirm: r.leadsReady, Log: r.log.With("part", "shared address")}
}

// addresses are those at which the API of this replica may be asked.
func (c Config) addresses() []string {
	if c.SharedAPI == "" {
		return []string{c.Advertise}
	}
	return []string{c.Advertise, c.SharedAPI}
}

// peerAddresses are those of the other members.
func (r *Replica) peerAddresses() (out []netip.Addr) {
	for _, m := range r.store.Status().Members {
		host, _, err := net.SplitHostPort(m.Address)
		if err != nil || m.ID == r.cfg.Name {
			continue
		}
		if ip, err := netip.ParseAddr(host); err == nil {
			out = append(out, ip)
		}
	}
	return out
}

// leadsReady returns nil when this replica is ready and leads, as a majority has just said.
func (r *Replica) leadsReady(ctx context.Context) error {
	if _, err := r.store.Sync(ctx); err != nil {
		return err
	}
	if leader := r.store.Status().Leader; leader != r.cfg.Name {
		return fmt.Errorf("replica %q leads", leader)
	}
	return r.ready(ctx)
}

// listenShared listens at the shared address too, which this machine need not have now.
func listenShared(own net.Listener, ip string, port int) (net.Listener, error) {
	free := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) (err error) {
		return errors.Join(c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.IPPROTO_IP, unix.IP_FREEBIND, 1) }), err)
	}}
	shared, err := free.Listen(context.Background(), "tcp", datadir.HostPort(ip, port))
	if err != nil {
		return nil, fmt.Errorf("listening for the API at --api-address-shared: %w", err)
	}
	return newBoth(own, shared), nil
}

// both is two listeners as one, which has the address of the first.
type both struct {
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

// newBoth accepts at both until it is closed, or one of them fails for good.
func newBoth(own, other net.Listener) *both {
	b := &both{Listener: own, other: other, accepted: make(chan accepted), closed: make(chan struct{})}
	b.close = sync.OnceValue(func() error {
		close(b.closed)
		return errors.Join(own.Close(), other.Close())
	})
	for _, l := range []net.Listener{own, other} {
		go b.accept(l)
	}
	return b
}

func (b *both) accept(l net.Listener) {
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
func (b *both) Accept() (net.Conn, error) {
	select {
	case a := <-b.accepted:
		return a.conn, a.err
	case <-b.closed:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (b *both) Close() error { return b.close() }
