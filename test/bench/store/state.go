package main

import (
	"context"
	"errors"
	"fmt"
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
	memoryLook   = 20 * time.Millisecond
	quietTime    = 3 * time.Second // a steady writer alone, to compare with
	maxQuiet     = 10 * time.Second
)

// state measures what a large state costs: memory, restart, snapshot. The
// groups have it one after the other, since both at once would not fit everywhere.
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
	for _, name := range []string{"memory", "restart of a follower", "restart of all", "snapshot by the leader", "snapshot by all"} {
		got := mine[name]
		params := map[string]any{"log": ours.name, "state MiB": b.stateMiB, "bytes": b.stateSize}
		if name == "memory" {
			params["state MiB"], params["bytes"] = b.memoryMiB, b.size
		}
		r := got.record(figures.Record{Measure: name, Params: params}, got.rounds[0])
		if other, ok := theirs[name]; ok {
			r.Reference = other.reference(b.etcdName, other.rounds[0])
		}
		b.records = append(b.records, r)
	}
	return nil
}

// stateOf measures one group. What it has no counterpart of is left out.
func (b *bench) stateOf(ctx context.Context, a arm) (map[string]outcome, error) {
	out := make(map[string]outcome)
	once := func(name string, do func() (map[string]float64, error)) error {
		var o outcome
		err := o.round(ctx, a, func(context.Context, arm) (map[string]float64, error) { return do() })
		out[name] = o
		return err
	}
	if err := once("memory", func() (map[string]float64, error) { return b.memory(ctx, a) }); err != nil {
		return nil, err
	}
	rest := (b.stateMiB - b.memoryMiB) * mebi / b.stateSize
	b.progress.say("filling up to %d MiB in values of %d bytes: %s", b.stateMiB, b.stateSize, a)
	if err := b.fill(ctx, a.group, "/state/", rest, b.stateSize); err != nil {
		return nil, err
	}
	do := drive.DoSnapshot
	if a.isReference() { // its state is on disk at all times; what reads all of it is a backup
		do = drive.DoBackup
	}
	if err := once("snapshot by the leader", func() (map[string]float64, error) { return b.pause(ctx, a, do, false) }); err != nil {
		return nil, err
	}
	if !a.isReference() {
		if err := once("snapshot by all", func() (map[string]float64, error) { return b.pause(ctx, a, do, true) }); err != nil {
			return nil, err
		}
	}
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	for name, which := range map[string][]*member{"restart of a follower": a.others(leader)[:1], "restart of all": a.members} {
		b.progress.say("%s: %s", name, a)
		if err := once(name, func() (map[string]float64, error) { return a.restart(ctx, which) }); err != nil {
			return nil, err
		}
	}
	return out, nil
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
// much more memory than before that takes, at its peak.
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
	start := time.Now()
	quiet, err := a.peaksDuring(ctx, func() error { return wait.Delay(ctx, min(quietTime, 10*b.duration)) })
	if err != nil {
		return nil, err
	}
	from := time.Now()
	busy, failed := a.peaksDuring(ctx, func() error { return a.everywhere(ctx, do, on) })
	to := time.Now()
	// The longer one waits the longer the longest pause: quiet must be as long.
	if err := wait.Delay(ctx, min(to.Sub(from), maxQuiet)); err != nil {
		return nil, err
	}
	end := time.Now()
	got, err := writer.end(ctx)
	if err := errors.Join(failed, err); err != nil {
		return nil, err
	}
	grown := 0.0
	for name := range busy {
		grown = max(grown, busy[name]-quiet[name])
	}
	return map[string]float64{
		"quiet_ms": max(longestGap(got.Acks, start.UnixMicro(), from.UnixMicro()), longestGap(got.Acks, to.UnixMicro(), end.UnixMicro())),
		"pause_ms": longestGap(got.Acks, from.UnixMicro(), to.UnixMicro()),
		"took_s":   to.Sub(from).Seconds(), "failed_calls": float64(got.Failed),
		"memory_percent": 100 * grown / float64(b.stateMiB*mebi),
	}, nil
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

// peaksDuring is the most memory of its own that each member held while something was done.
func (a arm) peaksDuring(ctx context.Context, do func() error) (map[string]float64, error) {
	peaks := make(map[string]float64)
	look := func() error {
		now, err := a.resident()
		for name, m := range now {
			peaks[name] = max(peaks[name], m.Anonymous)
		}
		return err
	}
	if err := look(); err != nil {
		return nil, err
	}
	var looks sync.WaitGroup
	ctx, done := context.WithCancel(ctx)
	looks.Go(func() {
		// When a member is gone, what is measured says so itself.
		for wait.Delay(ctx, memoryLook) == nil && look() == nil {
		}
	})
	err := do()
	done()
	looks.Wait()
	return peaks, err
}

// restart ends members with kill -9 at once, starts them again and tells how
// long it takes until each answers linearizable reads.
func (a arm) restart(ctx context.Context, which []*member) (map[string]float64, error) {
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
