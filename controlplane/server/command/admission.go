package command

import (
	"fmt"
	"net/netip"
	"strings"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/server"
)

// pluginFlags adds the flags that choose admission plugins, as kube-apiserver spells them. The returned function reads them.
func pluginFlags(c *cobra.Command, cfg *server.Config) func() error {
	var enable, disable []string
	c.Flags().StringSliceVar(&enable, "enable-admission-plugins", nil,
		"admission plugins that run besides those that always do: "+strings.Join(admission.OnRequest, ", "))
	c.Flags().StringSliceVar(&disable, "disable-admission-plugins", nil,
		"admission plugins that shall not run; those that Kubernetes runs by default always do")
	var ranges []string
	c.Flags().StringSliceVar(&ranges, "service-external-ip-ranges", nil,
		"CIDRs of the addresses that Services may name in spec.externalIPs (docs/services.md); the same on every replica (default: all that the cluster does not use itself)")
	return func() (err error) {
		cfg.ExternalIPRanges = nil
		for _, text := range ranges {
			p, err := netip.ParsePrefix(text)
			if err != nil {
				return fmt.Errorf("--service-external-ip-ranges: %q is not a CIDR such as 192.0.2.0/24", text)
			}
			cfg.ExternalIPRanges = append(cfg.ExternalIPRanges, p.Masked())
		}
		cfg.AdmissionPlugins, err = admission.Choose(enable, disable)
		return err
	}
}
