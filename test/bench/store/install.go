package main

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

const (
	loadedClients = 64 // of measurements under load
	// installSlack is the number of entries that a member may lack and still count as caught up.
	// Under load some entries are always in transit.
	installSlack = 100
	// missedBytes, with one entry per value, and missedEntriesEtcd are more than a leader's log
	// keeps of a small state: half of the state, or 5,000 entries of etcd.
	missedBytes       = 2 << 20
	missedEntriesEtcd = 6_000
	fewEntries        = 64              // kept by a replica regardless of their size
	quietTime         = 3 * time.Second // without the event, for comparison
	pollInterval      = 20 * time.Millisecond
	installLimit      = 3 * time.Minute
)

// measureInstalls measures how a member catches up by a snapshot, after it was down for longer than
// the logs of the other members reach back. It uses separate groups.
func (b *benchmarks) measureInstalls(ctx context.Context, ours, reference variant) error {
	values, spent, err := b.measureInNewGroup(ctx, ours)
	if err != nil {
		return err
	}
	r := spent.newRecord(figures.Record{Measure: nameInstall,
		Params: installParams(ours, b.options.state.installMiB, b.options.state.installMiB)},
		values)
	if reference.group != nil {
		values, spent, err := b.measureInNewGroup(ctx, reference)
		if err != nil {
			return err
		}
		r.Reference = spent.reference(b.options.etcdName, values)
	}
	b.records = append(b.records, r)
	return nil
}

func installParams(a variant, state, away int) map[string]any {
	return map[string]any{"log": a.name, "clients are": a.at, "clients": loadedClients, "state MiB": state,
		"missed MiB": away}
}

// measureInNewGroup measures the installation of a snapshot in a new group that is like the group
// of a variant. The written data would otherwise disturb other measurements.
func (b *benchmarks) measureInNewGroup(ctx context.Context, like variant) (map[string]float64, cost, error) {
	var spent cost
	g, err := b.newGroup(like.name, filepath.Join(b.dir, "install"))
	if err != nil {
		return nil, spent, err
	}
	fresh := variant{g, like.at}
	defer g.removeData()
	if err := g.startAll(ctx, b.options.load.conns); err != nil {
		return nil, spent, fmt.Errorf("group %s: %w", g.name, err)
	}
	var values map[string]float64
	_, err = spent.meterRound(fresh, func() error {
		values, err = b.measureInstall(ctx, fresh, func(rest []*member) error {
			b.progress.printProgress("a follower is stopped, writing %d MiB: %s", b.options.state.installMiB, fresh)
			return b.fillThrough(ctx, g, rest, "/install/", b.options.state.installMiB*mebi/b.options.load.size,
				b.options.load.size)
		})
		return err
	})
	return values, spent, err
}

// measureInstall kills a follower, calls writeMissed while it is down, and restarts it under load.
// It returns the results of the time in which the follower catches up.
func (b *benchmarks) measureInstall(ctx context.Context, a variant, writeMissed func(rest []*member) error) (
	map[string]float64, error,
) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	away := a.membersExcept(leader)[0]
	rest := a.membersExcept(away)
	had, err := away.callProcess(ctx, drive.Request{Do: drive.DoApplied})
	if err != nil {
		return nil, err
	}
	away.killProcess()
	if err := writeMissed(rest); err != nil {
		return nil, err
	}
	b.progress.printProgress("a follower restarts under %d clients: %s", loadedClients, a)
	load, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: loadedClients, Size: b.options.load.size,
		Duration: longLoad,
		Times:    true}, rest)
	if err != nil {
		return nil, err
	}
	quiet := min(quietTime, 10*b.options.load.duration)
	if err := wait.Delay(ctx, settleTime); err != nil {
		return nil, err
	}
	if err := a.awaitLogTruncation(ctx, leader, had.Applied, b.options.load.size); err != nil {
		return nil, err
	}
	start := time.Now()
	if err := wait.Delay(ctx, quiet); err != nil {
		return nil, err
	}
	from := time.Now()
	if err := a.startMember(away); err != nil {
		return nil, err
	}
	if err := awaitCaughtUp(ctx, away, leader); err != nil {
		return nil, err
	}
	to := time.Now()
	if err := wait.Delay(ctx, quiet); err != nil {
		return nil, err
	}
	end := time.Now()
	got, err := load.stopLoad(ctx)
	if err != nil {
		return nil, err
	}
	if err := checkInstalled(ctx, away); err != nil {
		return nil, err
	}
	out := windowBetween(from, to).callValues(got)
	addPrefixedValues(out, "before_", windowBetween(start, from).callValues(got))
	addPrefixedValues(out, "after_", windowBetween(to, end).callValues(got))
	out["took_s"], out["failed_calls"] = to.Sub(from).Seconds(), float64(got.Failed)
	return out, nil
}

// awaitLogTruncation waits until the leader's log no longer contains all entries that a member
// lacks. had is the number of entries that the member has applied, and size the bytes of a value.
func (a variant) awaitLogTruncation(ctx context.Context, leader *member, had uint64, size int) error {
	missed := uint64(missedBytes/size + fewEntries)
	if a.isReference() {
		missed = missedEntriesEtcd
	}
	for {
		r, err := leader.callProcess(ctx, drive.Request{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		if r.Applied >= had+missed {
			break
		}
		if err := wait.Delay(ctx, pollInterval); err != nil {
			return err
		}
	}
	if a.isReference() { // etcd truncates its log by itself
		return nil
	}
	_, err := leader.callProcess(ctx, drive.Request{Do: drive.DoSnapshot})
	return err
}

// checkInstalled returns an error if a member has not installed a snapshot, because then the
// measurement is invalid.
func checkInstalled(ctx context.Context, m *member) error {
	r, err := m.callProcess(ctx, drive.Request{Do: drive.DoMeters})
	if err == nil && r.Meters[drive.MeterInstalled] == 0 {
		err = fmt.Errorf("%s has caught up without a snapshot: the logs of the other members still had its "+
			"missing entries", m.name)
	}
	return err
}

// awaitCaughtUp waits until member m has applied nearly as many entries as member other.
func awaitCaughtUp(ctx context.Context, m, other *member) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	for {
		want, err := other.callProcess(ctx, drive.Request{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		have, err := m.callProcess(ctx, drive.Request{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		if have.Applied > 0 && have.Applied+installSlack >= want.Applied {
			return nil
		}
		if err := wait.Delay(ctx, pollInterval); err != nil {
			return fmt.Errorf("%s has applied entry %d of %d: %w", m.name, have.Applied, want.Applied, err)
		}
	}
}
