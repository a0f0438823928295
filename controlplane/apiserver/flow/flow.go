// Package flow bounds the requests that are under way at once, by number and by
// the memory that they are expected to take: reads, writes and watches apart,
// each user to a part of what there is, with room kept back for those who keep
// the cluster running. A request without room waits a moment, then it is refused.
package flow

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Class is what a request is counted as.
type Class int

// The classes.
const (
	Read Class = iota
	Write
	Watch // and everything else that lasts: logs, exec, port-forward
	classes
)

func (c Class) String() string { return [...]string{"readOnly", "mutating", "watch"}[c] }

// Limits bound a Gate.
type Limits struct {
	Seats [classes]int
	Bytes [classes]int64 // expected memory; of watches it is not counted
	// Patience is how long a read or write waits for room.
	Patience time.Duration
}

const (
	watchMemory = 96 << 10 // of one watch that is idle: connection, stream, goroutines
	minMemory   = 256 << 20
	// However large the machine is, what is written and read at once goes through the same disks and cores. Of the
	// largest writes, which are expected to take 8 MiB and more, one user has one under way: what others write waits
	// behind few of them.
	mostRead    = 512 << 20
	mostWritten = 32 << 20
)

// ForMemory are the limits of a process that may take limit bytes in all.
func ForMemory(limit int64) Limits {
	limit = max(limit, minMemory)
	return Limits{
		Seats:    [classes]int{Read: 400, Write: 200, Watch: int(min(max(limit/8/watchMemory, 512), 16384))},
		Bytes:    [classes]int64{Read: min(limit/4, mostRead), Write: min(limit/8, mostWritten)},
		Patience: time.Second,
	}
}

// Caller is on whose account a request goes. Trusted ones may use the room that is kept back.
type Caller struct {
	Name    string
	Trusted bool
}

// ErrFull says that there was no room in time.
var ErrFull = errors.New("too many requests are under way")

// Gate lets requests in. All methods are safe for concurrent use.
type Gate struct {
	pools    [classes]*pool
	patience time.Duration
}

// New returns a gate.
func New(l Limits) *Gate {
	g := &Gate{patience: l.Patience}
	for c := range g.pools {
		g.pools[c] = &pool{seats: l.Seats[c], bytes: l.Bytes[c], users: make(map[string]*usage)}
	}
	return g
}

// Stats is how many requests of a class are under way and how many were refused so far.
func (g *Gate) Stats(c Class) (underWay int, refused uint64) {
	p := g.pools[c]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.seats, p.refused
}

// Pass is the place of one request. It is used by one goroutine.
type Pass struct {
	pool     *pool
	caller   Caller
	patience time.Duration
	held     usage
}

// Enter waits for a place for a request that is expected to take so many bytes.
// The error is ErrFull or that of ctx.
func (g *Gate) Enter(ctx context.Context, c Class, caller Caller, bytes int64) (*Pass, error) {
	p := &Pass{pool: g.pools[c], caller: caller, patience: g.patience}
	if c == Watch {
		p.patience = 0 // places are given up rarely
	}
	return p, p.take(ctx, usage{1, bytes})
}

// Expect waits until the request may take so many more bytes.
func (p *Pass) Expect(ctx context.Context, bytes int64) error { return p.take(ctx, usage{0, bytes}) }

// Leave gives the place back.
func (p *Pass) Leave() {
	p.pool.give(p.caller, p.held)
	p.held = usage{}
}

func (p *Pass) take(ctx context.Context, u usage) error {
	got, err := p.pool.take(ctx, p.caller, u, p.held, p.patience)
	p.held.add(got)
	return err
}

type usage struct {
	seats int
	bytes int64
}

func (u *usage) add(v usage) { u.seats, u.bytes = u.seats+v.seats, u.bytes+v.bytes }
func (u *usage) sub(v usage) { u.seats, u.bytes = u.seats-v.seats, u.bytes-v.bytes }

// pool is the room of one class.
type pool struct {
	seats int
	bytes int64 // 0 = not counted

	mu       sync.Mutex
	all      usage
	ordinary usage // of those who are not trusted
	users    map[string]*usage
	waiting  []*waiter // first come first
	refused  uint64
}

type waiter struct {
	caller Caller
	want   usage
	ready  chan struct{} // closed, under the lock, when want has been taken
}

// Ordinary users may use three quarters of the room, and one of them half of that.
func (p *pool) ordinarySeats() int   { return max(p.seats*3/4, 1) }
func (p *pool) ordinaryBytes() int64 { return max(p.bytes*3/4, 1) }

// most is what one request may count for: the largest is let in when its user has nothing else under way.
func (p *pool) most(c Caller) int64 {
	if c.Trusted {
		return p.bytes
	}
	return p.ordinaryBytes() / 2
}

// fits says whether there is room now. Called under the lock.
func (p *pool) fits(c Caller, w usage) bool {
	if p.all.seats+w.seats > p.seats || p.bytes > 0 && p.all.bytes+w.bytes > p.bytes {
		return false
	}
	if c.Trusted {
		return true
	}
	if p.ordinary.seats+w.seats > p.ordinarySeats() || p.bytes > 0 && p.ordinary.bytes+w.bytes > p.ordinaryBytes() {
		return false
	}
	own := usage{}
	if u := p.users[c.Name]; u != nil {
		own = *u
	}
	return own.seats+w.seats <= max(p.ordinarySeats()/2, 1) && (p.bytes == 0 || own.bytes+w.bytes <= p.most(c))
}

func (p *pool) enter(c Caller, w usage) {
	p.all.add(w)
	if c.Trusted {
		return
	}
	p.ordinary.add(w)
	if p.users[c.Name] == nil {
		p.users[c.Name] = &usage{}
	}
	p.users[c.Name].add(w)
}

func (p *pool) give(c Caller, u usage) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all.sub(u)
	if !c.Trusted {
		p.ordinary.sub(u)
		if own := p.users[c.Name]; own != nil {
			if own.sub(u); *own == (usage{}) {
				delete(p.users, c.Name)
			}
		}
	}
	p.waiting = slices.DeleteFunc(p.waiting, func(w *waiter) bool {
		if !p.fits(w.caller, w.want) {
			return false // it must not hold up another user's
		}
		p.enter(w.caller, w.want)
		close(w.ready)
		return true
	})
}

// take returns what was taken: the bytes are at most what one request counts for.
func (p *pool) take(ctx context.Context, c Caller, want, held usage, patience time.Duration) (usage, error) {
	p.mu.Lock()
	if p.bytes > 0 {
		want.bytes = max(min(want.bytes, p.most(c)-held.bytes), 0)
	} else {
		want.bytes = 0
	}
	if p.fits(c, want) {
		p.enter(c, want)
		p.mu.Unlock()
		return want, nil
	}
	if patience <= 0 || len(p.waiting) >= p.seats {
		p.refused++
		p.mu.Unlock()
		return usage{}, ErrFull
	}
	w := &waiter{caller: c, want: want, ready: make(chan struct{})}
	p.waiting = append(p.waiting, w)
	p.mu.Unlock()

	t := time.NewTimer(patience)
	defer t.Stop()
	err := ErrFull
	select {
	case <-w.ready:
		return want, nil
	case <-t.C:
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiting, w)
	if i < 0 { // let in at the last moment
		return want, nil
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.refused++
	return usage{}, err
}
