package flowcontrol

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"keelson.dev/keelson/internal/virtual"
)

var (
	tenant = Caller{Name: "tenant"}
	other  = Caller{Name: "other"}
	admin  = Caller{Name: "admin", Trusted: true}
)

func small() *Gate {
	return New(Limits{Seats: [classes]int{16, 16, 16}, Bytes: [classes]int64{1600, 1600, 0}, Patience: time.Second})
}

// fill calls Enter until it is refused and returns the passes.
func fill(t *testing.T, g *Gate, c Class, who Caller, bytes int64) []*Pass {
	t.Helper()
	var out []*Pass
	for {
		p, err := g.Enter(t.Context(), c, who, bytes)
		if errors.Is(err, ErrFull) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, p)
	}
}

// One user takes no more than a part, all of them together leave room for those who are trusted,
// and classes do not meet.
func TestShares(t *testing.T) {
	for _, c := range []Class{Read, Write, Watch} {
		for _, bytes := range []int64{1, 100} {
			virtual.Test(t, func(t *testing.T) {
				g := small()
				mine := fill(t, g, c, tenant, bytes)
				if len(mine) != 6 {
					t.Errorf("%s: one user has %d places of 16", c, len(mine))
				}
				rest := append(fill(t, g, c, other, bytes), fill(t, g, c, Caller{Name: "third"}, bytes)...)
				if len(rest) != 6 {
					t.Errorf("%s: the others have %d places", c, len(rest))
				}
				if kept := fill(t, g, c, admin, bytes); len(kept) != 4 {
					t.Errorf("%s: %d places are kept", c, len(kept))
				}
				for _, next := range []Class{Read, Write, Watch} {
					if p, err := g.Enter(t.Context(), next, tenant, bytes); (err == nil) != (next != c) {
						t.Errorf("%s is full: %s answers %v", c, next, err)
					} else if err == nil {
						p.Leave()
					}
				}
				mine[0].Leave()
				if again := fill(t, g, c, tenant, bytes); len(again) != 1 {
					t.Errorf("%s: %d places after one was given back", c, len(again))
				}
				if n, refused := g.Stats(c); n != 16 || refused == 0 {
					t.Errorf("%s: %d under way, %d refused", c, n, refused)
				}
			})
		}
	}
}

// A request that is larger than a user's share is accepted if the user has no other request. It
// uses the whole share.
func TestLargeRequest(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		g := small()
		p, err := g.Enter(t.Context(), Read, tenant, 10)
		if err != nil {
			t.Fatal(err)
		}
		if err := p.Expect(t.Context(), 1<<40); err != nil {
			t.Fatal(err)
		}
		if more := fill(t, g, Read, tenant, 1); len(more) != 0 {
			t.Errorf("%d more beside it", len(more))
		}
		if one, err := g.Enter(t.Context(), Read, other, 1<<40); err != nil {
			t.Errorf("another user: %v", err)
		} else {
			one.Leave()
		}
		p.Leave()
		if n, _ := g.Stats(Read); n != 0 || len(g.pools[Read].users) != 0 || g.pools[Read].total != (usage{}) ||
			g.pools[Read].ordinary != (usage{}) {
			t.Errorf("%d under way, %v", n, g.pools[Read].users)
		}
	})
}

// A request waits for room for a moment, behind those of its own user only.
func TestWaiting(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		g := small()
		mine := fill(t, g, Write, tenant, 1)
		let := make(chan error, 1)
		go func() {
			p, err := g.Enter(t.Context(), Write, tenant, 1)
			if err == nil {
				p.Leave()
			}
			let <- err
		}()
		virtual.Wait()
		if p, err := g.Enter(t.Context(), Write, other, 1); err != nil {
			t.Errorf("another user waits too: %v", err)
		} else {
			p.Leave()
		}
		mine[0].Leave()
		if err := <-let; err != nil {
			t.Errorf("room was made: %v", err)
		}
		mine = append(mine[1:], fill(t, g, Write, tenant, 1)...)
		began := time.Now()
		if _, err := g.Enter(t.Context(), Write, tenant, 1); !errors.Is(err, ErrFull) ||
			time.Since(began) != time.Second {
			t.Errorf("without room: %v after %v", err, time.Since(began))
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if _, err := g.Enter(ctx, Write, tenant, 1); !errors.Is(err, context.Canceled) {
			t.Errorf("who has left: %v", err)
		}
		for _, p := range mine {
			p.Leave()
		}
		if len(g.pools[Write].waiting) != 0 || g.pools[Write].total != (usage{}) {
			t.Errorf("left are %+v", g.pools[Write])
		}
	})
}

// Whatever the order, nothing is lost.
func TestManyAtOnce(t *testing.T) {
	g := small()
	g.patience = time.Millisecond
	var all sync.WaitGroup
	for i := range 40 {
		all.Go(func() {
			who := Caller{Name: fmt.Sprint(i % 5), Trusted: i%5 == 0}
			for range 50 {
				p, err := g.Enter(t.Context(), Read, who, int64(i))
				if err != nil {
					continue
				}
				if p.Expect(t.Context(), int64(i*2)) == nil && g.pools[Read].seats < 1 {
					t.Error("no seats")
				}
				p.Leave()
			}
		})
	}
	all.Wait()
	if g.pools[Read].total != (usage{}) || g.pools[Read].ordinary != (usage{}) || len(g.pools[Read].users) != 0 ||
		len(g.pools[Read].waiting) != 0 {
		t.Errorf("left are %+v", g.pools[Read])
	}
}

