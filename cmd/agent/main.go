// Keelson-agent runs the pods of one Linux machine.
package main

import (
	"context"
	"errors"
	"flag"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"keelson.dev/keelson/agent/network"
	"keelson.dev/keelson/agent/node"
	"keelson.dev/keelson/csi/local"
	"keelson.dev/keelson/internal/memory"
)

func main() {
	if len(os.Args) == 2 && os.Args[1] == local.GuardCommand {
		if err := local.Guard(); err != nil {
			fail(1, err.Error())
		}
		return
	}
	cfg := node.Flags(flag.CommandLine)
	verbose := flag.Bool("verbose", false, "log every action")
	flag.Parse()
	level := slog.LevelInfo
	if *verbose {
		level = slog.LevelDebug
	}
	cfg.Log = slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
	if err := memory.Shield(memory.Daemon); err != nil {
		cfg.Log.Warn("the agent cannot be shielded from the OOM killer", "error", err)
	}
	if flag.NArg() == 1 && flag.Arg(0) == "remove-network" {
		if err := network.Remove(context.Background()); err != nil {
			fail(1, err.Error())
		}
		return
	}
	if flag.NArg() > 0 {
		fail(2, "unexpected argument "+flag.Arg(0)+": there is remove-network alone, for a node that leaves its cluster; see --help")
	}
	if err := cfg.Complete(); err != nil {
		fail(2, err.Error())
	}
	if err := cfg.WithNetwork(); err != nil {
		fail(2, err.Error())
	}
	n, err := node.New(*cfg)
	if err != nil {
		fail(2, err.Error())
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := n.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
		fail(1, err.Error())
	}
}

func fail(code int, message string) {
	slog.Error(message)
	os.Exit(code)
}
