package store

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/storetest/linear"
	"keelson.dev/keelson/test/testenv/storeproc"
)

// door is a replica from one start of its process to the end of it. The client
// below reconnects to the next process; a local read that may have reached that
// one is not this door's, whose local reads never go back.
type door struct {
	raftstore.Store
	member *storeproc.Member
	life   int
}

var _ raftstore.Leader = (*door)(nil)

// place is where the n-th member is, if there is one and its process runs.
func place(g *storeproc.Group, n int) linear.Place {
	return func() (linear.Door, bool) {
		members := g.Members()
		if n >= len(members) {
			return linear.Door{}, false
		}
		return doorOf(members[n])
	}
}

func doorOf(m *storeproc.Member) (linear.Door, bool) {
	d := &door{Store: m.Store(), member: m, life: m.Lives()}
	if !m.Running() {
		return linear.Door{}, false
	}
	return linear.Door{Name: fmt.Sprintf("%s, start %d", m.Name, d.life), Store: d}, true
}

// own turns the result of a local read of a later life into one that failed.
func (d *door) own(local bool, err error) error {
	if local && (err == nil || errors.Is(err, raftstore.ErrNotFound)) && d.member.Lives() != d.life {
		return fmt.Errorf("%w: the process of %s ended", raftstore.ErrUnavailable, d.member.Name)
	}
	return err
}

// answerReserve is more than what the server keeps of a deadline for the answer's way back.
const answerReserve = 150 * time.Millisecond

// Commit implements raftstore.Store. An answer in the last moment may have come
// because the server's part of the deadline was over, before the commit was
// applied at this replica. It counts as one that came at the deadline.
func (d *door) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	rev, err := d.Store.Commit(ctx, c)
	if deadline, ok := ctx.Deadline(); ok && err == nil && time.Until(deadline) < answerReserve {
		<-ctx.Done()
	}
	return rev, err
}

// Get implements raftstore.Store.
func (d *door) Get(ctx context.Context, key string, o raftstore.ReadOptions) (raftstore.Item, raftstore.Revision, error) {
	it, rev, err := d.Store.Get(ctx, key, o)
	return it, rev, d.own(o.Local, err)
}

// List implements raftstore.Store.
func (d *door) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	l, err := d.Store.List(ctx, prefix, o)
	return l, d.own(o.Local, err)
}

// Lead implements raftstore.Leader.
func (d *door) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	return d.Store.(raftstore.Leader).Lead(ctx, lead)
}

// impatient reads at every place again and again without waiting for earlier
// reads: a replica that comes back from a pause finds some that began after
// others have gone on without it. The result ends it and waits for the rest.
func impatient(w *linear.Workload, prefix string, places []linear.Place) (enough func()) {
	const (
		every   = 80 * time.Millisecond
		timeout = 600 * time.Millisecond // more of them at once, and no order can be found in time
		keys    = 6                      // as many as the workload has
	)
	var all sync.WaitGroup
	stop := make(chan struct{})
	all.Go(func() {
		pace := time.NewTicker(every)
		defer pace.Stop()
		for n := 0; ; n++ {
			select {
			case <-pace.C:
			case <-stop:
				return
			}
			for _, at := range places {
				d, up := at()
				if !up {
					continue
				}
				all.Go(func() {
					ctx, cancel := bounded(timeout)
					defer cancel()
					_, _, _ = w.Through(d).Get(ctx, fmt.Sprintf("%sk/%d", prefix, n%keys), raftstore.ReadOptions{})
				})
			}
		}
	})
	return func() {
		close(stop)
		all.Wait()
	}
}
