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

const usage = `bench-store measures the replicated store beside etcd, in the same run.

  make bench-store                                 everything, about 14 minutes on a quiet machine
  make bench-store ARGS="-kills 20 -etcd-kills 5"  the same with fewer kills, 3 minutes less
  make bench-store ARGS="-only puts"               puts alone
  make bench-store ARGS="-only kills"              100 kills of our leader beside 20 of etcd's, and the histogram: 5 minutes
  make bench-store ARGS="-only install,shutdown"   a follower brought up to date under load, orderly ends of the leader
  make bench-store ARGS="-only puts -clients 256 -logs wal -at grpc -rounds 9"
  make bench-store ARGS="-only state -state 2048"  install, snapshots, restart, comparison with 2 GiB
  make bench-store ARGS="-only state -of snapshots -snapshots 5"   snapshots of 1 GiB, five times each
  make bench-store ARGS="-only puts -profiles /tmp/p"   go tool pprof -top /tmp/p/FILE
  make bench-store ARGS="-short"                   what make bench shows of it

The parts, in their order: `

// The parts, in the order in which they run: puts have small states, and what
// makes the state large or the machine hot comes last.
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

var parts = []string{partPuts, partGets, partLists, partWatch, partVisible, partIdle, partBusy, partTransfers, partShutdown, partKills, partFreezes, partInstall, partState}

// The measures of the part state that can be left out. Its memory is always measured.
const (
	ofInstall    = "install"
	ofSnapshots  = "snapshots"
	ofRestarts   = "restarts"
	ofComparison = "comparison"
)

var ofStates = []string{ofInstall, ofSnapshots, ofRestarts, ofComparison}

type options struct {
	only          []string
	ofState       []string
	clients       []int
	logs          []string
	at            []string
	rounds        int
	conns         int
	duration      time.Duration
	size          int
	listKeys      int
	listTimes     int
	watcherCount  int
	watchFor      time.Duration
	commits       int
	idleFor       time.Duration
	busyFor       time.Duration
	transferCount int
	etcdTransfers int
	shutdownCount int
	etcdShutdowns int
	killCount     int
	etcdKills     int
	freezeCount   int
	etcdFreezes   int
	installMiB    int
	memoryMiB     int
	stateMiB      int
	stateSize     int
	snapshotCount int
	compareEvery  time.Duration
	snapshotBytes int64 // of our replicas; 0 = their default. Tests write little.

	etcd     string // the reference's program; "" = without
	etcdName string
	jsonPath string
	dir      string
	profiles string // a folder; "" = none
}

// places are the short names of where clients are.
var places = map[string]string{"process": inProcess, "grpc": overGRPC}

