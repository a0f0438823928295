package main

import (
	"flag"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

const usage = `bench-store measures the replicated store and etcd in the same run.

  make bench-store                                 everything, about 14 minutes on a quiet machine
  make bench-store ARGS="-kills 20 -etcd-kills 5"  the same with fewer kills, 3 minutes less
  make bench-store ARGS="-only puts"               puts alone
  make bench-store ARGS="-only kills"              100 kills of Keelson's leader, 20 of etcd's, histogram: 5 minutes
  make bench-store ARGS="-only install,shutdown"   a follower catches up under load; orderly shutdowns of the leader
  make bench-store ARGS="-only puts -clients 256 -logs wal -at grpc -rounds 9"
  make bench-store ARGS="-only state -state 2048"  install, snapshots, restart, comparison with 2 GiB
  make bench-store ARGS="-only state -of snapshots -snapshots 5"   snapshots of 1 GiB, each five times
  make bench-store ARGS="-only puts -profiles /tmp/p"   go tool pprof -top /tmp/p/FILE
  make bench-store ARGS="-short"                   the measurements that make bench shows

The parts, in their order: `

// The parts of the benchmark, in the order in which they run. Puts run first with a small state;
// parts that make the state large or the machine hot run last.
const (
	partPuts      = "puts"
	partGets      = "gets"
	partLists     = "lists"
	partWatch     = "watch"
	partVisible   = "visible"
	partIdle      = "idle"
	partBusy      = "busy"
	partTransfers = "transfers"
	partShutdown  = "shutdown"
	partInstall   = "install"
	partKills     = "kills"
	partFreezes   = "freezes"
	partState     = "state"
)

var parts = []string{partPuts, partGets, partLists, partWatch, partVisible, partIdle, partBusy, partTransfers,
	partShutdown, partKills, partFreezes, partInstall, partState}

// The optional measurements of the part state. Its memory is always measured.
const (
	stateInstall    = "install"
	stateSnapshots  = "snapshots"
	stateRestarts   = "restarts"
	stateComparison = "comparison"
)

var stateMeasures = []string{stateInstall, stateSnapshots, stateRestarts, stateComparison}

// options are the values of the command-line flags, grouped by subject.
type options struct {
	only   []string // the parts to run
	load   loadOptions
	probes probeOptions
	faults faultOptions
	state  stateOptions

	etcd     string // the reference's program; "" = no reference
	etcdName string
	jsonPath string
	dir      string
	profiles string // a directory; "" = no profiles
}

// loadOptions are the options of the loads with puts and gets: their clients, their duration and
// their values.
type loadOptions struct {
	clients  []int    // of puts
	logs     []string // log stores of puts; the other parts use the first
	at       []string // locations of Keelson's clients: inProcess, overGRPC
	rounds   int
	conns    int // to each member, from the clients' process
	duration time.Duration
	size     int // bytes per value
}

// probeOptions are the options of the parts lists, watch, visible, idle and busy.
type probeOptions struct {
	listKeys     int
	listTimes    int
	watcherCount int
	watchFor     time.Duration
	commits      int
	idleFor      time.Duration
	busyFor      time.Duration
}

// faultOptions are the numbers of repetitions of each way to lose or transfer the leadership, for
// Keelson and for etcd.
type faultOptions struct {
	transferCount, etcdTransfers int
	shutdownCount, etcdShutdowns int
	killCount, etcdKills         int
	freezeCount, etcdFreezes     int
}

// stateOptions are the options of the parts install and state.
type stateOptions struct {
	ofState       []string // measurements of the part state
	installMiB    int
	memoryMiB     int
	stateMiB      int
	stateSize     int
	snapshotCount int
	compareEvery  time.Duration
	snapshotBytes int64 // of Keelson's replicas; 0 = default. Tests use a small value.
}

// placesByName maps the names in the flag -at to the locations of clients.
var placesByName = map[string]string{"process": inProcess, "grpc": overGRPC}

// parseFlags parses and checks the command-line arguments. Its usage message goes to out.
func parseFlags(args []string, out io.Writer) (options, error) {
	var (
		o    options
		fs   = flag.NewFlagSet("bench-store", flag.ContinueOnError)
		only = fs.String("only", strings.Join(parts, ","), "comma-separated parts to run")
		of   = fs.String("of", strings.Join(stateMeasures, ","), "comma-separated measurements of the part state")
		many = fs.String("clients", "1,64,256", "comma-separated numbers of concurrent clients of puts")
		logs = fs.String("logs", "bolt,wal", "comma-separated log stores of puts; the other parts use the first")
		at   = fs.String("at", "process,grpc",
			"locations of Keelson's clients: process = in the replicas' processes, grpc = in another process")
		short = fs.Bool("short", false,
			"run the short form: puts with the first log store and clients in the replicas' processes")
	)
	fs.SetOutput(out)
	fs.IntVar(&o.load.rounds, "rounds", 5, "rounds of each measurement; figures are medians of the rounds")
	fs.IntVar(&o.load.conns, "conns", 4, "connections to each member from clients in a separate process")
	fs.DurationVar(&o.load.duration, "duration", time.Second, "duration of each round of load")
	fs.IntVar(&o.load.size, "size", 1024, "bytes per value")
	fs.IntVar(&o.probes.listKeys, "list-keys", 10_000, "number of keys of a list")
	fs.IntVar(&o.probes.listTimes, "list-times", 10, "lists per round")
	fs.IntVar(&o.probes.watcherCount, "watchers", 1000, "number of watchers on one prefix")
	fs.DurationVar(&o.probes.watchFor, "watch-for", 3*time.Second, "how long the watched keys are changed")
	fs.IntVar(&o.probes.commits, "commits", 60, "commits per round of the part visible")
	fs.DurationVar(&o.probes.idleFor, "idle-for", 4*time.Second, "how long idle groups are measured")
	fs.DurationVar(&o.probes.busyFor, "busy-for", 6*time.Second,
		"how long 64 clients and busy loops run at the same time")
	fs.IntVar(&o.faults.transferCount, "transfers", 20, "number of leadership transfers of Keelson")
	fs.IntVar(&o.faults.etcdTransfers, "etcd-transfers", 5, "number of leadership transfers of etcd")
	fs.IntVar(&o.faults.shutdownCount, "shutdowns", 20, "number of orderly shutdowns of Keelson's leader under load")
	fs.IntVar(&o.faults.etcdShutdowns, "etcd-shutdowns", 5, "number of orderly shutdowns of etcd's leader under load")
	fs.IntVar(&o.faults.killCount, "kills", 100, "number of kills (SIGKILL) of Keelson's leader under load")
	fs.IntVar(&o.faults.etcdKills, "etcd-kills", 20, "number of kills (SIGKILL) of etcd's leader under load")
	fs.IntVar(&o.faults.freezeCount, "freezes", 20, "number of freezes (SIGSTOP) of Keelson's leader under load")
	fs.IntVar(&o.faults.etcdFreezes, "etcd-freezes", 5, "number of freezes (SIGSTOP) of etcd's leader under load")
	fs.IntVar(&o.state.installMiB, "install", 256, "MiB that a stopped follower misses in the part install")
	fs.IntVar(&o.state.memoryMiB, "memory", 256, "MiB of values that the memory measurement writes")
	fs.IntVar(&o.state.stateMiB, "state", 1024,
		"MiB of state at installs, snapshots, restarts and comparisons, including those of -memory")
	fs.IntVar(&o.state.stateSize, "state-size", 4096, "bytes per value of the part of -state that exceeds -memory")
	fs.IntVar(&o.state.snapshotCount, "snapshots", 1, "repetitions of each snapshot measurement; figures are medians")
	fs.DurationVar(&o.state.compareEvery, "compare-every", 20*time.Second,
		"interval of state comparisons while comparisons are measured")
	fs.StringVar(&o.etcd, "etcd", "", "program that runs etcd, the reference (test/bench/etcd); empty = no reference")
	fs.StringVar(&o.jsonPath, "json", "", "write JSON lines to this file")
	fs.StringVar(&o.profiles, "profiles", "",
		"write CPU profiles of Keelson's processes to this directory, one per process and round")
	fs.StringVar(&o.dir, "dir", "", "directory for the data; empty = a temporary directory")
	fs.Usage = func() {
		fmt.Fprintf(out, "%s%s\n\n", usage, strings.Join(parts, ", "))
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("unexpected argument %q: see -help", fs.Arg(0))
	}
	o.only, o.state.ofState, o.load.logs = strings.Split(*only, ","), strings.Split(*of, ","), strings.Split(*logs, ",")
	if *short {
		o.useShortForm()
		*at = "process"
	}
	for _, p := range strings.Split(*at, ",") {
		place, ok := placesByName[p]
		if !ok {
			return o, fmt.Errorf("-at %s: want process or grpc", p)
		}
		o.load.at = append(o.load.at, place)
	}
	for _, n := range strings.Split(*many, ",") {
		v, err := strconv.Atoi(n)
		if err != nil || v < 1 {
			return o, fmt.Errorf("-clients %s: want comma-separated numbers above zero", *many)
		}
		o.load.clients = append(o.load.clients, v)
	}
	return o, o.checkFlags()
}

// useShortForm sets the options of the short form of the benchmark, which "make bench" shows.
func (o *options) useShortForm() {
	o.only, o.load.logs = []string{partPuts, partVisible}, o.load.logs[:1]
	o.load.rounds, o.load.duration, o.probes.commits = 2, time.Second, 40
}

// checkFlags returns an error that names an invalid flag.
func (o options) checkFlags() error {
	for _, p := range o.only {
		if !slices.Contains(parts, p) {
			return fmt.Errorf("-only %s: unknown part: want some of %s", p, strings.Join(parts, ", "))
		}
	}
	for _, p := range o.state.ofState {
		if !slices.Contains(stateMeasures, p) {
			return fmt.Errorf("-of %s: unknown measurement: want some of %s", p, strings.Join(stateMeasures, ", "))
		}
	}
	for _, l := range o.load.logs {
		if l != "bolt" && l != "wal" {
			return fmt.Errorf("-logs %s: want bolt or wal", l)
		}
	}
	for name, v := range map[string]int{
		"rounds": o.load.rounds, "conns": o.load.conns, "size": o.load.size, "list-keys": o.probes.listKeys,
		"list-times": o.probes.listTimes,
		"watchers":   o.probes.watcherCount,
		"commits":    o.probes.commits, "transfers": o.faults.transferCount, "etcd-transfers": o.faults.etcdTransfers,
		"shutdowns": o.faults.shutdownCount, "etcd-shutdowns": o.faults.etcdShutdowns, "kills": o.faults.killCount,
		"etcd-kills": o.faults.etcdKills,
		"freezes":    o.faults.freezeCount, "etcd-freezes": o.faults.etcdFreezes, "install": o.state.installMiB,
		"snapshots": o.state.snapshotCount,
		"memory":    o.state.memoryMiB, "state-size": o.state.stateSize,
		"duration": int(o.load.duration), "watch-for": int(o.probes.watchFor), "idle-for": int(o.probes.idleFor),
		"busy-for":      int(o.probes.busyFor),
		"compare-every": int(o.state.compareEvery),
	} {
		if v < 1 {
			return fmt.Errorf("-%s must be above zero", name)
		}
	}
	if o.state.stateMiB <= o.state.memoryMiB {
		return fmt.Errorf("-state %d must be above the %d MiB of -memory, which are part of the state",
			o.state.stateMiB, o.state.memoryMiB)
	}
	return nil
}

func (o options) includesPart(part string) bool { return slices.Contains(o.only, part) }
