// Command bench is the short form of every benchmark. It uses the lab that is
// up, or makes one and takes it away, prints one table and writes JSON lines.
// A figure stands beside the one to beat and, where there is one, beside a
// reference measured in the same run: machines drift, ratios do not.
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

// The parts, in the order in which they run: the store and the scheduler have the
// machine for themselves, idle is measured before the API's load fills the heaps.
const (
	partStore = "store"
	partSched = "sched"
	partBound = "bound"
	partNode  = "node"
	partIdle  = "idle"
	partAPI   = "api"

	partStorage = "storage" // not run unless it is asked for
)

var (
	parts    = []string{partStore, partSched, partBound, partNode, partIdle, partAPI}
	allParts = append(slices.Clone(parts), partStorage)
)

type options struct {
	only       []string
	jsonPath   string
	programs   string
	etcd       string
	kubeconfig string
	profiles   string
	duration   time.Duration
	inTurn     int
	burst      int
}

func main() {
	var o options
	only := flag.String("only", strings.Join(parts, ","), "the parts to run")
	flag.StringVar(&o.jsonPath, "json", "bench.json", "write JSON lines to this file")
	flag.StringVar(&o.programs, "programs", "", "folder of the programs store and floor (test/bench/store, test/bench/node/floor) and of the scheduler's test, sched.test")
	flag.StringVar(&o.etcd, "etcd", "", "the program of the store's reference (test/bench/etcd); none = no reference")
	flag.StringVar(&o.kubeconfig, "kubeconfig", "", "measure the API of this cluster instead of a lab's (part api only)")
	flag.StringVar(&o.profiles, "profiles", "", "folder for a CPU profile of each measure in which this process works; none = none")
	flag.DurationVar(&o.duration, "duration", 3*time.Second, "time per measure of load")
	flag.IntVar(&o.inTurn, "pods", 20, "pods created one at a time")
	flag.IntVar(&o.burst, "burst", 20, "pods created at once on one node")
	flag.Parse()
	o.only = strings.Split(*only, ",")

	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, o, os.Stdout, os.Stderr); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		stop()
		os.Exit(1)
	}
}

// check names the flag that is wrong.
func (o options) check() error {
	for _, p := range o.only {
		if !slices.Contains(allParts, p) {
			return fmt.Errorf("-only %s: the parts are %s", p, strings.Join(allParts, ", "))
		}
	}
	if o.kubeconfig != "" && !slices.Equal(o.only, []string{partAPI}) {
		return fmt.Errorf("-kubeconfig goes with -only %s: the other parts look into the lab's hosts", partAPI)
	}
	if o.inTurn < 1 || o.burst < 1 || o.duration <= 0 {
		return fmt.Errorf("-pods %d, -burst %d and -duration %s must be above zero", o.inTurn, o.burst, o.duration)
	}
	if (o.runs(partStore) || o.runs(partSched) || o.runs(partNode)) && o.programs == "" {
		return fmt.Errorf("-programs: the parts %s, %s and %s need the folder of their programs: scripts/bench builds them", partStore, partSched, partNode)
	}
	return nil
}

func (o options) runs(part string) bool { return slices.Contains(o.only, part) }

// bench is one run: what was measured so far.
type bench struct {
	options
	figures.Tally
	meter procfs.Meter
}

// run measures, and prints what it has also when a part fails.
func run(ctx context.Context, o options, out, progress io.Writer) error {
	if err := o.check(); err != nil {
		return err
	}
	b := &bench{options: o, Tally: figures.Begin(progress)}
	err := b.all(ctx)
	if len(b.Rows) == 0 {
		return err
	}
	fmt.Fprintln(out)
	if printed := figures.Print(out, b.Rows); printed != nil {
		return printed
	}
	if saved := b.Save(o.jsonPath); saved != nil {
		return saved
	}
	if worst := b.disturbed(); worst > 0.1 {
		b.Say("other work took up to %.0f%% of this machine: what counts is the ratios and the CPU seconds", 100*worst)
	}
	b.Say("done; records are in %s", o.jsonPath)
	return err
}

func (b *bench) all(ctx context.Context) (err error) {
	if b.runs(partStore) {
		if err := b.store(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partStore, err)
		}
	}
	if b.runs(partSched) {
		if err := b.sched(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partSched, err)
		}
	}
	if b.runs(partBound) {
		if err := b.untilBound(ctx); err != nil {
			return fmt.Errorf("part %s: %w", partBound, err)
		}
	}
	if !b.runs(partNode) && !b.runs(partIdle) && !b.runs(partAPI) && !b.runs(partStorage) {
		return nil
	}
	c, err := b.openCluster(ctx)
	if err != nil {
		return err
	}
	defer func() {
		if closed := c.close(); err == nil {
			err = closed
		}
	}()
	b.meter = c.meter
	for _, p := range []struct {
		name string
		do   func(context.Context, *cluster) error
	}{{partNode, b.node}, {partStorage, b.storage}, {partIdle, b.idle}, {partAPI, b.api}} {
		if !b.runs(p.name) {
			continue
		}
		if err := p.do(ctx, c); err != nil {
			return fmt.Errorf("part %s: %w", p.name, err)
		}
	}
	return nil
}

// measure runs one measure with its cost and keeps its record.
func (b *bench) measure(name string, params map[string]any, do func() (map[string]float64, error)) (figures.Record, error) {
	r := figures.Record{Measure: name, Params: params}
	stop, err := b.profile(name)
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
	b.Records = append(b.Records, r)
	return r, nil
}

// profile begins the CPU profile of a measure.
func (b *bench) profile(measure string) (stop func() error, err error) {
	if b.profiles == "" {
		return func() error { return nil }, nil
	}
	f, err := os.Create(filepath.Join(b.profiles, strings.NewReplacer(" ", "-", ",", "").Replace(measure)+".pprof"))
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

// disturbed is the largest share of the machine that went to other work during a measure.
func (b *bench) disturbed() float64 {
	worst := 0.0
	for _, r := range b.Records {
		worst = max(worst, r.Others)
	}
	return worst
}
