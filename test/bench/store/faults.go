package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/figures"
	"keelson.dev/keelson/test/bench/store/drive"
)

const (
	killClients     = 16
	transferClients = 64
	burners         = 4
	// settle is how long a load runs before and after what it is to suffer.
	settle = 300 * time.Millisecond
	// longLoad outlasts every measure; such loads are ended by order.
	longLoad = 5 * time.Minute
)

// kills ends the leader with kill -9 under load, again and again, and tells for
// how long nothing was acknowledged to clients of the other members.
func (b *bench) kills(ctx context.Context, ours, reference arm) error {
	r := figures.Record{Measure: "kill", Params: map[string]any{"clients": killClients, "log": ours.name, "clients are": ours.at, "kills": b.killCount}}
	gaps, failed, spent, err := b.killAll(ctx, ours, b.killCount)
	if err != nil {
		return err
	}
	r.Samples = gaps
	r = spent.record(r, gapValues(gaps, failed))
	if reference.group != nil && b.etcdKills > 0 {
		gaps, failed, spent, err := b.killAll(ctx, reference, b.etcdKills)
		if err != nil {
			return err
		}
		r.Params["kills of etcd"] = b.etcdKills
		r.Reference = spent.reference(b.etcdName, gapValues(gaps, failed))
		r.Reference.Samples = gaps
	}
	b.records = append(b.records, r)
	return nil
}

func (b *bench) killAll(ctx context.Context, a arm, times int) (gaps []float64, failed int, spent cost, err error) {
	for n := range times {
		b.progress.say("kill -9 of the leader: %d of %d: %s", n+1, times, a)
		_, err := spent.metered(a, func() error {
			gap, lost, err := a.killOnce(ctx)
			gaps = append(gaps, gap)
			failed += lost
			return err
		})
		if err != nil {
			return nil, 0, spent, fmt.Errorf("kill %d of %s: %w", n+1, a, err)
		}
	}
	return gaps, failed, spent, nil
}

func (a arm) killOnce(ctx context.Context) (gap float64, failed int, err error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return 0, 0, err
	}
	rest := a.others(leader)
	load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: killClients, Size: 1024, Duration: longLoad, Times: true}, rest)
	if err != nil {
		return 0, 0, err
	}
	if err := wait.Delay(ctx, settle); err != nil {
		return 0, 0, err
	}
	killed := time.Now().UnixMicro()
	leader.kill()
	if _, err := a.awaitLeader(ctx, rest); err != nil {
		return 0, 0, err
	}
	// Calls that were under way may hang for long, as etcd's do. What is told is
	// for how long nobody could write: fresh clients come when there is a leader.
	fresh, err := a.begin(drive.Order{Do: drive.DoPut, Clients: killClients, Size: 1024, Duration: settle, Times: true, Prefix: "fresh"}, rest)
	if err != nil {
		return 0, 0, err
	}
	after, err := fresh.wait(ctx)
	if err != nil {
		return 0, 0, err
	}
	got, err := load.end(ctx)
	if err != nil {
		return 0, 0, err
	}
	got = merge(got, after)
	if gap = longestGap(got.Acks, killed, math.MaxInt64); math.IsInf(gap, 1) {
		return 0, 0, errors.New("nothing was acknowledged after it")
	}
	if err := a.startMember(leader); err != nil {
		return 0, 0, err
	}
	return gap, got.Failed, a.awaitReady(ctx)
}

