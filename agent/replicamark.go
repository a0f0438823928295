package agent

import (
	"errors"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ControlPlane returns what Service rules must respect of the control plane.
type ControlPlane interface {
	// ReplicaAddresses returns every known address and TCP port on which a replica listens.
	ReplicaAddresses() []netip.AddrPort
	// Disconnected returns how long the node has been without a session; 0 while it has a session.
	Disconnected() time.Duration
}

// ReplicaMark is the packet mark of the agent's own connections to replicas. Service rules do not apply to packets that
// the node sends with this mark. A mark does not leave the network namespace in which it was set: pods cannot use it.
const ReplicaMark = 0x1000

// MarkReplicaConn sets ReplicaMark on a socket. It is a Control function of net.Dialer for connections to replicas, and
// for no others. Without CAP_NET_ADMIN the socket stays unmarked.
func MarkReplicaConn(_, _ string, raw syscall.RawConn) error {
	var err error
	if cerr := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, ReplicaMark)
	}); cerr != nil {
		return cerr
	}
	if errors.Is(err, unix.EPERM) {
		return nil
	}
	return err
}
