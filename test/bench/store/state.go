package main

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
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
	mine := large{bench: b, arm: ours, out: make(map[string]outcome)}
	if err := mine.all(ctx); err != nil {
		return fmt.Errorf("large state, %s: %w", ours, err)
	}
	theirs := large{bench: b, arm: reference, out: make(map[string]outcome)}
	if reference.group != nil {
		if err := theirs.all(ctx); err != nil {
			return fmt.Errorf("large state, %s: %w", reference, err)
		}
	}
	for _, name := range []string{measureMemory, measureInstall, measureSnapshot, measureSnapshots, measureRestart, measureRestarts, measureComparison} {
		got, ok := mine.out[name]
		if !ok {
			continue
		}
		r := got.record(figures.Record{Measure: name, Params: mine.params(name)}, medians(got.rounds))
		if other, ok := theirs.out[name]; ok {
			r.Reference = other.reference(b.etcdName, medians(other.rounds))
		}
		if len(got.rounds) > 1 {
			for _, round := range got.rounds {
				r.Samples = append(r.Samples, round["pause_ms"]) // the median hides the longest
			}
		}
		b.records = append(b.records, r)
	}
	return nil
}

// large is one group with a large state.
type large struct {
	*bench
	arm
	out map[string]outcome // by measure; what a group has no counterpart of is left out
}

func (l large) params(measure string) map[string]any {
	out := map[string]any{"log": l.name, "state MiB": l.stateMiB, "bytes": l.stateSize}
	switch measure {
	case measureMemory:
		out["state MiB"], out["bytes"] = l.memoryMiB, l.size
	case measureInstall:
		out = installParams(l.arm, l.stateMiB, l.stateMiB-l.memoryMiB)
	case measureSnapshot, measureSnapshots:
		out["times"] = l.snapshotCount
	case measureComparison:
		out["clients"], out["clients are"] = loadedClients, l.at
	}
	return out
}

// wants says whether a measure is asked for.
func (l large) wants(measure string) bool { return slices.Contains(l.ofState, measure) }

// all measures what is asked for, in an order in which each finds what it needs.
func (l large) all(ctx context.Context) error {
	if err := l.once(ctx, measureMemory, l.memory); err != nil {
		return err
	}
	if l.wants(ofInstall) {
		if err := l.once(ctx, measureInstall, func(ctx context.Context) (map[string]float64, error) {
			return l.install(ctx, l.arm, func(rest []*member) error { return l.fill(ctx, rest) })
		}); err != nil {
			return err
		}
	} else if err := l.fill(ctx, l.members); err != nil {
		return err
	}
	if l.wants(ofSnapshots) {
		if err := l.snapshots(ctx); err != nil {
			return err
		}
	}
	return l.restarts(ctx)
}

// once measures something once, or once more.
func (l large) once(ctx context.Context, measure string, do func(ctx context.Context) (map[string]float64, error)) error {
	o := l.out[measure]
	if err := o.round(ctx, l.arm, func(ctx context.Context, _ arm) (map[string]float64, error) { return do(ctx) }); err != nil {
		return fmt.Errorf("%s: %w", measure, err)
	}
	l.out[measure] = o
	return nil
}

// fill makes the state as large as asked for.
func (l large) fill(ctx context.Context, through []*member) error {
	l.progress.say("filling up to %d MiB in values of %d bytes through %v: %s", l.stateMiB, l.stateSize, names(through), l.arm)
	return l.fillThrough(ctx, l.group, through, "/state/", (l.stateMiB-l.memoryMiB)*mebi/l.stateSize, l.stateSize)
}

func (l large) snapshots(ctx context.Context) error {
	for range l.snapshotCount {
		for _, measure := range []string{measureSnapshot, measureSnapshots} {
			all := measure == measureSnapshots
			if all && l.isReference() {
				continue // of its backups, one is enough
			}
			if err := l.once(ctx, measure, func(ctx context.Context) (map[string]float64, error) { return l.pause(ctx, all) }); err != nil {
				return err
			}
		}
	}
	return nil
}

