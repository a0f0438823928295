package network

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"os"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"golang.zx2c4.com/wireguard/wgctrl"
	"golang.zx2c4.com/wireguard/wgctrl/wgtypes"
)

// CheckWireGuard returns nil if this machine supports WireGuard. Otherwise it returns an error with
// the reason and a remedy.
func CheckWireGuard() error {
	if have, err := findLink(wireguardName); err == nil && have != nil && have.Type() == kindWireGuard {
		return nil
	}
	try := &netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: wireguardName + "-try"}}
	err := netlink.LinkAdd(try)
	if err == nil || errors.Is(err, unix.EEXIST) {
		err = netlink.LinkDel(try)
	}
	switch {
	case errors.Is(err, unix.EOPNOTSUPP):
		return errors.New("--pod-network=wireguard: this machine's kernel has no WireGuard: load it with " +
			"'modprobe wireguard' " +
			"(Linux has it from 5.6 on), or start the agents of all nodes with auto, routes or vxlan")
	case err != nil:
		return fmt.Errorf("--pod-network=wireguard: testing the kernel's support: %w", err)
	}
	return nil
}

const kindWireGuard = "wireguard"

// findLink returns the network interface with this name. It returns nil without an error if the
// interface does not exist.
func findLink(name string) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if _, absent := errors.AsType[netlink.LinkNotFoundError](err); absent {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("finding interface %s: %w", name, err)
	}
	return l, nil
}

// removeLink removes a network interface. It succeeds if the interface no longer exists.
func removeLink(l netlink.Link) error {
	if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing interface %s: %w", l.Attrs().Name, err)
	}
	return nil
}

// installWireGuard creates or updates this node's WireGuard interface and returns its interface
// index, which is 0 if the interface does not exist. If want is nil, it removes the interface. The
// index may be valid although an error is returned.
func installWireGuard(want *WireGuard) (index int, err error) {
	have, err := findLink(wireguardName)
	if err != nil {
		return 0, err
	}
	if have != nil && (want == nil || have.Type() != kindWireGuard) {
		if err := removeLink(have); err != nil {
			return 0, err
		}
		have = nil
	}
	if want == nil {
		return 0, nil
	}
	if have == nil {
		if err := netlink.LinkAdd(&netlink.Wireguard{LinkAttrs: netlink.LinkAttrs{Name: wireguardName,
			MTU: want.MTU}}); err != nil {
			return 0, fmt.Errorf("creating the encrypted tunnel %s: %w: load it with 'modprobe wireguard'",
				wireguardName, err)
		}
		if have, err = netlink.LinkByName(wireguardName); err != nil {
			return 0, fmt.Errorf("creating the encrypted tunnel: %w", err)
		}
	}
	return have.Attrs().Index, updateWireGuard(have, want)
}

func updateWireGuard(have netlink.Link, want *WireGuard) error {
	if have.Attrs().MTU != want.MTU {
		if err := netlink.LinkSetMTU(have, want.MTU); err != nil {
			return fmt.Errorf("setting the MTU of %s to %d: %w", wireguardName, want.MTU, err)
		}
	}
	if err := configureWireGuard(want); err != nil {
		return err
	}
	if have.Attrs().Flags&net.FlagUp == 0 {
		if err := netlink.LinkSetUp(have); err != nil {
			return fmt.Errorf("setting %s up: %w", wireguardName, explainPortInUse(err, want.Port))
		}
	}
	return setTunnelAddrs(have, want.Addrs)
}

func explainPortInUse(err error, port int) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("%w: another program uses UDP port %d: stop that program, or give the agents of all nodes "+
			"another --wireguard-port", err, port)
	}
	return err
}

// configureWireGuard sets the private key, the port and the peers of the WireGuard interface.
func configureWireGuard(want *WireGuard) error {
	c, err := wgctrl.New()
	if err != nil {
		return fmt.Errorf("opening the kernel's WireGuard interface: %w", err)
	}
	defer c.Close()
	have, err := c.Device(wireguardName)
	if errors.Is(err, os.ErrNotExist) {
		err = unix.ENODEV
	}
	if err != nil {
		return fmt.Errorf("reading the encrypted tunnel %s: %w", wireguardName, err)
	}
	cfg, same := wireGuardChanges(have, want)
	if same {
		return nil
	}
	if err = c.ConfigureDevice(wireguardName, cfg); errors.Is(err, os.ErrNotExist) {
		err = unix.ENODEV
	}
	if err != nil {
		return fmt.Errorf("configuring the encrypted tunnel %s: %w", wireguardName, explainPortInUse(err, want.Port))
	}
	return nil
}

// wireGuardChanges returns the configuration changes that bring device to the wanted state. same
// reports whether no change is needed. Removed peers precede others, because their allowed ranges
// may move to another peer. It is pure.
func wireGuardChanges(device *wgtypes.Device, want *WireGuard) (cfg wgtypes.Config, same bool) {
	same = true
	if device.PrivateKey.PublicKey() != want.Key.PublicKey() {
		// compare public keys, because the kernel clamps the private key
		cfg.PrivateKey, same = &want.Key, false
	}
	if device.ListenPort != want.Port {
		cfg.ListenPort, same = &want.Port, false
	}
	if device.FirewallMark != 0 {
		cfg.FirewallMark, same = new(int), false
	}
	missing := map[wgtypes.Key]bool{}
	for _, p := range want.Peers {
		missing[p.Key] = true
	}
	there := map[wgtypes.Key]wgtypes.Peer{}
	for _, p := range device.Peers {
		there[p.PublicKey] = p
		if !missing[p.PublicKey] {
			cfg.Peers = append(cfg.Peers, wgtypes.PeerConfig{PublicKey: p.PublicKey, Remove: true})
		}
	}
	for _, p := range want.Peers {
		if is, ok := there[p.Key]; ok && is.PresharedKey == (wgtypes.Key{}) &&
			is.PersistentKeepaliveInterval == want.Keepalive &&
			is.Endpoint != nil && sameEndpoint(is.Endpoint.AddrPort(), p.Endpoint) &&
			sameAllowed(is.AllowedIPs, p.Allowed) {
			continue
		}
		cfg.Peers = append(cfg.Peers, wgtypes.PeerConfig{PublicKey: p.Key, PresharedKey: &wgtypes.Key{},
			Endpoint:                    net.UDPAddrFromAddrPort(p.Endpoint),
			PersistentKeepaliveInterval: &want.Keepalive, ReplaceAllowedIPs: true, AllowedIPs: ipNets(p.Allowed)})
	}
	return cfg, same && len(cfg.Peers) == 0
}

func sameEndpoint(have, want netip.AddrPort) bool {
	return have.Addr().Unmap() == want.Addr() && have.Port() == want.Port()
}

func sameAllowed(have []net.IPNet, want []netip.Prefix) bool {
	is := map[netip.Prefix]bool{}
	for _, n := range have {
		if p, ok := toPrefix(&n); ok {
			is[p] = true
		}
	}
	return len(have) == len(want) && len(is) == len(want) &&
		slices.Equal(slices.SortedFunc(maps.Keys(is), netip.Prefix.Compare),
			slices.SortedFunc(slices.Values(want), netip.Prefix.Compare))
}

func ipNets(all []netip.Prefix) (out []net.IPNet) {
	for _, p := range all {
		out = append(out, *ipNet(p))
	}
	return out
}
