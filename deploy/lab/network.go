package lab

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// bridgeHost is the namespace that holds the bridges, one for each link, and is the router between them; the forwarder
// lives in it.
var bridgeHost = Host{Name: "bridge", Role: "bridge"}

// inNetNS runs f on a thread inside the namespace. The thread is given up afterwards.
func inNetNS(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread with the goroutine
		fd, err := unix.Open(path, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err != nil {
			done <- fmt.Errorf("opening namespace %s: %w", path, err)
			return
		}
		defer unix.Close(fd)
		if err := unix.Setns(fd, unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("entering namespace %s: %w", path, err)
			return
		}
		done <- f()
	}()
	return <-done
}

// makeNetNS makes and pins an empty network namespace with lo up and forwarding on.
func (h Host) makeNetNS() error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		ns, err := netns.NewNamed(filepath.Base(h.NetNS()))
		if err == nil {
			defer ns.Close()
			err = prepareNetNS()
		}
		done <- err
	}()
	if err := <-done; err != nil {
		return fmt.Errorf("network namespace of host %s: %w", h.Name, err)
	}
	return nil
}

// prepareNetNS runs on a thread inside a fresh namespace: /proc/sys/net shows the
// calling thread's own.
func prepareNetNS() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return err
	}
	return os.WriteFile("/proc/sys/net/ipv4/ip_forward", []byte("1"), 0)
}

// makeBridges makes the bridges' own namespace. It has no link to the machine.
func (l *Lab) makeBridges() error {
	if err := bridgeHost.makeNetNS(); err != nil {
		return err
	}
	return inNetNS(bridgeHost.NetNS(), func() error {
		for i := range max(1, l.Config.Links) {
			br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName(i)}}
			if err := netlink.LinkAdd(br); err != nil {
				return fmt.Errorf("making bridge %s: %w", br.Name, err)
			}
			// It is the router of its link, with the addresses that hosts of the lab's families know it by.
			if err := address(br, l.Config.host("", bridgeHost.Role, i, 1)); err != nil {
				return err
			}
		}
		if l.Config.Families == FamilyIPv4 || l.Config.Families == "" {
			return nil
		}
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	})
}

// address gives a link the addresses of a host, and sets it up.
func address(l netlink.Link, h Host) error {
	for _, ip := range h.addresses() {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if ip.Is6() {
			a.Mask, a.Flags = net.CIDRMask(64, 128), unix.IFA_F_NODAD // nobody else has it, and daemons listen on it at once
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s: %w", ip, err)
		}
	}
	return netlink.LinkSetUp(l)
}

func (h Host) portName() string { return "p-" + h.Name }

// plug makes the host's namespace and its cable to its link's bridge, behind which are the other links. Pod and service
// addresses that are not routed end in a blackhole, after whatever a daemon does with them: with no default route they
// could not leave anyway, and this says so in the table.
func (l *Lab) plug(h Host) error {
	if err := h.makeNetNS(); err != nil {
		return err
	}
	hostNS, err := netns.GetFromPath(h.NetNS())
	if err != nil {
		return err
	}
	defer hostNS.Close()
	err = inNetNS(bridgeHost.NetNS(), func() error {
		br, err := netlink.LinkByName(bridgeName(h.Link))
		if err != nil {
			return err
		}
		// After a power cut the kernel takes the namespace, and the cable with it, only a moment later.
		if old, err := netlink.LinkByName(h.portName()); err == nil {
			if err := netlink.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("the cable of before: %w", err)
			}
		}
		veth := &netlink.Veth{
			LinkAttrs:     netlink.LinkAttrs{Name: h.portName(), MasterIndex: br.Attrs().Index},
			PeerName:      "eth0",
			PeerNamespace: netlink.NsFd(int(hostNS)),
		}
		if err := netlink.LinkAdd(veth); err != nil {
			return fmt.Errorf("cable: %w", err)
		}
		return netlink.LinkSetUp(veth)
	})
	if err == nil {
		err = inNetNS(h.NetNS(), func() error {
			eth0, err := netlink.LinkByName("eth0")
			if err != nil {
				return err
			}
			if err := address(eth0, h); err != nil {
				return err
			}
			return l.routes(h)
		})
	}
	if err != nil {
		return fmt.Errorf("plugging in host %s: %w", h.Name, err)
	}
	return nil
}

// connect sets the host's cable at the bridge up or down.
func (h Host) connect(up bool) error {
	return inNetNS(bridgeHost.NetNS(), func() error {
		l, err := netlink.LinkByName(h.portName())
		if err != nil {
			return fmt.Errorf("cable of host %s: %w", h.Name, err)
		}
		if up {
			return netlink.LinkSetUp(l)
		}
		return netlink.LinkSetDown(l)
	})
}

// connected says whether the host's cable is plugged in.
func (h Host) connected() bool {
	up := false
	_ = inNetNS(bridgeHost.NetNS(), func() error {
		l, err := netlink.LinkByName(h.portName())
		up = err == nil && l.Attrs().Flags&net.FlagUp != 0
		return err
	})
	return up
}

// removeNetNS unpins the namespace; its interfaces go with the last user.
func (h Host) removeNetNS() error {
	err := unpin(h.NetNS())
	if err != nil {
		return fmt.Errorf("removing network namespace of host %s: %w", h.Name, err)
	}
	return nil
}

// unpin removes a namespace's bind mount and its file; absent is fine.
func unpin(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue // pinned more than once
		}
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
			break
		}
		return fmt.Errorf("unmounting %s: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
