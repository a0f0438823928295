package upgrade

import (
	"context"
	"errors"
	"fmt"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// Cluster is the cluster that is upgraded. Each operation can be repeated after an interruption.
type Cluster interface {
	// ReadState returns the current state. It may fail while a replica is upgraded, and is then
	// called again.
	ReadState(ctx context.Context) (State, error)
	// TransferLeadership makes another replica the leader.
	TransferLeadership(ctx context.Context, from, to string) error
	// Replica and Agent install the goal's programs on a host and restart its daemon. They need not
	// wait until it is healthy.
	Replica(ctx context.Context, name string) error
	Agent(ctx context.Context, node string) error
	// Drain moves all pods off a node and records that; Return undoes both. A node that was already
	// cordoned stays cordoned.
	Drain(ctx context.Context, node string) error
	Return(ctx context.Context, node string) error
}

// Options configures Run.
type Options struct {
	Patience time.Duration // maximum time until a step has its effect
	Say      func(format string, args ...any)
}

// pollInterval is how often the state is read while Run waits.
const pollInterval = 100 * time.Millisecond

// ErrStopped means that an upgrade has stopped because something is unhealthy. Steps that were not
// started have no effect.
var ErrStopped = errors.New("stopped")

// Run does all remaining steps one after the other, and returns when everything has the goal's
// programs and is healthy. It stops if a step fails, or if the step's replica or node does not
// become healthy in time. A new Run continues.
func Run(ctx context.Context, c Cluster, g Goal, o Options) error {
	for {
		step, err := awaitNext(ctx, c, g, o)
		if err != nil {
			return err
		}
		if step.Do == Finish {
			o.Say("%v", step)
			return nil
		}
		if err := doStep(ctx, c, step); err != nil {
			return fmt.Errorf("%w at this step: %v: %w", ErrStopped, step, err)
		}
		at, err := awaitStep(ctx, c, g, step, o.Patience)
		if err != nil {
			return fmt.Errorf("%w after this step: %v: %w", ErrStopped, step, err)
		}
		if step.Do != Await {
			o.Say("%v%s", step, at.describeProgress(g))
		}
	}
}

// awaitStep waits until a step has its effect.
func awaitStep(ctx context.Context, c Cluster, g Goal, step Step, patience time.Duration) (at State, err error) {
	missing := errors.New("the cluster has not answered")
	err = pollUntil(ctx, patience, func(ctx context.Context) error {
		s, err := c.ReadState(ctx)
		switch why := s.pendingReason(step, g); {
		case err != nil && ctx.Err() != nil:
			return missing // an earlier reason is more useful than the timeout
		case err != nil:
			missing = err
		case why != "":
			missing = errors.New(why)
		default:
			at = s
			return nil
		}
		return missing
	})
	return at, err
}

// awaitNext returns the next step as soon as the cluster answers.
func awaitNext(ctx context.Context, c Cluster, g Goal, o Options) (step Step, err error) {
	var refused error
	err = pollUntil(ctx, o.Patience, func(ctx context.Context) error {
		s, err := c.ReadState(ctx)
		if err == nil {
			step, refused = Next(s, g)
		}
		return err
	})
	if err == nil {
		err = refused
	}
	return step, err
}

func doStep(ctx context.Context, c Cluster, s Step) error {
	switch s.Do {
	case TransferLead:
		return c.TransferLeadership(ctx, s.On, s.To)
	case Replica:
		return c.Replica(ctx, s.On)
	case Agent:
		return c.Agent(ctx, s.On)
	case Drain:
		return c.Drain(ctx, s.On)
	case Return:
		return c.Return(ctx, s.On)
	}
	return nil
}

// describeProgress returns how many replicas and nodes have the goal's programs.
func (s State) describeProgress(g Goal) string {
	members, nodes := 0, 0
	for _, m := range s.Members {
		if m.Release == g.Release {
			members++
		}
	}
	for _, n := range s.Nodes {
		if n.Release == g.Release {
			nodes++
		}
	}
	return fmt.Sprintf(" (%d of %d replicas, %d of %d nodes)", members, len(s.Members), nodes, len(s.Nodes))
}

// pollUntil calls cond until it returns nil. A call is work for the observed machine, which may be
// the one that must recover, so a slow call is followed by a pause of the same length.
func pollUntil(ctx context.Context, limit time.Duration, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return wait.For(ctx, pollInterval, func() error {
		began := time.Now()
		err := cond(ctx)
		if took := time.Since(began); err != nil && took > pollInterval {
			_ = wait.Delay(ctx, took)
		}
		return err
	})
}
