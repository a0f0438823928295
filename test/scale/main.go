// Command scale measures a whole control plane with as many nodes as fit on a machine. The three
// replicas are processes. The agents share a few more processes; each has a real session but runs
// no containers. The command prints a table and writes JSON lines, like the other benchmarks. Its
// parts:
//
//	deployment  time until all pods of a Deployment are bound, with one leader and with two
//	fleet       nodes join, Deployments fill them, then rest, churn, and the leader is killed
//	failover    the leader is killed under load: time from the election until activities resume
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

	"keelson.dev/keelson/controlplane/nodegateway/accept"
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

	nodes, pods     int    // of the part fleet
	processes       int    // of agents
	arrivals        int    // most agents started per second
	memory          string // memory limit of a replica
	rest, churn     time.Duration
	rate            int // pods replaced per second of churn
	replicas        int // of the Deployment
	deploymentNodes int
	rounds          int // per measurement of the Deployment
	kills           int // of leaders
}

func main() {
	if asked, err := runRole(); asked {
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	var o options
	only := flag.String("only", partDeployment+","+partFleet,
		"comma-separated parts to run, of "+strings.Join(parts, ", "))
	flag.StringVar(&o.jsonPath, "json", "scale.json", "write JSON lines to this file")
	flag.StringVar(&o.profiles, "profiles", "",
		"directory for CPU and heap profiles of the replicas; empty = no profiles")
	flag.IntVar(&o.nodes, "nodes", 500, "number of nodes, each with an agent (part fleet)")
	flag.IntVar(&o.pods, "pods", 5000, "number of pods on these nodes (part fleet)")
	flag.IntVar(&o.processes, "processes", 4, "number of processes that run the agents (part fleet)")
	flag.IntVar(&o.arrivals, "arrivals", 50, "most agents that are started per second (part fleet)")
	flag.StringVar(&o.memory, "memory", replicaMemory, "memory limit of a replica, its --memory-limit")
	flag.DurationVar(&o.rest, "rest", 20*time.Second, "how long the idle cluster is measured (part fleet)")
	flag.DurationVar(&o.churn, "churn", 20*time.Second, "how long pods are replaced (part fleet)")
	flag.IntVar(&o.rate, "rate", 100, "pods replaced per second of -churn")
	flag.IntVar(&o.replicas, "replicas", 5000, "pods of the Deployment (part deployment)")
	flag.IntVar(&o.deploymentNodes, "deployment-nodes", 1000, "number of nodes without agents (part deployment)")
	flag.IntVar(&o.rounds, "rounds", 3, "how often each measurement creates the Deployment (part deployment)")
	flag.IntVar(&o.kills, "kills", 100, "number of leaders that are killed (part failover)")
	flag.Parse()
	o.only = strings.Split(*only, ",")
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := runBenchmarks(ctx, o, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "scale:", err)
		stop()
		os.Exit(1)
	}
}

// roleEnv is the environment variable with the role of a child process: a replica or a group of
// agents.
const roleEnv = "KEELSON_SCALE_ROLE"

const (
	roleReplica = "replica"
	roleAgents  = "crowd"
)

// runRole runs the role of a child process, a replica or a group of agents. hasRole is false if
// this process has no role, so that it must run the measurements.
func runRole() (hasRole bool, err error) {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	switch os.Getenv(roleEnv) {
	case roleReplica:
		go gcheadroom.Run(ctx, gcheadroom.ServerHeadroom, memory.ReleaseUnused)
		_, err = command.New("scale").ExecuteContextC(ctx)
		return true, err
	case roleAgents:
		return true, runAgentGroup(ctx, os.Stdin)
	}
	return false, nil
}

func (o options) checkFlags() error {
	for _, p := range o.only {
		if !slices.Contains(parts, p) {
			return fmt.Errorf("-only %s: unknown part: want some of %s", p, strings.Join(parts, ", "))
		}
	}
	for name, n := range map[string]int{
		"nodes": o.nodes, "pods": o.pods, "processes": o.processes, "arrivals": o.arrivals, "rate": o.rate,
		"replicas":         o.replicas,
		"deployment-nodes": o.deploymentNodes, "rounds": o.rounds, "kills": o.kills,
	} {
		if n < 1 {
			return fmt.Errorf("-%s %d: want 1 or more", name, n)
		}
	}
	if most := accept.DefaultLimits().Total; o.nodes+maxJoining*o.processes > most &&
		slices.Contains(o.only, partFleet) {
		return fmt.Errorf("-nodes %d: a replica with this limit of open files accepts %d connections of "+
			"agents: raise the "+
			"limit (ulimit -n)", o.nodes, most)
	}
	if o.rest <= 0 || o.churn <= 0 {
		return fmt.Errorf("-rest %s and -churn %s must be above zero", o.rest, o.churn)
	}
	return nil
}

// benchmarks is one run of the measurements: its options and its results so far.
type benchmarks struct {
	options options
	tally   figures.BenchmarkRun
}

// runBenchmarks runs the selected parts. It stops at the first part that fails, and prints and
// saves the results so far.
func runBenchmarks(ctx context.Context, o options, out, progress io.Writer) error {
	if err := o.checkFlags(); err != nil {
		return err
	}
	b := &benchmarks{options: o, tally: figures.StartRun(progress)}
	var err error
	for _, p := range []struct {
		name string
		do   func(context.Context) error
	}{{partDeployment, b.measureDeployments}, {partFleet, b.measureFleet}, {partFailover, b.measureFailover}} {
		if err == nil && slices.Contains(o.only, p.name) {
			if err = p.do(ctx); err != nil {
				err = fmt.Errorf("part %s: %w", p.name, err)
			}
		}
	}
	if len(b.tally.Rows) == 0 {
		return err
	}
	fmt.Fprintln(out)
	return errors.Join(err, figures.Print(out, b.tally.Rows), b.tally.SaveRecords(o.jsonPath))
}
