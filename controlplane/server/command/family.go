package command

import (
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/server"
)

func addFamilyCommand() *cobra.Command {
	var cfg server.Config
	var pods, services string
	c := &cobra.Command{
		Use:   "add-family --cluster-cidr PREFIX --service-cidr PREFIX",
		Short: "Give a cluster of one address family the other one as well",
		Long: "Give pods and Services of a cluster that was made with one address family addresses of the other one as well. Stop the\n" +
			"daemon of a replica, run this verb there, start the daemon again, and go on with the next replica: with the same ranges.\n" +
			"Pods that run keep what they have, new ones get both. Services get a second address when their ipFamilyPolicy asks for it.",
		Example: "  keelson-controlplane add-family --cluster-cidr fd00:10:244::/48 --service-cidr fd00:10:96::/112",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if pods == "" || services == "" {
				return errors.New("--cluster-cidr and --service-cidr are needed: the ranges of the second family")
			}
			cluster, err := server.AddFamily(cfg, pods, services)
			if err != nil {
				return err
			}
			fmt.Fprintf(c.OutOrStdout(), "pods have addresses of %s, Services of %s. Start this replica with 'keelson-controlplane run', "+
				"and do the same on every other one.\n", cluster.ClusterCIDR, cluster.ServiceCIDR)
			return nil
		},
	}
	c.Flags().StringVar(&cfg.DataDir, "data-dir", defaultDataDir, "folder of this replica's data")
	c.Flags().StringVar(&pods, "cluster-cidr", "", "addresses of pods, of the family that the cluster lacks")
	c.Flags().StringVar(&services, "service-cidr", "", "addresses of Services, of the same family")
	return c
}
