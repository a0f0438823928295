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
	// memorySettleTime is how long a member may finish its work after fillState, before its memory
	// is read.
	memorySettleTime = 2 * time.Second
	memoryInterval   = 50 * time.Millisecond
)

// measureState measures the costs of a large state: memory, a follower that installs all of it,
// snapshots, restarts and a comparison. The groups are measured one after the other, because not
// every machine has memory for both at once.
func (b *benchmarks) measureState(ctx context.Context, ours, reference variant) error {
	mine := largeState{run: b, variant: ours, out: make(map[string]variantResults)}
	if err := mine.measureAll(ctx); err != nil {
		return fmt.Errorf("large state, %s: %w", ours, err)
	}
	theirs := largeState{run: b, variant: reference, out: make(map[string]variantResults)}
	if reference.group != nil {
		if err := theirs.measureAll(ctx); err != nil {
			return fmt.Errorf("large state, %s: %w", reference, err)
		}
	}
	for _, name := range []string{nameMemory, nameInstall, nameSnapshot, nameSnapshots, nameRestart,
		nameRestarts, nameComparison} {
		got, ok := mine.out[name]
		if !ok {
			continue
		}
		r := got.newRecord(figures.Record{Measure: name, Params: mine.params(name)}, medianValues(got.rounds))
		if other, ok := theirs.out[name]; ok {
			r.Reference = other.reference(b.options.etcdName, medianValues(other.rounds))
		}
		if len(got.rounds) > 1 {
			for _, round := range got.rounds {
				r.Samples = append(r.Samples, round["pause_ms"]) // the median hides the longest pause
			}
		}
		b.records = append(b.records, r)
	}
	return nil
}

// largeState is a group with a large state, and the results of its measurements.
type largeState struct {
	run     *benchmarks
	variant variant
	out     map[string]variantResults // by measurement; a measurement that does not apply to a group is missing
}

func (l largeState) params(measure string) map[string]any {
	out := map[string]any{"log": l.variant.name, "state MiB": l.run.options.state.stateMiB,
		"bytes": l.run.options.state.stateSize}
	switch measure {
	case nameMemory:
		out["state MiB"], out["bytes"] = l.run.options.state.memoryMiB, l.run.options.load.size
	case nameInstall:
		out = installParams(l.variant, l.run.options.state.stateMiB,
			l.run.options.state.stateMiB-l.run.options.state.memoryMiB)
	case nameSnapshot, nameSnapshots:
		out["times"] = l.run.options.state.snapshotCount
	case nameComparison:
		out["clients"], out["clients are"] = loadedClients, l.variant.at
	}
	return out
}

// isSelected reports whether the measurement with this name is selected by the options.
func (l largeState) isSelected(measure string) bool {
	return slices.Contains(l.run.options.state.ofState, measure)
}

// measureAll makes the selected measurements. Their order matters: each uses the state that the
// previous measurements left.
func (l largeState) measureAll(ctx context.Context) error {
	if err := l.measureOnce(ctx, nameMemory, l.measureMemory); err != nil {
		return err
	}
	if l.isSelected(stateInstall) {
		if err := l.measureOnce(ctx, nameInstall, func(ctx context.Context) (map[string]float64, error) {
			return l.run.measureInstall(ctx, l.variant, func(rest []*member) error { return l.fillState(ctx, rest) })
		}); err != nil {
			return err
		}
	} else if err := l.fillState(ctx, l.variant.members); err != nil {
		return err
	}
	if l.isSelected(stateSnapshots) {
		if err := l.snapshots(ctx); err != nil {
			return err
		}
	}
	return l.measureRestarts(ctx)
}

// measureOnce calls do, which makes the measurement with this name, and adds the result to earlier
// results.
func (l largeState) measureOnce(
	ctx context.Context, measure string, do func(ctx context.Context) (map[string]float64, error),
) error {
	o := l.out[measure]
	if err := o.runRound(ctx, l.variant, func(ctx context.Context, _ variant) (map[string]float64, error) {
		return do(ctx)
	}); err != nil {
		return fmt.Errorf("%s: %w", measure, err)
	}
	l.out[measure] = o
	return nil
}

// fillState writes keys through some members until the state has the configured size.
func (l largeState) fillState(ctx context.Context, through []*member) error {
	l.run.progress.printProgress("filling up to %d MiB in values of %d bytes through %v: %s",
		l.run.options.state.stateMiB, l.run.options.state.stateSize,
		names(through), l.variant)
	return l.run.fillThrough(ctx, l.variant.group, through, "/state/",
		(l.run.options.state.stateMiB-l.run.options.state.memoryMiB)*mebi/l.run.options.state.stateSize,
		l.run.options.state.stateSize)
}

func (l largeState) snapshots(ctx context.Context) error {
	for range l.run.options.state.snapshotCount {
		for _, measure := range []string{nameSnapshot, nameSnapshots} {
			all := measure == nameSnapshots
			if all && l.variant.isReference() {
				continue // one of etcd's backups is enough
			}
			if err := l.measureOnce(ctx, measure, func(ctx context.Context) (map[string]float64, error) {
				return l.measurePause(ctx, all)
			}); err != nil {
				return err
			}
		}
	}
	return nil
}

