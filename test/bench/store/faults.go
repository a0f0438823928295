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
	killClients = 16
	burners     = 4
	// settleTime is how long a load runs before and after a fault or a leadership transfer.
	settleTime = 300 * time.Millisecond
	// longLoad is longer than every measurement. Such a load is stopped by a request.
	longLoad = 5 * time.Minute
)

// measureKills repeatedly kills the leader with SIGKILL under load. It measures the time without an
// acknowledgement to clients of the other members. Both sides take turns in proportion, so that
// they run under the same conditions.
func (b *benchmarks) measureKills(ctx context.Context, ours, reference variant) error {
	return b.measureLosses(ctx, leaderLoss{nameKill, "kill -9 of the leader", b.options.faults.killCount,
		b.options.faults.etcdKills, killLeader},
		ours, reference)
}

// measureFreezes repeatedly stops the leader's process with SIGSTOP, like a machine that hangs: its
// port accepts connections, but it does not respond.
func (b *benchmarks) measureFreezes(ctx context.Context, ours, reference variant) error {
	return b.measureLosses(ctx, leaderLoss{nameFreeze, "freeze of the leader", b.options.faults.freezeCount,
		b.options.faults.etcdFreezes, freezeLeader},
		ours, reference)
}

// leaderLoss is one way in which a group of members loses its leader without a leadership transfer.
type leaderLoss struct {
	measure      string
	does         string // for the progress output
	ours, theirs int    // number of repetitions
	// inflict causes the loss, and returns the function that undoes it.
	inflict func(a variant, leader *member) (undo func() error, err error)
}

func killLeader(a variant, leader *member) (func() error, error) {
	leader.killProcess()
	return func() error { return a.startMember(leader) }, nil
}

func freezeLeader(_ variant, leader *member) (func() error, error) {
	return leader.resumeProcess, leader.freezeProcess()
}

func (b *benchmarks) measureLosses(ctx context.Context, l leaderLoss, ours, reference variant) error {
	var mine, theirs lossResults
	for n := range l.ours {
		b.progress.printProgress("%s: %d of %d: %s%s", l.does, n+1, l.ours, ours, mine)
		if err := mine.add(ctx, ours, l); err != nil {
			return fmt.Errorf("%s %d of %s: %w", l.measure, n+1, ours, err)
		}
		for reference.group != nil && len(theirs.gaps) < (n+1)*l.theirs/l.ours {
			b.progress.printProgress("%s: %d of %d: %s%s", l.does, len(theirs.gaps)+1, l.theirs, reference, theirs)
			if err := theirs.add(ctx, reference, l); err != nil {
				return fmt.Errorf("%s %d of %s: %w", l.measure, len(theirs.gaps)+1, reference, err)
			}
		}
	}
	r := figures.Record{
		Measure: l.measure, Params: map[string]any{"clients": killClients, "log": ours.name, "clients are": ours.at,
			l.measure + "s": l.ours},
		Samples: mine.gaps,
	}
	if len(theirs.gaps) > 0 {
		r.Params[l.measure+"s of etcd"] = l.theirs
		r.Reference = theirs.spent.reference(b.options.etcdName, gapValues(theirs.gaps, theirs.failed))
		r.Reference.Samples = theirs.gaps
	}
	b.records = append(b.records, mine.spent.newRecord(r, gapValues(mine.gaps, mine.failed)))
	return nil
}

// lossResults are the results of a group's leader losses so far: the pauses in milliseconds, the
// failed calls, and the cost.
type lossResults struct {
	gaps   []float64
	failed int
	spent  cost
}

// String returns a summary for the progress output.
func (k lossResults) String() string {
	if len(k.gaps) == 0 {
		return ""
	}
	return fmt.Sprintf(" (so far p50 %.0f ms, max %.0f ms)", figures.Quantile(slices.Clone(k.gaps), 0.5),
		slices.Max(k.gaps))
}

func (k *lossResults) add(ctx context.Context, a variant, l leaderLoss) error {
	_, err := k.spent.meterRound(a, func() error {
		gap, failed, err := a.measureLossOnce(ctx, l)
		k.gaps = append(k.gaps, gap)
		k.failed += failed
		return err
	})
	return err
}

