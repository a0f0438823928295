package proxy

import (
	"errors"
	"maps"
	"net/netip"
	"os"
	"testing"

	"github.com/vishvananda/netlink"
	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"

	"keelson.dev/keelson/agent/proxy/proxytest"
	"keelson.dev/keelson/agent/proxy/servicemodel"
	"keelson.dev/keelson/test/testenv/space"
)

// F118: Clean removes all virtual servers of Services, including node ports at the node's own
// addresses. Virtual servers of other programs remain: those at other addresses, and all of them on
// a node on which mode ipvs was never active.
func TestVirtualServersOfOthersStay(t *testing.T) {
	elsewhere := virtualServer{Frontend: servicemodel.Frontend{IP: netip.MustParseAddr("192.0.2.200"),
		Proto: "tcp", Port: 80}}
	atNode := virtualServer{Frontend: servicemodel.Frontend{IP: netip.MustParseAddr("10.89.0.101"),
		Proto: "tcp", Port: 80}}
	backends := realServers{netip.MustParseAddrPort("192.0.2.201:80"): 1}
	ports := servicemodel.Compute([]*v1.Service{proxytest.Service("web", "10.96.0.10", 30080)},
		[]*discoveryv1.EndpointSlice{proxytest.Slice("web", proxytest.Endpoint("10.244.0.2", "w1", true, true, false))},
		testPlace).Ports()
	denied := errors.New("denied")
	for _, c := range []struct {
		name  string
		used  bool // mode ipvs was active
		there virtualServer
		clean func(*fakeIPVS) error
		want  error
	}{
		{"another mode", true, elsewhere, func(f *fakeIPVS) error { return f.Clean(t.Context()) }, nil},
		{"a node that leaves", true, elsewhere, func(f *fakeIPVS) error { return f.removeServersAndLink() }, nil},
		{"a node of another mode", false, atNode, func(f *fakeIPVS) error { return f.Clean(t.Context()) }, nil},
		{"a node of another mode that leaves", false, atNode, func(f *fakeIPVS) error {
			return f.removeServersAndLink()
		}, nil},
		{"an interface that nobody can look for", false, atNode, func(f *fakeIPVS) error {
			f.linkExists = func() (bool, error) { return false, denied }
			return f.removeServersAndLink()
		}, denied},
	} {
		t.Run(c.name, func(t *testing.T) {
			f := newFakeIPVS()
			if c.used {
				if err := f.Sync(t.Context(), testBase, maps.Values(ports)); err != nil {
					t.Fatal(err)
				}
				if len(f.kernel.servers) != 2 {
					t.Fatalf("a Service with a node port has %s", f.kernel.text())
				}
			}
			f.kernel.servers[c.there] = backends
			if err := c.clean(f); !errors.Is(err, c.want) {
				t.Error(err)
			}
			if left := f.kernel.servers; len(left) != 1 || !maps.Equal(left[c.there], backends) ||
				len(f.kernel.held) > 0 {
				t.Errorf("left is %s, want %v alone", f.kernel.text(), c.there)
			}
		})
	}
}

// F118: on a node that leaves a cluster of mode ipvs, and whose kernel no longer has IPVS, the
// interface is removed.
func TestInterfaceOfVirtualServersGoes(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root for network namespaces")
	}
	err := space.In(space.New(t), func() error {
		// A veth interface with the same name, because not every test kernel supports dummy
		// interfaces.
		if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: ipvsLink}, PeerName: "peer"}); err !=
			nil {
			return err
		}
		if err := errors.Join(Remove(), Remove()); err != nil {
			return err
		}
		if _, err := netlink.LinkByName(ipvsLink); !errors.As(err, new(netlink.LinkNotFoundError)) {
			return errors.Join(errors.New(ipvsLink+" is there still"), err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
