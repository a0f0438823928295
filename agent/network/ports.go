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

// createdInterfaces returns the interfaces that the bridge plugin created for a sandbox on
// Keelson's own network, from the cached result of ADD. The result is empty for another network, or
// if no result is cached.
func (n *Network) createdInterfaces(a cachedAttachment) []*types100.Interface {
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

// hostVeth returns the host's end of the veth pair of a sandbox on Keelson's own network, from the
// cached result of ADD. It returns nil if the interface no longer exists or no result is cached.
func (n *Network) hostVeth(a cachedAttachment) *types100.Interface {
	for _, i := range n.createdInterfaces(a) {
		if l, err := netlink.LinkByName(i.Name); i.Sandbox == "" && err == nil && l.Type() == "veth" {
			return i
		}
	}
	return nil
}

// removePort removes port, the host's end of a sandbox's veth pair, if it still exists after DEL.
// The bridge plugin does not remove the pair if the sandbox's network namespace was already
// unpinned. In that case the pair remains while a process or another mount holds the namespace.
func removePort(port *types100.Interface) error {
	if port == nil {
		return nil
	}
	l, err := netlink.LinkByName(port.Name)
	if err != nil || l.Type() != "veth" || l.Attrs().HardwareAddr.String() != port.Mac {
		return nil // DEL removed the port, and another pod may have its name now
	}
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing port %s: %w", port.Name, err)
	}
	return nil
}

// portName matches the names of the bridge ports (veth interfaces) that the bridge plugin creates.
var portName = regexp.MustCompile(`^veth[0-9a-f]{8}$`)

// collectPorts removes the ports of Keelson's bridge that belong to no sandbox in libcni's cache.
// keep contains the IDs of existing sandboxes. If an existing sandbox holds an address but is
// missing in the cache, its port is unknown, and no port is removed. The caller must prevent
// concurrent ADDs.
func (n *Network) collectPorts(keep []string) error {
	bridge, err := netlink.LinkByName(cni.Bridge)
	if err != nil {
		return nil // the bridge does not exist
	}
	attached, _ := n.cachedAttachments("") // unreadable records count as missing
	recorded, ours := map[string]bool{}, map[string]bool{}
	for _, a := range attached {
		for _, i := range n.createdInterfaces(a) {
			recorded[a.rt.ContainerID] = true
			ours[i.Name] = ours[i.Name] || i.Sandbox == ""
		}
	}
	wanted := n.keptSandboxes(keep)
	for id := range n.addressHolders() {
		if wanted[id] && !recorded[id] {
			return nil
		}
	}
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("listing unused ports: %w", err)
	}
	var errs []error
	for _, l := range links {
		at := l.Attrs()
		if at.MasterIndex != bridge.Attrs().Index || l.Type() != "veth" || !portName.MatchString(at.Name) ||
			ours[at.Name] {
			continue
		}
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			errs = append(errs, fmt.Errorf("removing unused port %s: %w", at.Name, err))
		}
	}
	return errors.Join(errs...)
}