func (a variant) measureLossOnce(ctx context.Context, l leaderLoss) (gap float64, failed int, err error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return 0, 0, err
	}
	rest := a.membersExcept(leader)
	load, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: killClients, Size: 1024, Duration: longLoad,
		Times: true}, rest)
	if err != nil {
		return 0, 0, err
	}
	if err := wait.Delay(ctx, settleTime); err != nil {
		return 0, 0, err
	}
	struck := time.Now().UnixMicro()
	undo, err := l.inflict(a, leader)
	if err != nil {
		return 0, 0, err
	}
	if _, err := a.awaitLeader(ctx, rest); err != nil {
		return 0, 0, err
	}
	// Calls in progress may hang for long, as etcd's do. The measured value is the time in which no
	// client can write, so new clients start when there is a leader.
	fresh, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: killClients, Size: 1024,
		Duration: settleTime, Times: true,
		Prefix: "fresh"}, rest)
	if err != nil {
		return 0, 0, err
	}
	after, err := fresh.awaitReply(ctx)
	if err != nil {
		return 0, 0, err
	}
	got, err := load.stopLoad(ctx)
	if err != nil {
		return 0, 0, err
	}
	got = mergeReplies(got, after)
	if gap = longestGap(got.Acks, struck, math.MaxInt64); math.IsInf(gap, 1) {
		return 0, 0, errors.New("no write was acknowledged afterwards")
	}
	if err := undo(); err != nil {
		return 0, 0, err
	}
	return gap, got.Failed, a.awaitReady(ctx)
}

// leadershipMove is one way of a leadership transfer in which the leader keeps serving until the
// transfer.
type leadershipMove struct {
	measure      string
	does         string // for the progress output
	ours, theirs int    // number of repetitions
	once         func(a variant, ctx context.Context) (moveResult, error)
}

// moveResult is the result of one transfer as seen by clients.
type moveResult struct {
	got  drive.Reply
	from int64   // time of the request in Unix microseconds
	took float64 // milliseconds until the response
}

// measureTransfers measures leadership transfers that a request starts.
func (b *benchmarks) measureTransfers(ctx context.Context, variants []variant) error {
	// etcd's transfers are fewer: they take longer, because calls in progress get no response for a
	// while.
	return b.measureMoves(ctx, variants, leadershipMove{nameTransfer, "leadership transfers",
		b.options.faults.transferCount,
		b.options.faults.etcdTransfers,
		variant.transferOnce})
}

// measureShutdowns measures shutdowns of the leader's process, which first transfers leadership.
func (b *benchmarks) measureShutdowns(ctx context.Context, variants []variant) error {
	return b.measureMoves(ctx, variants, leadershipMove{nameShutdown, "orderly shutdowns of the leader",
		b.options.faults.shutdownCount, b.options.faults.etcdShutdowns,
		variant.shutdownOnce})
}

// measureMoves transfers leadership repeatedly under load. It measures the longest time without an
// acknowledgement, during the transfer and just before it.
func (b *benchmarks) measureMoves(ctx context.Context, variants []variant, m leadershipMove) error {
	var reference *figures.Measured
	for _, a := range slices.Backward(variants) { // the reference is the last variant
		times := m.ours
		if a.isReference() {
			times = m.theirs
		}
		b.progress.printProgress("%s under %d clients, %d times: %s", m.does, loadedClients, times, a)
		var (
			values map[string]float64
			gaps   []float64
			spent  cost
		)
		_, err := spent.meterRound(a, func() (err error) {
			values, gaps, err = a.repeatMove(ctx, m, times)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s, %s: %w", m.measure, a, err)
		}
		if a.isReference() {
			reference = spent.reference(b.options.etcdName, values)
			reference.Samples = gaps
			continue
		}
		b.records = append(b.records, spent.newRecord(figures.Record{
			Measure: m.measure, Params: map[string]any{"clients": loadedClients, "times": times, "log": a.name,
				"clients are": a.at},
			Samples: gaps, Reference: reference,
		}, values))
	}
	return nil
}

// repeatMove repeats a leadership transfer under load. It returns the quantiles of the results, and
// the pause in writes of each transfer in milliseconds.
func (a variant) repeatMove(ctx context.Context, m leadershipMove, times int) (
	values map[string]float64, gaps []float64, err error,
) {
	var (
		quiet, took []float64
		failed      int
	)
	for range times {
		one, err := m.once(a, ctx)
		if err != nil {
			return nil, nil, err
		}
		gap := longestGap(one.got.Acks, one.from, math.MaxInt64)
		if math.IsInf(gap, 1) {
			return nil, nil, errors.New("no write was acknowledged afterwards")
		}
		gaps, took = append(gaps, gap), append(took, one.took)
		quiet = append(quiet, longestGap(one.got.Acks, slices.Min(one.got.Acks), one.from))
		failed += one.got.Failed
	}
	values = gapValues(gaps, failed)
	values["quiet_max_ms"], values["took_p50_ms"], values["took_max_ms"] = slices.Max(quiet), medianOf(took),
		slices.Max(took)
	return values, gaps, nil
}

// transferOnce requests one leadership transfer from the leader, under load, and returns its
// result.
func (a variant) transferOnce(ctx context.Context) (moveResult, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return moveResult{}, err
	}
	return a.measureMoveOnce(ctx, a.members, func() error {
		_, err := leader.callProcess(ctx, drive.Request{Do: drive.DoTransfer})
		return err
	})
}

