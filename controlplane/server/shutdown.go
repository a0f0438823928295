package server

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"keelson.dev/keelson/raftstore"
)

// runAPI runs the API server until the context shutdown or the context running ends. When shutdown
// ends, the replica shuts down: runAPI transfers leadership, stops the API server, and calls
// stopAll, which stops all other components. Leadership is transferred first, so that the virtual
// IP address has moved to another replica before this replica refuses connections.
func (r *Replica) runAPI(shutdown, running context.Context, stopAll func()) error {
	ctx, cancel := context.WithCancel(running)
	defer cancel()
	var waiting sync.WaitGroup
	waiting.Go(func() {
		select {
		case <-shutdown.Done():
			r.transferLeadership(ctx)
		case <-ctx.Done():
		}
		cancel()
	})
	err := r.api.server.Run(ctx)
	cancel()
	waiting.Wait()
	if shutdown.Err() != nil {
		stopAll()
	}
	return err
}

// transferTimeout is the timeout of the leadership transfer that a replica attempts before it stops
// its API server. If the transfer fails, the store tries again when the store itself stops.
const transferTimeout = 2 * time.Second

// transferLeadership transfers leadership to another voter if this replica is the leader and
// another voter exists. It logs a failure.
func (r *Replica) transferLeadership(ctx context.Context) {
	s := r.store.Status()
	if s.Leader != r.cfg.Name || !slices.ContainsFunc(s.Members, func(m raftstore.Member) bool {
		return m.Voter && m.ID != r.cfg.Name
	}) {
		return
	}
	limited, cancel := context.WithTimeout(ctx, transferTimeout)
	defer cancel()
	if err := r.store.TransferLeadership(limited); err != nil && !errors.Is(err, raftstore.ErrNotLeader) {
		r.log.Warn("leadership could not be transferred before the API stops", "err", err)
	}
}
