package replica

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// unheardTimeout is for how long what was sent to a peer may stay without an
// acknowledgement of its kernel.
const unheardTimeout = 2 * time.Second

// giveUpUnheard makes connections break when the other end has not been heard
// for unheardTimeout while something was due from it. The kernel would go on for
// a quarter of an hour, and it doubles the time between its attempts: after a cut
// of half a minute a connection stays dead for another half although the line is
// whole, and with it every call that waits for its answer. raft's own
// connections have deadlines for that.
func giveUpUnheard(dial func(context.Context, string) (net.Conn, error)) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := dial(ctx, address)
		if err != nil {
			return nil, err
		}
		switch conn := conn.(type) {
		case *net.TCPConn:
			err = unheardAtMost(conn, unheardTimeout)
		case interface{ SetUnheardTimeout(d time.Duration) error }: // one that does by itself what the kernel does
			err = conn.SetUnheardTimeout(unheardTimeout)
		}
		if err != nil {
			conn.Close()
			return nil, fmt.Errorf("bounding how long the peer at %s may be unheard: %w", address, err)
		}
		return conn, nil
	}
}

func unheardAtMost(conn *net.TCPConn, d time.Duration) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	var refused error
	err = raw.Control(func(fd uintptr) {
		refused = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(d.Milliseconds()))
	})
	return errors.Join(err, refused)
}