// shutdownOnce shuts down the leader's process under load on the other members, and starts it
// again. It returns the result of the leadership transfer.
func (a variant) shutdownOnce(ctx context.Context) (moveResult, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return moveResult{}, err
	}
	out, err := a.measureMoveOnce(ctx, a.membersExcept(leader), func() error { return leader.terminateProcess(ctx) })
	if err != nil {
		return moveResult{}, err
	}
	if err := a.startMember(leader); err != nil {
		return moveResult{}, err
	}
	return out, a.awaitReady(ctx)
}

// measureMoveOnce calls do while clients of the members through write, and returns the result.
func (a variant) measureMoveOnce(ctx context.Context, through []*member, do func() error) (out moveResult, err error) {
	load, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: loadedClients, Size: 1024, Duration: longLoad,
		Times: true}, through)
	if err != nil {
		return out, err
	}
	if err := wait.Delay(ctx, settleTime); err != nil {
		return out, err
	}
	asked := time.Now()
	refused := do()
	out.from, out.took = asked.UnixMicro(), float64(time.Since(asked).Microseconds())/1000
	if err := wait.Delay(ctx, settleTime); err != nil {
		return out, err
	}
	out.got, err = load.stopLoad(ctx)
	return out, errors.Join(refused, err)
}

// gapValues returns quantiles of the pauses gaps, which are in milliseconds, and the number of
// failed calls.
func gapValues(gaps []float64, failed int) map[string]float64 {
	sorted := slices.Clone(gaps)
	return map[string]float64{
		"n": float64(len(gaps)), "p50_ms": figures.Quantile(sorted, 0.5), "p99_ms": figures.Quantile(sorted, 0.99),
		"max_ms": figures.Quantile(sorted, 1), "failed_calls": float64(failed),
	}
}

// measureElections counts leader elections while the machine is overloaded.
func (b *benchmarks) measureElections(ctx context.Context, variants []variant) error {
	return b.runMeasurement(ctx, measure{
		name: "busy", params: map[string]any{"clients": 64, "busy loops": burners,
			"for": b.options.probes.busyFor.String()},
		variants: variants, rounds: 1,
		do: func(ctx context.Context, a variant) (map[string]float64, error) {
			before, err := a.raftTerm(ctx)
			if err != nil {
				return nil, err
			}
			for range burners {
				burner, err := program{b.self, drive.RoleBurn}.startProcess("busy loop", struct{}{})
				if err != nil {
					return nil, err
				}
				defer burner.killProcess()
			}
			// Failed calls after a lost leader are a result, not an error.
			load, err := a.sendRequest(drive.Request{Do: drive.DoPut, Clients: 64, Size: b.options.load.size,
				Duration: b.options.probes.busyFor},
				a.members)
			if err != nil {
				return nil, err
			}
			r, err := load.awaitReply(ctx)
			if err != nil {
				return nil, err
			}
			after, err := a.raftTerm(ctx)
			if err != nil {
				return nil, err
			}
			out := loadValues(r)
			out["elections"], out["failed_calls"] = float64(after-before), float64(r.Failed)
			return out, nil
		},
	})
}

// raftTerm returns the raft term of the group. Every election increments it, even an unsuccessful
// one.
func (a variant) raftTerm(ctx context.Context) (uint64, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return 0, err
	}
	r, err := leader.callProcess(ctx, drive.Request{Do: drive.DoStatus})
	return r.Term, err
}
