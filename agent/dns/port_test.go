package dns

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// F101: the statements of docs/reference/dns.md about other listeners at the server's port. Another
// address of the node is free. All addresses are available to programs that use SO_REUSEPORT like
// the server. Queries to the server's address reach the server even then.
func TestOthersAtThePort(t *testing.T) {
	var err error
	for range 20 { // a connection of another program may use the port at another address
		if err = othersAtThePort(t); !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	if err != nil {
		t.Error(err)
	}
}

func othersAtThePort(t *testing.T) error {
	t.Helper()
	own, err := listenAt(t.Context(), netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		return err
	}
	defer own.shutDown()
	port := own.udp[0].LocalAddr().(*net.UDPAddr).AddrPort().Port()
	sharing := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var failed error
		err := c.Control(func(fd uintptr) {
			failed = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEPORT, 1)
		})
		return errors.Join(err, failed)
	}}
	for _, c := range []struct {
		name, at string
		how      net.ListenConfig
		want     error
	}{{"another address", "127.0.0.2", net.ListenConfig{}, nil},
		{"all addresses", "0.0.0.0", net.ListenConfig{}, unix.EADDRINUSE},
		{"all addresses, sharing", "0.0.0.0", sharing, nil}} {
		at := netip.AddrPortFrom(netip.MustParseAddr(c.at), port)
		l, err := c.how.Listen(t.Context(), "tcp4", at.String())
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, c.want) {
			return fmt.Errorf("%s, TCP: %w, want %v", c.name, err, c.want)
		}
		p, err := c.how.ListenPacket(t.Context(), "udp4", at.String())
		if err == nil {
			heard(t, own, p, port)
			p.Close()
		}
		if !errors.Is(err, c.want) {
			return fmt.Errorf("%s, UDP: %w, want %v", c.name, err, c.want)
		}
	}
	return nil
}

// heard checks that packets to the server's address reach the server and no other program.
func heard(t *testing.T, own *addressListener, other net.PacketConn, port uint16) {
	t.Helper()
	const n = 16
	for range n {
		c, err := net.Dial("udp4", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), port).String())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write([]byte("question")); err != nil {
			t.Fatal(err)
		}
		c.Close()
	}
	got := make(chan struct{}, n)
	var readers sync.WaitGroup
	for _, u := range own.udp {
		_ = u.SetReadDeadline(time.Time{})
		readers.Go(func() {
			for buf := make([]byte, 64); ; {
				if _, _, err := u.ReadFrom(buf); err != nil {
					return
				}
				got <- struct{}{}
			}
		})
	}
	patience := time.After(time.Minute)
	for i := range n {
		select {
		case <-got:
		case <-patience:
			t.Fatalf("%d of %d questions came to the server", i, n)
		}
	}
	for _, u := range own.udp {
		_ = u.SetReadDeadline(time.Now())
	}
	readers.Wait()
	_ = other.SetReadDeadline(time.Now())
	if _, _, err := other.ReadFrom(make([]byte, 64)); err == nil {
		t.Error("a question for the server came to somebody else")
	}
}