// transfers moves the leadership under load and tells for how long nothing was acknowledged.
func (b *bench) transfers(ctx context.Context, arms []arm) error {
	var reference *figures.Measured
	for _, a := range slices.Backward(arms) { // the reference is the last
		times := b.transferCount
		if a.isReference() { // of which clients in flight do not hear for a while: it takes longer
			times = b.etcdTransfers
		}
		b.progress.say("leader transfers under %d clients, %d times: %s", transferClients, times, a)
		var (
			gaps, quiet []float64
			failed      int
			spent       cost
		)
		_, err := spent.metered(a, func() (err error) {
			gaps, quiet, failed, err = b.transferAll(ctx, a, times)
			return err
		})
		if err != nil {
			return fmt.Errorf("transfer, %s: %w", a, err)
		}
		values := gapValues(gaps, failed)
		values["quiet_max_ms"] = slices.Max(quiet)
		if a.isReference() {
			reference = spent.reference(b.etcdName, values)
			reference.Samples = gaps
			continue
		}
		b.records = append(b.records, spent.record(figures.Record{
			Measure: "transfer", Params: map[string]any{"clients": transferClients, "times": b.transferCount, "log": a.name, "clients are": a.at},
			Samples: gaps, Reference: reference,
		}, values))
	}
	return nil
}

// transferAll tells the pause of each transfer, and the longest without one just before.
func (b *bench) transferAll(ctx context.Context, a arm, times int) (gaps, quiet []float64, failed int, err error) {
	for range times {
		got, from, err := a.transferOnce(ctx)
		if err != nil {
			return nil, nil, 0, err
		}
		gap := longestGap(got.Acks, from, math.MaxInt64)
		if math.IsInf(gap, 1) {
			return nil, nil, 0, errors.New("nothing was acknowledged after it")
		}
		gaps = append(gaps, gap)
		quiet = append(quiet, longestGap(got.Acks, slices.Min(got.Acks), from))
		failed += got.Failed
	}
	return gaps, quiet, failed, nil
}

// transferOnce moves the leadership under load. It tells when that was asked for, in unix microseconds.
func (a arm) transferOnce(ctx context.Context) (got drive.Reply, from int64, err error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return got, 0, err
	}
	load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: transferClients, Size: 1024, Duration: longLoad, Times: true}, a.members)
	if err != nil {
		return got, 0, err
	}
	if err := wait.Delay(ctx, settle); err != nil {
		return got, 0, err
	}
	from = time.Now().UnixMicro()
	_, refused := leader.do(ctx, drive.Order{Do: drive.DoTransfer})
	if err := wait.Delay(ctx, settle); err != nil {
		return got, 0, err
	}
	got, err = load.end(ctx)
	return got, from, errors.Join(refused, err)
}

// gapValues summarises pauses in milliseconds.
func gapValues(gaps []float64, failed int) map[string]float64 {
	sorted := slices.Clone(gaps)
	return map[string]float64{
		"n": float64(len(gaps)), "p50_ms": figures.Quantile(sorted, 0.5), "p99_ms": figures.Quantile(sorted, 0.99),
		"max_ms": figures.Quantile(sorted, 1), "failed_calls": float64(failed),
	}
}

// elections counts changes of leader while the machine has more to do than it can.
func (b *bench) elections(ctx context.Context, arms []arm) error {
	return b.run(ctx, measure{
		name: "busy", params: map[string]any{"clients": 64, "busy loops": burners, "for": b.busyFor.String()}, arms: arms, rounds: 1,
		do: func(ctx context.Context, a arm) (map[string]float64, error) {
			before, err := a.term(ctx)
			if err != nil {
				return nil, err
			}
			for range burners {
				burner, err := program{b.self, drive.RoleBurn}.start("busy loop", struct{}{})
				if err != nil {
					return nil, err
				}
				defer burner.kill()
			}
			r, err := a.do(ctx, drive.Order{Do: drive.DoPut, Clients: 64, Size: b.size, Duration: b.busyFor}, a.members)
			if err != nil {
				return nil, err
			}
			after, err := a.term(ctx)
			if err != nil {
				return nil, err
			}
			out := loadValues(r)
			out["elections"] = float64(after - before)
			return out, nil
		},
	})
}

// term is the group's term: each election, also one in vain, makes a new one.
func (a arm) term(ctx context.Context) (uint64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return 0, err
	}
	r, err := leader.do(ctx, drive.Order{Do: drive.DoStatus})
	return r.Term, err
}
