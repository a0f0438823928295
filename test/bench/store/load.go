package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"time"

	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/test/bench/store/drive"
)

const (
	warmUp      = 300 * time.Millisecond
	visiblePace = 20 * time.Millisecond
	listPrefix  = "/list/"
)

// through chooses members: the leader, the followers, one of them, or all.
func (a arm) through(ctx context.Context, which string) ([]*member, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	switch which {
	case "leader":
		return []*member{leader}, nil
	case "follower":
		return a.others(leader)[:1], nil
	case "followers":
		return a.others(leader), nil
	default:
		return a.members, nil
	}
}

// puts writes in a closed loop.
func (b *bench) puts(ctx context.Context, clients int, which string, arms []arm) error {
	return b.load(ctx, measure{
		name: drive.DoPut, params: map[string]any{"clients": clients, "through": which, "bytes": b.size}, arms: arms,
	}, drive.Order{Clients: clients}, which)
}

// gets reads keys that are there, linearizably, through the followers.
func (b *bench) gets(ctx context.Context, arms []arm) error {
	const (
		clients = 64
		keys    = 2000
		which   = "followers"
	)
	return b.load(ctx, measure{
		name: drive.DoGet, params: map[string]any{"clients": clients, "through": which, "bytes": b.size}, arms: arms,
		warm: b.filling("/get/", keys),
	}, drive.Order{Clients: clients, Prefix: "/get/", Count: keys}, which)
}

// load runs clients in a closed loop, by turns with each arm.
func (b *bench) load(ctx context.Context, m measure, o drive.Order, which string) error {
	o.Do, o.Size, o.Times = m.name, b.size, true
	once := func(ctx context.Context, a arm, d time.Duration) (map[string]float64, error) {
		to, err := a.through(ctx, which)
		if err != nil {
			return nil, err
		}
		o.Duration = d
		r, err := a.do(ctx, o, to)
		if err != nil {
			return nil, err
		}
		out := loadValues(r)
		if len(r.Acks) > 1 { // of all clients together
			out["longest_pause_ms"] = longestGap(r.Acks, slices.Min(r.Acks), math.MaxInt64)
		}
		return out, nil
	}
	fill := m.warm
	m.rounds = b.rounds
	m.warm = func(ctx context.Context, a arm) error {
		if fill != nil {
			if err := fill(ctx, a); err != nil {
				return err
			}
		}
		_, err := once(ctx, a, min(warmUp, b.duration))
		return err
	}
	m.do = func(ctx context.Context, a arm) (map[string]float64, error) { return once(ctx, a, b.duration) }
	return b.run(ctx, m)
}

// filling fills each group once: two arms may share one.
func (b *bench) filling(prefix string, keys int) func(ctx context.Context, a arm) error {
	filled := make(map[string]bool)
	return func(ctx context.Context, a arm) error {
		if filled[a.name] {
			return nil
		}
		filled[a.name] = true
		return b.fill(ctx, a.group, prefix, keys, b.size)
	}
}

// lists reads 10,000 keys at once, through a follower.
func (b *bench) lists(ctx context.Context, arms []arm) error {
	return b.run(ctx, measure{
		name: "list", params: map[string]any{"keys": b.listKeys, "bytes": b.size}, arms: arms, rounds: b.rounds,
		warm: b.filling(listPrefix, b.listKeys),
		do: func(ctx context.Context, a arm) (map[string]float64, error) {
			to, err := a.through(ctx, "follower")
			if err != nil {
				return nil, err
			}
			r, err := a.do(ctx, drive.Order{Do: drive.DoList, Prefix: listPrefix, Count: b.listTimes, Clients: 1}, to)
			if err != nil {
				return nil, err
			}
			if r.Keys != b.listKeys {
				return nil, fmt.Errorf("a list shows %d keys of %d", r.Keys, b.listKeys)
			}
			out := latencies(r.Micros)
			if a.at != inProcess { // where nothing is copied
				out["mb_s"] = float64(r.Bytes) * float64(len(r.Micros)) / 1e6 / r.Took
			}
			return out, nil
		},
	})
}

// fillOps is how many keys one commit of a fill puts.
const fillOps = 32

// fill puts keys through clients of another process, at 16 a time.
func (b *bench) fill(ctx context.Context, g *group, prefix string, keys, size int) error {
	return b.fillThrough(ctx, g, g.members, prefix, keys, size)
}

// fillThrough is fill through some of the members.
func (b *bench) fillThrough(ctx context.Context, g *group, through []*member, prefix string, keys, size int) error {
	_, err := arm{g, overGRPC}.do(ctx, drive.Order{Do: drive.DoFill, Clients: 16, Prefix: prefix, Count: keys, Size: size, Ops: fillOps}, through)
	return err
}

// watchers sets many watchers on one prefix, spread over all members, and puts at a steady pace.
func (b *bench) watchers(ctx context.Context, arms []arm) error {
	const pace = 50 * time.Millisecond // 20 changes a second
	count := max(2, int(b.watchFor/pace))
	return b.seen(ctx, "watch", map[string]any{"watchers": b.watcherCount, "changes/s": 20}, arms, 1, sight{
		prefix: "/watched/", watchers: b.watcherCount, count: count, pace: pace, on: "all",
	})
}

// visible tells when isolated commits, acknowledged by the leader, are seen on the followers.
func (b *bench) visible(ctx context.Context, arms []arm) error {
	return b.seen(ctx, "seen on followers after ack", map[string]any{"commits": b.commits}, arms, b.rounds, sight{
		prefix: "/visible/", watchers: 2, count: b.commits, pace: visiblePace, on: "followers",
	})
}

// sight is watchers on some members, and puts through the leader.
type sight struct {
	prefix          string
	watchers, count int
	pace            time.Duration
	on              string
}

func (b *bench) seen(ctx context.Context, name string, params map[string]any, arms []arm, rounds int, s sight) error {
	var watched call
	return b.run(ctx, measure{
		name: name, params: params, arms: arms, rounds: rounds,
		set: func(ctx context.Context, a arm) error {
			on, err := a.through(ctx, s.on)
			if err != nil {
				return err
			}
			o := drive.Order{Do: drive.DoWatch, Prefix: s.prefix, Clients: s.watchers, Count: s.count}
			if _, err := a.do(ctx, o, on); err != nil {
				return err
			}
			o.Do = drive.DoWatched
			watched, err = a.begin(o, on)
			return err
		},
		do: func(ctx context.Context, a arm) (map[string]float64, error) {
			leader, err := a.through(ctx, "leader")
			if err != nil {
				return nil, err
			}
			acked, err := a.do(ctx, drive.Order{Do: drive.DoPace, Prefix: s.prefix, Count: s.count, Every: s.pace, Clients: 1}, leader)
			if err != nil {
				return nil, err
			}
			got, err := watched.wait(ctx)
			if err != nil {
				return nil, err
			}
			if want := s.watchers; len(got.Arrivals) != want {
				return nil, fmt.Errorf("%d watchers of %d have reported", len(got.Arrivals), want)
			}
			return latencies(delays(acked.Acks, got.Arrivals)), nil
		},
	})
}

// idle shows what doing nothing costs.
func (b *bench) idle(ctx context.Context, arms []arm) error {
	return b.run(ctx, measure{
		name: "idle", params: map[string]any{"for": b.idleFor.String()}, arms: arms, rounds: 1,
		do: func(ctx context.Context, a arm) (map[string]float64, error) {
			return map[string]float64{}, wait.Delay(ctx, b.idleFor)
		},
	})
}
