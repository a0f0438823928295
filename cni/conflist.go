// Package cni contains Keelson's own CNI network configuration, and the selection of an operator's
// configuration.
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
	Version = "1.1.0" // of the CNI specification: the first version with GC
)

// Options are the parameters of Keelson's own CNI configuration list (see Conflist).
type Options struct {
	PodCIDRs []netip.Prefix // of this node, one per address family of its pods, the primary family first
	IPAMDir  string         // state of host-local; cleared by a reboot, like the pods
	MTU      int            // 0: the MTU of the link
	// HostPorts adds the portmap plugin. Without it, pods without host ports save one plugin
	// execution.
	HostPorts bool
}

type plugin map[string]any

// Conflist returns Keelson's own CNI configuration list as JSON: the bridge plugin with addresses
// from host-local, and optionally the portmap plugin.
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
			all["rangeEnd"] = secondToLast(p).String() // the last address is this node's end of the tunnel
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
	if o.HostPorts {
		plugins = append(plugins, plugin{"type": "portmap", "backend": "nftables", "snat": true,
			"capabilities": plugin{"portMappings": true}})
	}
	return json.Marshal(plugin{"cniVersion": Version, "name": Name, "plugins": plugins})
}

// secondToLast returns the second to last address of an IPv6 range. It is the last address that
// pods may get, because the last address of the range belongs to this node's tunnel interface.
func secondToLast(p netip.Prefix) netip.Addr {
	raw := p.Masked().Addr().As16()
	for i := p.Bits(); i < 128; i++ {
		raw[i/8] |= 1 << (7 - i%8)
	}
	return netip.AddrFrom16(raw).Prev()
}

// FindOperatorConfig returns the path of the network configuration that an operator or a network
// product has installed in dir: the first *.conflist, *.conf or *.json file in alphabetical order.
// It returns "" if dir has no such file or does not exist.
func FindOperatorConfig(dir string) (string, error) {
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
