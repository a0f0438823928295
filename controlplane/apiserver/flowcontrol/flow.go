// Package flowcontrol limits the number of concurrent requests and their estimated memory. Reads,
// writes and watches have separate limits, and each user may use only a part of them. A part of the
// limits is reserved for components that run the cluster. A request that exceeds a limit waits
// briefly and is then refused.
//
// After a large write, the next large write of the same user must wait. The wait grows with the
// load of the store, so that other users can use the store most of the time.
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
	Watch // also all other long-running requests: logs, exec, port-forward
	classes
)

func (c Class) String() string { return [...]string{"readOnly", "mutating", "watch"}[c] }

// Limits are the limits of a Gate for each class: the number of concurrent requests (Seats) and
// their total estimated memory (Bytes).
type Limits struct {
	Seats [classes]int
	Bytes [classes]int64 // 0 = not limited, as for watches
	// Patience is how long a read or write may wait before it is refused.
	Patience time.Duration
	// Rest determines how long a user must wait after a large write: after the largest possible
	// write, this multiple of the write's duration. The wait after smaller writes is proportionally
	// shorter. 0 disables the wait.
	Rest int
}

const (
	watchMemory = 96 << 10 // memory of an idle watch: connection, stream, goroutines
	minMemory   = 256 << 20
	// Maximum total bytes of concurrent reads and writes on machines of any size, because disks and
	// cores are shared. The estimate of the largest writes is 8 MiB and more, so a user can run
	// only one such write at a time, and writes of other users wait for few of them.
	maxReadBytes  = 512 << 20
	maxWriteBytes = 32 << 20
	// A write is large if its estimated memory has at least this number of bytes.
	largeWrite = 1 << 20
	// The largest writes of a user take at most a fourth of the time: the wait is three times as
	// long.
	restTimes = 3
	maxRest   = 3 * time.Second
)

// ForMemory returns the default limits for a process that may use limit bytes of memory in total.
func ForMemory(limit int64) Limits {
	limit = max(limit, minMemory)
	return Limits{
		Seats:    [classes]int{Read: 400, Write: 200, Watch: int(min(max(limit/8/watchMemory, 512), 16384))},
		Bytes:    [classes]int64{Read: min(limit/4, maxReadBytes), Write: min(limit/8, maxWriteBytes)},
		Patience: time.Second,
		Rest:     restTimes,
	}
}

// Caller is the user to which a request is charged.
type Caller struct {
	Name string
	// Trusted callers may use the reserved part, and are not limited individually.
	Trusted bool
	// Node marks the agent of a node. A node may use the reserved part, but only a small share of
	// the limits. All nodes together leave a part of the limits to the other callers.
	Node bool
}

// ErrFull is returned for a request that is refused because a limit is reached.
var ErrFull = errors.New("too many concurrent requests")

// Gate admits requests within its limits. All methods are safe for concurrent use.
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
	return p.total.seats, p.refused
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
	err := p.reserveUsage(ctx, usage{1, bytes})
	p.began = time.Now()
	return p, err
}

// Expect waits until the given number of further bytes is reserved for the request. It returns
// ErrFull, or the error of ctx.
func (p *Pass) Expect(ctx context.Context, bytes int64) error {
	return p.reserveUsage(ctx, usage{0, bytes})
}

// Leave releases the reservation. After a large write, most of its bytes continue to count against
// the user for restDuration, which delays the user's next large write. Small writes remain
// possible.
func (p *Pass) Leave() {
	rest, resting := p.restDuration(), int64(0)
	if rest > 0 {
		resting = min(p.held.bytes, p.pool.maxBytes(p.caller)*7/8)
		time.AfterFunc(rest, func() { p.pool.releaseRest(p.caller, resting) })
	}
	p.pool.releaseUsage(p.caller, p.held, resting)
	p.held = usage{}
}

// restDuration returns how long most bytes of a write continue to count against its user. It is 0
// if the write has less than largeWrite bytes, or if the caller is trusted or a node. It is
// proportional to the write's size and its duration, which grows with the load of the store and the
// disks.
func (p *Pass) restDuration() time.Duration {
	if p.rest == 0 || p.caller.Trusted || p.caller.Node || p.held.seats == 0 || p.held.bytes < largeWrite {
		return 0
	}
	part := float64(p.held.bytes) / float64(p.pool.maxBytes(p.caller))
	return min(time.Duration(part*float64(p.rest)*float64(time.Since(p.began))), maxRest)
}

func (p *Pass) reserveUsage(ctx context.Context, u usage) error {
	got, err := p.pool.reserve(ctx, p.caller, u, p.held, p.patience)
	p.held.addUsage(got)
	return err
}

type usage struct {
	seats int
	bytes int64
}

func (u *usage) addUsage(v usage)      { u.seats, u.bytes = u.seats+v.seats, u.bytes+v.bytes }
func (u *usage) subtractUsage(v usage) { u.seats, u.bytes = u.seats-v.seats, u.bytes-v.bytes }

// pool holds the limits and the usage of one class.
type pool struct {
	seats int
	bytes int64 // 0 = not limited

	mu       sync.Mutex
	total    usage
	ordinary usage // usage of callers that are neither trusted nor nodes, all together
	nodes    usage
	users    map[string]*usage // usage of each untrusted caller by name, including the bytes of recent large writes
	waiting  []*waiter         // in order of arrival
	refused  uint64
}

type waiter struct {
	caller Caller
	want   usage
	ready  chan struct{} // closed when want has been reserved; the pool is locked at this time
}

