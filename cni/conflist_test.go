package cni

import (
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// F107: libcni accepts Keelson's own configuration, with the plugins in order.
func TestConflist(t *testing.T) {
	for _, ports := range []bool{false, true} {
		raw, err := Conflist(Options{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.244.3.0/24"),
			netip.MustParsePrefix("fd44:0:0:3::/64")}, IPAMDir: "/run/x", HostPorts: ports, MTU: 1450})
		if err != nil {
			t.Fatal(err)
		}
		list, err := libcni.NetworkConfFromBytes(raw)
		if err != nil {
			t.Fatalf("libcni refuses %s: %v", raw, err)
		}
		want := 1
		if ports {
			want = 2
		}
		if list.Name != Name || len(list.Plugins) != want || list.Plugins[0].Network.Type != "bridge" {
			t.Errorf("ports=%v: got %s", ports, raw)
		}
	}
	if _, err := Conflist(Options{}); err == nil {
		t.Error("a node without a pod CIDR got a configuration")
	}
}

// F109: a third party's configuration takes precedence, the first one by name.
func TestForeign(t *testing.T) {
	dir := t.TempDir()
	if p, err := FindOperatorConfig(filepath.Join(dir, "absent")); p != "" || err != nil {
		t.Fatalf("absent folder: %q, %v", p, err)
	}
	for _, n := range []string{"README", ".hidden.conf", "20-b.conflist", "10-a.conf"} {
		if err := os.WriteFile(filepath.Join(dir, n), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if p, err := FindOperatorConfig(dir); err != nil || filepath.Base(p) != "10-a.conf" {
		t.Fatalf("got %q, %v", p, err)
	}
}
