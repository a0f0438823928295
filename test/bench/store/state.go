package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/procfs"
	"keelson.dev/keelson/test/bench/store/drive"
)

const (
	mebi = 1 << 20
	// memorySettle lets a fill's last work end before memory is read.
	memorySettle = 2 * time.Second
	memoryLook   = 50 * time.Millisecond
)

// state measures what a large state costs: memory, a follower that has to take
// all of it in, snapshots, restarts, a comparison. The groups have it one after
// the other, since both at once would not fit everywhere.
func (b *bench) state(ctx context.Context, ours, reference arm) error {
	mine, err := b.stateOf(ctx, ours)
	if err != nil {
		return fmt.Errorf("large state, %s: %w", ours, err)
	}
	var theirs map[string]outcome
	if reference.group != nil {
		if theirs, err = b.stateOf(ctx, reference); err != nil {
			return fmt.Errorf("large state, %s: %w", reference, err)
		}
	}
	for _, name := range []string{measureMemory, measureInstall, measureSnapshot, measureSnapshots, measureRestart, measureRestarts, measureComparison} {
		got := mine[name]
		params := map[string]any{"log": ours.name, "state MiB": b.stateMiB, "bytes": b.stateSize}
		switch name {
		case measureMemory:
			params["state MiB"], params["bytes"] = b.memoryMiB, b.size
		case measureInstall:
			params = installParams(ours, b.stateMiB, b.stateMiB-b.memoryMiB)
		case measureSnapshot, measureSnapshots:
			params["times"] = b.snapshotCount
		case measureComparison:
			params["clients"], params["clients are"] = loadedClients, ours.at
		}
		r := got.record(figures.Record{Measure: name, Params: params}, medians(got.rounds))
		if other, ok := theirs[name]; ok {
			r.Reference = other.reference(b.etcdName, medians(other.rounds))
		}
		b.records = append(b.records, r)
	}
	return nil
}

// stateOf measures one group. What it has no counterpart of is left out.
func (b *bench) stateOf(ctx context.Context, a arm) (map[string]outcome, error) {
	out := make(map[string]outcome)
	var failed error
	once := func(name string, do func() (map[string]float64, error)) {
		if failed != nil {
			return
		}
		o := out[name]
		if err := o.round(ctx, a, func(context.Context, arm) (map[string]float64, error) { return do() }); err != nil {
			failed = fmt.Errorf("%s: %w", name, err)
		}
		out[name] = o
	}
	once(measureMemory, func() (map[string]float64, error) { return b.memory(ctx, a) })
	once(measureInstall, func() (map[string]float64, error) {
		return b.install(ctx, a, func(rest []*member) error {
			keys := (b.stateMiB - b.memoryMiB) * mebi / b.stateSize
			b.progress.say("a follower is away, filling up to %d MiB in values of %d bytes: %s", b.stateMiB, b.stateSize, a)
			return b.fillThrough(ctx, a.group, rest, "/state/", keys, b.stateSize)
		})
	})
	do := drive.DoSnapshot
	if a.isReference() { // its state is on disk at all times; what reads all of it is a backup
		do = drive.DoBackup
	}
	for range b.snapshotCount {
		once(measureSnapshot, func() (map[string]float64, error) { return b.pause(ctx, a, do, false) })
		if !a.isReference() {
			once(measureSnapshots, func() (map[string]float64, error) { return b.pause(ctx, a, do, true) })
		}
	}
	once(measureRestart, func() (map[string]float64, error) {
		leader, err := a.awaitLeader(ctx, a.members)
		if err != nil {
			return nil, err
		}
		return b.restart(ctx, a, a.others(leader)[:1])
	})
	for _, m := range a.members {
		m.setup.CompareEvery = b.compareEvery // heeded from the next start on
	}
	once(measureRestarts, func() (map[string]float64, error) { return b.restart(ctx, a, a.members) })
	if !a.isReference() { // it compares only on request, and members that do not serve
		once(measureComparison, func() (map[string]float64, error) { return b.comparison(ctx, a) })
	}
	return out, failed
}

