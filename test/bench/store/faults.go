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
	// settle is how long a load runs before and after what it is to suffer.
	settle = 300 * time.Millisecond
	// longLoad outlasts every measure; such loads are ended by order.
	longLoad = 5 * time.Minute
)

// kills ends the leader with kill -9 under load, again and again, and tells for
// how long nothing was acknowledged to clients of the other members. The two
// sides have their turns in proportion, so that both see the same machine.
func (b *bench) kills(ctx context.Context, ours, reference arm) error {
	return b.losses(ctx, loss{measureKill, "kill -9 of the leader", b.killCount, b.etcdKills, kill}, ours, reference)
}

// freezes stops the leader's process, as a machine that hangs: its port goes on taking connections, and nobody answers.
func (b *bench) freezes(ctx context.Context, ours, reference arm) error {
	return b.losses(ctx, loss{measureFreeze, "freeze of the leader", b.freezeCount, b.etcdFreezes, freeze}, ours, reference)
}

// loss is one way in which a group loses its leader without a word.
type loss struct {
	measure      string
	does         string // for a line of progress
	ours, theirs int    // how often
	// strike does it, and returns what undoes it.
	strike func(a arm, leader *member) (undo func() error, err error)
}

func kill(a arm, leader *member) (func() error, error) {
	leader.kill()
	return func() error { return a.startMember(leader) }, nil
}

func freeze(_ arm, leader *member) (func() error, error) {
	return leader.thaw, leader.freeze()
}

func (b *bench) losses(ctx context.Context, l loss, ours, reference arm) error {
	var mine, theirs lost
	for n := range l.ours {
		b.progress.say("%s: %d of %d: %s%s", l.does, n+1, l.ours, ours, mine)
		if err := mine.add(ctx, ours, l); err != nil {
			return fmt.Errorf("%s %d of %s: %w", l.measure, n+1, ours, err)
		}
		for reference.group != nil && len(theirs.gaps) < (n+1)*l.theirs/l.ours {
			b.progress.say("%s: %d of %d: %s%s", l.does, len(theirs.gaps)+1, l.theirs, reference, theirs)
			if err := theirs.add(ctx, reference, l); err != nil {
				return fmt.Errorf("%s %d of %s: %w", l.measure, len(theirs.gaps)+1, reference, err)
			}
		}
	}
	r := figures.Record{
		Measure: l.measure, Params: map[string]any{"clients": killClients, "log": ours.name, "clients are": ours.at, l.measure + "s": l.ours},
		Samples: mine.gaps,
	}
	if len(theirs.gaps) > 0 {
		r.Params[l.measure+"s of etcd"] = l.theirs
		r.Reference = theirs.spent.reference(b.etcdName, gapValues(theirs.gaps, theirs.failed))
		r.Reference.Samples = theirs.gaps
	}
	b.records = append(b.records, mine.spent.record(r, gapValues(mine.gaps, mine.failed)))
	return nil
}

// lost is what losses of one group's leaders have shown so far.
type lost struct {
	gaps   []float64
	failed int
	spent  cost
}

// String is for a line of progress.
func (k lost) String() string {
	if len(k.gaps) == 0 {
		return ""
	}
	return fmt.Sprintf(" (so far p50 %.0f ms, max %.0f ms)", figures.Quantile(slices.Clone(k.gaps), 0.5), slices.Max(k.gaps))
}

func (k *lost) add(ctx context.Context, a arm, l loss) error {
	_, err := k.spent.metered(a, func() error {
		gap, failed, err := a.loseOnce(ctx, l)
		k.gaps = append(k.gaps, gap)
		k.failed += failed
		return err
	})
	return err
}

func (a arm) loseOnce(ctx context.Context, l loss) (gap float64, failed int, err error) {
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
	struck := time.Now().UnixMicro()
	undo, err := l.strike(a, leader)
	if err != nil {
		return 0, 0, err
	}
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
	if gap = longestGap(got.Acks, struck, math.MaxInt64); math.IsInf(gap, 1) {
		return 0, 0, errors.New("nothing was acknowledged after it")
	}
	if err := undo(); err != nil {
		return 0, 0, err
	}
	return gap, got.Failed, a.awaitReady(ctx)
}

// move is one way in which the leadership leaves a leader that goes on until it has done so.
type move struct {
	measure      string
	does         string // for a line of progress
	ours, theirs int    // how often
	once         func(a arm, ctx context.Context) (moved, error)
}

// moved is what clients have seen of it.
type moved struct {
	got  drive.Reply
	from int64   // when it was asked for, in unix microseconds
	took float64 // milliseconds until it was answered
}

