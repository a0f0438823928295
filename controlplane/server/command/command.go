// Package command is the command line of keelson-controlplane.
package command

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/controlplane/server"
)

// New returns the command tree.
func New(version string) *cobra.Command {
	root := &cobra.Command{
		Use:   "keelson-controlplane",
		Short: "One replica of a Keelson control plane",
		Long: "One replica of a Keelson control plane: a raft-replicated store, the Kubernetes API over it,\n" +
			"and, on the leader, controllers and scheduler.",
		Example:       "  keelson-controlplane init --advertise-address 192.0.2.11\n  keelson-controlplane run --advertise-address 192.0.2.11",
		Version:       version,
		SilenceErrors: true, SilenceUsage: true,
	}
	root.AddCommand(initCommand(), joinCommand(), runCommand(version))
	return root
}

// identity adds the flags that every verb has.
func identity(c *cobra.Command, cfg *server.Config) {
	host, _ := os.Hostname()
	f := c.Flags()
	f.StringVar(&cfg.Name, "name", host, "name of this replica; it never changes")
	f.StringVar(&cfg.DataDir, "data-dir", "/var/lib/keelson/controlplane", "folder of this replica's data")
	f.StringVar(&cfg.Advertise, "advertise-address", "", "IP address under which users, agents and replicas reach this replica")
}

func initCommand() *cobra.Command {
	var cfg server.Config
	var cluster server.Cluster
	var kubeconfigServer, output string
	c := &cobra.Command{
		Use:     "init",
		Short:   "Make a new cluster: its keys, its configuration, the first join tokens",
		Example: "  keelson-controlplane init --advertise-address 192.0.2.11 --cluster-name prod",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			f, err := server.Init(cfg, cluster, kubeconfigServer)
			if err != nil {
				return err
			}
			if output == "json" {
				return json.NewEncoder(c.OutOrStdout()).Encode(f)
			}
			fmt.Fprintf(c.OutOrStdout(), "cluster made. Start this replica with 'keelson-controlplane run'.\n\n"+
				"kubeconfig of the administrator:  %s\nfurther replicas join with token: %s\nworkers join with token:          %s\n(tokens are good for 24 hours)\n",
				f.Kubeconfig, f.ControlPlaneToken, f.NodeToken)
			return nil
		},
	}
	identity(c, &cfg)
	f := c.Flags()
	f.StringVar(&cluster.Name, "cluster-name", "keelson", "name of the cluster")
	f.StringVar(&cluster.ClusterCIDR, "cluster-cidr", "10.244.0.0/16", "addresses of pods")
	f.StringVar(&cluster.ServiceCIDR, "service-cidr", "10.96.0.0/16", "addresses of Services")
	f.StringVar(&cluster.Domain, "cluster-domain", "cluster.local", "DNS domain of the cluster")
	f.StringVar(&kubeconfigServer, "kubeconfig-server", "", "the API's URL in the kubeconfig (default: this replica)")
	f.StringVarP(&output, "output", "o", "text", "text or json")
	return c
}

func joinCommand() *cobra.Command {
	var cfg server.Config
	var token string
	var servers []string
	c := &cobra.Command{
		Use:     "join",
		Short:   "Make this machine a further replica of a cluster",
		Example: "  keelson-controlplane join --advertise-address 192.0.2.12 --token keelson1.controlplane... --server 192.0.2.11:6444",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if token == "" || len(servers) == 0 {
				return fmt.Errorf("--token and --server are needed: 'kctl cluster token create --role controlplane' makes a token")
			}
			if err := server.Join(c.Context(), cfg, strings.TrimSpace(token), servers); err != nil {
				return err
			}
			fmt.Fprintln(c.OutOrStdout(), "joined. Start this replica with 'keelson-controlplane run'.")
			return nil
		},
	}
	identity(c, &cfg)
	c.Flags().StringVar(&token, "token", "", "join token for a control-plane replica")
	c.Flags().StringArrayVar(&servers, "server", nil, "host:port at which a replica listens for agents (repeatable)")
	return c
}

func runCommand(version string) *cobra.Command {
	cfg := server.Config{Version: version}
	eviction, debug := 0, false
	c := &cobra.Command{
		Use:     "run",
		Short:   "Run this replica",
		Example: "  keelson-controlplane run --advertise-address 192.0.2.11",
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			if eviction < 0 {
				return fmt.Errorf("--eviction-seconds %d: want 0 or more", eviction)
			}
			level := slog.LevelInfo
			if debug {
				level = slog.LevelDebug
			}
			cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level})).With("replica", cfg.Name)
			cfg.PodEviction = time.Duration(eviction) * time.Second
			return server.Run(c.Context(), cfg)
		},
	}
	identity(c, &cfg)
	c.Flags().IntVar(&eviction, "eviction-seconds", 15, "seconds after which pods leave a node that was lost")
	c.Flags().BoolVar(&debug, "debug", false, "log more")
	return c
}
