package agent

import (
	"errors"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// ControlPlane provides the state of the control plane that Service rules depend on.
type ControlPlane interface {
	// ReplicaAddresses returns every known address and TCP port on which a replica listens.
	ReplicaAddresses() []netip.AddrPort
	// Disconnected returns how long the node has been without a session, or 0 while it has a
	// session.
	Disconnected() time.Duration
}

// ReplicaMark is the packet mark of the agent's own connections to replicas. Service rules do not
// apply to packets that the node sends with this mark. A mark stays in the network namespace in
// which it was set, so pods cannot use it.
const ReplicaMark = 0x1000

// MarkReplicaConn sets ReplicaMark on a socket. Use it as the Control function of a net.Dialer for
// connections to replicas only. Without CAP_NET_ADMIN the socket remains unmarked.
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
