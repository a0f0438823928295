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

// Options shape a workload. Zero values mean the defaults.
type Options struct {
	Prefix    string        // all keys lie under it (default "/linear/")
	Seed      uint64        // of the clients' choices
	Clients   int           // at each place (default 3)
	Followers int           // at each place, of the whole prefix (default 1); each place has one more of a part of it
	Keys      int           // that the clients contend for (default 6)
	Pace      time.Duration // between two calls of a client (default 4 ms)
	Timeout   time.Duration // of a call (default 3 s)
	TTL       time.Duration // of keys with one (default 300 ms)
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

// Place is where clients live: it gives the door that is there now, and false
// while there is none.
type Place func() (Door, bool)

// Workload is clients and followers at work.
type Workload struct {
	*Recorder
	opts    Options
	stop    chan struct{}
	clients sync.WaitGroup

	followers sync.WaitGroup
	lives     context.Context // ends when followers shall give up
	giveUp    context.CancelFunc
	curtain   atomic.Uint64 // the revision that followers have to see; 0 = not known yet
	waiting   atomic.Int64  // followers that have not
}

// Start begins to work on a store that can be reached now through the first place.
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
	w.lives, w.giveUp = context.WithCancel(context.Background())
	for n := range places {
		for i := range o.Followers + 1 {
			prefix := o.Prefix
			if i == o.Followers {
				prefix = w.narrow()
			}
			w.follow(n*(o.Followers+1)+i, prefix, n, places)
		}
		for i := range o.Clients {
			c := &client{w: w, id: n*o.Clients + i, place: places[n], last: make(map[string]raftstore.Revision)}
			c.rng = rand.New(rand.NewPCG(o.Seed, uint64(c.id)))
			w.clients.Add(1)
			go func() { defer w.clients.Done(); c.run() }()
		}
		w.clients.Add(1)
		go func() { defer w.clients.Done(); w.lead(n, places[n]) }()
	}
	return w, nil
}

// narrow is the part of the prefix that some followers watch alone.
func (w *Workload) narrow() string { return w.opts.Prefix + modelled + "1" }

// Stop ends the clients. Followers go on until Settle.
func (w *Workload) Stop() {
	close(w.stop)
	w.clients.Wait()
}

// Settle waits, on a store that is whole again, until all keys with a TTL have
// expired and every follower has seen the last commit. What does not happen
// before ctx ends is in the report. Call Stop before and Check after it.
func (w *Workload) Settle(ctx context.Context, d Door) *Report {
	defer w.followers.Wait()
	defer w.giveUp()
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
			rep.add(Expiry, "%d keys with TTL stay, error %v", len(l.Items), err)
			return rep
		}
	}
	rev, err := c.Commit(ctx, raftstore.Commit{Ops: []raftstore.Op{
		raftstore.Put(w.opts.Prefix+"~end", []byte("end")), raftstore.Put(w.narrow()+"~end", []byte("end of the part")),
	}})
	if err != nil {
		rep.add(WatchStuck, "the last commit failed: %v", err)
		return rep
	}
	w.curtain.Store(uint64(rev))
	for w.waiting.Load() > 0 {
		select {
		case <-poll.C:
		case <-ctx.Done():
			rep.add(WatchStuck, "%d followers have not seen the last revision %d", w.waiting.Load(), rev)
			return rep
		}
	}
	return rep
}

// follow starts a follower, which begins at one place and moves on by turns.
func (w *Workload) follow(id int, prefix string, at int, places []Place) {
	f := w.Follow(id, prefix)
	rng := rand.New(rand.NewPCG(w.opts.Seed, uint64(1_000_000+id)))
	enough := func(seen raftstore.Revision) bool {
		end := w.curtain.Load()
		return end != 0 && uint64(seen) >= end
	}
	w.waiting.Add(1)
	w.followers.Add(1)
	go func() {
		defer w.followers.Done()
		pace := time.NewTicker(10 * time.Millisecond)
		defer pace.Stop()
		for ; w.lives.Err() == nil; at++ {
			select {
			case <-pace.C:
			case <-w.lives.Done():
			}
			d, up := places[at%len(places)]()
			if !up {
				continue
			}
			// One tells everything from the beginning; the others begin anew now and then.
			if id > 0 && rng.IntN(6) == 0 {
				f.Forget()
			}
			// Those of a part also go back to any revision of the past, or to what
			// is left of it.
			if prefix != w.opts.Prefix && rng.IntN(2) == 0 {
				f.Rewind(raftstore.Revision(rng.Int64N(int64(f.Cursor()) + 1)))
			}
			// Some watches last long, most are given up after some deliveries.
			left := 1 + rng.IntN(400)
			ctx, cancel := context.WithTimeout(w.lives, time.Duration(50+rng.IntN(2000))*time.Millisecond)
			// Why it ended does not matter: it goes on from where it was.
			_ = f.Watch(ctx, d, func(seen raftstore.Revision) bool {
				left--
				return left <= 0 || enough(seen)
			})
			cancel()
			if enough(f.Cursor()) {
				w.waiting.Add(-1)
				return
			}
		}
	}()
}

