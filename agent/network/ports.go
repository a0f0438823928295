package network

import (
	"errors"
	"fmt"
	"regexp"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/cni"
)

// made are the interfaces that our own network made for a sandbox, by the result of its ADD; none when it is not known.
func (n *Network) made(a asAttached) []*types100.Interface {
	if a.list.Name != cni.Name {
		return nil
	}
	cached, err := n.cni.GetNetworkListCachedResult(a.list, a.rt)
	if err != nil || cached == nil {
		return nil
	}
	result, err := types100.GetResult(cached)
	if err != nil {
		return nil
	}
	return result.Interfaces
}

// port is the host's end of what our own network gave a sandbox, by the result of its ADD; nil when it is not known.
func (n *Network) port(a asAttached) *types100.Interface {
	for _, i := range n.made(a) {
		if l, err := netlink.LinkByName(i.Name); i.Sandbox == "" && err == nil && l.Type() == "veth" {
			return i
		}
	}
	return nil
}

// unplug removes a port whose other end the plugin could not reach, because the sandbox's namespace was unpinned
// before: whoever holds that namespace in some other way (a process, another's mounts) would keep the port as well.
func unplug(port *types100.Interface) error {
	if port == nil {
		return nil
	}
	l, err := netlink.LinkByName(port.Name)
	if err != nil || l.Type() != "veth" || l.Attrs().HardwareAddr.String() != port.Mac {
		return nil // it went with DEL, and the name may be another's by now
	}
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing port %s: %w", port.Name, err)
	}
	return nil
}

// portName is how the bridge plugin calls a port that it makes.
var portName = regexp.MustCompile(`^veth[0-9a-f]{8}$`)

// collectPorts removes the ports of our own bridge that no record of a sandbox names. Nobody attaches a sandbox meanwhile.
// While a sandbox that is kept holds an address and has no record, a port without one may be its own, and all stay.
func (n *Network) collectPorts(keep []string) error {
	bridge, err := netlink.LinkByName(cni.Bridge)
	if err != nil {
		return nil // there is none yet, or none any more
	}
	attached, _ := n.remembered("") // what cannot be read is as if it were lost
	recorded, ours := map[string]bool{}, map[string]bool{}
	for _, a := range attached {
		for _, i := range n.made(a) {
			recorded[a.rt.ContainerID] = true
			ours[i.Name] = ours[i.Name] || i.Sandbox == ""
		}
	}
	wanted := n.kept(keep)
	for id := range n.holders() {
		if wanted[id] && !recorded[id] {
			return nil
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("looking for ports that are nobody's: %w", err)
	}
	var errs []error
	for _, l := range links {
		at := l.Attrs()
		if at.MasterIndex != bridge.Attrs().Index || l.Type() != "veth" || !portName.MatchString(at.Name) || ours[at.Name] {
			continue
		}
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("removing port %s, which is nobody's: %w", at.Name, err))
		}
	}
	return errors.Join(errs...)
}