// memory tells how much a member grows for what is stored in it.
func (b *bench) memory(ctx context.Context, a arm) (map[string]float64, error) {
	before, err := a.resident()
	if err != nil {
		return nil, err
	}
	b.progress.say("filling %d MiB in values of %d bytes: %s", b.memoryMiB, b.size, a)
	if err := b.fill(ctx, a.group, "/memory/", b.memoryMiB*mebi/b.size, b.size); err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, min(memorySettle, 10*b.duration)); err != nil {
		return nil, err
	}
	after, err := a.resident()
	if err != nil {
		return nil, err
	}
	stored := float64(b.memoryMiB * mebi)
	mean := func(m map[string]procfs.Memory, of func(procfs.Memory) float64) float64 {
		sum := 0.0
		for _, v := range m {
			sum += of(v)
		}
		return sum / float64(len(m))
	}
	anonymous := func(m procfs.Memory) float64 { return m.Anonymous }
	file := func(m procfs.Memory) float64 { return m.File }
	own := (mean(after, anonymous) - mean(before, anonymous)) / stored
	mapped := (mean(after, file) - mean(before, file)) / stored
	return map[string]float64{"kib_per_kib": own + mapped, "anonymous_per_kib": own, "file_per_kib": mapped}, nil
}

// resident is the memory of each member.
func (a arm) resident() (map[string]procfs.Memory, error) {
	out := make(map[string]procfs.Memory)
	for _, m := range a.members {
		got, err := procfs.ReadMemory(m.cmd.Process.Pid)
		if err != nil {
			return nil, fmt.Errorf("memory of %s: %w", m.name, err)
		}
		out[m.setup.Name] = got
	}
	return out, nil
}