// Ordinary users, which are neither trusted nor nodes, may together use three quarters of the
// limits. Each of them may use half of this part.
func (p *pool) ordinarySeats() int   { return max(p.seats*3/4, 1) }
func (p *pool) ordinaryBytes() int64 { return max(p.bytes*3/4, 1) }

// Nodes may together use seven eighths of the limits. Each of them may use one eighth of the
// limits.
func (p *pool) nodeSeats() int   { return max(p.seats*7/8, 1) }
func (p *pool) nodeBytes() int64 { return max(p.bytes*7/8, 1) }

// maxBytes returns the maximum number of bytes that one caller may reserve. A larger request counts
// as this number, so that it can run if its user has no other request.
func (p *pool) maxBytes(c Caller) int64 {
	switch {
	case c.Trusted:
		return p.bytes
	case c.Node:
		return max(p.bytes/8, 1)
	}
	return p.ordinaryBytes() / 2
}

// maxOwnRequests returns how many requests of one untrusted caller may run at the same time.
func (p *pool) maxOwnRequests(c Caller) int {
	if c.Node {
		return max(p.seats/8, 1)
	}
	return max(p.ordinarySeats()/2, 1)
}

// groupLimits returns the total usage and the limits of the group of untrusted callers to which c
// belongs: the nodes, or the ordinary users.
func (p *pool) groupLimits(c Caller) (has *usage, seats int, bytes int64) {
	if c.Node {
		return &p.nodes, p.nodeSeats(), p.nodeBytes()
	}
	return &p.ordinary, p.ordinarySeats(), p.ordinaryBytes()
}

// canReserve reports whether c may reserve w within all limits at present. The caller holds mu.
func (p *pool) canReserve(c Caller, w usage) bool {
	if p.total.seats+w.seats > p.seats || p.bytes > 0 && p.total.bytes+w.bytes > p.bytes {
		return false
	}
	if c.Trusted {
		return true
	}
	if has, seats, bytes := p.groupLimits(c); has.seats+w.seats > seats || p.bytes > 0 && has.bytes+w.bytes > bytes {
		return false
	}
	own := usage{}
	if u := p.users[c.Name]; u != nil {
		own = *u
	}
	return own.seats+w.seats <= p.maxOwnRequests(c) && (p.bytes == 0 || own.bytes+w.bytes <= p.maxBytes(c))
}

func (p *pool) addCaller(c Caller, w usage) {
	p.total.addUsage(w)
	if c.Trusted {
		return
	}
	has, _, _ := p.groupLimits(c)
	has.addUsage(w)
	if p.users[c.Name] == nil {
		p.users[c.Name] = &usage{}
	}
	p.users[c.Name].addUsage(w)
}

// releaseUsage releases the usage u of a finished request of c. resting bytes of it continue to
// count against c until releaseRest is called.
func (p *pool) releaseUsage(c Caller, u usage, resting int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total.subtractUsage(u)
	if !c.Trusted {
		has, _, _ := p.groupLimits(c)
		has.subtractUsage(u)
		u.bytes -= resting
		p.subtractUser(c, u)
	}
	p.admitWaiting()
}

// releaseRest releases the bytes that still count against c after a large write.
func (p *pool) releaseRest(c Caller, bytes int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.subtractUser(c, usage{0, bytes})
	p.admitWaiting()
}

// subtractUser subtracts u from the individual usage of c. It does nothing if c has none.
func (p *pool) subtractUser(c Caller, u usage) {
	if own := p.users[c.Name]; own != nil {
		if own.subtractUsage(u); *own == (usage{}) {
			delete(p.users, c.Name)
		}
	}
}

// admitWaiting admits the waiting requests that the limits allow now, in order of arrival. The
// caller holds mu.
func (p *pool) admitWaiting() {
	p.waiting = slices.DeleteFunc(p.waiting, func(w *waiter) bool {
		if !p.canReserve(w.caller, w.want) {
			return false // the request does not block waiting requests of other users
		}
		p.addCaller(w.caller, w.want)
		close(w.ready)
		return true
	})
}

// reserve reserves the requested usage for c, and waits for it at most patience. heldUsage is what
// the same request has already reserved; both together are at most maxBytes. It returns the
// reserved usage.
func (p *pool) reserve(ctx context.Context, c Caller, requested, heldUsage usage, patience time.Duration) (
	usage, error,
) {
	p.mu.Lock()
	if p.bytes > 0 {
		requested.bytes = max(min(requested.bytes, p.maxBytes(c)-heldUsage.bytes), 0)
	} else {
		requested.bytes = 0
	}
	if p.canReserve(c, requested) {
		p.addCaller(c, requested)
		p.mu.Unlock()
		return requested, nil
	}
	if patience <= 0 || len(p.waiting) >= p.seats {
		p.refused++
		p.mu.Unlock()
		return usage{}, ErrFull
	}
	w := &waiter{caller: c, want: requested, ready: make(chan struct{})}
	p.waiting = append(p.waiting, w)
	p.mu.Unlock()

	t := time.NewTimer(patience)
	defer t.Stop()
	err := ErrFull
	select {
	case <-w.ready:
		return requested, nil
	case <-t.C:
	case <-ctx.Done():
		err = ctx.Err()
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := slices.Index(p.waiting, w)
	if i < 0 { // admitted just before the timeout
		return requested, nil
	}
	p.waiting = slices.Delete(p.waiting, i, i+1)
	p.refused++
	return usage{}, err
}
