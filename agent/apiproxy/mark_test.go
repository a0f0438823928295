package apiproxy

import (
	"net"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
)

// F117: connections to replicas carry the mark that exempts them from Service rules.
func TestConnectionsToReplicasAreMarked(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root to set a mark")
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	d := net.Dialer{Control: configureSocket}
	c, err := d.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	if cerr := raw.Control(func(fd uintptr) {
		mark, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK)
		if err != nil || mark != agent.ReplicaMark {
			t.Errorf("mark %#x, want %#x: %v", mark, agent.ReplicaMark, err)
		}
	}); cerr != nil {
		t.Error(cerr)
	}
}
