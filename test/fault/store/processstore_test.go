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

// processStore is the store as served by one process of a replica. The client reconnects to the
// next process of the replica; a local read that may have reached the next process fails.
type processStore struct {
	raftstore.Store
	member        *storeproc.Member
	processNumber int
}

var _ raftstore.Leader = (*processStore)(nil)

// memberPlace returns the place of the n-th member, if it exists and its process runs.
func memberPlace(g *storeproc.Group, n int) linear.Place {
	return func() (linear.Door, bool) {
		members := g.Members()
		if n >= len(members) {
			return linear.Door{}, false
		}
		return processStoreOf(members[n])
	}
}

func processStoreOf(m *storeproc.Member) (linear.Door, bool) {
	d := &processStore{Store: m.Store(), member: m, processNumber: m.ProcessCount()}
	if !m.Running() {
		return linear.Door{}, false
	}
	return linear.Door{Name: fmt.Sprintf("%s, start %d", m.Name, d.processNumber), Store: d}, true
}

// rejectOtherLife turns the result of a local read of a later process into an error.
func (d *processStore) rejectOtherLife(local bool, err error) error {
	if local && (err == nil || errors.Is(err, raftstore.ErrNotFound)) && d.member.ProcessCount() != d.processNumber {
		return fmt.Errorf("%w: the process of %s ended", raftstore.ErrUnavailable, d.member.Name)
	}
	return err
}

// answerReserve is more than the part of a deadline that the server reserves for the response.
const answerReserve = 150 * time.Millisecond

// Commit implements raftstore.Store. A response shortly before the deadline may have been sent
// because the server's part of the deadline was over, before the commit was applied at this
// replica. It counts as a response at the deadline.
func (d *processStore) Commit(ctx context.Context, c raftstore.Commit) (raftstore.Revision, error) {
	rev, err := d.Store.Commit(ctx, c)
	if deadline, ok := ctx.Deadline(); ok && err == nil && time.Until(deadline) < answerReserve {
		<-ctx.Done()
	}
	return rev, err
}

// Get implements raftstore.Store.
func (d *processStore) Get(ctx context.Context, key string, o raftstore.ReadOptions) (
	raftstore.Item, raftstore.Revision, error,
) {
	it, rev, err := d.Store.Get(ctx, key, o)
	return it, rev, d.rejectOtherLife(o.Local, err)
}

// List implements raftstore.Store.
func (d *processStore) List(ctx context.Context, prefix string, o raftstore.ListOptions) (raftstore.List, error) {
	l, err := d.Store.List(ctx, prefix, o)
	return l, d.rejectOtherLife(o.Local, err)
}

// Lead implements raftstore.Leader.
func (d *processStore) Lead(ctx context.Context, lead func(ctx context.Context, fence raftstore.Fence) error) error {
	return d.Store.(raftstore.Leader).Lead(ctx, lead)
}

// readImpatiently reads at every place continuously without waiting for earlier reads: a replica
// that resumes after a pause then has reads that started after the others continued without it. The
// returned function ends the reads and waits for them.
func readImpatiently(w *linear.Workload, prefix string, places []linear.Place) (enough func()) {
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
					ctx, cancel := withTimeout(timeout)
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