// measureRestarts measures restarts of members and a comparison of their states. The members are
// restarted with frequent comparisons.
func (l largeState) measureRestarts(ctx context.Context) error {
	compares := l.isSelected(stateComparison) && !l.variant.isReference() // etcd compares on request, on idle members
	if l.isSelected(stateRestarts) {
		if err := l.measureOnce(ctx, nameRestart, func(ctx context.Context) (map[string]float64, error) {
			leader, err := l.variant.awaitLeader(ctx, l.variant.members)
			if err != nil {
				return nil, err
			}
			return l.restartMembers(ctx, l.variant.membersExcept(leader)[:1])
		}); err != nil {
			return err
		}
	}
	if !l.isSelected(stateRestarts) && !compares {
		return nil
	}
	for _, m := range l.variant.members {
		m.setup.CompareEvery = l.run.options.state.compareEvery
	}
	if err := l.measureOnce(ctx, nameRestarts, func(ctx context.Context) (map[string]float64, error) {
		return l.restartMembers(ctx, l.variant.members)
	}); err != nil {
		return err
	}
	if !compares {
		return nil
	}
	return l.measureOnce(ctx, nameComparison, func(ctx context.Context) (map[string]float64, error) {
		return l.run.measureComparison(ctx, l.variant)
	})
}

