// Command etcd is the reference of the store's benchmark: one member of an etcd
// cluster, or clients of one with etcd's own client, under the same orders as
// the replicas of Keelson. scripts/bench builds it; test/bench/store runs it.
//
// It is a module of its own, so that nothing of etcd is linked or listed anywhere
// else. What both sides share, ./drive, is a link to the folder beside.
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
	if err := run(ctx, os.Getenv(drive.RoleEnv)); err != nil {
		fmt.Fprintln(os.Stderr, "etcd of the benchmark:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, role string) error {
	lines := drive.NewLines(os.Stdin)
	if role != drive.RoleMember && role != drive.RoleLoad {
		return fmt.Errorf("%s=%q: this program is run by test/bench/store", drive.RoleEnv, role)
	}
	s, err := lines.Setup()
	if err != nil {
		return err
	}
	if role == drive.RoleMember {
		return serveMember(ctx, s, lines)
	}
	return serveLoad(ctx, s, lines)
}
