// Package space makes network namespaces for tests: of each only loopback is up, and nothing leads out of it.
package space

import (
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
)

// New makes a namespace, which goes with the test. It needs root.
func New(t testing.TB) netns.NsHandle {
	t.Helper()
	var ns netns.NsHandle
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with what it entered
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

// In runs f on a thread inside ns, which is given up afterwards.
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
