// Command net measures the network of pods on a node, compared with references in the same run.
//
//	net dns [FLAG...]         the agent's DNS server, compared with CoreDNS
//	net services [FLAG...]    Service rules: time to write, memory, and the cost for traffic
//	net policies [FLAG...]    network policies: time to write, and the cost for traffic
//
// scripts/bench builds it and the references.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
)

// commands maps the name of each measurement, and of each child process of a measurement, to its
// function.
var commands = map[string]func(context.Context, []string) error{
	"dns":           benchDNS,
	"serve-dns":     serveDNS,
	"services":      benchServices,
	"services-node": servicesNode,
	"policies":      benchPolicies,
	"policies-node": policiesNode,
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	err := errors.New("a measurement is required: dns, services or policies")
	if len(os.Args) > 1 {
		do, ok := commands[os.Args[1]]
		if err = fmt.Errorf("unknown measurement %s: want dns, services or policies", os.Args[1]); ok {
			err = do(ctx, os.Args[2:])
		}
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench-net:", err)
		stop()
		os.Exit(1)
	}
}
