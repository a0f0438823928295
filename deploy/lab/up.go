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

// Up builds the lab and returns when every replica and every worker is ready.
// When it fails half-way it takes everything back.
func (l *Lab) Up(ctx context.Context) (err error) {
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
	begin := time.Now()
	step := func(format string, args ...any) {
		l.say("%6.1fs  %s", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}
	if err := l.save(); err != nil {
		return fmt.Errorf("lab: writing state: %w", err)
	}
	if err := makeBridge(); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	var g errgroup.Group
	for _, h := range l.Config.Hosts {
		g.Go(func() error {
			if err := h.plug(); err != nil {
				return err
			}
			if err := l.powerOn(h); err != nil {
				return err
			}
			if h.Role == RoleWorker {
				return l.giveImages(h)
			}
			return nil
		})
	}
	if err := g.Wait(); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("%d hosts on %s, no route out", len(l.Config.Hosts), Subnet)
	if err := l.startAll(ctx, step); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("lab is up: API at https://%s, kubeconfig %s", l.Config.Listen, l.Config.Kubeconfig)
	return nil
}

// startAll starts the daemons in the order in which they need each other.
func (l *Lab) startAll(ctx context.Context, step func(string, ...any)) error {
	registry, err := l.Host("registry")
	if err != nil {
		return err
	}
	if err := l.start(registry); err != nil {
		return err
	}
	trust, kubeconfig, err := l.initCluster(ctx)
	if err != nil {
		return err
	}
	if err := l.writeKubeconfig(kubeconfig); err != nil {
		return err
	}
	replicas := l.hosts(RoleControlPlane)
	if err := l.start(replicas[0]); err != nil {
		return err
	}
	if err := l.startSupervisor(); err != nil {
		return err
	}
	if err := l.waitReady(ctx, replicas[0]); err != nil {
		return err
	}
	step("replica %s serves", replicas[0].Name)

	var g errgroup.Group
	g.Go(func() error { return l.fillRegistry(ctx) })
	for _, h := range l.hosts(RoleWorker) {
		g.Go(func() error {
			if err := h.giveToken(trust.NodeToken); err != nil {
				return err
			}
			return l.start(h)
		})
	}
	g.Go(func() error {
		for _, h := range replicas[1:] {
			if err := l.joinReplica(ctx, h, trust.ControlPlaneToken); err != nil {
				return err
			}
			if err := l.start(h); err != nil {
				return err
			}
		}
		for _, h := range replicas[1:] {
			if err := l.waitReady(ctx, h); err != nil {
				return err
			}
			step("replica %s joined", h.Name)
		}
		return nil
	})
	if err := g.Wait(); err != nil {
		return err
	}
	return l.waitNodes(ctx, step)
}

func (l *Lab) writeKubeconfig(raw []byte) error {
	if err := os.MkdirAll(filepath.Dir(l.Config.Kubeconfig), 0o700); err != nil {
		return err
	}
	return os.WriteFile(l.Config.Kubeconfig, raw, 0o600)
}

// waitReady waits until a replica answers /readyz.
func (l *Lab) waitReady(ctx context.Context, h Host) error {
	ctx, cancel := context.WithTimeout(ctx, 60*time.Second)
	defer cancel()
	err := wait.For(ctx, 50*time.Millisecond, func() error {
		if h.daemonPID() == 0 {
			cancel() // it will not come back by itself
			return fmt.Errorf("its daemon ended; the end of %s:\n%s", h.LogFile(), tail(h.LogFile(), 15))
		}
		return ready(ctx, h)
	})
	if err != nil {
		return fmt.Errorf("replica %s does not become ready: %w", h.Name, err)
	}
	return nil
}

// keepLogs copies the daemons' logs aside before a failed Up takes everything back.
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
	l.say("the daemons' logs are kept in %s", dir)
}

// Down takes the lab away: processes, mounts, namespaces, interfaces, cgroups and
// state. It works from what it finds on the machine, also when everything was
// killed, and is safe to call twice.
func (l *Lab) Down(ctx context.Context) error {
	var errs []error
	errs = append(errs, killAll(ctx, "/keelson-lab"))
	for _, h := range append(leftoverHosts(), l.Config.Hosts...) {
		errs = append(errs, unpin(h.MountNS()), unpin(h.UTSNS()), h.removeNetNS())
	}
	errs = append(errs, bridgeHost.removeNetNS())
	errs = append(errs, unmountBelow(runRoot), unmountBelow(stateRoot))
	errs = append(errs, removeCgroups(ctx, "/keelson-lab"))
	errs = append(errs, os.RemoveAll(runRoot), os.RemoveAll(stateRoot))
	if l.Config.Kubeconfig != "" {
		if err := os.Remove(l.Config.Kubeconfig); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("lab: taking the lab down: %w", err)
	}
	return nil
}
