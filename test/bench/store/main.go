// Command store measures the replicated store: three replicas in three
// processes on loopback, with mTLS between them and fsync, with each log store,
// and clients both in the replicas' processes, as the apiserver is, and in a
// process of their own over gRPC. The reference is etcd, three members with the
// same TLS between them and etcd's own client in a process of its own, by turns
// in the same run: machines drift, ratios do not. scripts/bench builds both.
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
		err = command(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench-store:", err)
		stop()
		os.Exit(1)
	}
}

var errNoRole = errors.New("not one of the benchmark's processes")

// asRole is what this program does as one of the benchmark's processes.
func asRole(ctx context.Context, role string) error {
	serve := serveClients
	switch role {
	case "":
		return errNoRole
	case drive.RoleBurn:
		drive.Burn(os.Stdin)
		return nil
	case drive.RoleMember:
		serve = serveMember
	case drive.RoleLoad:
	default:
		return fmt.Errorf("%s=%q is no role", drive.RoleEnv, role)
	}
	lines := drive.NewLines(os.Stdin)
	s, err := lines.Setup()
	if err != nil {
		return err
	}
	return serve(ctx, s, lines)
}

// command is what a person runs.
func command(ctx context.Context, args []string, out, progress io.Writer) error {
	o, err := parse(args, progress)
	if err != nil {
		return err
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	return run(ctx, o, self, out, progress)
}
