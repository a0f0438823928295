package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"keelson.dev/keelson/internal/wait"
)

// startTimeout is the maximum time until a started daemon is ready. It normally takes seconds, but
// much longer on a busy or emulated machine. If a daemon exits, the wait ends at once.
const startTimeout = 3 * time.Minute

// Up creates the lab on this machine and starts it. It returns when every replica and every worker
// is ready. After an error, it removes everything, and keeps copies of the daemons' logs.
func (l *Lab) Up(ctx context.Context) (err error) {
	if err := l.removeRemains(ctx); err != nil {
		return err
	}
	if err := l.Preflight(); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			down, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
			defer cancel()
			l.keepLogs()
			err = errors.Join(err, l.Down(down))
		}
	}()
	step := l.stepPrinter()
	l.Config.Maker = thisProcess()
	if err := l.markBusy(); err != nil {
		return err
	}
	if err := l.createHosts(l.registry().copyImages); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("%d hosts on %s, no route out", len(l.Config.Hosts), l.Config.describeNetwork())
	if err := l.startAll(ctx, step); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	l.Config.Built = true
	if err := l.clearBusy(); err != nil {
		return err
	}
	step("lab is up: API at https://%s, kubeconfig %s", l.Config.Listen, l.Config.Kubeconfig)
	return nil
}

// removeRemains removes namespaces, mounts, and folders of a lab that can no longer be started. It
// returns an error if there is a lab on this machine.
func (l *Lab) removeRemains(ctx context.Context) error {
	if err := needRoot(); err != nil {
		return err
	}
	found, err := FindLab(l.out)
	if err != nil {
		return err
	}
	if found.State != NoLab {
		return errors.New("lab: there is a lab on this machine: take it away with 'kctl lab down' first")
	}
	if len(ListLeftovers()) == 0 {
		return nil
	}
	l.printf("removing the remains of an earlier lab")
	if err := errors.Join(l.releaseAll(ctx), os.RemoveAll(stateRoot)); err != nil {
		return fmt.Errorf("lab: removing the remains of an earlier lab: %w", err)
	}
	return nil
}

