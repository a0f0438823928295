package session

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// F117: the addresses on which replicas listen survive a restart, even if the last replica that
// reported is of the previous release and does not send all of them.
func TestReplicaAddressesAreKept(t *testing.T) {
	dir := t.TempDir()
	seed := []string{"192.0.2.9:6444", "api.example.com:6444"}
	r := newReplicaList(slog.New(slog.DiscardHandler), dir, seed)
	full := &fleetv1.Replica{Name: "a", FleetAddress: "192.0.2.1:6444", ApiAddress: "192.0.2.1:6443",
		OtherAddresses: []string{"192.0.2.1:6445", "192.0.2.5:6443"}}
	r.recordReplicas(nil, []*fleetv1.Replica{full,
		{Name: "b", FleetAddress: "192.0.2.2:6444", ApiAddress: "192.0.2.2:6443"}})
	r.recordReplicas(nil, []*fleetv1.Replica{{Name: "a", FleetAddress: "192.0.2.1:6444", ApiAddress: "192.0.2.1:6443"}})
	want := "[192.0.2.1:6443 192.0.2.1:6444 192.0.2.1:6445 192.0.2.2:6443 192.0.2.2:6444 192.0.2.5:6443 192.0.2.9:6444]"
	if got := fmt.Sprint(r.allAddresses()); got != want {
		t.Errorf("addresses %s, want %s", got, want)
	}
	again := newReplicaList(slog.New(slog.DiscardHandler), dir, seed)
	if err := again.loadFiles(); err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(again.allAddresses()); got != want {
		t.Errorf("after a restart %s, want %s", got, want)
	}
	if err := os.WriteFile(filepath.Join(dir, replicaAddressesFile), []byte(`{"version":2,"listens":[]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	broken := newReplicaList(slog.New(slog.DiscardHandler), dir, seed)
	if err := broken.loadFiles(); err == nil {
		t.Error("a file that cannot be read is no error")
	}
	if got, _ := broken.wantedAddresses(); len(got) == 0 || got[0] != "192.0.2.1:6444" {
		t.Errorf("without that file the replicas are %v", got)
	}
}

// The stored addresses of replicas are bounded.
func TestReplicaAddressesAreBounded(t *testing.T) {
	r := newReplicaList(slog.New(slog.DiscardHandler), t.TempDir(), nil)
	for i := range 10 * maxStoredReplicas {
		at := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)}), 6444).String()
		r.recordReplicas(nil, []*fleetv1.Replica{{Name: "a", FleetAddress: at}})
	}
	if n := len(r.addressesByReplica); n > maxStoredReplicas {
		t.Errorf("the addresses of %d replicas are kept, want %d at most", n, maxStoredReplicas)
	}
}

// F117: Disconnected returns how long a node has been without a session.
func TestDisconnected(t *testing.T) {
	begin := time.Now()
	o := newConnectionState(begin)
	if got := o.disconnectedFor(begin.Add(7 * time.Second)); got != 7*time.Second {
		t.Errorf("before the first session %v", got)
	}
	o.setConnected(true, begin.Add(8*time.Second))
	if got := o.disconnectedFor(begin.Add(time.Hour)); got != 0 {
		t.Errorf("during a session %v", got)
	}
	o.setConnected(false, begin.Add(time.Hour))
	if got := o.disconnectedFor(begin.Add(time.Hour + time.Minute)); got != time.Minute {
		t.Errorf("after a session %v", got)
	}
}

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
	c, err := replicaDialer.Dial("tcp", ln.Addr().String())
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
