package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/recovery"
	"keelson.dev/keelson/controlplane/server"
)

func addFamilyCommand() *cobra.Command {
	var cfg server.Config
	var pods, services string
	c := &cobra.Command{
		Use:   "add-address-family --cluster-cidr PREFIX --service-cidr PREFIX",
		Short: "Add a second address family to a cluster",
		Long: "Add a second address family to a cluster with one address family, so that pods and Services can\n" +
			"have IPv4 and IPv6 addresses.\n" +
			"\n" +
			"For one replica after the other: stop its daemon, run this command with the same ranges, and start\n" +
			"its daemon. Running pods keep their addresses. New pods get an address of each family. A Service\n" +
			"gets a second address if its ipFamilyPolicy requests it.",
		Example: "  keelson-controlplane add-address-family --cluster-cidr fd00:10:244::/48 --service-cidr " +
			"fd00:10:96::/112",
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if pods == "" || services == "" {
				return errors.New("--cluster-cidr and --service-cidr are needed: the ranges of the second family")
			}
			cluster, err := recovery.AddFamily(cfg.Dir(), pods, services)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(),
				"pods have addresses of %s, Services of %s. Start this replica with 'keelson-controlplane run', "+
					"and do the same on every other one.\n", cluster.ClusterCIDR, cluster.ServiceCIDR)
			return nil
		},
	}
	c.Flags().StringVar(&cfg.DataDir, "data-dir", defaultDataDir, "data directory of this replica")
	c.Flags().StringVar(&pods, "cluster-cidr", "", "address range of pods in the second family")
	c.Flags().StringVar(&services, "service-cidr", "", "address range of Services in the second family")
	return c
}
