// Command net measures what traffic of pods meets on a node, beside what it replaces, in the same run.
//
//	net dns [FLAG...]         the agent's DNS server beside CoreDNS
//	net services [FLAG...]    what Service rules cost: to write, to keep, and to the traffic that meets them
//	net policies [FLAG...]    what network policies cost: to write, and to the traffic that meets them
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

// commands are the measures by name, and the processes that they consist of.
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
	err := errors.New("which measure? dns, services or policies")
	if len(os.Args) > 1 {
		do, ok := commands[os.Args[1]]
		if err = fmt.Errorf("%s is no measure: dns, services or policies", os.Args[1]); ok {
			err = do(ctx, os.Args[2:])
		}
	}
	if err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "bench-net:", err)
		stop()
		os.Exit(1)
	}
}
