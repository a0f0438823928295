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

// Remove carries out the steps of plan.Remove, one after the other. It stops at the first error.
func (s *Site) Remove(ctx context.Context, steps []plan.Step) error {
	for _, step := range steps {
		began := time.Now()
		if err := s.removeStep(ctx, step); err != nil {
			return fmt.Errorf("%s: %s: %w", step.Machine, step, err)
		}
		s.Printf("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
	}
	return nil
}

func (s *Site) removeStep(ctx context.Context, step plan.Step) (err error) {
	name := step.Machine
	switch step.Do {
	case plan.Drain:
		_, err = s.runKctl(ctx, drainTimeout+apiTimeout, "drain", name, "--ignore-daemonsets", "--delete-emptydir-data",
			"--force", "--timeout="+drainTimeout.String())
	case plan.Cordon:
		_, err = s.runKctl(ctx, apiTimeout, "cordon", name)
	case plan.Leave:
		if _, err = s.runKctl(ctx, apiTimeout, "cluster", "member", "remove", name); err == nil {
			err = s.awaitRemoved(ctx, name)
		}
	case plan.Uninstall:
		err = s.runUninstaller(ctx, name)
	case plan.DeleteNode:
		_, err = s.runKctl(ctx, apiTimeout, "delete", "node", name, "--ignore-not-found", "--wait=false")
	default:
		err = errors.New("this is no part of a removal")
	}
	return err
}

// awaitRemoved waits until the raft cluster has no member with the given name.
func (s *Site) awaitRemoved(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeout(ctx, readyTimeout)
	defer cancel()
	return wait.For(ctx, pollInterval, func() error {
		members, err := s.queryMembers(ctx)
		if _, still := members[name]; err == nil && still {
			err = errors.New("it is a member still")
		}
		return err
	})
}

// runUninstaller runs uninstall.sh on a machine, which removes all programs and data of Keelson. If
// uninstall.sh is not installed, because an installation was interrupted early, it runs
// uninstall.sh of an uploaded release.
func (s *Site) runUninstaller(ctx context.Context, name string) error {
	_, err := s.runScript(ctx, name, installTimeout, `root=${DESTDIR:-}
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

// Reset uninstalls Keelson from machines with the steps of plan.Reset, in groups. The steps of a
// group are carried out in parallel, and the next group follows. After an error on a machine, it
// continues with the other machines, and returns all errors.
func (s *Site) Reset(ctx context.Context, groups ...[]plan.Step) error {
	var errs []error
	for _, steps := range groups {
		failed := make([]error, len(steps))
		var g errgroup.Group
		g.SetLimit(maxAgents)
		for i, step := range steps {
			g.Go(func() error {
				began := time.Now()
				if err := s.runUninstaller(ctx, step.Machine); err != nil {
					failed[i] = fmt.Errorf("%s: %w", step, err)
					return nil
				}
				s.Printf("%s: %s: done in %.0fs", step.Machine, step, time.Since(began).Seconds())
				return nil
			})
		}
		_ = g.Wait() // failed contains the error of each machine
		errs = append(errs, failed...)
	}
	return errors.Join(errs...)
}