// pause tells for how long commits of one steady writer stop while all of the
// state is read or written, by the leader or by every member at once, and how
// much more memory that takes than as many commits without it. Both begin with a
// collection of garbage: else what grows is that of the commits, and when it is
// collected, with a large state, is a matter of chance.
func (b *bench) pause(ctx context.Context, a arm, do string, everywhere bool) (map[string]float64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	on := []*member{leader}
	if everywhere {
		on = a.members
	}
	b.progress.say("a steady writer, then %s by %v: %s", do, names(on), a)
	writer, err := a.begin(drive.Order{Do: drive.DoPut, Clients: 1, Size: b.size, Duration: longLoad, Times: true}, []*member{leader})
	if err != nil {
		return nil, err
	}
	during, err := a.watched(ctx, func() error { return a.everywhere(ctx, do, on) })
	if err != nil {
		return nil, err
	}
	took := time.Duration(during.to-during.from) * time.Microsecond
	without, err := a.watched(ctx, func() error { return quiet(ctx, leader, during.commits, 2*took) })
	if err != nil {
		return nil, err
	}
	got, err := writer.end(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{
		"quiet_ms": longestGap(got.Acks, without.from, without.to),
		"pause_ms": longestGap(got.Acks, during.from, during.to),
		"took_s":   took.Seconds(), "failed_calls": float64(got.Failed),
		"commits": float64(during.commits), "quiet_commits": float64(without.commits),
	}
	for name, of := range map[string]func(use) float64{
		"memory_percent": use.resident, "heap_percent": use.objects, "allocated_percent": use.allocations,
	} {
		grown, all := math.Inf(-1), 0.0
		for member := range during.uses {
			grown = max(grown, of(during.uses[member])-of(without.uses[member]))
			all = max(all, of(during.uses[member]))
		}
		out[name], out["all_"+name] = 100*max(0, grown)/float64(b.stateMiB*mebi), 100*all/float64(b.stateMiB*mebi)
	}
	return out, nil
}

// quiet waits for a number of entries of a steady writer, or as long as a limit.
func quiet(ctx context.Context, leader *member, commits uint64, limit time.Duration) error {
	first, err := leader.do(ctx, drive.Order{Do: drive.DoApplied})
	for until := time.Now().Add(limit); err == nil && time.Now().Before(until); {
		if err = wait.Delay(ctx, lookEvery); err != nil {
			return err
		}
		var now drive.Reply
		if now, err = leader.do(ctx, drive.Order{Do: drive.DoApplied}); now.Applied >= first.Applied+commits {
			break
		}
	}
	return err
}

// watch is a window, with the entries applied and the memory that each member used within it.
type watch struct {
	window
	commits uint64
	uses    map[string]use
}

// use is by how much a member's memory grew, at most.
type use struct{ anonymous, heap, allocated float64 }

func (u use) resident() float64    { return u.anonymous }
func (u use) objects() float64     { return u.heap }
func (u use) allocations() float64 { return u.allocated }

// watched does something and watches the memory of all members meanwhile.
func (a arm) watched(ctx context.Context, do func() error) (out watch, err error) {
	if err := a.everywhere(ctx, drive.DoCollect, a.members); err != nil {
		return out, err
	}
	first, err := a.uses(ctx)
	if err != nil {
		return out, err
	}
	out.uses = make(map[string]use)
	look := func() error {
		now, err := a.uses(ctx)
		for name, u := range now {
			most, was := out.uses[name], first[name]
			out.uses[name] = use{max(most.anonymous, u.anonymous-was.anonymous), max(most.heap, u.heap-was.heap), u.allocated - was.allocated}
		}
		return err
	}
	var looks sync.WaitGroup
	looking, done := context.WithCancel(ctx)
	looks.Go(func() {
		// When a member is gone, what is measured says so itself.
		for wait.Delay(looking, memoryLook) == nil && look() == nil {
		}
	})
	before, err := a.members[0].do(ctx, drive.Order{Do: drive.DoApplied})
	from := time.Now()
	err = errors.Join(err, do())
	out.window = between(from, time.Now())
	after, late := a.members[0].do(ctx, drive.Order{Do: drive.DoApplied})
	out.commits = after.Applied - before.Applied
	done()
	looks.Wait()
	return out, errors.Join(err, late, look())
}

// uses is what each member uses now.
func (a arm) uses(ctx context.Context) (map[string]use, error) {
	resident, err := a.resident()
	if err != nil {
		return nil, err
	}
	out := make(map[string]use)
	for _, m := range a.members {
		r, err := m.do(ctx, drive.Order{Do: drive.DoMeters})
		if err != nil {
			return nil, err
		}
		name := m.setup.Name
		out[name] = use{resident[name].Anonymous, r.Meters[drive.MeterHeap], r.Meters[drive.MeterAllocated]}
	}
	return out, nil
}

// everywhere gives an order to members: a snapshot to themselves, a backup to
// clients of theirs.
func (a arm) everywhere(ctx context.Context, do string, on []*member) error {
	if do == drive.DoBackup {
		_, err := a.do(ctx, drive.Order{Do: do}, on)
		return err
	}
	var all call
	for _, m := range on {
		w, err := m.begin(drive.Order{Do: do})
		if err != nil {
			return err
		}
		all = append(all, w)
	}
	_, err := all.wait(ctx)
	return err
}

// restart ends members with kill -9 at once, starts them again and tells how
// long it takes until each answers linearizable reads.
func (b *bench) restart(ctx context.Context, a arm, which []*member) (map[string]float64, error) {
	b.progress.say("restart of %v: %s", names(which), a)
	for _, m := range which {
		m.kill()
	}
	began := time.Now()
	for _, m := range which {
		if err := a.startMember(m); err != nil {
			return nil, err
		}
	}
	if _, err := a.awaitLeader(ctx, a.members); err != nil {
		return nil, err
	}
	out := map[string]float64{"took_s": time.Since(began).Seconds()}
	for _, m := range which {
		seconds, err := procfs.CPU(m.cmd.Process.Pid)
		if err != nil {
			return nil, fmt.Errorf("CPU of %s: %w", m.name, err)
		}
		out["cpu_s"] += seconds
	}
	return out, nil
}
