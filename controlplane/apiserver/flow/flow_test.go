package flow

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

var (
	tenant = Caller{Name: "tenant"}
	other  = Caller{Name: "other"}
	admin  = Caller{Name: "admin", Trusted: true}
)

func small() *Gate {
	return New(Limits{Seats: [classes]int{16, 16, 16}, Bytes: [classes]int64{1600, 1600, 0}, Patience: time.Second})
}

// fill enters as often as it is let.
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

// One user takes no more than a part, all of them together leave room for those who are trusted, and classes do not meet.
func TestShares(t *testing.T) {
	for _, c := range []Class{Read, Write, Watch} {
		for _, bytes := range []int64{1, 100} {
			synctest.Test(t, func(t *testing.T) {
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

// What is larger than a user's part is let in when the user has nothing else, and counts for the whole part.
func TestLargeRequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
		if n, _ := g.Stats(Read); n != 0 || len(g.pools[Read].users) != 0 || g.pools[Read].all != (usage{}) || g.pools[Read].ordinary != (usage{}) {
			t.Errorf("%d under way, %v", n, g.pools[Read].users)
		}
	})
}

// A request waits for room for a moment, behind those of its own user only.
func TestWaiting(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
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
		synctest.Wait()
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
		if _, err := g.Enter(t.Context(), Write, tenant, 1); !errors.Is(err, ErrFull) || time.Since(began) != time.Second {
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
		if len(g.pools[Write].waiting) != 0 || g.pools[Write].all != (usage{}) {
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
	if g.pools[Read].all != (usage{}) || g.pools[Read].ordinary != (usage{}) || len(g.pools[Read].users) != 0 || len(g.pools[Read].waiting) != 0 {
		t.Errorf("left are %+v", g.pools[Read])
	}
}

func TestForMemory(t *testing.T) {
	for _, limit := range []int64{0, 256 << 20, 2 << 30, 64 << 30} {
		l := ForMemory(limit)
		if l.Seats[Watch] < 512 || l.Seats[Watch] > 16384 || l.Bytes[Read]+l.Bytes[Write] > max(limit, minMemory)/2 || l.Bytes[Write] < 1<<20 {
			t.Errorf("%d bytes: %+v", limit, l)
		}
	}
}

// However much memory there is, one user has one of the largest writes under way at a time; small ones pass beside it.
func TestLargeWritesOfOneUserFollowOneAnother(t *testing.T) {
	l := ForMemory(1 << 40)
	l.Patience = 0
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
