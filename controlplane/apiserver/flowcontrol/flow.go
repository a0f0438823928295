// Package flowcontrol limits the concurrent requests by their number and their estimated memory.
// Reads, writes and watches have separate limits, and each user may use only a part of them. A
// reserve is kept for components that run the cluster. A request that exceeds a limit waits briefly
// and is then refused.
//
// After a large write, its user's next large write must wait. The wait grows with the load of the
// store, so that the store is mostly available to other users.
package flowcontrol

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"
)

// Class is the class of a request: read, write or watch. Each class has its own limits.
type Class int

// The classes of requests.
const (
	Read Class = iota
	Write
	Watch // and all other long-running requests: logs, exec, port-forward
	classes
)

func (c Class) String() string { return [...]string{"readOnly", "mutating", "watch"}[c] }

// Limits are the limits of a Gate: per class the concurrent requests (Seats) and their memory
// (Bytes).
type Limits struct {
	Seats [classes]int
	Bytes [classes]int64 // estimated memory; not limited for watches
	// Patience is how long a read or write may wait before it is refused.
	Patience time.Duration
	// Rest is the wait after a user's largest possible write, as a multiple of the write's
	// duration. The wait after smaller large writes is proportionally shorter. 0 disables it.
	Rest int
}

const (
	watchMemory = 96 << 10 // memory of an idle watch: connection, stream, goroutines
	minMemory   = 256 << 20
	// Limits of concurrent memory that apply to machines of any size, because disks and cores are
	// shared. The estimate of the largest writes is 8 MiB and more, so a user can run only one of
	// them at a time. Writes of other users then wait behind few of them.
	mostRead    = 512 << 20
	mostWritten = 32 << 20
	// Estimated bytes from which a write is large.
	largeWrite = 1 << 20
	// A user's largest writes run for at most a fourth of the time.
	restTimes = 3
	maxRest   = 3 * time.Second
)

// ForMemory returns the limits of a process that may use limit bytes of memory in total.
func ForMemory(limit int64) Limits {
	limit = max(limit, minMemory)
	return Limits{
		Seats:    [classes]int{Read: 400, Write: 200, Watch: int(min(max(limit/8/watchMemory, 512), 16384))},
		Bytes:    [classes]int64{Read: min(limit/4, mostRead), Write: min(limit/8, mostWritten)},
		Patience: time.Second,
		Rest:     restTimes,
	}
}

// Caller is the user to which a request is charged.
type Caller struct {
	Name string
	// Trusted callers may use the reserve without limits per caller.
	Trusted bool
	// Node marks the agent of a node. A node may use the reserve, but only a small part of the
	// limits. All nodes together leave a part to the other callers.
	Node bool
}

// ErrFull reports that a request was refused because a limit was reached.
var ErrFull = errors.New("too many requests are under way")

// Gate admits requests within limits. All methods are safe for concurrent use.
type Gate struct {
	pools    [classes]*pool
	patience time.Duration
	rest     int
}

// New returns a Gate with the limits l.
func New(l Limits) *Gate {
	g := &Gate{patience: l.Patience, rest: l.Rest}
	for c := range g.pools {
		g.pools[c] = &pool{seats: l.Seats[c], bytes: l.Bytes[c], users: make(map[string]*usage)}
	}
	return g
}

// Stats returns how many requests of a class are running, and how many were refused since the
// start.
func (g *Gate) Stats(c Class) (underWay int, refused uint64) {
	p := g.pools[c]
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.all.seats, p.refused
}

// Pass is the reservation of one running request. It must be used by one goroutine only.
type Pass struct {
	pool     *pool
	caller   Caller
	patience time.Duration
	held     usage
	rest     int
	began    time.Time
}

// Enter waits until a request of class c with the given estimated bytes may run. It returns
// ErrFull, or the error of ctx. After success, the caller must call Leave.
func (g *Gate) Enter(ctx context.Context, c Class, caller Caller, bytes int64) (*Pass, error) {
	p := &Pass{pool: g.pools[c], caller: caller, patience: g.patience}
	switch c {
	case Watch:
		p.patience = 0 // watches rarely end, so waiting is useless
	case Write:
		p.rest = g.rest
	}
	err := p.take(ctx, usage{1, bytes})
	p.began = time.Now()
	return p, err
}

