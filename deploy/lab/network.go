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

// bridgeHost is a Host that consists only of a network namespace. This namespace contains the
// bridges of the lab, one for each link, and routes between the links. The forwarder runs in it.
var bridgeHost = Host{Name: "bridge", Role: "bridge"}

// inNetNS runs f on an OS thread in the network namespace that is pinned at path, and returns the
// error of f. The OS thread ends afterwards.
func inNetNS(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // not unlocked, so that the Go runtime ends the thread
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

// makeNetNS creates the network namespace of the host h and pins it at NetNS, without interfaces
// except lo. It enables IPv4 forwarding.
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

// prepareNetNS brings up lo and enables IPv4 forwarding in the current network namespace. It must
// run on a thread in that namespace, because /proc/sys/net shows the namespace of the calling
// thread.
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

// makeBridges creates the network namespace of bridgeHost with one bridge for each link. The
// namespace has no interface to the machine's own network.
func (hb hostBuilder) makeBridges() error {
	if err := bridgeHost.makeNetNS(); err != nil {
		return err
	}
	return inNetNS(bridgeHost.NetNS(), func() error {
		for i := range max(1, hb.config.Links) {
			br := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName(i)}}
			if err := netlink.LinkAdd(br); err != nil {
				return fmt.Errorf("making bridge %s: %w", br.Name, err)
			}
			// A bridge has the first address of its link: the hosts use it as their router.
			if err := assignAddresses(br, hb.config.newHost("", bridgeHost.Role, i, 1)); err != nil {
				return err
			}
		}
		if hb.config.Families == FamilyIPv4 || hb.config.Families == "" {
			return nil
		}
		return os.WriteFile("/proc/sys/net/ipv6/conf/all/forwarding", []byte("1"), 0)
	})
}

// assignAddresses assigns the IP addresses of the host h to the interface l, and brings the
// interface up.
func assignAddresses(l netlink.Link, h Host) error {
	for _, ip := range h.addresses() {
		a := &netlink.Addr{IPNet: &net.IPNet{IP: ip.AsSlice(), Mask: net.CIDRMask(24, 32)}}
		if ip.Is6() {
			a.Mask, a.Flags = net.CIDRMask(64, 128), unix.IFA_F_NODAD // daemons bind it at once
		}
		if err := netlink.AddrAdd(l, a); err != nil {
			return fmt.Errorf("address %s: %w", ip, err)
		}
	}
	return netlink.LinkSetUp(l)
}

func (h Host) portName() string { return "p-" + h.Name }

// connectHost creates the network namespace of the host h, and connects it by a veth pair to the
// bridge of its link. It adds addresses and routes; see addRoutes.
func (hb hostBuilder) connectHost(h Host) error {
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
		// After cutPower, the kernel removes the previous namespace and its veth pair with a delay.
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
			return hb.addRoutes(h)
		})
	}
	if err != nil {
		return fmt.Errorf("plugging in host %s: %w", h.Name, err)
	}
	return nil
}

// setCableUp connects the host h to its bridge, or disconnects it, like a network cable. It sets
// that end of the host's veth pair up or down which is connected to the bridge.
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

// isCableUp reports whether the host h is connected to its bridge; see setCableUp.
func (h Host) isCableUp() bool {
	up := false
	_ = inNetNS(bridgeHost.NetNS(), func() error {
		l, err := netlink.LinkByName(h.portName())
		up = err == nil && l.Attrs().Flags&net.FlagUp != 0
		return err
	})
	return up
}

// removeNetNS unpins the host's network namespace. The kernel removes it, with its interfaces, when
// no process uses it.
func (h Host) removeNetNS() error {
	err := unpinNamespace(h.NetNS())
	if err != nil {
		return fmt.Errorf("removing network namespace of host %s: %w", h.Name, err)
	}
	return nil
}

// unpinNamespace unpins the namespace at a path: it removes the bind mount, and the file on which
// it is mounted. It does nothing if no namespace is pinned there.
func unpinNamespace(path string) error {
	for {
		err := unix.Unmount(path, unix.MNT_DETACH)
		if err == nil {
			continue // a namespace may be pinned several times at one path
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
