// Command store measures the replicated store: three replicas in three processes on loopback, with
// mutual TLS and fsync, with each log store. Clients are in the replicas' processes, like the API
// server, or in their own process over gRPC. The reference is etcd: three members with the same
// TLS, and etcd's own client in its own process. Both are measured in turn in the same run, because
// the speed of a machine changes. scripts/bench builds both.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"keelson.dev/keelson/test/bench/store/drive"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := asRole(ctx, os.Getenv(drive.RoleEnv))
	if errors.Is(err, errNoRole) {
		err = runCommandLine(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench-store:", err)
		stop()
		os.Exit(1)
	}
}

var errNoRole = errors.New("not a child process of the benchmark")

// asRole runs the role of a child process of the benchmark, which RoleEnv contains. It returns
// errNoRole if this process has no role.
func asRole(ctx context.Context, role string) error {
	serve := serveClients
	switch role {
	case "":
		return errNoRole
	case drive.RoleBurn:
		drive.BurnCPU(os.Stdin)
		return nil
	case drive.RoleMember:
		serve = serveMember
	case drive.RoleLoad:
	default:
		return fmt.Errorf("%s=%q: unknown role", drive.RoleEnv, role)
	}
	lines := drive.NewRequestReader(os.Stdin)
	s, err := lines.ReadSetup()
	if err != nil {
		return err
	}
	return serve(ctx, s, lines)
}

// runCommandLine runs the benchmark with command-line arguments.
func runCommandLine(ctx context.Context, args []string, out, progress io.Writer) error {
	o, err := parseFlags(args, progress)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return runBenchmarks(ctx, o, self, out, progress)
}
