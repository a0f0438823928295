package command

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/apiserver/admission/builtin"
	"keelson.dev/keelson/controlplane/server"
)

// parseRanges parses cidrs, the values of a flag. Its error names the flag.
func parseRanges(flag string, cidrs []string) (out []netip.Prefix, err error) {
	for _, text := range cidrs {
		p, err := netip.ParsePrefix(text)
		if err != nil {
			return nil, fmt.Errorf("--%s: %q is not a CIDR such as 192.0.2.0/24", flag, text)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// pluginFlags adds the flags that select admission plugins, with the names that kube-apiserver
// uses. It also adds the flags for the address ranges that admission allows. The returned function
// parses the values into cfg.
func pluginFlags(c *cobra.Command, cfg *server.Config) func() error {
	var enable, disable []string
	c.Flags().StringSliceVar(&enable, "enable-admission-plugins", nil,
		"admission plugins to enable in addition to those that are always enabled: "+
			strings.Join(builtin.OnRequest, ", "))
	c.Flags().StringSliceVar(&disable, "disable-admission-plugins", nil,
		"admission plugins to disable; plugins that Kubernetes enables by default cannot be disabled")
	var ranges, podRanges []string
	c.Flags().StringSliceVar(&podRanges, "pod-address-ranges", nil,
		"CIDRs of the addresses that pods may have in addition to their node's podCIDRs, for nodes with a CNI "+
			"plugin other than Keelson's (docs/explanation/node-trust.md); must be the same on every replica "+
			"(default: any address)")
	c.Flags().BoolVar(&cfg.Network.MirrorPodPeers, "mirror-pod-peers", false,
		"use mirror pods (of static pods) as endpoints of Services and peers of network policies; every node can "+
			"create such pods with any labels (docs/explanation/node-trust.md)")
	c.Flags().StringSliceVar(&ranges, "service-external-ip-ranges", nil,
		"CIDRs of the addresses that are allowed in spec.externalIPs of Services "+
			"(docs/reference/services.md); must be the "+
			"same on every replica (default: all that the cluster itself does not use)")
	return func() (err error) {
		if cfg.Network.ExternalIPRanges, err = parseRanges("service-external-ip-ranges", ranges); err != nil {
			return err
		}
		if cfg.Network.PodAddressRanges, err = parseRanges("pod-address-ranges", podRanges); err != nil {
			return err
		}
		cfg.Admission.Plugins, err = builtin.Choose(enable, disable)
		return err
	}
}
