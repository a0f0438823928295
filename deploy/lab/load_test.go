package lab

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/internal/await"
)

// A registry too busy to hear that a connection is wanted hears it when the kernel says so again.
func TestPushWaitsForABusyRegistry(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("making a network namespace needs root")
	}
	h := Host{Name: "busy-registry"}
	if err := h.makeNetNS(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := netns.DeleteNamed(filepath.Base(h.NetNS())); err != nil {
			t.Error(err)
		}
	})
	listener, address, err := oneMayWait(h)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(listener)
	first, err := h.Dial(t.Context(), address)
	if err != nil {
		t.Fatal(err)
	}
	defer first.Close()

	pushed := make(chan error, 1)
	go func() {
		conn, err := h.registryTransport().DialContext(t.Context(), "tcp", address)
		if err == nil {
			err = conn.Close()
		}
		pushed <- err
	}()
	await.Until(t.Context(), t, await.Patience, 5*time.Millisecond, "a full listen queue", func() error {
		return turnedAway(h)
	})
	accepted, _, err := unix.Accept(listener)
	if err != nil {
		t.Fatal(err)
	}
	defer unix.Close(accepted)
	if err := <-pushed; err != nil {
		t.Error(err)
	}
}

// oneMayWait listens on the host, where one connection may wait to be accepted and the next are not heard.
func oneMayWait(h Host) (fd int, address string, err error) {
	err = inNetNS(h.NetNS(), func() error {
		if fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0); err != nil {
			return err
		}
		err := errors.Join(unix.Bind(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), unix.Listen(fd, 0))
		if err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		at, err := unix.Getsockname(fd)
		if err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		address = net.JoinHostPort("127.0.0.1", strconv.Itoa(at.(*unix.SockaddrInet4).Port))
		return nil
	})
	return fd, address, err
}

// turnedAway is nil when a listener of the host has not heard that a connection is wanted.
func turnedAway(h Host) error {
	return inNetNS(h.NetNS(), func() error {
		raw, err := os.ReadFile("/proc/thread-self/net/netstat")
		if err != nil {
			return err
		}
		lines := strings.Split(string(raw), "\n") // names, and below them the values
		for i := 0; i+1 < len(lines); i += 2 {
			names, values := strings.Fields(lines[i]), strings.Fields(lines[i+1])
			for n, name := range names {
				if name == "ListenDrops" && n < len(values) && values[n] != "0" {
					return nil
				}
			}
		}
		return errors.New("every connection was heard")
	})
}
