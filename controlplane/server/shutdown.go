package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// serve runs the API until told ends, or all does; then it ends all. Another replica leads before the API ends, so that the
// address that replicas share is elsewhere by the time at which nobody is let in here any more.
func (r *Replica) serve(told, all context.Context, end func()) error {
	ctx, cancel := context.WithCancel(all)
	defer cancel()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-told.Done():
			r.leadNoMore(ctx)
		case <-ctx.Done():
		}
		cancel()
	})
	err := r.api.Run(ctx)
	cancel()
	waiting.Wait()
	if told.Err() != nil {
		end()
	}
	return err
}

// mostLeaving bounds how long a leader that was told to end looks for a successor before its API ends. The store looks again.
const mostLeaving = 2 * time.Second

// leadNoMore hands leadership over, where this replica has it and another one has a vote. It does not ask another leader to
// step down, should there be one by now.
func (r *Replica) leadNoMore(ctx context.Context) {
	s := r.store.Status()
	if s.Leader != r.cfg.Name || !slices.ContainsFunc(s.Members, func(m raftstore.Member) bool { return m.Voter && m.ID != r.cfg.Name }) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, mostLeaving)
	defer cancel()
	if err := r.store.TransferLeadership(limited); err != nil && !errors.Is(err, raftstore.ErrNotLeader) {
		r.log.Warn("this replica ends, leads still, and has not handed over before its API ends", "err", err)
	}
}
