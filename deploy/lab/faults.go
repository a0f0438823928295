package lab

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// KillDaemon kills the host's daemon alone with SIGKILL; containers and shims stay.
func (l *Lab) KillDaemon(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	pid := h.daemonPID()
	if pid == 0 {
		return fmt.Errorf("lab: the daemon of host %s does not run: start it with 'kctl lab restart %s'", name, name)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("lab: killing the daemon of host %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return wait.For(ctx, time.Millisecond, func() error {
		if !isZombie(pid) { // what is about to end is not the host's any more, and still has its locks
			return fmt.Errorf("the daemon of host %s (pid %d) is still there", name, pid)
		}
		return nil
	})
}

// Kill cuts the host's power: every process, mount and everything in its /run is gone. Its disk stays. The machine's kernel
// lives on and closes what the processes had open, which others hear: Partition first makes the end a silent one.
func (l *Lab) Kill(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := h.powerCut(ctx); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	// Interfaces of pods go with their namespaces; the host's own comes back new.
	return h.removeNetNS()
}

// Restart starts the host again after Kill, or its daemon after KillDaemon or Stop.
// A daemon that runs is stopped first, as a service manager would.
func (l *Lab) Restart(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := l.Stop(ctx, name); err != nil {
		return err
	}
	if !exists(h.NetNS()) {
		if err := l.plug(h); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if !exists(h.MountNS()) {
		if err := l.powerOn(h); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if err := l.start(h); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if h.Role == RoleRegistry {
		if err := l.waitRegistry(ctx); err != nil { // so that what is pulled next is found
			return fmt.Errorf("lab: %w", err)
		}
	}
	return nil
}

// RestartDaemon starts the host's daemon again, as a service manager would: one that runs is stopped in good order
// first. The host itself must have power; containers stay.
func (l *Lab) RestartDaemon(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if !exists(h.NetNS()) || !exists(h.MountNS()) {
		return fmt.Errorf("lab: host %s has no power, so it has no daemon to restart: start the host with 'kctl lab restart %s'", name, name)
	}
	return l.Restart(ctx, name)
}

// Stop ends the host's daemon in good order (SIGTERM, after 15 s SIGKILL). A stopped one is fine.
func (l *Lab) Stop(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	pid := h.daemonPID()
	if pid == 0 {
		return nil
	}
	_ = syscall.Kill(pid, syscall.SIGTERM)
	graceful, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	if wait.For(graceful, 5*time.Millisecond, func() error {
		if !isZombie(pid) {
			return fmt.Errorf("still running")
		}
		return nil
	}) == nil {
		return nil
	}
	return l.KillDaemon(ctx, name)
}

// Pause freezes every process of the host, Resume lets them go on.
func (l *Lab) Pause(name string) error  { return l.freeze(name, true) }
func (l *Lab) Resume(name string) error { return l.freeze(name, false) }

func (l *Lab) freeze(name string, on bool) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := freeze(h.CgroupPath(), on); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return nil
}

// Partition unplugs the host's cable, Heal plugs it in again (and thaws the host).
func (l *Lab) Partition(name string) error { return l.connect(name, false) }

// Heal undoes Partition and Pause.
func (l *Lab) Heal(name string) error {
	if err := l.connect(name, true); err != nil {
		return err
	}
	return l.freeze(name, false)
}

func (l *Lab) connect(name string, up bool) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := h.connect(up); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return nil
}
