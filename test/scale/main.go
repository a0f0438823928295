// Command scale measures a whole control plane with as many nodes as fit on a machine: three replicas as processes, and
// agents in a few more, which have a real session each, and of an agent nothing else. It prints a table and writes JSON
// lines, as the other benchmarks.
//
//	fleet       nodes join, Deployments fill them, then rest, churn, and the death of the leader
//	failover    the leader is killed under load: how long after the election of the next one everything goes on
//	deployment  one Deployment on nodes that nobody runs: until all its pods are bound, with one leader and with two
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/controlplane/nodegateway"
	"keelson.dev/keelson/controlplane/server/command"
	"keelson.dev/keelson/internal/gcheadroom"
	"keelson.dev/keelson/internal/memory"
	"keelson.dev/keelson/test/bench/figures"
)

// The parts, in the order in which they run.
const (
	partDeployment = "deployment"
	partFleet      = "fleet"
	partFailover   = "failover"
)

var parts = []string{partDeployment, partFleet, partFailover}

type options struct {
	only     []string
	jsonPath string
	profiles string

	nodes, pods     int    // of the fleet
	processes       int    // of agents
	arrivals        int    // of agents within a second
	memory          string // that a replica may take
	rest, churn     time.Duration
	rate            int // pods replaced in a second of churn
	replicas        int // of the Deployment
	deploymentNodes int
	rounds          int // of each measure of the Deployment
	kills           int // of leaders
}

func main() {
	if asked, err := role(); asked {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	var o options
	only := flag.String("only", partDeployment+","+partFleet, "the parts to run, of "+strings.Join(parts, ", "))
	flag.StringVar(&o.jsonPath, "json", "scale.json", "write JSON lines to this file")
	flag.StringVar(&o.profiles, "profiles", "", "folder for CPU and heap profiles of the replicas; none = none")
	flag.IntVar(&o.nodes, "nodes", 500, "nodes with an agent's session")
	flag.IntVar(&o.pods, "pods", 5000, "pods on them")
	flag.IntVar(&o.processes, "processes", 4, "processes that the agents share")
	flag.IntVar(&o.arrivals, "arrivals", 50, "agents that come within a second, at most")
	flag.StringVar(&o.memory, "memory", replicaMemory, "memory that a replica may take, its --memory-limit")
	flag.DurationVar(&o.rest, "rest", 20*time.Second, "how long nothing happens")
	flag.DurationVar(&o.churn, "churn", 20*time.Second, "how long pods are replaced")
	flag.IntVar(&o.rate, "rate", 100, "pods replaced in a second of churn")
	flag.IntVar(&o.replicas, "replicas", 5000, "pods of the one Deployment")
	flag.IntVar(&o.deploymentNodes, "deployment-nodes", 1000, "nodes that it is bound to; nobody runs on them")
	flag.IntVar(&o.rounds, "rounds", 3, "times that the Deployment is made, for each measure")
	flag.IntVar(&o.kills, "kills", 100, "leaders that are killed, of the part failover")
	flag.Parse()
	o.only = strings.Split(*only, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		stop()
		os.Exit(1)
	}
}

// asRole says in the environment of a process that it is a replica or a crowd of agents.
const asRole = "KEELSON_SCALE_ROLE"

const (
	roleReplica = "replica"
	roleCrowd   = "crowd"
)

// role runs what this process was begun for; asked is false where it is the one that measures.
func role() (asked bool, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch os.Getenv(asRole) {
	case roleReplica:
		go gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, memory.ReleaseUnused)
		_, err = command.New("scale").ExecuteContextC(ctx)
		return true, err
	case roleCrowd:
		return true, crowdProcess(ctx, os.Stdin)
	}
	return false, nil
}

func (o options) check() error {
	for _, p := range o.only {
		if !slices.Contains(parts, p) {
			return fmt.Errorf("-only %s: the parts are %s", p, strings.Join(parts, ", "))
		}
	}
	for flag, n := range map[string]int{
		"nodes": o.nodes, "pods": o.pods, "processes": o.processes, "arrivals": o.arrivals, "rate": o.rate, "replicas": o.replicas,
		"deployment-nodes": o.deploymentNodes, "rounds": o.rounds, "kills": o.kills,
	} {
		if n < 1 {
			return fmt.Errorf("-%s %d: want 1 or more", flag, n)
		}
	}
	if most := nodegateway.Connections().Total; o.nodes+joiningAtOnce*o.processes > most && slices.Contains(o.only, partFleet) {
		return fmt.Errorf("-nodes %d: a replica that may open so few files takes %d connections of agents: raise the limit (ulimit -n)", o.nodes, most)
	}
	if o.rest <= 0 || o.churn <= 0 {
		return fmt.Errorf("-rest %s and -churn %s must be above zero", o.rest, o.churn)
	}
	return nil
}

// bench is one run: what was measured so far.
type bench struct {
	options
	figures.Tally
}

// run measures, and prints what it has also when a part fails.
func run(ctx context.Context, o options, out, progress io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	b := &bench{options: o, Tally: figures.Begin(progress)}
	var err error
	for _, p := range []struct {
		name string
		do   func(context.Context) error
	}{{partDeployment, b.deployments}, {partFleet, b.fleet}, {partFailover, b.failover}} {
		if err == nil && slices.Contains(o.only, p.name) {
			if err = p.do(ctx); err != nil {
				err = fmt.Errorf("part %s: %w", p.name, err)
			}
		}
	}
	if len(b.Rows) == 0 {
		return err
	}
	fmt.Fprintln(out)
	return errors.Join(err, figures.Print(out, b.Rows), b.Save(o.jsonPath))
}
