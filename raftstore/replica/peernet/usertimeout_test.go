package peernet

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A connection to a peer breaks by itself when the other end takes nothing any
// more. The deadline of the write is only there to end the test.
func TestConnectionToThePeerBreaks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	conn, err := WithUserTimeout(dialTCP)(t.Context(), l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	other, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer other.Close()
	if err := conn.SetWriteDeadline(time.Now().Add(20 * userTimeout)); err != nil {
		t.Fatal(err)
	}
	for err == nil {
		_, err = conn.Write(make([]byte, 1<<20))
	}
	if !errors.Is(err, unix.ETIMEDOUT) {
		t.Errorf("write to a peer that reads nothing: %v, want %v", err, unix.ETIMEDOUT)
	}
}

func dialTCP(ctx context.Context, address string) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, "tcp", address)
}