// transfers: the leader is told to give its leadership away.
func (b *bench) transfers(ctx context.Context, arms []arm) error {
	// Of etcd's, clients in flight do not hear for a while: it takes longer.
	return b.moves(ctx, arms, move{measureTransfer, "leader transfers", b.transferCount, b.etcdTransfers, arm.transferOnce})
}

// shutdowns: the leader's process is told to end, and gives its leadership away first.
func (b *bench) shutdowns(ctx context.Context, arms []arm) error {
	return b.moves(ctx, arms, move{measureShutdown, "orderly ends of the leader", b.shutdownCount, b.etcdShutdowns, arm.shutdownOnce})
}

// moves moves the leadership under load, again and again, and tells for how long
// nothing was acknowledged, and how much of that there was just before.
func (b *bench) moves(ctx context.Context, arms []arm, m move) error {
	var reference *figures.Measured
	for _, a := range slices.Backward(arms) { // the reference is the last
		times := m.ours
		if a.isReference() {
			times = m.theirs
		}
		b.progress.say("%s under %d clients, %d times: %s", m.does, loadedClients, times, a)
		var (
			values map[string]float64
			gaps   []float64
			spent  cost
		)
		_, err := spent.metered(a, func() (err error) {
			values, gaps, err = a.moveAll(ctx, m, times)
			return err
		})
		if err != nil {
			return fmt.Errorf("%s, %s: %w", m.measure, a, err)
		}
		if a.isReference() {
			reference = spent.reference(b.etcdName, values)
			reference.Samples = gaps
			continue
		}
		b.records = append(b.records, spent.record(figures.Record{
			Measure: m.measure, Params: map[string]any{"clients": loadedClients, "times": times, "log": a.name, "clients are": a.at},
			Samples: gaps, Reference: reference,
		}, values))
	}
	return nil
}

// moveAll tells the pause of each move too.
func (a arm) moveAll(ctx context.Context, m move, times int) (values map[string]float64, gaps []float64, err error) {
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
			return nil, nil, errors.New("nothing was acknowledged after it")
		}
		gaps, took = append(gaps, gap), append(took, one.took)
		quiet = append(quiet, longestGap(one.got.Acks, slices.Min(one.got.Acks), one.from))
		failed += one.got.Failed
	}
	values = gapValues(gaps, failed)
	values["quiet_max_ms"], values["took_p50_ms"], values["took_max_ms"] = slices.Max(quiet), median(took), slices.Max(took)
	return values, gaps, nil
}

// transferOnce orders the leader to give its leadership away, under load.
func (a arm) transferOnce(ctx context.Context) (moved, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return moved{}, err
	}
	return a.moveOnce(ctx, a.members, func() error {
		_, err := leader.do(ctx, drive.Order{Do: drive.DoTransfer})
		return err
	})
}

// shutdownOnce asks the leader's process to end, under load on the others, and starts it again.
func (a arm) shutdownOnce(ctx context.Context) (moved, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return moved{}, err
	}
	out, err := a.moveOnce(ctx, a.others(leader), func() error { return leader.terminate(ctx) })
	if err != nil {
		return moved{}, err
	}
	if err := a.startMember(leader); err != nil {
		return moved{}, err
	}
	return out, a.awaitReady(ctx)
}

// moveOnce moves the leadership while clients of some members put.
func (a arm) moveOnce(ctx context.Context, through []*member, do func() error) (out moved, err error) {
	load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: loadedClients, Size: 1024, Duration: longLoad, Times: true}, through)
	if err != nil {
		return out, err
	}
	if err := wait.Delay(ctx, settle); err != nil {
		return out, err
	}
	asked := time.Now()
	refused := do()
	out.from, out.took = asked.UnixMicro(), float64(time.Since(asked).Microseconds())/1000
	if err := wait.Delay(ctx, settle); err != nil {
		return out, err
	}
	out.got, err = load.end(ctx)
	return out, errors.Join(refused, err)
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
			// A store that loses its leader over this may fail calls: that is a figure, too.
			load, err := a.begin(drive.Order{Do: drive.DoPut, Clients: 64, Size: b.size, Duration: b.busyFor}, a.members)
			if err != nil {
				return nil, err
			}
			r, err := load.wait(ctx)
			if err != nil {
				return nil, err
			}
			after, err := a.term(ctx)
			if err != nil {
				return nil, err
			}
			out := loadValues(r)
			out["elections"], out["failed_calls"] = float64(after-before), float64(r.Failed)
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
