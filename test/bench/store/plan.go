package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"time"

	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

// step is a part of the benchmark, or a piece of a part, with its estimated duration.
type step struct {
	lasts time.Duration // estimated duration
	do    func(ctx context.Context) error
}

// runBenchmarks runs the selected parts. It stops at the first part that fails, and prints and
// saves the results so far.
func runBenchmarks(ctx context.Context, o options, self string, out, progress io.Writer) (err error) {
	b := &benchmarks{options: o, self: self, groups: make(map[string]*group)}
	b.progress.to, b.progress.began = progress, time.Now()
	if b.dir = o.dir; b.dir == "" {
		if b.dir, err = os.MkdirTemp("", "bench-store-"); err != nil {
			return err
		}
		defer os.RemoveAll(b.dir)
	}
	if o.etcd != "" {
		v, err := etcdVersion(ctx, o.etcd)
		if err != nil {
			return err
		}
		b.options.etcdName = nameOfEtcd + " " + v
	}
	b.records = append(b.records, b.newSetupRecord())
	defer b.killGroups()
	err = b.steps(ctx)
	if len(b.records) == 1 {
		return err
	}
	if worst := b.maxOtherWork(); worst > 0.1 {
		fmt.Fprintf(progress, "other work used up to %.0f%% of this machine: only the ratios and the CPU time "+
			"are meaningful\n",
			100*worst)
	}
	fmt.Fprintln(out)
	return errors.Join(err, printRecords(out, b.records, b.options.etcdName), writeRecords(o.jsonPath, b.records))
}

// maxOtherWork returns the largest share of the machine that other work used during a measurement,
// 0 to 1.
func (b *benchmarks) maxOtherWork() float64 {
	worst := 0.0
	for _, r := range b.records {
		worst = max(worst, r.Others)
	}
	return worst
}

func (b *benchmarks) steps(ctx context.Context) error {
	steps := b.planSteps()
	for i, s := range steps {
		b.progress.left = 0
		for _, later := range steps[i+1:] {
			b.progress.left += later.lasts
		}
		b.progress.step, b.progress.lasts = time.Now(), s.lasts
		if err := s.do(ctx); err != nil {
			return err
		}
	}
	return nil
}

// killGroups kills all groups.
func (b *benchmarks) killGroups() {
	for _, g := range b.groups {
		g.killAll()
	}
}

// planSteps returns the steps of the selected parts.
func (b *benchmarks) planSteps() []step {
	var out []step
	add := func(part string, lasts time.Duration, do func(ctx context.Context) error) {
		if b.options.includesPart(part) {
			out = append(out, step{lasts, do})
		}
	}
	out = append(out, step{5 * time.Second, b.startGroups})
	logs, first := b.options.load.logs, b.options.load.logs[:1]
	if !b.options.includesPart(partPuts) {
		logs = first
	}
	for _, n := range b.options.load.clients {
		ways := []string{"all"}
		if n == 1 {
			ways = []string{"leader", "follower"}
		}
		for _, way := range ways {
			add(partPuts, b.estimateLoad(logs), func(ctx context.Context) error {
				return b.measurePuts(ctx, n, way, b.variants(logs))
			})
		}
	}
	if len(logs) > 1 {
		out = append(out, step{time.Second, func(context.Context) error { b.dropGroups(logs[1:]); return nil }})
	}
	few := time.Duration(len(b.options.load.at) + 1)
	add(partGets, b.estimateLoad(first), func(ctx context.Context) error {
		return b.measureGets(ctx, b.variants(first))
	})
	add(partLists, 10*time.Second, func(ctx context.Context) error { return b.measureLists(ctx, b.variants(first)) })
	add(partWatch, few*(b.options.probes.watchFor+time.Second), func(ctx context.Context) error {
		return b.measureWatchers(ctx, b.variants(first))
	})
	add(partVisible, few*time.Duration(b.options.load.rounds*b.options.probes.commits)*visiblePace,
		func(ctx context.Context) error {
			return b.measureVisibility(ctx, b.variants(first))
		})
	one := b.options.load.at[:1]
	add(partIdle, 2*b.options.probes.idleFor, func(ctx context.Context) error {
		return b.measureIdle(ctx, b.variantsAt(first, one))
	})
	add(partBusy, few*b.options.probes.busyFor, func(ctx context.Context) error {
		return b.measureElections(ctx, b.variants(first))
	})
	add(partTransfers, time.Duration(b.options.faults.transferCount)*700*time.Millisecond+
		time.Duration(b.options.faults.etcdTransfers)*2600*time.Millisecond, func(ctx context.Context) error {
		return b.measureTransfers(ctx, b.variantsAt(first, one))
	})
	add(partShutdown, time.Duration(b.options.faults.shutdownCount)*1200*time.Millisecond+
		time.Duration(b.options.faults.etcdShutdowns)*3600*time.Millisecond, func(ctx context.Context) error {
		return b.measureShutdowns(ctx, b.variantsAt(first, one))
	})
	add(partKills, time.Duration(b.options.faults.killCount)*1700*time.Millisecond+
		time.Duration(b.options.faults.etcdKills)*4*time.Second,
		func(ctx context.Context) error {
			return b.measureKills(ctx, variant{b.groups[first[0]], one[0]}, b.reference())
		})
	add(partFreezes, time.Duration(b.options.faults.freezeCount)*2500*time.Millisecond+
		time.Duration(b.options.faults.etcdFreezes)*4*time.Second,
		func(ctx context.Context) error {
			return b.measureFreezes(ctx, variant{b.groups[first[0]], one[0]}, b.reference())
		})
	add(partInstall, time.Duration(b.options.state.installMiB)*150*time.Millisecond, func(ctx context.Context) error {
		return b.measureInstalls(ctx, variant{b.groups[first[0]], one[0]}, b.reference())
	})
	add(partState, time.Duration(b.options.state.stateMiB)*250*time.Millisecond, func(ctx context.Context) error {
		return b.measureState(ctx, variant{b.groups[first[0]], one[0]}, b.reference())
	})
	return out
}

