package linear

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"keelson.dev/keelson/raftstore"
)

// Options configure a Workload. Zero values mean the defaults.
type Options struct {
	Prefix  string // prefix of all keys (default "/linear/")
	Seed    uint64 // seed of the clients' choices
	Clients int    // number of clients per Place (default 3)
	// number of followers of the whole prefix per Place (default 1); each Place has one more
	// follower of a part of the prefix
	Followers int
	Keys      int           // number of keys that the clients contend for (default 6)
	Pace      time.Duration // interval between two calls of a client (default 4 ms)
	Timeout   time.Duration // timeout of a call (default 3 s)
	TTL       time.Duration // TTL of keys that have one (default 300 ms)
}

func (o Options) withDefaults() Options {
	if o.Prefix == "" {
		o.Prefix = "/linear/"
	}
	if o.Clients == 0 {
		o.Clients = 3
	}
	if o.Followers == 0 {
		o.Followers = 1
	}
	if o.Keys == 0 {
		o.Keys = 6
	}
	if o.Pace == 0 {
		o.Pace = 4 * time.Millisecond
	}
	if o.Timeout == 0 {
		o.Timeout = 3 * time.Second
	}
	if o.TTL == 0 {
		o.TTL = 300 * time.Millisecond
	}
	return o
}

// Place returns the running replica through which a group of clients currently makes its calls, and
// false while that replica is not running.
type Place func() (Door, bool)

// Workload is a set of running clients and followers that use a store and record their calls.
type Workload struct {
	*Recorder
	opts    Options
	stop    chan struct{}
	clients sync.WaitGroup

	followers followerSet
}

// followerSet is the state of the running followers of a Workload.
type followerSet struct {
	running sync.WaitGroup
	ctx     context.Context // ends when the followers must stop
	stop    context.CancelFunc
	last    atomic.Uint64 // revision of the last commit, made by Settle, which followers must receive; 0 = none yet
	waiting atomic.Int64  // number of followers that have not received the last commit
}

// Start starts a workload that runs until Stop: for each Place, clients, followers, and one writer
// that commits with fences. The replica of the first Place must be running.
func Start(ctx context.Context, o Options, places ...Place) (*Workload, error) {
	o = o.withDefaults()
	first, ok := places[0]()
	if !ok {
		return nil, errors.New("the first place has no store")
	}
	rec, err := NewRecorder(ctx, first.Store, o.Prefix)
	if err != nil {
		return nil, err
	}
	w := &Workload{Recorder: rec, opts: o, stop: make(chan struct{})}
	w.followers.ctx, w.followers.stop = context.WithCancel(context.Background())
	for n := range places {
		for i := range o.Followers + 1 {
			prefix := o.Prefix
			if i == o.Followers {
				prefix = w.narrowPrefix()
			}
			w.runFollower(n*(o.Followers+1)+i, prefix, n, places)
		}
		for i := range o.Clients {
			c := &client{w: w, id: n*o.Clients + i, place: places[n], last: make(map[string]raftstore.Revision)}
			c.rng = rand.New(rand.NewPCG(o.Seed, uint64(c.id)))
			w.clients.Add(1)
			go func() { defer w.clients.Done(); c.runCalls() }()
		}
		w.clients.Add(1)
		go func() { defer w.clients.Done(); w.runFencedWriter(n, places[n]) }()
	}
	return w, nil
}

// narrowPrefix returns the part of the prefix that one follower per Place watches instead of the
// whole prefix.
func (w *Workload) narrowPrefix() string { return w.opts.Prefix + modelled + "1" }

// Stop stops the clients. Followers continue until Settle.
func (w *Workload) Stop() {
	close(w.stop)
	w.clients.Wait()
}

// Settle waits until all keys with a TTL have expired, makes a last commit through d, and waits
// until every follower has received that commit. It then stops the followers. Faults must no longer
// be injected. The report contains a violation for each condition that was not met before ctx
// ended. Call Stop before Settle, and Check after it.
func (w *Workload) Settle(ctx context.Context, d Door) *Report {
	defer w.followers.running.Wait()
	defer w.followers.stop()
	c := w.Through(d)
	rep := new(Report)
	poll := time.NewTicker(5 * time.Millisecond)
	defer poll.Stop()
	for {
		l, err := c.List(ctx, w.opts.Prefix+"ttl/", raftstore.ListOptions{})
		if err == nil && len(l.Items) == 0 {
			break
		}
		select {
		case <-poll.C:
		case <-ctx.Done():
			rep.addViolation(Expiry, "%d keys with TTL remain, error %v", len(l.Items), err)
			return rep
		}
	}
	rev, err := c.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{
		raftstore.Put(w.opts.Prefix+"~end", []byte("end")),
		raftstore.Put(w.narrowPrefix()+"~end", []byte("end of the part")),
	}})
	if err != nil {
		rep.addViolation(WatchStuck, "the last commit failed: %v", err)
		return rep
	}
	w.followers.last.Store(uint64(rev))
	for w.followers.waiting.Load() > 0 {
		select {
		case <-poll.C:
		case <-ctx.Done():
			rep.addViolation(WatchStuck, "%d followers have not received the last revision %d",
				w.followers.waiting.Load(), rev)
			return rep
		}
	}
	return rep
}