// lead writes under the fence of every leadership at a place, and a little
// beyond its end, when it must not succeed any more.
func (w *Workload) lead(n int, place Place) {
	pace := time.NewTicker(10 * time.Millisecond)
	defer pace.Stop()
	for count := 0; w.pause(pace); {
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
			// The fence of whoever led before must not open anything here.
			before := w.Fence()
			w.commitFenced(d, n, &count, fence)
			if before != 0 && before != fence {
				w.commitFenced(d, n, &count, before)
			}
			for ctx.Err() == nil && w.pause(pace) {
				w.commitFenced(d, n, &count, fence)
			}
			for late := 0; late < 200 && w.Fence() <= fence && w.pause(pace); late++ {
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

// pause waits for the next tick; false when clients shall stop.
func (w *Workload) pause(pace *time.Ticker) bool {
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

// client makes random calls, one after the other.
type client struct {
	w     *Workload
	id, n int
	rng   *rand.Rand
	place Place
	last  map[string]raftstore.Revision // revisions at which keys were seen
}

func (c *client) run() {
	pace := time.NewTicker(c.w.opts.Pace)
	defer pace.Stop()
	for c.w.pause(pace) {
		d, up := c.place()
		if !up {
			continue
		}
		ctx, cancel := context.WithTimeout(context.Background(), c.w.opts.Timeout)
		c.step(ctx, c.w.Through(d))
		cancel()
	}
}

func (c *client) key() string {
	return fmt.Sprintf("%s%s%d", c.w.opts.Prefix, modelled, c.rng.IntN(c.w.opts.Keys))
}

// value is one that nobody else puts.
func (c *client) value() []byte {
	c.n++
	return fmt.Appendf(nil, "%d-%d", c.id, c.n)
}

// step makes one call, or two that belong together.
func (c *client) step(ctx context.Context, at Client) {
	switch n := c.rng.IntN(100); {
	case n < 28:
		c.get(ctx, at, raftstore.ReadOptions{})
	case n < 36:
		c.get(ctx, at, raftstore.ReadOptions{Local: true})
	case n < 46:
		c.list(ctx, at)
	case n < 48:
		_, _ = at.Sync(ctx)
	case n < 63:
		c.commit(ctx, at, raftstore.Put(c.key(), c.value()))
	case n < 80:
		c.commit(ctx, at, c.conditional(c.key()))
	case n < 88:
		a, b := c.conditional(c.key()), raftstore.Put(c.key(), c.value())
		if a.Key != b.Key {
			c.commit(ctx, at, a, b)
		}
	case n < 95:
		// A deletion names itself by what it puts beside.
		key := c.key()
		remove := raftstore.Delete(key)
		if c.rng.IntN(2) == 0 && c.last[key] != 0 {
			remove = raftstore.DeleteAt(key, c.last[key])
		}
		c.commit(ctx, at, remove, raftstore.Put(fmt.Sprintf("%smark/%d", c.w.opts.Prefix, c.id), c.value()))
	case n < 97:
		key := c.key()
		c.commit(ctx, at, raftstore.Op{Kind: raftstore.OpCheck, Key: key, If: c.condition(key)})
	default:
		// One that is renewed, or one that nobody puts again, and so stays for ever if its end is forgotten.
		key := fmt.Sprintf("%sttl/%d", c.w.opts.Prefix, c.id)
		if c.rng.IntN(2) == 0 {
			key += fmt.Sprintf("/%d", c.n)
		}
		op := raftstore.Put(key, c.value())
		op.TTL = c.w.opts.TTL/2 + time.Duration(c.rng.Int64N(int64(c.w.opts.TTL)))
		op.TTL = op.TTL.Round(time.Millisecond)
		c.commit(ctx, at, op)
	}
}

func (c *client) condition(key string) raftstore.Precondition {
	if at := c.last[key]; at != 0 {
		return raftstore.Precondition{Revision: at}
	}
	return raftstore.Precondition{Absent: true}
}

func (c *client) conditional(key string) raftstore.Op {
	return raftstore.Op{Kind: raftstore.OpPut, Key: key, Value: c.value(), If: c.condition(key)}
}

func (c *client) commit(ctx context.Context, at Client, ops ...raftstore.Op) {
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
		c.note(conflict.Key, conflict.Have)
	}
}

func (c *client) note(key string, it *raftstore.Item) {
	if it == nil {
		delete(c.last, key)
		return
	}
	c.last[key] = it.Modified
}

func (c *client) get(ctx context.Context, at Client, o raftstore.ReadOptions) {
	key := c.key()
	it, _, err := at.Get(ctx, key, o)
	switch {
	case err == nil:
		c.note(key, &it)
	case errors.Is(err, raftstore.ErrNotFound):
		c.note(key, nil)
	}
}

// list reads everything at once, or in two pages of one revision.
func (c *client) list(ctx context.Context, at Client) {
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
	l, err := at.List(ctx, prefix, o)
	if err != nil || !l.More {
		return
	}
	o.After, o.At = l.Items[len(l.Items)-1].Key, l.Revision
	_, _ = at.List(ctx, prefix, o)
}