// estimateLoad returns the estimated duration of one load that is run once for each variant. logs
// are the log stores of Keelson's variants.
func (b *benchmarks) estimateLoad(logs []string) time.Duration {
	return time.Duration(len(logs)*len(b.options.load.at)+1) *
		(warmUp + time.Duration(b.options.load.rounds)*b.options.load.duration)
}

// variants returns the variants of Keelson, one for each log store in logs and each location of
// clients. The reference is the last element.
func (b *benchmarks) variants(logs []string) []variant { return b.variantsAt(logs, b.options.load.at) }

func (b *benchmarks) variantsAt(logs, at []string) []variant {
	var out []variant
	for _, l := range logs {
		for _, place := range at {
			out = append(out, variant{b.groups[l], place})
		}
	}
	if r := b.reference(); r.group != nil {
		out = append(out, r)
	}
	return out
}

// reference returns the variant of etcd. Its group is nil without a reference.
func (b *benchmarks) reference() variant { return variant{b.groups[nameOfEtcd], overGRPC} }

// startGroups starts the groups and measures the disk.
func (b *benchmarks) startGroups(ctx context.Context) error {
	b.progress.printProgress("starting the groups")
	logs := b.options.load.logs
	if !b.options.includesPart(partPuts) {
		logs = logs[:1]
	}
	for _, l := range slices.Compact(slices.Sorted(slices.Values(logs))) {
		g, err := b.newGroup(l, b.dir)
		if err != nil {
			return err
		}
		b.groups[l] = g
	}
	if b.options.etcd != "" {
		g, err := b.newGroup(nameOfEtcd, b.dir)
		if err != nil {
			return err
		}
		b.groups[nameOfEtcd] = g
	}
	for _, g := range b.groups {
		if err := g.startAll(ctx, b.options.load.conns); err != nil {
			return fmt.Errorf("group %s: %w", g.name, err)
		}
	}
	return b.measureFsync()
}

// newGroup prepares the group of this name below dir: the reference, or replicas with the log store
// name.
func (b *benchmarks) newGroup(name, dir string) (*group, error) {
	if name == nameOfEtcd {
		return newEtcd(b.options.etcd, dir)
	}
	g, err := newKeelson(b.self, name, dir)
	if err != nil {
		return nil, err
	}
	for _, m := range g.members {
		m.setup.SnapshotBytes = b.options.state.snapshotBytes
	}
	return g, nil
}

// dropGroups kills groups that are no longer measured.
func (b *benchmarks) dropGroups(names []string) {
	for _, name := range names {
		b.groups[name].killAll()
		delete(b.groups, name)
	}
}

// measureFsync measures appending -size bytes with fsync, the lower bound of a commit's latency.
func (b *benchmarks) measureFsync() error {
	const times = 300
	f, err := os.Create(filepath.Join(b.dir, "fsync"))
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	block := drive.RandomValue(b.options.load.size)
	var micros []uint32
	for range times {
		began := time.Now()
		if _, err := f.Write(block); err != nil {
			return err
		}
		if err := f.Sync(); err != nil {
			return err
		}
		micros = append(micros, uint32(time.Since(began).Microseconds()))
	}
	b.records = append(b.records, figures.Record{Measure: "fsync", Params: map[string]any{"bytes": b.options.load.size},
		Values: latencyValues(micros)})
	return nil
}
