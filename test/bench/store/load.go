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

// selectMembers returns the members that which selects: "leader", "followers", "follower" for one
// of them, or all members for any other text.
func (a variant) selectMembers(ctx context.Context, which string) ([]*member, error) {
	leader, err := a.awaitLeader(ctx, a.members)
	if err != nil {
		return nil, err
	}
	switch which {
	case "leader":
		return []*member{leader}, nil
	case "follower":
		return a.membersExcept(leader)[:1], nil
	case "followers":
		return a.membersExcept(leader), nil
	default:
		return a.members, nil
	}
}

// measurePuts measures writes of concurrent clients through the members that which selects; see
// selectMembers.
func (b *benchmarks) measurePuts(ctx context.Context, clients int, which string, variants []variant) error {
	return b.measureLoad(ctx, measure{
		name: drive.DoPut, params: map[string]any{"clients": clients, "through": which, "bytes": b.options.load.size},
		variants: variants,
	}, drive.Request{Clients: clients}, which)
}

// measureGets measures linearizable reads of existing keys through the followers.
func (b *benchmarks) measureGets(ctx context.Context, variants []variant) error {
	const (
		clients = 64
		keys    = 2000
		which   = "followers"
	)
	return b.measureLoad(ctx, measure{
		name: drive.DoGet, params: map[string]any{"clients": clients, "through": which, "bytes": b.options.load.size},
		variants: variants,
		warm:     b.newFill("/get/", keys),
	}, drive.Request{Clients: clients, Prefix: "/get/", Count: keys}, which)
}

// measureLoad measures a load of concurrent clients, in turn with each variant. which selects the
// members to which they connect; see selectMembers.
func (b *benchmarks) measureLoad(ctx context.Context, m measure, o drive.Request, which string) error {
	o.Do, o.Size, o.Times = m.name, b.options.load.size, true
	once := func(ctx context.Context, a variant, d time.Duration) (map[string]float64, error) {
		to, err := a.selectMembers(ctx, which)
		if err != nil {
			return nil, err
		}
		o.Duration = d
		r, err := a.runLoad(ctx, o, to)
		if err != nil {
			return nil, err
		}
		out := loadValues(r)
		if len(r.Acks) > 1 { // over all clients
			out["longest_pause_ms"] = longestGap(r.Acks, slices.Min(r.Acks), math.MaxInt64)
		}
		return out, nil
	}
	fill := m.warm
	m.rounds = b.options.load.rounds
	m.warm = func(ctx context.Context, a variant) error {
		if fill != nil {
			if err := fill(ctx, a); err != nil {
				return err
			}
		}
		_, err := once(ctx, a, min(warmUp, b.options.load.duration))
		return err
	}
	m.do = func(ctx context.Context, a variant) (map[string]float64, error) {
		return once(ctx, a, b.options.load.duration)
	}
	return b.runMeasurement(ctx, m)
}

// newFill returns a function that writes keys to the group of a variant. It writes to each group
// only once, because two variants may share a group.
func (b *benchmarks) newFill(prefix string, keys int) func(ctx context.Context, a variant) error {
	filled := make(map[string]bool)
	return func(ctx context.Context, a variant) error {
		if filled[a.name] {
			return nil
		}
		filled[a.name] = true
		return b.fillKeys(ctx, a.group, prefix, keys, b.options.load.size)
	}
}

// measureLists measures listing -list-keys keys at once through a follower.
func (b *benchmarks) measureLists(ctx context.Context, variants []variant) error {
	return b.runMeasurement(ctx, measure{
		name: "list", params: map[string]any{"keys": b.options.probes.listKeys, "bytes": b.options.load.size},
		variants: variants, rounds: b.options.load.rounds,
		warm: b.newFill(listPrefix, b.options.probes.listKeys),
		do: func(ctx context.Context, a variant) (map[string]float64, error) {
			to, err := a.selectMembers(ctx, "follower")
			if err != nil {
				return nil, err
			}
			r, err := a.runLoad(ctx, drive.Request{Do: drive.DoList, Prefix: listPrefix,
				Count:   b.options.probes.listTimes,
				Clients: 1}, to)
			if err != nil {
				return nil, err
			}
			if r.Keys != b.options.probes.listKeys {
				return nil, fmt.Errorf("a list has returned %d keys, want %d", r.Keys, b.options.probes.listKeys)
			}
			out := latencyValues(r.Micros)
			if a.at != inProcess { // in process, nothing is copied
				out["mb_s"] = float64(r.Bytes) * float64(len(r.Micros)) / 1e6 / r.Took
			}
			return out, nil
		},
	})
}