func TestForMemory(t *testing.T) {
	for _, limit := range []int64{0, 256 << 20, 2 << 30, 64 << 30} {
		l := ForMemory(limit)
		if l.Seats[Watch] < 512 || l.Seats[Watch] > 16384 || l.Bytes[Read]+l.Bytes[Write] > max(limit, minMemory)/2 ||
			l.Bytes[Write] < 1<<20 {
			t.Errorf("%d bytes: %+v", limit, l)
		}
	}
}

// However much memory there is, one user has one of the largest writes under way at a time; small
// ones pass beside it.
func TestLargeWritesOfOneUserFollowOneAnother(t *testing.T) {
	l := ForMemory(1 << 40)
	l.Patience, l.Rest = 0, 0
	g, ctx := New(l), context.Background()
	const large, small = 8 << 20, 64 << 10
	first, err := g.Enter(ctx, Write, Caller{Name: "a"}, large)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := g.Enter(ctx, Write, Caller{Name: "a"}, large); err != ErrFull {
		t.Errorf("a second large one of the same user: %v", err)
	}
	for name, bytes := range map[string]int64{"a": small, "b": large} {
		if _, err := g.Enter(ctx, Write, Caller{Name: name}, bytes); err != nil {
			t.Errorf("%d bytes of %s: %v", bytes, name, err)
		}
	}
	first.Leave()
	if _, err := g.Enter(ctx, Write, Caller{Name: "a"}, large); err != nil {
		t.Errorf("the next large one: %v", err)
	}
}

// A user who writes large objects one after the other rests between them, three times as long as
// the last one took. Others, small writes and those who are trusted do not, and while a user rests
// the room is theirs.
func TestLargeWritesRest(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		const large, small, took = 12 << 20, 64 << 10, 100 * time.Millisecond
		l := ForMemory(1 << 40)
		g, ctx := New(l), t.Context()
		write := func(c Caller, bytes int64) (waited time.Duration) {
			t.Helper()
			began := time.Now()
			p, err := g.Enter(ctx, Write, c, bytes)
			if err != nil {
				t.Fatalf("%d bytes of %s: %v", bytes, c.Name, err)
			}
			waited = time.Since(began)
			time.Sleep(took)
			p.Leave()
			return waited
		}
		write(tenant, large)
		if got := write(tenant, small); got != 0 {
			t.Errorf("a small write waited %v", got)
		}
		if got := write(tenant, large); got != 2*took {
			t.Errorf("the next large write waited %v, want %v", got, 2*took)
		}
		for _, who := range []Caller{other, admin, {Name: "node", Node: true}} {
			if got := write(who, large); got != 0 {
				t.Errorf("%s waited %v for the tenant's rest", who.Name, got)
			}
		}
		for range 2 {
			if got := write(admin, large); got != 0 {
				t.Errorf("the administrator waited %v", got)
			}
		}
		time.Sleep(time.Minute)
		if p := g.pools[Write]; p.total != (usage{}) || p.ordinary != (usage{}) || p.nodes != (usage{}) ||
			len(p.users) != 0 {
			t.Errorf("left are %+v", p)
		}
	})
}

// A write that took very long is followed by a rest that ends.
func TestRestIsBounded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		l := ForMemory(1 << 40)
		l.Patience = time.Minute
		g := New(l)
		p, err := g.Enter(t.Context(), Write, tenant, 12<<20)
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(30 * time.Second)
		p.Leave()
		began := time.Now()
		if p, err = g.Enter(t.Context(), Write, tenant, 12<<20); err != nil || time.Since(began) != maxRest {
			t.Errorf("after a write of half a minute the next waited %v: %v", time.Since(began), err)
		}
		p.Leave()
	})
}

// One node has a small part, all nodes leave room to administrators, and ordinary users' requests
// do not keep nodes out.
func TestNodesAreBounded(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		for _, c := range []Class{Read, Write, Watch} {
			for _, bytes := range []int64{1, 100} {
				g := small()
				if got := len(fill(t, g, c, Caller{Name: "n0", Node: true}, bytes)); got != 2 {
					t.Errorf("%s: one node has %d places of 16", c, got)
				}
				all := 2
				for i := range 10 {
					all += len(fill(t, g, c, Caller{Name: fmt.Sprint("m", i), Node: true}, bytes))
				}
				if all != 14 {
					t.Errorf("%s: nodes have %d places of 16", c, all)
				}
				if kept := len(fill(t, g, c, admin, bytes)); kept != 2 {
					t.Errorf("%s: %d places are kept for administrators", c, kept)
				}
				g = small()
				for _, who := range []string{"a", "b"} {
					fill(t, g, c, Caller{Name: who}, bytes)
				}
				if got := len(fill(t, g, c, Caller{Name: "n0", Node: true}, bytes)); got != 2 {
					t.Errorf("%s: beside ordinary users a node has %d places", c, got)
				}
			}
		}
	})
}
