// Package cni holds what Keelson adds to the Container Network Interface: its
// own network configuration, used where an operator has put no other, and the
// rule by which one is chosen.
package cni

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// Name is the name of Keelson's own network; Bridge is its bridge on every worker.
const (
	Name    = "keelson"
	Bridge  = "keelson0"
	Version = "1.1.0" // of the CNI specification: the first with GC
)

// Options are what the own configuration depends on.
type Options struct {
	PodCIDRs []netip.Prefix // of this node, one of each family that its pods have, the first family's first
	IPAMDir  string         // where host-local keeps addresses; emptied by a reboot, as the pods are
	MTU      int            // 0 = that of the link
	// Ports adds the portmap plugin: pods without host ports save an exec without it.
	Ports bool
}

type plugin map[string]any

// Conflist renders Keelson's own configuration list: bridge with host-local
// addresses, and portmap where asked for.
func Conflist(o Options) ([]byte, error) {
	if len(o.PodCIDRs) == 0 {
		return nil, errors.New("cni: the node has no pod CIDR")
	}
	var ranges [][]plugin
	var routes []plugin
	for _, p := range o.PodCIDRs {
		all := plugin{"subnet": p.String()}
		out := "0.0.0.0/0"
		if p.Addr().Is6() {
			out = "::/0"
			all["rangeEnd"] = beforeLast(p).String() // the last one is the node's own end of the tunnel to others
		}
		ranges = append(ranges, []plugin{all})
		routes = append(routes, plugin{"dst": out})
	}
	bridge := plugin{
		"type": "bridge", "bridge": Bridge, "isGateway": true, "hairpinMode": true, "ipMasq": false,
		"ipam": plugin{"type": "host-local", "dataDir": o.IPAMDir, "ranges": ranges, "routes": routes},
	}
	if o.MTU > 0 {
		bridge["mtu"] = o.MTU
	}
	plugins := []plugin{bridge}
	if o.Ports {
		plugins = append(plugins, plugin{"type": "portmap", "backend": "nftables", "snat": true, "capabilities": plugin{"portMappings": true}})
	}
	return json.Marshal(plugin{"cniVersion": Version, "name": Name, "plugins": plugins})
}

// beforeLast is the last address but one of an IPv6 range.
func beforeLast(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().As16()
	for i := p.Bits(); i < 128; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	return netip.AddrFrom16(raw).Prev()
}

// Foreign returns the path of the configuration an operator (or another network
// product) has put into dir: the first *.conflist, *.conf or *.json by name; "" when there is none.
func Foreign(dir string) (string, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("cni: looking for network configurations: %w", err)
	}
	var names []string
	for _, e := range entries {
		if e.IsDir() || strings.HasPrefix(e.Name(), ".") {
			continue
		}
		switch filepath.Ext(e.Name()) {
		case ".conflist", ".conf", ".json":
			names = append(names, e.Name())
		}
	}
	if len(names) == 0 {
		return "", nil
	}
	return filepath.Join(dir, slices.Min(names)), nil
}
