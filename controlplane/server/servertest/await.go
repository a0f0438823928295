package servertest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/internal/await"
)

// Patience is how long Eventually waits. It is also the timeout of the clients of a Plane.
const Patience = 60 * time.Second

// Eventually calls condition repeatedly until it returns nil. If condition still returns an error
// after Patience, the test fails with that error.
func Eventually(t *testing.T, condition func() error) {
	t.Helper()
	await.Until(context.Background(), t, Patience, 20*time.Millisecond, "the replica", condition)
}

// Address returns the loopback address of replica number n.
func Address(n int) string { return fmt.Sprintf("127.0.0.%d", 10+n) }

// assignedPorts are the ports that FreePort has returned. A test may listen on its port only later,
// so FreePort must not return the port again.
var assignedPorts sync.Map

// FreePort returns a TCP port that is free on the loopback addresses of the replicas 1 to 4
// (Address). It is below the range from which the kernel assigns ports, so that no other test gets
// it before it is used.
func FreePort(t *testing.T) int {
	t.Helper()
	for range 1000 {
		port := 20000 + rand.IntN(10000)
		free := true
		for n := 1; n <= 4 && free; n++ {
			l, err := net.Listen("tcp", datadir.HostPort(Address(n), port))
			if free = err == nil; free {
				l.Close()
			}
		}
		if _, assigned := assignedPorts.LoadOrStore(port, true); free && !assigned {
			return port
		}
	}
	t.Fatal("no port is free on all addresses")
	return 0
}
