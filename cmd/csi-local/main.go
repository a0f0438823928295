// Keelson-csi-local is the CSI driver for volumes on a node's own disk.
package main

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/csi/local"
)

// version is set by the linker.
var version = "dev"

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand {
		if err := local.RunThawGuard(); err != nil {
			log.Error(err.Error())
			os.Exit(1)
		}
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	_, err := commandline.Execute(ctx, newCommand(log), os.Args[1:])
	var usage *commandline.UsageError
	switch {
	case errors.As(err, &usage):
		log.Error(err.Error())
		os.Exit(2)
	case err != nil && !errors.Is(err, context.Canceled):
		log.Error("stopped", "err", err)
		os.Exit(1)
	}
}

// errUsage is the error for missing flags or unexpected arguments.
var errUsage = &commandline.UsageError{
	Err: errors.New("usage: keelson-csi-local [--name NAME] [--root DIR] [--socket PATH] --node-id NAME"),
}

// newCommand returns the root command of the driver.
func newCommand(log *slog.Logger) *cobra.Command {
	host, _ := os.Hostname() // --node-id is for machines without a hostname
	cfg := local.Config{Log: log}
	c := &cobra.Command{
		Use:   "keelson-csi-local",
		Short: "Run the CSI driver for volumes on a node's own disk",
		Long: `Run the CSI driver for volumes on a node's own disk. keelson-agent runs the same driver itself, with
its flag --local-volumes.`,
		Example: "  keelson-csi-local --node-id w1 --root /var/lib/keelson/local-volumes",
		Version: version,
		Args:    cobra.ArbitraryArgs, // reported together with missing flags
		RunE: func(c *cobra.Command, args []string) error {
			if cfg.NodeID == "" || len(args) > 0 {
				return errUsage
			}
			return local.New(cfg).Run(c.Context())
		},
	}
	commandline.MarkFlagErrors(c)
	f := c.Flags()
	f.StringVar(&cfg.Name, "name", local.DriverName, "name of the CSI driver")
	f.StringVar(&cfg.Root, "root", "/var/lib/keelson/local-volumes", "directory of the volumes")
	f.StringVar(&cfg.Socket, "socket", "/var/lib/keelson/plugins/"+local.DriverName+"/csi.sock",
		"path of the Unix socket on which the driver listens")
	f.StringVar(&cfg.NodeID, "node-id", host, "name of the node on which the driver runs")
	return c
}
