// keelson-controlplane is one replica of a Keelson control plane.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"keelson.dev/keelson/cmd/internal/commandline"
	"keelson.dev/keelson/controlplane/server/command"
	"keelson.dev/keelson/internal/gcheadroom"
	"keelson.dev/keelson/internal/memory"
)

// version is set by the linker.
var version = "dev"

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	go gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, memory.ReleaseUnused)
	if c, err := commandline.Execute(ctx, command.New(version), os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, command.Failure(c, err))
		os.Exit(1)
	}
}
