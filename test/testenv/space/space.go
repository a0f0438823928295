// Package space creates network namespaces for tests. In each only the loopback interface is up,
// and no route leads out of it.
package space

import (
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// New creates a network namespace that is closed at the end of the test. It needs root.
func New(t testing.TB) netns.NsHandle {
	t.Helper()
	var ns netns.NsHandle
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked: the thread ends with this goroutine
		var err error
		if ns, err = netns.New(); err == nil {
			var lo netlink.Link
			if lo, err = netlink.LinkByName("lo"); err == nil {
				err = netlink.LinkSetUp(lo)
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("making a namespace: %v", err)
	}
	t.Cleanup(func() { ns.Close() })
	return ns
}

// In runs f on an OS thread in the network namespace ns, and returns its error. The thread ends
// afterwards.
func In(ns netns.NsHandle, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if err := netns.Set(ns); err != nil {
			done <- err
			return
		}
		done <- f()
	}()
	return <-done
}
