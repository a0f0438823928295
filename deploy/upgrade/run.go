package upgrade

import (
	"context"
	"errors"
	"fmt"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// Cluster carries out the steps of an upgrade on a cluster. Each method may be called again after
// an interruption.
type Cluster interface {
	// ReadState returns the current state. It may fail while a replica is upgraded. Run then calls
	// it again.
	ReadState(ctx context.Context) (State, error)
	// TransferLeadership transfers the raft leadership from the replica leader to the replica
	// target.
	TransferLeadership(ctx context.Context, leader, target string) error
	// Replica and Agent install the goal's release on the named host, and restart the daemon there.
	// They need not wait until the daemon is healthy.
	Replica(ctx context.Context, name string) error
	Agent(ctx context.Context, node string) error
	// Drain cordons a node, moves its pods to other nodes, and records this, so that ReadState
	// returns the node with Drained set. Return removes the record and uncordons the node. A node
	// that was cordoned before Drain stays cordoned.
	Drain(ctx context.Context, node string) error
	Return(ctx context.Context, node string) error
}

// Options configures Run. Say prints a progress message.
type Options struct {
	Patience time.Duration // maximum time to wait for the effect of a step
	Say      func(format string, args ...any)
}

// pollInterval is the time between two calls of ReadState while Run waits.
const pollInterval = 100 * time.Millisecond

// ErrStopped is returned by Run if a step has failed, or if its replica or node did not become
// healthy in time. The remaining steps were not started.
var ErrStopped = errors.New("stopped")

// Run upgrades the cluster c to the goal g: it carries out the steps of Next, one after the other.
// It returns nil when all replicas and nodes have the release and are healthy. It stops at the
// first step that fails, or after which the replica or node does not become healthy in time.
// Another call of Run continues from there.
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

// awaitStep waits until a step has its effect, and returns the resulting state of the cluster. It
// waits at most for the duration patience, and then returns the reason why the step has no effect
// yet.
func awaitStep(ctx context.Context, c Cluster, g Goal, step Step, patience time.Duration) (state State, err error) {
	missing := errors.New("the cluster has not answered")
	err = pollUntil(ctx, patience, func(ctx context.Context) error {
		s, err := c.ReadState(ctx)
		switch why := s.pendingReason(step, g); {
		case err != nil && ctx.Err() != nil:
			return missing // the reason of an earlier attempt is more useful than the timeout
		case err != nil:
			missing = err
		case why != "":
			missing = errors.New(why)
		default:
			state = s
			return nil
		}
		return missing
	})
	return state, err
}

// awaitNext reads the current state, and returns the result of Next for it. If the state cannot be
// read, it retries for at most Options.Patience.
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

// describeProgress returns a text with the numbers of replicas and nodes that have the goal's
// release.
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

// pollUntil calls cond every pollInterval until it returns nil, for at most limit. After a failed
// call that took longer than pollInterval, it waits for at least the duration of that call. The
// reason is that cond uses the resources of the machine that must become healthy.
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
