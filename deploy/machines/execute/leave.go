package execute

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/deploy/machines/plan"
	"keelson.dev/keelson/internal/wait"
)

// Remove carries out what plan.Remove has planned, one step after the other.
func (s *Site) Remove(ctx context.Context, steps []plan.Step) error {
	for _, step := range steps {
		began := time.Now()
		if err := s.removal(ctx, step); err != nil {
			return fmt.Errorf("%s: %s: %w", step.Machine, step, err)
		}
		s.Tell("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
	}
	return nil
}

func (s *Site) removal(ctx context.Context, step plan.Step) (err error) {
	name := step.Machine
	switch step.Do {
	case plan.Drain:
		_, err = s.kctl(ctx, drainLimit+apiLimit, "drain", name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout="+drainLimit.String())
	case plan.Cordon:
		_, err = s.kctl(ctx, apiLimit, "cordon", name)
	case plan.Leave:
		if _, err = s.kctl(ctx, apiLimit, "cluster", "member", "remove", name); err == nil {
			err = s.awaitLeft(ctx, name)
		}
	case plan.Uninstall:
		err = s.uninstall(ctx, name)
	case plan.Forget:
		_, err = s.kctl(ctx, apiLimit, "delete", "node", name, "--ignore-not-found", "--wait=false")
	default:
		err = errors.New("this is no part of a removal")
	}
	return err
}

// awaitLeft waits until the group names a replica no more.
func (s *Site) awaitLeft(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, readyLimit)
	defer cancel()
	return wait.For(ctx, pollEvery, func() error {
		members, err := s.members(ctx)
		if _, still := members[name]; err == nil && still {
			err = errors.New("it is a member still")
		}
		return err
	})
}

// uninstall has uninstall.sh take everything away. Where it is not there, an installation was cut off before it had anything started.
func (s *Site) uninstall(ctx context.Context, name string) error {
	_, err := s.run(ctx, name, installLimit, `root=${DESTDIR:-}
at=$root/usr/lib/keelson/uninstall.sh
if [ -e "$at" ]; then exec sh "$at"; fi
for t in "$root/var/cache/keelson"/keelson-*.tar.gz; do
  [ -e "$t" ] || continue
  work=$(mktemp -d) && tar -xzf "$t" -C "$work" --no-same-owner && sh "$work"/*/uninstall.sh && rm -rf "$work"
  exit
done
echo "there is no uninstall.sh in /usr/lib/keelson: run that of a release there" >&2
exit 1`, nil)
	return err
}

// Reset carries out what plan.Reset has planned: those of each rank side by side. What fails on one machine keeps no other from it.
func (s *Site) Reset(ctx context.Context, ranks ...[]plan.Step) error {
	var errs []error
	for _, steps := range ranks {
		failed := make([]error, len(steps))
		var g errgroup.Group
		g.SetLimit(agentsAtOnce)
		for i, step := range steps {
			g.Go(func() error {
				began := time.Now()
				if err := s.uninstall(ctx, step.Machine); err != nil {
					failed[i] = fmt.Errorf("%s: %w", step, err)
					return nil
				}
				s.Tell("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
				return nil
			})
		}
		_ = g.Wait() // each machine's error is its own
		errs = append(errs, failed...)
	}
	return errors.Join(errs...)
}