// runFollower starts a follower of a prefix in its own goroutine. The follower first watches
// through places[at], and then through the places in turn.
func (w *Workload) runFollower(id int, prefix string, at int, places []Place) {
	f := w.Follow(id, prefix)
	rng := rand.New(rand.NewPCG(w.opts.Seed, uint64(1_000_000+id)))
	enough := func(seen raftstore.Revision) bool {
		end := w.followers.last.Load()
		return end != 0 && uint64(seen) >= end
	}
	w.followers.waiting.Add(1)
	w.followers.running.Add(1)
	go func() {
		defer w.followers.running.Done()
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for ; w.followers.ctx.Err() == nil; at++ {
			select {
			case <-pace.C:
			case <-w.followers.ctx.Done():
			}
			d, up := places[at%len(places)]()
			if !up {
				continue
			}
			// Follower 0 watches everything from the start; the others sometimes list again.
			if id > 0 && rng.IntN(6) == 0 {
				f.Forget()
			}
			// A follower of a part of the prefix also goes back to a random earlier revision. Watch
			// fails if history does not retain that revision.
			if prefix != w.opts.Prefix && rng.IntN(2) == 0 {
				f.Rewind(raftstore.Revision(rng.Int64N(int64(f.Cursor()) + 1)))
			}
			// Some watches last long; most end after a few deliveries.
			left := 1 + rng.IntN(400)
			ctx, cancel := context.WithTimeout(w.followers.ctx, time.Duration(50+rng.IntN(2000))*time.Millisecond)
			// The error does not matter: the follower resumes behind the last received revision.
			_ = f.Watch(ctx, d, func(seen raftstore.Revision) bool {
				left--
				return left <= 0 || enough(seen)
			})
			cancel()
			if enough(f.Cursor()) {
				w.followers.waiting.Add(-1)
				return
			}
		}
	}()
}

// runFencedWriter commits with fences through one Place, until the workload stops. n is the index
// of the Place. Each time the replica becomes the leader, it commits with the new fence. It also
// commits once with the newest fence of an earlier term, which must be refused. After the replica
// has lost leadership, it waits until another leader has committed, or for a limited time. It then
// commits with the old fence, which must be refused, too.
func (w *Workload) runFencedWriter(n int, place Place) {
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for count := 0; w.awaitTick(pace); {
		d, up := place()
		if !up {
			continue
		}
		leader, ok := d.Store.(raftstore.Leader)
		if !ok {
			return
		}
		ctx, cancel := context.WithCancel(context.Background())
		stop := make(chan struct{})
		go func() { // until the workload or the replica stops
			select {
			case <-w.stop:
				cancel()
			case <-stop:
			}
		}()
		_ = leader.Lead(ctx, func(ctx context.Context, fence raftstore.Fence) error {
			// The fence of an earlier leadership must be refused here.
			before := w.Fence()
			w.commitFenced(d, n, &count, fence)
			if before != 0 && before != fence {
				w.commitFenced(d, n, &count, before)
			}
			for ctx.Err() == nil && w.awaitTick(pace) {
				w.commitFenced(d, n, &count, fence)
			}
			for late := 0; late < 200 && w.Fence() <= fence && w.awaitTick(pace); late++ {
			}
			for range 3 {
				w.commitFenced(d, n, &count, fence)
			}
			return nil
		})
		close(stop)
		cancel()
	}
}

func (w *Workload) commitFenced(d Door, n int, count *int, fence raftstore.Fence) {
	ctx, cancel := context.WithTimeout(context.Background(), w.opts.Timeout)
	defer cancel()
	*count++
	_, _ = w.Through(d).Commit(ctx, raftstore.Commit{Fence: fence, Ops: []raftstore.Op{
		raftstore.Put(w.opts.Prefix+"led", fmt.Appendf(nil, "%d at %d under %d", *count, n, fence)),
	}})
}

// awaitTick waits for the next tick of pace and returns true. It returns false if the workload is
// being stopped.
func (w *Workload) awaitTick(pace *time.Ticker) bool {
	select {
	case <-w.stop:
		return false
	default:
	}
	select {
	case <-w.stop:
		return false
	case <-pace.C:
		return true
	}
}

// client makes random calls through one Place, one after the other.
type client struct {
	w     *Workload
	id, n int
	rng   *rand.Rand
	place Place
	last  map[string]raftstore.Revision // last revision of each key that this client has read or written
}

func (c *client) runCalls() {
	pace := time.NewTicker(c.w.opts.Pace)
	defer pace.Stop()
	for c.w.awaitTick(pace) {
		d, up := c.place()
		if !up {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), c.w.opts.Timeout)
		c.makeCall(ctx, c.w.Through(d))
		cancel()
	}
}

