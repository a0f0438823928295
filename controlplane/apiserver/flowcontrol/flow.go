// Package flowcontrol bounds the requests that are under way at once, by number and by
// the memory that they are expected to take: reads, writes and watches apart,
// each user to a part of what there is, with room kept back for those who keep
// the cluster running. A request without room waits a moment, then it is refused.
// Whose writes are large rests between them, the longer the more the store has to
// do: what others write finds it free most of the time.
package flowcontrol

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
	// Rest is how many times as long as a user's largest write took the next one has to wait
	// after it; smaller ones rest less. 0 is no rest.
	Rest int
}

const (
	watchMemory = 96 << 10 // of one watch that is idle: connection, stream, goroutines
	minMemory   = 256 << 20
	// However large the machine is, what is written and read at once goes through the same disks and cores. Of the
	// largest writes, which are expected to take 8 MiB and more, one user has one under way: what others write waits
	// behind few of them.
	mostRead    = 512 << 20
	mostWritten = 32 << 20
	// A write is large that is expected to take so much.
	largeWrite = 1 << 20
	// A user whose writes are of the largest has one under way for a fourth of the time at most.
	restTimes = 3
	maxRest   = 3 * time.Second
)

// ForMemory are the limits of a process that may take limit bytes in all.
func ForMemory(limit int64) Limits {
	limit = max(limit, minMemory)
	return Limits{
		Seats:    [classes]int{Read: 400, Write: 200, Watch: int(min(max(limit/8/watchMemory, 512), 16384))},
		Bytes:    [classes]int64{Read: min(limit/4, mostRead), Write: min(limit/8, mostWritten)},
		Patience: time.Second,
		Rest:     restTimes,
	}
}

// Caller is on whose account a request goes.
type Caller struct {
	Name string
	// Trusted ones may use the room that is kept back.
	Trusted bool
	// Node is one of many who are trusted a little: it may use the room that is kept back, a
	// small part of all the room, and all nodes together leave some to the others.
	Node bool
}

// ErrFull says that there was no room in time.
var ErrFull = errors.New("too many requests are under way")

// Gate lets requests in. All methods are safe for concurrent use.
type Gate struct {
	pools    [classes]*pool
	patience time.Duration
	rest     int
}

// New returns a gate.
func New(l Limits) *Gate {
	g := &Gate{patience: l.Patience, rest: l.Rest}
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
	rest     int
	began    time.Time
}

// Enter waits for a place for a request that is expected to take so many bytes.
// The error is ErrFull or that of ctx.
func (g *Gate) Enter(ctx context.Context, c Class, caller Caller, bytes int64) (*Pass, error) {
	p := &Pass{pool: g.pools[c], caller: caller, patience: g.patience}
	switch c {
	case Watch:
		p.patience = 0 // places are given up rarely
	case Write:
		p.rest = g.rest
	}
	err := p.take(ctx, usage{1, bytes})
	p.began = time.Now()
	return p, err
}

// Expect waits until the request may take so many more bytes.
func (p *Pass) Expect(ctx context.Context, bytes int64) error { return p.take(ctx, usage{0, bytes}) }

// Leave gives the place back. After a large write its user's part stays taken for a while, but for room for small ones.
func (p *Pass) Leave() {
	rest, resting := p.pause(), int64(0)
	if rest > 0 {
		resting = min(p.held.bytes, p.pool.most(p.caller)*7/8)
		time.AfterFunc(rest, func() { p.pool.rested(p.caller, resting) })
	}
	p.pool.give(p.caller, p.held, resting)
	p.held = usage{}
}

// pause is how long the user's next write of this size has to wait. What the store and the disks have to do
// makes this one slow, and so the pause long.
func (p *Pass) pause() time.Duration {
	if p.rest == 0 || p.caller.Trusted || p.caller.Node || p.held.seats == 0 || p.held.bytes < largeWrite {
		return 0
	}
	part := float64(p.held.bytes) / float64(p.pool.most(p.caller))
	return min(time.Duration(part*float64(p.rest)*float64(time.Since(p.began))), maxRest)
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
	nodes    usage
	users    map[string]*usage // of all but the trusted; what rests counts here only
	waiting  []*waiter         // first come first
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

// Nodes together may use seven eighths of the room, and one of them an eighth.
func (p *pool) nodeSeats() int   { return max(p.seats*7/8, 1) }
func (p *pool) nodeBytes() int64 { return max(p.bytes*7/8, 1) }

// most is what one request may count for: the largest is let in when its user has nothing else under way.
func (p *pool) most(c Caller) int64 {
	switch {
	case c.Trusted:
		return p.bytes
	case c.Node:
		return max(p.bytes/8, 1)
	}
	return p.ordinaryBytes() / 2
}

// own is how many requests of one caller may be under way.
func (p *pool) own(c Caller) int {
	if c.Node {
		return max(p.seats/8, 1)
	}
	return max(p.ordinarySeats()/2, 1)
}

// group is what callers of this sort have together, and what they may have.
func (p *pool) group(c Caller) (has *usage, seats int, bytes int64) {
	if c.Node {
		return &p.nodes, p.nodeSeats(), p.nodeBytes()
	}
	return &p.ordinary, p.ordinarySeats(), p.ordinaryBytes()
}

// fits says whether there is room now. Called under the lock.
func (p *pool) fits(c Caller, w usage) bool {
	if p.all.seats+w.seats > p.seats || p.bytes > 0 && p.all.bytes+w.bytes > p.bytes {
		return false
	}
	if c.Trusted {
		return true
	}
	if has, seats, bytes := p.group(c); has.seats+w.seats > seats || p.bytes > 0 && has.bytes+w.bytes > bytes {
		return false
	}
	own := usage{}
	if u := p.users[c.Name]; u != nil {
		own = *u
	}
	return own.seats+w.seats <= p.own(c) && (p.bytes == 0 || own.bytes+w.bytes <= p.most(c))
}

func (p *pool) enter(c Caller, w usage) {
	p.all.add(w)
	if c.Trusted {
		return
	}
	has, _, _ := p.group(c)
	has.add(w)
	if p.users[c.Name] == nil {
		p.users[c.Name] = &usage{}
	}
	p.users[c.Name].add(w)
}

// give takes back what a request had. So many bytes stay on its user's account until rested.
func (p *pool) give(c Caller, u usage, resting int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.all.sub(u)
	if !c.Trusted {
		has, _, _ := p.group(c)
		has.sub(u)
		u.bytes -= resting
		p.settle(c, u)
	}
	p.letIn()
}

// rested ends the rest after a large write.
func (p *pool) rested(c Caller, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle(c, usage{0, bytes})
	p.letIn()
}

// settle takes what was given back off a user's account.
func (p *pool) settle(c Caller, u usage) {
	if own := p.users[c.Name]; own != nil {
		if own.sub(u); *own == (usage{}) {
			delete(p.users, c.Name)
		}
	}
}

// letIn lets those in who wait and for whom there is room now.
func (p *pool) letIn() {
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
