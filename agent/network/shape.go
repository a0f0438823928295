package network

import (
	"errors"
	"fmt"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/cni"
)

// checkBandwidthSupport returns an error if the request has a bandwidth limit that the network
// config would not enforce. This can only be a third-party network.
func checkBandwidthSupport(config *libcni.NetworkConfigList, r agent.NetworkRequest) error {
	if r.Ingress == 0 && r.Egress == 0 || config.Name == cni.Name {
		return nil
	}
	for _, p := range config.Plugins {
		if p.Network.Capabilities["bandwidth"] {
			return nil
		}
	}
	return fmt.Errorf("network %q: pod %s/%s requests bandwidth limits, and no plugin of the network has the "+
		"capability bandwidth: "+
		"add the bandwidth plugin to its configuration, or remove the pod's annotations", config.Name,
		r.Namespace, r.Name)
}

// limitBandwidth limits the bandwidth of a sandbox on Keelson's own network. Ingress is limited at
// the host's end of the veth pair, egress at the sandbox's end.
func (n *Network) limitBandwidth(res types.Result, r agent.NetworkRequest) error {
	if r.Ingress == 0 && r.Egress == 0 {
		return nil
	}
	result, err := types100.GetResult(res)
	if err != nil {
		return fmt.Errorf("limiting bandwidth: %w", err)
	}
	if r.Ingress > 0 {
		for _, i := range result.Interfaces {
			if l, err := netlink.LinkByName(i.Name); i.Sandbox == "" && err == nil && l.Type() == "veth" {
				if err := setRateLimit(nil, l, r.Ingress); err != nil {
					return fmt.Errorf("limiting the ingress bandwidth of pod %s/%s to %d bit/s: %w", r.Namespace,
						r.Name, r.Ingress, err)
				}
			}
		}
	}
	if r.Egress > 0 {
		if err := limitEgress(r.NetNS, r.Egress); err != nil {
			return fmt.Errorf("limiting the egress bandwidth of pod %s/%s to %d bit/s: %w", r.Namespace,
				r.Name, r.Egress, err)
		}
	}
	return nil
}

func limitEgress(path string, rate int64) error {
	ns, err := netns.GetFromPath(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	h, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer h.Close()
	l, err := h.LinkByName(ifName)
	if err != nil {
		return err
	}
	return setRateLimit(h, l, rate)
}

// Parameters of the token bucket filter. A packet waits at most 250 ms. The bucket is large enough
// for a packet of any size.
const (
	queueMicros = 250_000
	minBurst    = 128 << 10 // bytes; before segmentation offload, a packet may have 64 KiB
)

// setRateLimit sets a token bucket filter with the given rate (bits per second) on a link.
func setRateLimit(h *netlink.Handle, l netlink.Link, rate int64) error {
	bytes := uint64(max(rate/8, 1))
	burst := uint32(min(max(bytes/100, minBurst), 1<<30)) // 10 ms at the given rate
	tbf := &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: l.Attrs().Index, Handle: netlink.MakeHandle(1, 0),
			Parent: netlink.HANDLE_ROOT},
		Rate: bytes, Buffer: netlink.Xmittime(bytes, burst),
		Limit: uint32(min(bytes*queueMicros/1_000_000+uint64(burst), 1<<31)),
	}
	replace := netlink.QdiscReplace
	if h != nil {
		replace = h.QdiscReplace
	}
	if err := replace(tbf); err != nil {
		if errors.Is(err, unix.ENOENT) {
			return fmt.Errorf("%w: this kernel has no token bucket filter: load it with 'modprobe sch_tbf'", err)
		}
		return err
	}
	return nil
}