// measureMemory measures the growth of a member's memory per stored byte.
func (l largeState) measureMemory(ctx context.Context) (map[string]float64, error) {
	before, err := l.variant.residentMemory()
	if err != nil {
		return nil, err
	}
	l.run.progress.printProgress("filling %d MiB in values of %d bytes: %s", l.run.options.state.memoryMiB,
		l.run.options.load.size, l.variant)
	if err := l.run.fillThrough(ctx, l.variant.group, l.variant.members, "/memory/",
		l.run.options.state.memoryMiB*mebi/l.run.options.load.size, l.run.options.load.size); err != nil {
		return nil, err
	}
	if err := wait.Delay(ctx, min(memorySettleTime, 10*l.run.options.load.duration)); err != nil {
		return nil, err
	}
	after, err := l.variant.residentMemory()
	if err != nil {
		return nil, err
	}
	stored := float64(l.run.options.state.memoryMiB * mebi)
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

// residentMemory returns the resident memory of each member by name.
func (a variant) residentMemory() (map[string]procfs.Memory, error) {
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

// measurePause measures how long commits of one steady writer stop while the leader, or every
// member at once, reads or writes the whole state. It also measures the additional memory, compared
// with the same number of commits without it. Both start with a garbage collection. Otherwise the
// growth would depend on when garbage is collected.
func (l largeState) measurePause(ctx context.Context, everywhere bool) (map[string]float64, error) {
	leader, err := l.variant.awaitLeader(ctx, l.variant.members)
	if err != nil {
		return nil, err
	}
	do := drive.DoSnapshot
	if l.variant.isReference() { // etcd's state is always on disk; a backup reads all of it
		do = drive.DoBackup
	}
	on := []*member{leader}
	if everywhere {
		on = l.variant.members
	}
	l.run.progress.printProgress("a steady writer, then %s by %v: %s", do, names(on), l.variant)
	writer, err := l.variant.sendRequest(drive.Request{Do: drive.DoPut, Clients: 1, Size: l.run.options.load.size,
		Duration: longLoad, Times: true},
		[]*member{leader})
	if err != nil {
		return nil, err
	}
	during, err := l.variant.sampleMemory(ctx, func() error { return l.variant.sendToMembers(ctx, do, on) })
	if err != nil {
		return nil, err
	}
	took := time.Duration(during.to-during.from) * time.Microsecond
	without, err := l.variant.sampleMemory(ctx, func() error {
		return awaitCommits(ctx, leader, during.commits,
			2*took)
	})
	if err != nil {
		return nil, err
	}
	got, err := writer.stopLoad(ctx)
	if err != nil {
		return nil, err
	}
	out := map[string]float64{
		"quiet_ms": longestGap(got.Acks, without.from, without.to),
		"pause_ms": longestGap(got.Acks, during.from, during.to),
		"took_s":   took.Seconds(), "failed_calls": float64(got.Failed),
		"commits": float64(during.commits), "quiet_commits": float64(without.commits),
	}
	maps.Copy(out, l.memoryCosts(during, without))
	return out, nil
}

// memoryCosts returns the largest memory growth of a member in percent of the state, by name. The
// total growth is in the values all_*. The other values are the growth beyond that of without, a
// time window with the same number of commits.
func (l largeState) memoryCosts(during, without memoryWindow) map[string]float64 {
	out := make(map[string]float64)
	for name, of := range map[string]func(memoryUse) float64{
		"memory_percent": memoryUse.resident, "heap_percent": memoryUse.heapBytes,
		"allocated_percent": memoryUse.allocatedBytes,
	} {
		percent := 100 / float64(l.run.options.state.stateMiB*mebi)
		for member := range during.memoryUses {
			all := of(during.memoryUses[member])
			out[name] = max(out[name], percent*(all-of(without.memoryUses[member])))
			out["all_"+name] = max(out["all_"+name], percent*all)
		}
	}
	return out
}

// awaitCommits waits until the leader has applied this number of further entries, or until the time
// limit.
func awaitCommits(ctx context.Context, leader *member, commits uint64, limit time.Duration) error {
	first, err := leader.callProcess(ctx, drive.Request{Do: drive.DoApplied})
	for until := time.Now().Add(limit); err == nil && time.Now().Before(until); {
		if err = wait.Delay(ctx, pollInterval); err != nil {
			return err
		}
		var now drive.Reply
		if now, err = leader.callProcess(ctx,
			drive.Request{Do: drive.DoApplied}); now.Applied >= first.Applied+commits {
			break
		}
	}
	return err
}

// memoryWindow is a time window, with the number of applied entries and the memory growth of each
// member.
type memoryWindow struct {
	window
	commits    uint64
	memoryUses map[string]memoryUse
}

// memoryUse is a member's memory in bytes, or its largest growth.
type memoryUse struct{ anonymous, heap, allocated float64 }

func (u memoryUse) resident() float64       { return u.anonymous }
func (u memoryUse) heapBytes() float64      { return u.heap }
func (u memoryUse) allocatedBytes() float64 { return u.allocated }

// sampleMemory calls do and meanwhile samples the memory of all members. It returns the largest
// growth.
func (a variant) sampleMemory(ctx context.Context, do func() error) (out memoryWindow, err error) {
	if err := a.sendToMembers(ctx, drive.DoCollect, a.members); err != nil {
		return out, err
	}
	first, err := a.memoryUses(ctx)
	if err != nil {
		return out, err
	}
	out.memoryUses = make(map[string]memoryUse)
	look := func() error {
		now, err := a.memoryUses(ctx)
		for name, u := range now {
			most, was := out.memoryUses[name], first[name]
			out.memoryUses[name] = memoryUse{max(most.anonymous, u.anonymous-was.anonymous),
				max(most.heap, u.heap-was.heap),
				u.allocated - was.allocated}
		}
		return err
	}
	var looks sync.WaitGroup
	looking, done := context.WithCancel(ctx)
	looks.Go(func() {
		// A failed sample ends the loop: the measurement itself reports a missing member.
		for wait.Delay(looking, memoryInterval) == nil && look() == nil {
		}
	})
	before, err := a.members[0].callProcess(ctx, drive.Request{Do: drive.DoApplied})
	from := time.Now()
	err = errors.Join(err, do())
	out.window = windowBetween(from, time.Now())
	after, late := a.members[0].callProcess(ctx, drive.Request{Do: drive.DoApplied})
	out.commits = after.Applied - before.Applied
	done()
	looks.Wait()
	return out, errors.Join(err, late, look())
}

// memoryUses returns the current memory use of each member by name.
func (a variant) memoryUses(ctx context.Context) (map[string]memoryUse, error) {
	resident, err := a.residentMemory()
	if err != nil {
		return nil, err
	}
	out := make(map[string]memoryUse)
	for _, m := range a.members {
		r, err := m.callProcess(ctx, drive.Request{Do: drive.DoMeters})
		if err != nil {
			return nil, err
		}
		name := m.setup.Name
		out[name] = memoryUse{resident[name].Anonymous, r.Meters[drive.MeterHeap], r.Meters[drive.MeterAllocated]}
	}
	return out, nil
}

// sendToMembers sends a request without parameters to the members targets and waits for the
// replies. A backup is requested from the clients of the members.
func (a variant) sendToMembers(ctx context.Context, do string, targets []*member) error {
	if do == drive.DoBackup {
		_, err := a.runLoad(ctx, drive.Request{Do: do}, targets)
		return err
	}
	var all pendingRequests
	for _, m := range targets {
		w, err := m.sendRequest(drive.Request{Do: do})
		if err != nil {
			return err
		}
		all = append(all, w)
	}
	_, err := all.awaitReply(ctx)
	return err
}

// restartMembers kills the selected members with SIGKILL at once and starts them again. It returns
// the seconds until all members are ready, and the CPU seconds.
func (l largeState) restartMembers(ctx context.Context, selected []*member) (map[string]float64, error) {
	l.run.progress.printProgress("restart of %v: %s", names(selected), l.variant)
	for _, m := range selected {
		m.killProcess()
	}
	began := time.Now()
	for _, m := range selected {
		if err := l.variant.startMember(m); err != nil {
			return nil, err
		}
	}
	if _, err := l.variant.awaitLeader(ctx, l.variant.members); err != nil {
		return nil, err
	}
	out := map[string]float64{"took_s": time.Since(began).Seconds()}
	for _, m := range selected {
		seconds, err := procfs.CPU(m.cmd.Process.Pid)
		if err != nil {
			return nil, fmt.Errorf("CPU of %s: %w", m.name, err)
		}
		out["cpu_s"] += seconds
	}
	return out, nil
}
