// Command bench is the short form of all benchmarks. It uses the running lab, or creates a lab and
// deletes it afterwards. It prints one table and writes JSON lines. Each figure is compared with a
// target and, where possible, with a reference measured in the same run: the speed of a machine
// changes, ratios hardly do.
//
//	scripts/bench [-only store,sched,bound,node,idle,api,storage] [-json FILE] [-kubeconfig FILE]
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"syscall"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
)

// The parts of the benchmark, in the order in which they run. The store and the scheduler run
// before the lab uses the machine. idle runs before the load of api grows the heaps.
const (
	partStore = "store"
	partSched = "sched"
	partBound = "bound"
	partNode  = "node"
	partIdle  = "idle"
	partAPI   = "api"

	partStorage = "storage" // only with -only
)

var (
	parts    = []string{partStore, partSched, partBound, partNode, partIdle, partAPI}
	allParts = append(slices.Clone(parts), partStorage)
)

type options struct {
	only           []string
	jsonPath       string
	programs       string
	etcd           string
	kubeconfig     string
	profiles       string
	duration       time.Duration
	sequentialPods int
	burstPods      int
}

func main() {
	var o options
	only := flag.String("only", strings.Join(parts, ","), "comma-separated parts to run")
	flag.StringVar(&o.jsonPath, "json", "bench.json", "write JSON lines to this file")
	flag.StringVar(&o.programs, "programs", "",
		"directory with the programs store and floor (test/bench/store, test/bench/node/floor) and with the "+
			"test binary of the scheduler, sched.test")
	flag.StringVar(&o.etcd, "etcd", "",
		"program that runs etcd, the store's reference (test/bench/etcd); empty = no reference")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "",
		"measure the API of this cluster instead of a lab (part api only)")
	flag.StringVar(&o.profiles, "profiles", "",
		"directory for CPU profiles of this process, one per measurement; empty = no profiles")
	flag.DurationVar(&o.duration, "duration", 3*time.Second, "duration of each load measurement")
	flag.IntVar(&o.sequentialPods, "pods", 20, "number of pods that are created one at a time")
	flag.IntVar(&o.burstPods, "burst", 20, "number of pods that are created at once on one node")
	flag.Parse()
	o.only = strings.Split(*only, ",")

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := runBenchmarks(ctx, o, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// checkFlags returns an error that names an invalid flag.
func (o options) checkFlags() error {
	for _, p := range o.only {
		if !slices.Contains(allParts, p) {
			return fmt.Errorf("-only %s: unknown part: want some of %s", p, strings.Join(allParts, ", "))
		}
	}
	if o.kubeconfig != "" && !slices.Equal(o.only, []string{partAPI}) {
		return fmt.Errorf("-kubeconfig requires -only %s: the other parts need the hosts of a lab", partAPI)
	}
	if o.sequentialPods < 1 || o.burstPods < 1 || o.duration <= 0 {
		return fmt.Errorf("-pods %d, -burst %d and -duration %s must be above zero", o.sequentialPods,
			o.burstPods, o.duration)
	}
	if (o.includesPart(partStore) || o.includesPart(partSched) || o.includesPart(partNode)) && o.programs == "" {
		return fmt.Errorf("-programs is required for the parts %s, %s and %s: run scripts/bench, which builds the "+
			"programs", partStore, partSched, partNode)
	}
	return nil
}

func (o options) includesPart(part string) bool { return slices.Contains(o.only, part) }

// benchmarks is one run: its options and its results so far.
type benchmarks struct {
	options options
	tally   figures.BenchmarkRun
	meter   procfs.Meter
}

// runBenchmarks runs the selected parts. It stops at the first part that fails, and prints and
// saves the results so far.
func runBenchmarks(ctx context.Context, o options, out, progress io.Writer) error {
	if err := o.checkFlags(); err != nil {
		return err
	}
	b := &benchmarks{options: o, tally: figures.StartRun(progress)}
	err := b.runParts(ctx)
	if len(b.tally.Rows) == 0 {
		return err
	}
	fmt.Fprintln(out)
	if printed := figures.Print(out, b.tally.Rows); printed != nil {
		return printed
	}
	if saved := b.tally.SaveRecords(o.jsonPath); saved != nil {
		return saved
	}
	if worst := b.maxOtherWork(); worst > 0.1 {
		b.tally.LogProgress("other work used up to %.0f%% of this machine: only the ratios and the CPU "+
			"seconds are meaningful",
			100*worst)
	}
	b.tally.LogProgress("done; records are in %s", o.jsonPath)
	return err
}

func (b *benchmarks) runParts(ctx context.Context) (err error) {
	if b.options.includesPart(partStore) {
		if err := b.measureStore(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partStore, err)
		}
	}
	if b.options.includesPart(partSched) {
		if err := b.measureScheduler(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partSched, err)
		}
	}
	if b.options.includesPart(partBound) {
		if err := b.measureBinding(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partBound, err)
		}
	}
	if !b.options.includesPart(partNode) && !b.options.includesPart(partIdle) && !b.options.includesPart(partAPI) &&
		!b.options.includesPart(partStorage) {
		return nil
	}
	c, err := b.openCluster(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if closed := c.returnLab(); err == nil {
			err = closed
		}
	}()
	b.meter = c.meter
	for _, p := range []struct {
		name string
		do   func(context.Context, *cluster) error
	}{{partNode, b.measurePods}, {partStorage, b.measureStorage}, {partIdle, b.measureIdle}, {partAPI, b.measureAPI}} {
		if !b.options.includesPart(p.name) {
			continue
		}
		if err := p.do(ctx, c); err != nil {
			return fmt.Errorf("part %s: %w", p.name, err)
		}
	}
	return nil
}

// runMeasurement calls do, which returns the measured values. It adds a record with these values
// and with the CPU time that the measurement cost to the results of the run, and returns the
// record.
func (b *benchmarks) runMeasurement(name string, params map[string]any, do func() (map[string]float64, error)) (
	figures.Record, error,
) {
	r := figures.Record{Measure: name, Params: params}
	stop, err := b.startProfile(name)
	if err != nil {
		return r, err
	}
	err = b.meter.Run(&r, func() (err error) {
		defer func() { err = errors.Join(err, stop()) }()
		r.Values, err = do()
		return err
	})
	if err != nil {
		return r, fmt.Errorf("%s: %w", name, err)
	}
	b.tally.Records = append(b.tally.Records, r)
	return r, nil
}

// startProfile starts a CPU profile of this process for a measurement, if -profiles is set. stop
// writes it.
func (b *benchmarks) startProfile(measure string) (stop func() error, err error) {
	if b.options.profiles == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(filepath.Join(b.options.profiles,
		strings.NewReplacer(" ", "-", ",", "").Replace(measure)+".pprof"))
	if err != nil {
		return nil, fmt.Errorf("-profiles: %w", err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		return nil, errors.Join(fmt.Errorf("-profiles: %w", err), f.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return f.Close()
	}, nil
}

// maxOtherWork returns the largest share of the machine that other work used during a measurement,
// 0 to 1.
func (b *benchmarks) maxOtherWork() float64 {
	worst := 0.0
	for _, r := range b.tally.Records {
		worst = max(worst, r.Others)
	}
	return worst
}
