// Keelson-csi-local is the CSI driver for volumes on a node's own disk.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"keelson.dev/keelson/csi/local"
)

func main() {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand {
		if err := local.RunThawGuard(); err != nil {
			log.Error(err.Error())
			os.Exit(1)
		}
		return
	}
	host, _ := os.Hostname() // --node-id is for machines without a hostname
	cfg := local.Config{Log: log}
	flag.StringVar(&cfg.Name, "name", local.DriverName, "name of the CSI driver")
	flag.StringVar(&cfg.Root, "root", "/var/lib/keelson/local-volumes", "directory of the volumes")
	flag.StringVar(&cfg.Socket, "socket", "/var/lib/keelson/plugins/"+local.DriverName+"/csi.sock", "path of the Unix socket on which the driver listens")
	flag.StringVar(&cfg.NodeID, "node-id", host, "name of the node on which the driver runs")
	flag.Parse()
	if cfg.NodeID == "" || flag.NArg() > 0 {
		log.Error("usage: keelson-csi-local [--name NAME] [--root DIR] [--socket PATH] --node-id NAME")
		os.Exit(2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := local.New(cfg).Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		log.Error("stopped", "err", err)
		os.Exit(1)
	}
}