// Expect waits until the given number of further bytes is reserved. It returns ErrFull, or the
// error of ctx.
func (p *Pass) Expect(ctx context.Context, bytes int64) error { return p.take(ctx, usage{0, bytes}) }

// Leave releases the reservation. After a large write, most of its bytes still count against its
// user for some time; small writes of the user remain possible.
func (p *Pass) Leave() {
	rest, resting := p.pause(), int64(0)
	if rest > 0 {
		resting = min(p.held.bytes, p.pool.most(p.caller)*7/8)
		time.AfterFunc(rest, func() { p.pool.rested(p.caller, resting) })
	}
	p.pool.give(p.caller, p.held, resting)
	p.held = usage{}
}

// pause returns how long the user must wait after this large write; 0 for other requests. It is
// proportional to the write's duration, which grows with the load of the store and the disks.
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

// pool holds the limits and the usage of one class.
type pool struct {
	seats int
	bytes int64 // 0 = not limited

	mu       sync.Mutex
	all      usage
	ordinary usage // usage of callers that are neither trusted nor nodes
	nodes    usage
	users    map[string]*usage // usage by name of all untrusted callers, including bytes of recent large writes
	waiting  []*waiter         // in order of arrival
	refused  uint64
}

type waiter struct {
	caller Caller
	want   usage
	ready  chan struct{} // closed, with the pool locked, when want has been reserved
}

// Ordinary users together may use three quarters of the limits, and each of them half of this part.
func (p *pool) ordinarySeats() int   { return max(p.seats*3/4, 1) }
func (p *pool) ordinaryBytes() int64 { return max(p.bytes*3/4, 1) }

// Nodes together may use seven eighths of the limits, and each of them one eighth of the limits.
func (p *pool) nodeSeats() int   { return max(p.seats*7/8, 1) }
func (p *pool) nodeBytes() int64 { return max(p.bytes*7/8, 1) }

// most returns the most bytes that one caller may reserve. A larger request counts as this number,
// so it can run if its user has no other request.
func (p *pool) most(c Caller) int64 {
	switch {
	case c.Trusted:
		return p.bytes
	case c.Node:
		return max(p.bytes/8, 1)
	}
	return p.ordinaryBytes() / 2
}

// own returns how many requests of one untrusted caller may run at once.
func (p *pool) own(c Caller) int {
	if c.Node {
		return max(p.seats/8, 1)
	}
	return max(p.ordinarySeats()/2, 1)
}

// group returns the usage and the limits of all untrusted callers of c's type: nodes, or ordinary
// users.
func (p *pool) group(c Caller) (has *usage, seats int, bytes int64) {
	if c.Node {
		return &p.nodes, p.nodeSeats(), p.nodeBytes()
	}
	return &p.ordinary, p.ordinarySeats(), p.ordinaryBytes()
}

// fits reports whether c may reserve w now. The caller holds mu.
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

// give releases a request's usage u. resting bytes of it continue to count against the user until
// rested is called.
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

// rested releases the bytes that still counted against a user after a large write.
func (p *pool) rested(c Caller, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.settle(c, usage{0, bytes})
	p.letIn()
}

// settle subtracts u from the usage of the user c, if it is counted.
func (p *pool) settle(c Caller, u usage) {
	if own := p.users[c.Name]; own != nil {
		if own.sub(u); *own == (usage{}) {
			delete(p.users, c.Name)
		}
	}
}

// letIn admits waiting requests that fit now, in order of arrival. The caller holds mu.
func (p *pool) letIn() {
	p.waiting = slices.DeleteFunc(p.waiting, func(w *waiter) bool {
		if !p.fits(w.caller, w.want) {
			return false // it does not block requests of other users
		}
		p.enter(w.caller, w.want)
		close(w.ready)
		return true
	})
}

// take reserves want for c, in addition to held, and waits at most patience. It returns the
// reserved usage; its bytes are limited by most.
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
	if i < 0 { // admitted just before the timeout
		return want, nil
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.refused++
	return usage{}, err
}
