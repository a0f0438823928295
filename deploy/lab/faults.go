package lab

import (
	"context"
	"fmt"
	"syscall"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// KillDaemon kills the daemon of the named host with SIGKILL, and waits until it has exited.
// Containers and their shims continue.
func (l *Lab) KillDaemon(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	pid := h.daemonPID()
	if pid == 0 {
		return fmt.Errorf("lab: the daemon of host %s is not running: start it with 'kctl lab restart %s'", name, name)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		return fmt.Errorf("lab: killing the daemon of host %s: %w", name, err)
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return wait.For(ctx, time.Millisecond, func() error {
		if !isZombie(pid) { // outside the cgroup, an exiting process still holds its locks
			return fmt.Errorf("the daemon of host %s (pid %d) is still there", name, pid)
		}
		return nil
	})
}

// Kill simulates a power failure of the named host. Its processes, mounts, and /run are removed,
// and its disk stays. The kernel closes the sockets of killed processes, so that their peers notice
// it. For a failure that peers do not notice, call Partition first.
func (l *Lab) Kill(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := h.cutPower(ctx); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	// Interfaces of pods are removed with their namespaces. Restart creates the host's interface
	// again.
	return h.removeNetNS()
}

// Restart starts the named host again after Kill, or its daemon after KillDaemon or Stop. If the
// daemon is running, it is stopped gracefully first. Restart does not wait until the daemon is
// ready, except for the registry.
func (l *Lab) Restart(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := l.Stop(ctx, name); err != nil {
		return err
	}
	if !fileExists(h.NetNS()) {
		if err := l.hosts().connectHost(h); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if !fileExists(h.MountNS()) {
		if err := l.hosts().createHost(h); err != nil {
			return fmt.Errorf("lab: %w", err)
		}
	}
	if err := l.hosts().startDaemon(h); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	if h.Role == RoleRegistry {
		if err := l.registry().waitRegistry(ctx); err != nil { // so that later image pulls succeed
			return fmt.Errorf("lab: %w", err)
		}
	}
	return nil
}

// RestartDaemon stops the daemon of the named host gracefully, and starts it again. Containers
// continue. It returns an error after Kill, because the namespaces of the host must exist.
func (l *Lab) RestartDaemon(ctx context.Context, name string) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if !fileExists(h.NetNS()) || !fileExists(h.MountNS()) {
		return fmt.Errorf("lab: host %s has no power, so it has no daemon to restart: start the host with 'kctl lab "+
			"restart %s'", name, name)
	}
	return l.Restart(ctx, name)
}

// Stop stops the daemon of the named host with SIGTERM. If the daemon has not exited after 15
// seconds, it is killed with SIGKILL. Stop does nothing if the daemon is not running.
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

// Pause freezes all processes of the named host. Resume thaws them.
func (l *Lab) Pause(name string) error  { return l.setHostFrozen(name, true) }
func (l *Lab) Resume(name string) error { return l.setHostFrozen(name, false) }

func (l *Lab) setHostFrozen(name string, on bool) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := setFrozen(h.CgroupPath(), on); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return nil
}

// Partition disconnects the named host from the network: it sets that end of the host's veth pair
// down which is connected to the bridge.
func (l *Lab) Partition(name string) error { return l.setCable(name, false) }

// Heal connects the named host to the network again, and thaws its processes. It reverses Partition
// and Pause.
func (l *Lab) Heal(name string) error {
	if err := l.setCable(name, true); err != nil {
		return err
	}
	return l.setHostFrozen(name, false)
}

func (l *Lab) setCable(name string, up bool) error {
	h, err := l.Host(name)
	if err != nil {
		return err
	}
	if err := h.setCableUp(up); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	return nil
}
