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

// bridgeHost is the namespace with the bridges, one per link. It routes between them, and the
// forwarder runs in it.
var bridgeHost = Host{Name: "bridge", Role: "bridge"}

// inNetNS runs f on a thread in the namespace. The thread is discarded afterwards.
func inNetNS(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so that the runtime ends the thread
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

// makeNetNS creates and pins an empty network namespace with lo up and forwarding enabled.
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

// prepareNetNS must run on a thread in the new namespace, because /proc/sys/net shows the namespace
// of the calling thread.
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

// makeBridges creates the bridges in their own namespace, which has no link to the machine.
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
			// The bridge is the router of its link and has the router's addresses.
			if err := assignAddresses(br, l.Config.newHost("", bridgeHost.Role, i, 1)); err != nil {
				return err
			}
		}
		if l.Config.Families == FamilyIPv4 || l.Config.Families == "" {
			return nil
		}
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	})
}

// assignAddresses assigns the addresses of a host to a link and sets it up.
func assignAddresses(l netlink.Link, h Host) error {
	for _, ip := range h.addresses() {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if ip.Is6() {
			a.Mask, a.Flags = net.CIDRMask(64, 128), unix.IFA_F_NODAD // no duplicates exist, and daemons use it at once
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s: %w", ip, err)
		}
	}
	return netlink.LinkSetUp(l)
}

func (h Host) portName() string { return "p-" + h.Name }

// connectHost creates the host's network namespace and its cable to the bridge of its link.
// Blackhole routes for pod and Service addresses come after all routes of daemons. Without a
// default route, such packets could not leave anyway; the blackhole makes that explicit.
func (l *Lab) connectHost(h Host) error {
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
		// After cutPower, the kernel removes the namespace and its cable with a delay.
		if old, err := netlink.LinkByName(h.portName()); err == nil {
			if err := netlink.LinkDel(old); err != nil && !errors.Is(err, unix.ENODEV) {
				return fmt.Errorf("removing the old cable: %w", err)
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
			if err := assignAddresses(eth0, h); err != nil {
				return err
			}
			return l.addRoutes(h)
		})
	}
	if err != nil {
		return fmt.Errorf("plugging in host %s: %w", h.Name, err)
	}
	return nil
}

// setCableUp sets the bridge's end of the host's cable up or down.
func (h Host) setCableUp(up bool) error {
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

// isCableUp reports whether the host's cable is connected.
func (h Host) isCableUp() bool {
	up := false
	_ = inNetNS(bridgeHost.NetNS(), func() error {
		l, err := netlink.LinkByName(h.portName())
		up = err == nil && l.Attrs().Flags&net.FlagUp != 0
		return err
	})
	return up
}

// removeNetNS unpins the namespace. Its interfaces are removed with its last user.
func (h Host) removeNetNS() error {
	err := unpinNamespace(h.NetNS())
	if err != nil {
		return fmt.Errorf("removing network namespace of host %s: %w", h.Name, err)
	}
	return nil
}

// unpinNamespace removes a namespace's bind mount and its file. It ignores a namespace that is not
// pinned.
func unpinNamespace(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue // it was pinned more than once
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
