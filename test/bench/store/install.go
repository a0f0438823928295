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
	loadedClients = 64 // of what is measured under load
	// installSlack is how many entries a member that has caught up may lack:
	// under load some are always on their way.
	installSlack = 100
	// missedBytes, in values of one entry each, and missedEntriesEtcd are more than
	// a leader's log keeps of a small state: half of the state, or etcd's 5,000 entries.
	missedBytes       = 2 << 20
	missedEntriesEtcd = 6_000
	fewEntries        = 64              // that a replica keeps however large they are
	quietTime         = 3 * time.Second // without what is measured, to compare with
	lookEvery         = 20 * time.Millisecond
	installLimit      = 3 * time.Minute
)

// installs measures, in groups of their own, how a member that was away for
// longer than the logs of the others reach back is brought up to date.
func (b *bench) installs(ctx context.Context, ours, reference arm) error {
	values, spent, err := b.installFresh(ctx, ours)
	if err != nil {
		return err
	}
	r := spent.record(figures.Record{Measure: measureInstall, Params: installParams(ours, b.installMiB, b.installMiB)}, values)
	if reference.group != nil {
		values, spent, err := b.installFresh(ctx, reference)
		if err != nil {
			return err
		}
		r.Reference = spent.reference(b.etcdName, values)
	}
	b.records = append(b.records, r)
	return nil
}

func installParams(a arm, state, away int) map[string]any {
	return map[string]any{"log": a.name, "clients are": a.at, "clients": loadedClients, "state MiB": state, "missed MiB": away}
}

// installFresh measures it with a new group like the arm's, since what is written
// for it would be in the way of other measures.
func (b *bench) installFresh(ctx context.Context, like arm) (map[string]float64, cost, error) {
	var spent cost
	g, err := b.newGroup(like.name, filepath.Join(b.dir, "install"))
	if err != nil {
		return nil, spent, err
	}
	fresh := arm{g, like.at}
	defer g.remove()
	if err := g.up(ctx, b.conns); err != nil {
		return nil, spent, fmt.Errorf("group %s: %w", g.name, err)
	}
	var values map[string]float64
	_, err = spent.metered(fresh, func() error {
		values, err = b.install(ctx, fresh, func(rest []*member) error {
			b.progress.say("a follower is away, filling %d MiB: %s", b.installMiB, fresh)
			return b.fillThrough(ctx, g, rest, "/install/", b.installMiB*mebi/b.size, b.size)
		})
		return err
	})
	return values, spent, err
}

// install ends a follower, does what it is to miss, and starts it again under load.
func (b *bench) install(ctx context.Context, a arm, miss func(rest []*member) error) (map[string]float64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	away := a.others(leader)[0]
	rest := a.others(away)
	had, err := away.do(ctx, drive.Order{Do: drive.DoApplied})
	if err != nil {
		return nil, err
	}
	away.kill()
	if err := miss(rest); err != nil {
		return nil, err
	}
	b.progress.say("a follower comes back under %d clients: %s", loadedClients, a)
	load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: loadedClients, Size: b.size, Duration: longLoad, Times: true}, rest)
	if err != nil {
		return nil, err
	}
	quiet := min(quietTime, 10*b.duration)
	if err := wait.Delay(ctx, settle); err != nil {
		return nil, err
	}
	if err := a.cutOff(ctx, leader, had.Applied, b.size); err != nil {
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
	if err := caughtUp(ctx, away, leader); err != nil {
		return nil, err
	}
	to := time.Now()
	if err := wait.Delay(ctx, quiet); err != nil {
		return nil, err
	}
	end := time.Now()
	got, err := load.end(ctx)
	if err != nil {
		return nil, err
	}
	if err := installed(ctx, away); err != nil {
		return nil, err
	}
	out := between(from, to).calls(got)
	beside(out, "before_", between(start, from).calls(got))
	beside(out, "after_", between(to, end).calls(got))
	out["took_s"], out["failed_calls"] = to.Sub(from).Seconds(), float64(got.Failed)
	return out, nil
}

// cutOff waits until a member that had so many entries lacks more than the leader's log keeps.
func (a arm) cutOff(ctx context.Context, leader *member, had uint64, size int) error {
	missed := uint64(missedBytes/size + fewEntries)
	if a.isReference() {
		missed = missedEntriesEtcd
	}
	for {
		r, err := leader.do(ctx, drive.Order{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		if r.Applied >= had+missed {
			break
		}
		if err := wait.Delay(ctx, lookEvery); err != nil {
			return err
		}
	}
	if a.isReference() { // it shortens its log as it goes
		return nil
	}
	_, err := leader.do(ctx, drive.Order{Do: drive.DoSnapshot})
	return err
}

// installed says whether a member has taken a snapshot in: otherwise something else was measured.
func installed(ctx context.Context, m *member) error {
	r, err := m.do(ctx, drive.Order{Do: drive.DoMeters})
	if err == nil && r.Meters[drive.MeterInstalled] == 0 {
		err = fmt.Errorf("%s has caught up without a snapshot: the logs of the others reached back to it", m.name)
	}
	return err
}

// caughtUp waits until a member has applied nearly as much as another.
func caughtUp(ctx context.Context, m, with *member) error {
	ctx, cancel := context.WithTimeout(ctx, installLimit)
	defer cancel()
	for {
		want, err := with.do(ctx, drive.Order{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		have, err := m.do(ctx, drive.Order{Do: drive.DoApplied})
		if err != nil {
			return err
		}
		if have.Applied > 0 && have.Applied+installSlack >= want.Applied {
			return nil
		}
		if err := wait.Delay(ctx, lookEvery); err != nil {
			return fmt.Errorf("%s has applied entry %d of %d: %w", m.name, have.Applied, want.Applied, err)
		}
	}
}
