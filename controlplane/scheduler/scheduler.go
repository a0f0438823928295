// Package scheduler assigns pods to nodes. Its thinking is Schedule, a function of
// a snapshot of the cluster and a pod; plugins say what fits and what is better.
// Everything else is a thin shell: a queue fed by informers, a cache with the pods that
// have been bound but not yet seen bound, and bindings in flight.
package scheduler

import (
	"context"
	"log/slog"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// Config is everything a Scheduler needs.
type Config struct {
	// Client calls as the scheduler (client.As(api.User{Name: api.UserScheduler ...})).
	Client    *client.Client
	Informers *client.Informers // New registers its informers; the server runs them
	Actor     string            // names this replica in timelines: "scheduler/cp2"
	Timeline  *api.Timeline     // may be nil
	Log       *slog.Logger      // may be nil
}

// Scheduler schedules while its replica leads.
type Scheduler struct{ cfg Config }

// New prepares a scheduler and registers its informers. Nothing runs until Run.
func New(cfg Config) *Scheduler { return &Scheduler{cfg: cfg} }

// Run schedules until ctx (the leadership) ends; every write carries fence, the term of the
// leadership. The informers must be synced. It may be called again for a later leadership.
func (s *Scheduler) Run(ctx context.Context, fence uint64) error { <-ctx.Done(); return ctx.Err() }