// stepPrinter returns a function that prints a progress message with the seconds since stepPrinter
// was called.
func (l *Lab) stepPrinter() func(format string, args ...any) {
	begin := time.Now()
	return func(format string, args ...any) {
		l.printf("%6.1fs  %s", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}
}

// createHosts creates the bridges, and then all hosts in parallel, without daemons. It calls
// prepareWorker for each worker after the worker's creation.
func (l *Lab) createHosts(prepareWorker func(worker Host) error) error {
	if err := l.hosts().makeBridges(); err != nil {
		return err
	}
	var g errgroup.Group
	for _, h := range l.Config.Hosts {
		g.Go(func() error {
			if err := l.hosts().connectHost(h); err != nil {
				return err
			}
			if err := l.hosts().createHost(h); err != nil {
				return err
			}
			if h.Role == RoleWorker {
				return prepareWorker(h)
			}
			return nil
		})
	}
	return g.Wait()
}

// startAll creates the cluster and starts the daemons of all hosts: the registry, the first
// replica, the other replicas, and the workers. It returns when all of them are ready. step prints
// progress.
func (l *Lab) startAll(ctx context.Context, step func(string, ...any)) error {
	registry, err := l.Host("registry")
	if err != nil {
		return err
	}
	if err := l.hosts().startDaemon(registry); err != nil {
		return err
	}
	trust, kubeconfig, err := l.hosts().initCluster(ctx)
	if err != nil {
		return err
	}
	if err := l.hosts().writeKubeconfig(kubeconfig); err != nil {
		return err
	}
	replicas := l.hosts().hostsWithRole(RoleControlPlane)
	if err := l.hosts().startDaemon(replicas[0]); err != nil {
		return err
	}
	if err := l.hosts().startSupervisor(); err != nil {
		return err
	}
	if err := l.readiness().waitReady(ctx, replicas[0]); err != nil {
		return err
	}
	step("replica %s serves", replicas[0].Name)

	var g errgroup.Group
	g.Go(func() error { return l.registry().fillRegistry(ctx) })
	for _, h := range l.hosts().hostsWithRole(RoleWorker) {
		g.Go(func() error {
			if err := h.writeJoinToken(trust.NodeToken); err != nil {
				return err
			}
			return l.hosts().startDaemon(h)
		})
	}
	g.Go(func() error {
		for _, h := range replicas[1:] {
			if err := l.hosts().joinReplica(ctx, h, trust.ControlPlaneToken); err != nil {
				return err
			}
			if err := l.hosts().startDaemon(h); err != nil {
				return err
			}
		}
		for _, h := range replicas[1:] {
			if err := l.readiness().waitReady(ctx, h); err != nil {
				return err
			}
			step("replica %s joined", h.Name)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	return l.readiness().waitNodes(ctx, nil, step)
}

// writeKubeconfig writes the administrator's kubeconfig to Config.Kubeconfig. It also removes the
// API discovery of a previous cluster at the same address from the cache of kubectl and kctl.
func (hb hostBuilder) writeKubeconfig(raw []byte) error {
	if err := removeDiscoveryCache(hb.config.Listen); err != nil {
		return fmt.Errorf("removing the cached discovery of an earlier cluster at %s: %w", hb.config.Listen, err)
	}
	if err := os.MkdirAll(filepath.Dir(hb.config.Kubeconfig), 0o700); err != nil {
		return err
	}
	return os.WriteFile(hb.config.Kubeconfig, raw, 0o600)
}

// waitReady waits until the replica on the host h is ready. If the daemon exits, it returns an
// error with the end of the daemon's log.
func (r readiness) waitReady(ctx context.Context, h Host) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		if h.daemonPID() == 0 {
			cancel() // nothing restarts the daemon
			return fmt.Errorf("its daemon exited; the end of %s:\n%s", h.LogFile(), lastLines(h.LogFile(), 15))
		}
		return checkReady(ctx, h)
	})
	if err != nil {
		return fmt.Errorf("replica %s does not become ready: %w", h.Name, err)
	}
	return nil
}

// keepLogs copies the logs of all daemons to a new temporary folder, and prints its path.
func (l *Lab) keepLogs() {
	dir, err := os.MkdirTemp("", "keelson-lab-logs-")
	if err != nil {
		return
	}
	for _, h := range l.Config.Hosts {
		if raw, err := os.ReadFile(h.LogFile()); err == nil {
			_ = os.WriteFile(filepath.Join(dir, h.Name+".log"), raw, 0o600)
		}
	}
	l.printf("the daemons' logs are kept in %s", dir)
}

// Down removes the lab from this machine: processes, mounts, namespaces, interfaces, cgroups, and
// disks. It searches the machine for them, so it also works if all processes were killed or
// lab.json is lost. It may be called again, for example after an error.
func (l *Lab) Down(ctx context.Context) error {
	if fileExists(configFile()) {
		// If the removal is interrupted, parts of the disks remain, and the lab must not be started
		// again. On a full disk, this cannot be recorded.
		l.Config.Built = false
		_ = l.markBusy()
	}
	errs := []error{l.releaseAll(ctx), os.RemoveAll(stateRoot), removeDiscoveryCache(l.Config.Listen)}
	if l.Config.Kubeconfig != "" {
		if err := os.Remove(l.Config.Kubeconfig); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	errs = append(errs, l.Config.removeTestFolders())
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lab: taking the lab down: %w", err)
	}
	return nil
}

// releaseAll kills all processes of the lab, and removes everything that a machine loses at a power
// failure. That includes mounts, namespaces, loop devices, interfaces, cgroups, and /run. The disks
// of the hosts remain.
func (l *Lab) releaseAll(ctx context.Context) error {
	errs := []error{killCgroup(ctx, CgroupRoot())}
	for _, h := range append(leftoverHosts(), l.Config.Hosts...) {
		errs = append(errs, unpinNamespace(h.MountNS()), unpinNamespace(h.UTSNS()), h.removeNetNS())
	}
	return errors.Join(append(errs, bridgeHost.removeNetNS(), unmountBelow(runRoot), unmountBelow(stateRoot),
		detachLoopDevices(stateRoot), removeCgroups(ctx, CgroupRoot()), os.RemoveAll(runRoot))...)
}
