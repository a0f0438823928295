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

// step is one part of the run, or a piece of it.
type step struct {
	lasts time.Duration // about
	do    func(ctx context.Context) error
}

// run measures, and prints what it has also when a part fails.
func run(ctx context.Context, o options, self string, out, progress io.Writer) (err error) {
	b := &bench{options: o, self: self, groups: make(map[string]*group)}
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
		b.etcdName = nameOfEtcd + " " + v
	}
	b.records = append(b.records, b.setup())
	defer b.end()
	err = b.steps(ctx)
	if len(b.records) == 1 {
		return err
	}
	if worst := b.disturbed(); worst > 0.1 {
		fmt.Fprintf(progress, "other work took up to %.0f%% of this machine: what counts is the ratios and the CPU\n", 100*worst)
	}
	fmt.Fprintln(out)
	return errors.Join(err, print(out, b.records, b.etcdName), writeLines(o.jsonPath, b.records))
}

// disturbed is the largest share of the machine that went to other work during a measure.
func (b *bench) disturbed() float64 {
	worst := 0.0
	for _, r := range b.records {
		worst = max(worst, r.Others)
	}
	return worst
}

func (b *bench) steps(ctx context.Context) error {
	steps := b.plan()
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

// end ends what is still up.
func (b *bench) end() {
	for _, g := range b.groups {
		g.down()
	}
}

// plan lists the steps of the parts that are asked for.
func (b *bench) plan() []step {
	var out []step
	add := func(part string, lasts time.Duration, do func(ctx context.Context) error) {
		if b.runs(part) {
			out = append(out, step{lasts, do})
		}
	}
	out = append(out, step{5 * time.Second, b.begin})
	logs, first := b.logs, b.logs[:1]
	if !b.runs(partPuts) {
		logs = first
	}
	for _, n := range b.clients {
		ways := []string{"all"}
		if n == 1 {
			ways = []string{"leader", "follower"}
		}
		for _, way := range ways {
			add(partPuts, b.loadLasts(logs), func(ctx context.Context) error { return b.puts(ctx, n, way, b.arms(logs)) })
		}
	}
	if len(logs) > 1 {
		out = append(out, step{time.Second, func(context.Context) error { b.drop(logs[1:]); return nil }})
	}
	few := time.Duration(len(b.at) + 1)
	add(partGets, b.loadLasts(first), func(ctx context.Context) error { return b.gets(ctx, b.arms(first)) })
	add(partLists, 10*time.Second, func(ctx context.Context) error { return b.lists(ctx, b.arms(first)) })
	add(partWatch, few*(b.watchFor+time.Second), func(ctx context.Context) error { return b.watchers(ctx, b.arms(first)) })
	add(partVisible, few*time.Duration(b.rounds*b.commits)*visiblePace, func(ctx context.Context) error { return b.visible(ctx, b.arms(first)) })
	one := b.at[:1]
	add(partIdle, 2*b.idleFor, func(ctx context.Context) error { return b.idle(ctx, b.armsAt(first, one)) })
	add(partBusy, few*b.busyFor, func(ctx context.Context) error { return b.elections(ctx, b.arms(first)) })
	add(partTransfers, time.Duration(b.transferCount)*700*time.Millisecond+time.Duration(b.etcdTransfers)*2600*time.Millisecond, func(ctx context.Context) error { return b.transfers(ctx, b.armsAt(first, one)) })
	add(partShutdown, time.Duration(b.shutdownCount)*1200*time.Millisecond+time.Duration(b.etcdShutdowns)*3600*time.Millisecond, func(ctx context.Context) error { return b.shutdowns(ctx, b.armsAt(first, one)) })
	add(partKills, time.Duration(b.killCount)*1700*time.Millisecond+time.Duration(b.etcdKills)*4*time.Second, func(ctx context.Context) error {
		return b.kills(ctx, arm{b.groups[first[0]], one[0]}, b.reference())
	})
	add(partFreezes, time.Duration(b.freezeCount)*2500*time.Millisecond+time.Duration(b.etcdFreezes)*4*time.Second, func(ctx context.Context) error {
		return b.freezes(ctx, arm{b.groups[first[0]], one[0]}, b.reference())
	})
	add(partInstall, time.Duration(b.installMiB)*150*time.Millisecond, func(ctx context.Context) error {
		return b.installs(ctx, arm{b.groups[first[0]], one[0]}, b.reference())
	})
	add(partState, time.Duration(b.stateMiB)*250*time.Millisecond, func(ctx context.Context) error {
		return b.state(ctx, arm{b.groups[first[0]], one[0]}, b.reference())
	})
	return out
}

// loadLasts is about how long a load takes with everyone.
func (b *bench) loadLasts(logs []string) time.Duration {
	return time.Duration(len(logs)*len(b.at)+1) * (warmUp + time.Duration(b.rounds)*b.duration)
}

// arms are our groups with clients in each place, and the reference last.
func (b *bench) arms(logs []string) []arm { return b.armsAt(logs, b.at) }

func (b *bench) armsAt(logs, at []string) []arm {
	var out []arm
	for _, l := range logs {
		for _, place := range at {
			out = append(out, arm{b.groups[l], place})
		}
	}
	if r := b.reference(); r.group != nil {
		out = append(out, r)
	}
	return out
}

// reference is etcd; without a group when none exists.
func (b *bench) reference() arm { return arm{b.groups[nameOfEtcd], overGRPC} }

// begin starts the groups and measures the disk.
func (b *bench) begin(ctx context.Context) error {
	b.progress.say("starting the groups")
	logs := b.logs
	if !b.runs(partPuts) {
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
		if err := g.up(ctx, b.conns); err != nil {
			return fmt.Errorf("group %s: %w", g.name, err)
		}
	}
	return b.fsync()
}

// newGroup prepares a group by its name: the reference, or replicas with that log store.
func (b *bench) newGroup(name, dir string) (*group, error) {
	if name == nameOfEtcd {
		return newEtcd(b.options.etcd, dir)
	}
	g, err := newKeelson(b.self, name, dir)
	if err != nil {
		return nil, err
	}
	for _, m := range g.members {
		m.setup.SnapshotBytes = b.snapshotBytes
	}
	return g, nil
}

// drop ends groups that are not measured any more.
func (b *bench) drop(names []string) {
	for _, name := range names {
		b.groups[name].down()
		delete(b.groups, name)
	}
}

// fsync times appending 1 KiB and fsync, the floor of any commit.
func (b *bench) fsync() error {
	const times = 300
	f, err := os.Create(filepath.Join(b.dir, "fsync"))
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	defer f.Close()
	block := drive.Value(b.size)
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
	b.records = append(b.records, figures.Record{Measure: "fsync", Params: map[string]any{"bytes": b.size}, Values: latencies(micros)})
	return nil
}