// parse reads the command line.
func parse(args []string, to io.Writer) (options, error) {
	var (
		o     options
		fs    = flag.NewFlagSet("bench-store", flag.ContinueOnError)
		only  = fs.String("only", strings.Join(parts, ","), "the parts to run")
		of    = fs.String("of", strings.Join(ofStates, ","), "the measures of the part state")
		many  = fs.String("clients", "1,64,256", "numbers of concurrent clients of puts")
		logs  = fs.String("logs", "bolt,wal", "log stores of puts; the other parts take the first")
		at    = fs.String("at", "process,grpc", "where our clients are: in the replicas' processes, in another over gRPC")
		short = fs.Bool("short", false, "the short form: puts with the first log store, in process")
	)
	fs.SetOutput(to)
	fs.IntVar(&o.rounds, "rounds", 5, "rounds of each measure; figures are medians of them")
	fs.IntVar(&o.conns, "conns", 4, "connections to each member of clients in a process of their own")
	fs.DurationVar(&o.duration, "duration", time.Second, "time per round of load")
	fs.IntVar(&o.size, "size", 1024, "bytes per value")
	fs.IntVar(&o.listKeys, "list-keys", 10_000, "keys of a list")
	fs.IntVar(&o.listTimes, "list-times", 10, "lists per round")
	fs.IntVar(&o.watcherCount, "watchers", 1000, "watchers on one prefix")
	fs.DurationVar(&o.watchFor, "watch-for", 3*time.Second, "how long changes are made for the watchers")
	fs.IntVar(&o.commits, "commits", 60, "commits per round whose sight on followers is timed")
	fs.DurationVar(&o.idleFor, "idle-for", 4*time.Second, "how long idleness is watched")
	fs.DurationVar(&o.busyFor, "busy-for", 6*time.Second, "how long 64 clients run beside busy loops")
	fs.IntVar(&o.transferCount, "transfers", 20, "transfers of the leadership, ours")
	fs.IntVar(&o.etcdTransfers, "etcd-transfers", 5, "transfers of etcd's")
	fs.IntVar(&o.shutdownCount, "shutdowns", 20, "orderly ends of our leader's process under load")
	fs.IntVar(&o.etcdShutdowns, "etcd-shutdowns", 5, "orderly ends of etcd's")
	fs.IntVar(&o.killCount, "kills", 100, "how often to kill -9 our leader under load")
	fs.IntVar(&o.etcdKills, "etcd-kills", 20, "how often to kill -9 etcd's")
	fs.IntVar(&o.freezeCount, "freezes", 20, "how often to freeze our leader under load, which no connection tells of")
	fs.IntVar(&o.etcdFreezes, "etcd-freezes", 5, "how often to freeze etcd's")
	fs.IntVar(&o.installMiB, "install", 256, "MiB that a follower misses which is brought up to date under load")
	fs.IntVar(&o.memoryMiB, "memory", 256, "MiB of values by which memory is measured")
	fs.IntVar(&o.stateMiB, "state", 1024, "MiB of state at installs, snapshots, restarts and comparisons, that of -memory included")
	fs.IntVar(&o.stateSize, "state-size", 4096, "bytes per value of the rest of that state")
	fs.IntVar(&o.snapshotCount, "snapshots", 1, "how often each measure of a snapshot is repeated; figures are medians")
	fs.DurationVar(&o.compareEvery, "compare-every", 20*time.Second, "how often the states are compared while that is measured")
	fs.StringVar(&o.etcd, "etcd", "", "the reference's program (test/bench/etcd); none = no reference")
	fs.StringVar(&o.jsonPath, "json", "", "write JSON lines to this file")
	fs.StringVar(&o.profiles, "profiles", "", "write a CPU profile of each of our processes and round to this folder")
	fs.StringVar(&o.dir, "dir", "", "where to put the data (default: a temporary folder)")
	fs.Usage = func() {
		fmt.Fprintf(to, "%s%s\n\n", usage, strings.Join(parts, ", "))
		fs.PrintDefaults()
	}
	if err := fs.Parse(args); err != nil {
		return o, err
	}
	if fs.NArg() > 0 {
		return o, fmt.Errorf("%q is no flag: see -help", fs.Arg(0))
	}
	o.only, o.ofState, o.logs = strings.Split(*only, ","), strings.Split(*of, ","), strings.Split(*logs, ",")
	if *short {
		o.shorten()
		*at = "process"
	}
	for _, p := range strings.Split(*at, ",") {
		place, ok := places[p]
		if !ok {
			return o, fmt.Errorf("-at %s: it is process or grpc", p)
		}
		o.at = append(o.at, place)
	}
	for _, n := range strings.Split(*many, ",") {
		v, err := strconv.Atoi(n)
		if err != nil || v < 1 {
			return o, fmt.Errorf("-clients %s: numbers above zero, with commas between", *many)
		}
		o.clients = append(o.clients, v)
	}
	return o, o.check()
}

// shorten is the form that make bench shows.
func (o *options) shorten() {
	o.only, o.logs = []string{partPuts, partVisible}, o.logs[:1]
	o.rounds, o.duration, o.commits = 2, time.Second, 40
}

// check names the flag that is wrong.
func (o options) check() error {
	for _, p := range o.only {
		if !slices.Contains(parts, p) {
			return fmt.Errorf("-only %s: the parts are %s", p, strings.Join(parts, ", "))
		}
	}
	for _, p := range o.ofState {
		if !slices.Contains(ofStates, p) {
			return fmt.Errorf("-of %s: the measures of a large state are %s", p, strings.Join(ofStates, ", "))
		}
	}
	for _, l := range o.logs {
		if l != "bolt" && l != "wal" {
			return fmt.Errorf("-logs %s: the log stores are bolt and wal", l)
		}
	}
	for flag, v := range map[string]int{
		"rounds": o.rounds, "conns": o.conns, "size": o.size, "list-keys": o.listKeys, "list-times": o.listTimes, "watchers": o.watcherCount,
		"commits": o.commits, "transfers": o.transferCount, "etcd-transfers": o.etcdTransfers,
		"shutdowns": o.shutdownCount, "etcd-shutdowns": o.etcdShutdowns, "kills": o.killCount, "etcd-kills": o.etcdKills,
		"freezes": o.freezeCount, "etcd-freezes": o.etcdFreezes, "install": o.installMiB, "snapshots": o.snapshotCount, "memory": o.memoryMiB, "state-size": o.stateSize,
		"duration": int(o.duration), "watch-for": int(o.watchFor), "idle-for": int(o.idleFor), "busy-for": int(o.busyFor),
		"compare-every": int(o.compareEvery),
	} {
		if v < 1 {
			return fmt.Errorf("-%s must be above zero", flag)
		}
	}
	if o.stateMiB <= o.memoryMiB {
		return fmt.Errorf("-state %d: the state includes the %d MiB of -memory, and more", o.stateMiB, o.memoryMiB)
	}
	return nil
}

func (o options) runs(part string) bool { return slices.Contains(o.only, part) }