// restarts restarts members, and compares their states, which they do often from then on.
func (l large) restarts(ctx context.Context) error {
	compares := l.wants(ofComparison) && !l.isReference() // etcd compares on request, and members that do not serve
	if l.wants(ofRestarts) {
		if err := l.once(ctx, measureRestart, func(ctx context.Context) (map[string]float64, error) {
			leader, err := l.awaitLeader(ctx, l.members)
			if err != nil {
				return nil, err
			}
			return l.restart(ctx, l.others(leader)[:1])
		}); err != nil {
			return err
		}
	}
	if !l.wants(ofRestarts) && !compares {
		return nil
	}
	for _, m := range l.members {
		m.setup.CompareEvery = l.compareEvery
	}
	if err := l.once(ctx, measureRestarts, func(ctx context.Context) (map[string]float64, error) { return l.restart(ctx, l.members) }); err != nil {
		return err
	}
	if !compares {
		return nil
	}
	return l.once(ctx, measureComparison, func(ctx context.Context) (map[string]float64, error) { return l.comparison(ctx, l.arm) })
}

// memory tells how much a member grows for what is stored in it.
func (l large) memory(ctx context.Context) (map[string]float64, error) {
	before, err := l.resident()
	if err != nil {
		return nil, err
	}
	l.progress.say("filling %d MiB in values of %d bytes: %s", l.memoryMiB, l.size, l.arm)
	if err := l.fillThrough(ctx, l.group, l.members, "/memory/", l.memoryMiB*mebi/l.size, l.size); err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, min(memorySettle, 10*l.duration)); err != nil {
		return nil, err
	}
	after, err := l.resident()
	if err != nil {
		return nil, err
	}
	stored := float64(l.memoryMiB * mebi)
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
func (l large) pause(ctx context.Context, everywhere bool) (map[string]float64, error) {
	leader, err := l.awaitLeader(ctx, l.members)
	if err != nil {
		return nil, err
	}
	do := drive.DoSnapshot
	if l.isReference() { // its state is on disk at all times; what reads all of it is a backup
		do = drive.DoBackup
	}
	on := []*member{leader}
	if everywhere {
		on = l.members
	}
	l.progress.say("a steady writer, then %s by %v: %s", do, names(on), l.arm)
	writer, err := l.arm.begin(drive.Order{Do: drive.DoPut, Clients: 1, Size: l.size, Duration: longLoad, Times: true}, []*member{leader})
	if err != nil {
		return nil, err
	}
	during, err := l.watched(ctx, func() error { return l.everywhere(ctx, do, on) })
	if err != nil {
		return nil, err
	}
	took := time.Duration(during.to-during.from) * time.Microsecond
	without, err := l.watched(ctx, func() error { return quiet(ctx, leader, during.commits, 2*took) })
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
	maps.Copy(out, l.costs(during, without))
	return out, nil
}

// costs is what memory something took of the member that it took most of, in
// percent of the state: more than as many commits without it, and in all.
func (l large) costs(during, without watch) map[string]float64 {
	out := make(map[string]float64)
	for name, of := range map[string]func(use) float64{
		"memory_percent": use.resident, "heap_percent": use.objects, "allocated_percent": use.allocations,
	} {
		percent := 100 / float64(l.stateMiB*mebi)
		for member := range during.uses {
			all := of(during.uses[member])
			out[name] = max(out[name], percent*(all-of(without.uses[member])))
			out["all_"+name] = max(out["all_"+name], percent*all)
		}
	}
	return out
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
func (l large) restart(ctx context.Context, which []*member) (map[string]float64, error) {
	l.progress.say("restart of %v: %s", names(which), l.arm)
	for _, m := range which {
		m.kill()
	}
	began := time.Now()
	for _, m := range which {
		if err := l.startMember(m); err != nil {
			return nil, err
		}
	}
	if _, err := l.awaitLeader(ctx, l.members); err != nil {
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
