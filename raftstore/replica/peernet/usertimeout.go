package peernet

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// userTimeout is how long sent data may remain without an acknowledgment from the peer's kernel.
const userTimeout = 2 * time.Second

// WithUserTimeout returns a dial function that calls dial and sets TCP_USER_TIMEOUT. A connection
// breaks if the peer's kernel acknowledges nothing for userTimeout while data is pending. By
// default the kernel retries for a quarter of an hour and doubles the pause between attempts. After
// a network failure of half a minute, a connection and all calls on it would hang for another half
// minute although the network works again. raft's own connections have deadlines.
func WithUserTimeout(dial func(context.Context,
	string) (net.Conn, error)) func(context.Context, string) (net.Conn, error) {
	return func(ctx context.Context, address string) (net.Conn, error) {
		conn, err := dial(ctx, address)
		if err != nil {
			return nil, err
		}
		switch conn := conn.(type) {
		case *net.TCPConn:
			err = setUserTimeout(conn, userTimeout)
		// a test connection that implements the timeout itself
		case interface{ SetUnheardTimeout(d time.Duration) error }:
			err = conn.SetUnheardTimeout(userTimeout)
		}
		if err != nil {
			conn.Close()
			return nil, fmt.Errorf("setting the user timeout of the connection to %s: %w", address, err)
		}
		return conn, nil
	}
}

func setUserTimeout(conn *net.TCPConn, d time.Duration) error {
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
