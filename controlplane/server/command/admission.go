package command

import (
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
	return func() (err error) {
		cfg.AdmissionPlugins, err = admission.Choose(enable, disable)
		return err
	}
}
