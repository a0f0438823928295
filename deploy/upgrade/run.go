package upgrade

import (
	"context"
	"errors"
	"fmt"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// Cluster is a cluster that is upgraded. Each deed may be done again after it was cut off.
type Cluster interface {
	// Look says how the cluster is now. It may fail while a replica is exchanged, and is asked again.
	Look(ctx context.Context) (State, error)
	// HandOver has another replica lead.
	HandOver(ctx context.Context, from, to string) error
	// Replica and Agent put the goal's programs in place of those of a host, and start its daemon again. They need not wait
	// until it is well.
	Replica(ctx context.Context, name string) error
	Agent(ctx context.Context, node string) error
	// Drain has all pods leave a node, and notes it there; Return undoes both. A node that took no pods before stays so.
	Drain(ctx context.Context, node string) error
	Return(ctx context.Context, node string) error
}

// Options say how Run goes about it.
type Options struct {
	Patience time.Duration // for something to become well after its step
	Say      func(format string, args ...any)
}

// lookEvery is how often the cluster is looked at while something is waited for.
const lookEvery = 100 * time.Millisecond

// ErrStopped says that an upgrade has stopped at something that is not well. What was not begun is as it was.
var ErrStopped = errors.New("stopped")

// Run does all that is left to do, one step after the other, and returns when everything has the goal's programs and is well.
// It stops at the first step that fails, or after which its replica or node is not well in time. Run again, it goes on.
func Run(ctx context.Context, c Cluster, g Goal, o Options) error {
	for {
		step, err := next(ctx, c, g, o)
		if err != nil {
			return err
		}
		if step.Do == Finish {
			o.Say("%v", step)
			return nil
		}
		if err := do(ctx, c, step); err != nil {
			return fmt.Errorf("%w at this step: %v: %w", ErrStopped, step, err)
		}
		at, err := settle(ctx, c, g, step, o.Patience)
		if err != nil {
			return fmt.Errorf("%w after this step: %v: %w", ErrStopped, step, err)
		}
		if step.Do != Await {
			o.Say("%v%s", step, at.progress(g))
		}
	}
}

// settle waits until a step has come about.
func settle(ctx context.Context, c Cluster, g Goal, step Step, patience time.Duration) (at State, err error) {
	missing := errors.New("the cluster has not answered")
	err = within(ctx, patience, func(ctx context.Context) error {
		s, err := c.Look(ctx)
		switch why := s.missing(step, g); {
		case err != nil && ctx.Err() != nil:
			return missing // what was seen before says more than that the time is up
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

// next looks until the cluster answers.
func next(ctx context.Context, c Cluster, g Goal, o Options) (step Step, err error) {
	var refused error
	err = within(ctx, o.Patience, func(ctx context.Context) error {
		s, err := c.Look(ctx)
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

func do(ctx context.Context, c Cluster, s Step) error {
	switch s.Do {
	case HandOver:
		return c.HandOver(ctx, s.On, s.To)
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

// progress says how much has the goal's programs.
func (s State) progress(g Goal) string {
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

// within looks until something is so. Looking is work for the machine that is asked, which may be the one that is waited for: one
// that is slow to answer has as long for itself in between.
func within(ctx context.Context, limit time.Duration, cond func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return wait.For(ctx, lookEvery, func() error {
		began := time.Now()
		err := cond(ctx)
		if took := time.Since(began); err != nil && took > lookEvery {
			_ = wait.Delay(ctx, took)
		}
		return err
	})
}
