// Command etcd is the reference of the store's benchmark. It runs one member of an etcd cluster, or
// clients of such a cluster with etcd's own client. It serves the same requests as the replicas of
// Keelson. scripts/bench builds it; test/bench/store runs it.
//
// It is a separate module, so that no other program links etcd or lists it as a dependency.
// ./drive, the code that both sides share, is a symbolic link to test/bench/store/drive.
package main

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"keelson.dev/keelson/test/bench/etcd/drive"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "-version" {
		fmt.Println(etcdVersion())
		return
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := runRole(ctx, os.Getenv(drive.RoleEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "etcd of the benchmark:", err)
		stop()
		os.Exit(1)
	}
}

// runRole runs the role that test/bench/store sets for this process.
func runRole(ctx context.Context, role string) error {
	orders := drive.NewRequestReader(os.Stdin)
	if role != drive.RoleMember && role != drive.RoleLoad {
		return fmt.Errorf("%s=%q: want the role that test/bench/store sets for this program", drive.RoleEnv, role)
	}
	s, err := orders.ReadSetup()
	if err != nil {
		return err
	}
	if role == drive.RoleMember {
		return serveMember(ctx, s, orders)
	}
	return serveLoad(ctx, s, orders)
}
