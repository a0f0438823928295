package lab

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Values of Config.Families: the address families of hosts, pods, and Services.
const (
	FamilyIPv4 = "ipv4"
	FamilyDual = "dual" // the first address is IPv4
	FamilyIPv6 = "ipv6"
)

const maxLinks = 9

// lastMetric is a route metric above the metrics of all routes that daemons add. Routes with
// lastMetric are therefore used only if there is no other route.
const lastMetric = 1 << 16

func bridgeName(link int) string { return "lab" + strconv.Itoa(link) }

func (c *Config) checkNetwork() error {
	if c.Links < 0 || c.Links > maxLinks {
		return fmt.Errorf("lab: %d links: want 1 to %d", c.Links, maxLinks)
	}
	if !slices.Contains([]string{"", FamilyIPv4, FamilyDual, FamilyIPv6}, c.Families) {
		return fmt.Errorf("lab: families %q: want ipv4, dual or ipv6", c.Families)
	}
	if !slices.Contains([]string{"", "auto", "routes", "vxlan", "wireguard"}, c.PodNetwork) {
		return fmt.Errorf("lab: pod network %q: want auto, routes, vxlan or wireguard", c.PodNetwork)
	}
	return nil
}

// newHost returns a Host with the n-th address of a link, for each address family of the lab. A
// link is a bridge with its own address range; 0 is the first. It creates nothing on the machine.
func (c *Config) newHost(name string, role Role, link, n int) Host {
	four := netip.AddrFrom4([4]byte{10, 89, byte(link), byte(n)})
	six := netip.MustParseAddr(fmt.Sprintf("fd89:0:0:%d::%d", link, n))
	h := Host{Name: name, Role: role, Link: link, IP: four}
	switch c.Families {
	case FamilyDual:
		h.Second = six
	case FamilyIPv6:
		h.IP = six
	}
	return h
}

func (h Host) addresses() []netip.Addr {
	if h.Second.IsValid() {
		return []netip.Addr{h.IP, h.Second}
	}
	return []netip.Addr{h.IP}
}

// nodeIPs returns the IP addresses of the host as a comma-separated list.
func (h Host) nodeIPs() string {
	var out []string
	for _, ip := range h.addresses() {
		out = append(out, ip.String())
	}
	return strings.Join(out, ",")
}

// Endpoint returns IP:PORT for a port at the first address of the host.
func (h Host) Endpoint(port int) string { return net.JoinHostPort(h.IP.String(), strconv.Itoa(port)) }

// Ranges returns the pod and Service address ranges of the cluster. They have the form of the flags
// --cluster-cidr and --service-cidr of 'keelson-controlplane init'.
func (c *Config) Ranges() (pods, services string) {
	switch c.Families {
	case FamilyDual:
		return ClusterCIDR + "," + ClusterCIDR6, ServiceCIDR + "," + ServiceCIDR6
	case FamilyIPv6:
		return ClusterCIDR6, ServiceCIDR6
	}
	return ClusterCIDR, ServiceCIDR
}

// addRoutes adds routes to the other links of the lab in the current network namespace, which must
// be the namespace of the host h. It also adds blackhole routes for the pod and Service ranges,
// which apply while no daemon has added a route.
func (hb hostBuilder) addRoutes(h Host) error {
	router := hb.config.newHost("", bridgeHost.Role, h.Link, 1)
	if hb.config.Links > 1 {
		for _, ip := range router.addresses() {
			all := "10.89.0.0/16"
			if ip.Is6() {
				all = "fd89::/48"
			}
			_, dst, _ := net.ParseCIDR(all)
			if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Gw: ip.AsSlice()}); err != nil {
				return fmt.Errorf("route to the other links: %w", err)
			}
		}
	}
	pods, services := hb.config.Ranges()
	for cidr := range strings.SplitSeq(pods+","+services, ",") {
		_, dst, _ := net.ParseCIDR(cidr)
		if err := netlink.RouteAdd(&netlink.Route{Dst: dst, Type: unix.RTN_BLACKHOLE, Priority: lastMetric}); err !=
			nil {
			return fmt.Errorf("blackhole for %s: %w", cidr, err)
		}
	}
	return nil
}

// describeNetwork returns the address ranges of the hosts as a text for progress messages.
func (c *Config) describeNetwork() string {
	where := Subnet
	if c.Links > 1 {
		where = strconv.Itoa(c.Links) + " links of 10.89.0.0/16"
	}
	switch c.Families {
	case FamilyDual:
		where += " with IPv6"
	case FamilyIPv6:
		where = strings.NewReplacer(Subnet, "fd89::/64", "10.89.0.0/16", "fd89::/48").Replace(where)
	}
	return where
}