// fillOps is the number of keys in one commit of fillKeys.
const fillOps = 32

// fillKeys writes this number of keys with a prefix to a group, with 16 clients of the clients'
// process.
func (b *benchmarks) fillKeys(ctx context.Context, g *group, prefix string, keys, size int) error {
	return b.fillThrough(ctx, g, g.members, prefix, keys, size)
}

// fillThrough is the same as fillKeys, but the clients connect only to the members through.
func (b *benchmarks) fillThrough(
	ctx context.Context, g *group, through []*member, prefix string, keys, size int,
) error {
	_, err := variant{g, overGRPC}.runLoad(ctx, drive.Request{Do: drive.DoFill, Clients: 16, Prefix: prefix,
		Count: keys,
		Size:  size, Ops: fillOps}, through)
	return err
}

// measureWatchers measures the delays of many watchers on one prefix, spread over all members, with
// puts at a constant rate.
func (b *benchmarks) measureWatchers(ctx context.Context, variants []variant) error {
	const pace = 50 * time.Millisecond // 20 changes a second
	count := max(2, int(b.options.probes.watchFor/pace))
	return b.measureArrivals(ctx, "watch", map[string]any{"watchers": b.options.probes.watcherCount, "changes/s": 20},
		variants, 1, watchSpec{
			prefix: "/watched/", watcherCount: b.options.probes.watcherCount, count: count, pace: pace, on: "all",
		})
}

// measureVisibility measures when single commits, acknowledged by the leader, are visible on the
// followers.
func (b *benchmarks) measureVisibility(ctx context.Context, variants []variant) error {
	return b.measureArrivals(ctx, "seen on followers after ack", map[string]any{"commits": b.options.probes.commits},
		variants,
		b.options.load.rounds, watchSpec{
			prefix: "/visible/", watcherCount: 2, count: b.options.probes.commits, pace: visiblePace,
			on: "followers",
		})
}

// watchSpec defines a measurement with watchers on some members, and with puts through the leader.
type watchSpec struct {
	prefix              string
	watcherCount, count int
	pace                time.Duration
	on                  string
}

func (b *benchmarks) measureArrivals(
	ctx context.Context, name string, params map[string]any, variants []variant, rounds int, s watchSpec,
) error {
	var watched pendingRequests
	return b.runMeasurement(ctx, measure{
		name: name, params: params, variants: variants, rounds: rounds,
		prepare: func(ctx context.Context, a variant) error {
			on, err := a.selectMembers(ctx, s.on)
			if err != nil {
				return err
			}
			o := drive.Request{Do: drive.DoWatch, Prefix: s.prefix, Clients: s.watcherCount, Count: s.count}
			if _, err := a.runLoad(ctx, o, on); err != nil {
				return err
			}
			o.Do = drive.DoWatched
			watched, err = a.sendRequest(o, on)
			return err
		},
		do: func(ctx context.Context, a variant) (map[string]float64, error) {
			leader, err := a.selectMembers(ctx, "leader")
			if err != nil {
				return nil, err
			}
			acked, err := a.runLoad(ctx, drive.Request{Do: drive.DoPace, Prefix: s.prefix, Count: s.count,
				Every:   s.pace,
				Clients: 1}, leader)
			if err != nil {
				return nil, err
			}
			got, err := watched.awaitReply(ctx)
			if err != nil {
				return nil, err
			}
			if want := s.watcherCount; len(got.Arrivals) != want {
				return nil, fmt.Errorf("%d of %d watchers have reported", len(got.Arrivals), want)
			}
			return latencyValues(arrivalDelays(acked.Acks, got.Arrivals)), nil
		},
	})
}

// measureIdle measures the CPU time of an idle group.
func (b *benchmarks) measureIdle(ctx context.Context, variants []variant) error {
	return b.runMeasurement(ctx, measure{
		name: "idle", params: map[string]any{"for": b.options.probes.idleFor.String()}, variants: variants, rounds: 1,
		do: func(ctx context.Context, a variant) (map[string]float64, error) {
			return map[string]float64{}, wait.Delay(ctx, b.options.probes.idleFor)
		},
	})
}