func (c *client) randomKey() string {
	return fmt.Sprintf("%s%s%d", c.w.opts.Prefix, modelled, c.rng.IntN(c.w.opts.Keys))
}

// uniqueValue returns a value that no other commit of the workload puts.
func (c *client) uniqueValue() []byte {
	c.n++
	return fmt.Appendf(nil, "%d-%d", c.id, c.n)
}

// makeCall makes one random call through the given client, or two related calls.
func (c *client) makeCall(ctx context.Context, target Client) {
	switch n := c.rng.IntN(100); {
	case n < 28:
		c.getKey(ctx, target, raftstore.ReadOptions{})
	case n < 36:
		c.getKey(ctx, target, raftstore.ReadOptions{Local: true})
	case n < 46:
		c.listAll(ctx, target)
	case n < 48:
		_, _ = target.Sync(ctx)
	case n < 63:
		c.commitOps(ctx, target, raftstore.Put(c.randomKey(), c.uniqueValue()))
	case n < 80:
		c.commitOps(ctx, target, c.conditionalOp(c.randomKey()))
	case n < 88:
		a, b := c.conditionalOp(c.randomKey()), raftstore.Put(c.randomKey(), c.uniqueValue())
		if a.Key != b.Key {
			c.commitOps(ctx, target, a, b)
		}
	case n < 95:
		// A deletion has no value by which Check can identify its commit. The commit therefore also
		// puts a unique value.
		key := c.randomKey()
		remove := raftstore.Delete(key)
		if c.rng.IntN(2) == 0 && c.last[key] != 0 {
			remove = raftstore.DeleteAt(key, c.last[key])
		}
		c.commitOps(ctx, target, remove,
			raftstore.Put(fmt.Sprintf("%smark/%d", c.w.opts.Prefix, c.id), c.uniqueValue()))
	case n < 97:
		key := c.randomKey()
		c.commitOps(ctx, target, raftstore.Op{Kind: raftstore.OpCheck, Key: key, If: c.randomCondition(key)})
	default:
		// Either a key that is put repeatedly, or a key that is put only once and remains if its
		// expiry is lost.
		key := fmt.Sprintf("%sttl/%d", c.w.opts.Prefix, c.id)
		if c.rng.IntN(2) == 0 {
			key += fmt.Sprintf("/%d", c.n)
		}
		op := raftstore.Put(key, c.uniqueValue())
		op.TTL = c.w.opts.TTL/2 + time.Duration(c.rng.Int64N(int64(c.w.opts.TTL)))
		op.TTL = op.TTL.Round(time.Millisecond)
		c.commitOps(ctx, target, op)
	}
}

func (c *client) randomCondition(key string) raftstore.Precondition {
	if at := c.last[key]; at != 0 {
		return raftstore.Precondition{Revision: at}
	}
	return raftstore.Precondition{Absent: true}
}

func (c *client) conditionalOp(key string) raftstore.Op {
	return raftstore.Op{Kind: raftstore.OpPut, Key: key, Value: c.uniqueValue(), If: c.randomCondition(key)}
}

func (c *client) commitOps(ctx context.Context, at Client, ops ...raftstore.Op) {
	rev, err := at.Commit(ctx, raftstore.Commit{Ops: ops})
	var conflict *raftstore.ConflictError
	switch {
	case err == nil:
		for _, op := range ops {
			if op.Kind == raftstore.OpPut {
				c.last[op.Key] = rev
			}
		}
	case errors.As(err, &conflict):
		c.rememberRevision(conflict.Key, conflict.Have)
	}
}

func (c *client) rememberRevision(key string, it *raftstore.Item) {
	if it == nil {
		delete(c.last, key)
		return
	}
	c.last[key] = it.Modified
}

func (c *client) getKey(ctx context.Context, at Client, o raftstore.ReadOptions) {
	key := c.randomKey()
	it, _, err := at.Get(ctx, key, o)
	switch {
	case err == nil:
		c.rememberRevision(key, &it)
	case errors.Is(err, raftstore.ErrNotFound):
		c.rememberRevision(key, nil)
	}
}

// listAll lists a randomly chosen prefix through the given client. With a random limit, it lists at
// most two pages of the same revision.
func (c *client) listAll(ctx context.Context, target Client) {
	prefix := c.w.opts.Prefix
	switch c.rng.IntN(4) {
	case 0:
		prefix += modelled
	case 1:
		prefix += "mark/"
	}
	var o raftstore.ListOptions
	if c.rng.IntN(3) == 0 {
		o.Limit = 1 + c.rng.IntN(c.w.opts.Keys)
	}
	l, err := target.List(ctx, prefix, o)
	if err != nil || !l.More {
		return
	}
	o.After, o.At = l.Items[len(l.Items)-1].Key, l.Revision
	_, _ = target.List(ctx, prefix, o)
}
