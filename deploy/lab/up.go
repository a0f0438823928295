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

// beginning is how long a daemon that lives may take until it serves: seconds, on a machine that is busy or emulated many times
// that. One that ends is told of at once.
const beginning = 3 * time.Minute

// Up builds the lab and returns when every replica and every worker is ready.
// When it fails half-way it takes everything back.
func (l *Lab) Up(ctx context.Context) (err error) {
	if err := l.makeRoom(ctx); err != nil {
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
	step := l.steps()
	l.Config.Maker = thisProcess()
	if err := l.begin(); err != nil {
		return err
	}
	if err := l.powerOnAll(l.giveImages); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("%d hosts on %s, no route out", len(l.Config.Hosts), l.Config.network())
	if err := l.startAll(ctx, step); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	l.Config.Built = true
	if err := l.done(); err != nil {
		return err
	}
	step("lab is up: API at https://%s, kubeconfig %s", l.Config.Listen, l.Config.Kubeconfig)
	return nil
}

// makeRoom refuses to build beside another lab, and takes away what is left of one that can no longer be started.
func (l *Lab) makeRoom(ctx context.Context) error {
	if err := needRoot(); err != nil {
		return err
	}
	found, err := Look(l.out)
	if err != nil {
		return err
	}
	if found.State != None {
		return errors.New("lab: there is a lab on this machine: take it away with 'kctl lab down' first")
	}
	if len(Leftovers()) == 0 {
		return nil
	}
	l.say("taking away what is left of an earlier lab")
	if err := errors.Join(l.powerOff(ctx), os.RemoveAll(stateRoot)); err != nil {
		return fmt.Errorf("lab: taking away what is left of an earlier one: %w", err)
	}
	return nil
}

// steps tells a person how far the lab is, each line with the time since now.
func (l *Lab) steps() func(format string, args ...any) {
	begin := time.Now()
	return func(format string, args ...any) {
		l.say("%6.1fs  %s", time.Since(begin).Seconds(), fmt.Sprintf(format, args...))
	}
}

// powerOnAll makes the bridge and all hosts, with cables and power; workers are given something besides.
func (l *Lab) powerOnAll(give func(worker Host) error) error {
	if err := l.makeBridges(); err != nil {
		return err
	}
	var g errgroup.Group
	for _, h := range l.Config.Hosts {
		g.Go(func() error {
			if err := l.plug(h); err != nil {
				return err
			}
			if err := l.powerOn(h); err != nil {
				return err
			}
			if h.Role == RoleWorker {
				return give(h)
			}
			return nil
		})
	}
	return g.Wait()
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
	return l.waitNodes(ctx, nil, step)
}

// writeKubeconfig writes what clients on this machine reach the lab with, and forgets what they knew of its address.
func (l *Lab) writeKubeconfig(raw []byte) error {
	if err := forgetDiscovery(l.Config.Listen); err != nil {
		return fmt.Errorf("forgetting which kinds an earlier cluster at %s served: %w", l.Config.Listen, err)
	}
	if err := os.MkdirAll(filepath.Dir(l.Config.Kubeconfig), 0o700); err != nil {
		return err
	}
	return os.WriteFile(l.Config.Kubeconfig, raw, 0o600)
}

// waitReady waits until a replica answers /readyz.
func (l *Lab) waitReady(ctx context.Context, h Host) error {
	ctx, cancel := context.WithTimeout(ctx, beginning)
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
	if exists(configFile()) {
		// One that is cut off leaves parts of disks, which nobody must start. With a full disk it cannot be noted.
		l.Config.Built = false
		_ = l.begin()
	}
	errs := []error{l.powerOff(ctx), os.RemoveAll(stateRoot), forgetDiscovery(l.Config.Listen)}
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

// powerOff ends every process of the lab and takes away what no machine keeps without power: mounts, namespaces,
// loop devices, interfaces, cgroups and /run. The disks of the hosts stay.
func (l *Lab) powerOff(ctx context.Context) error {
	errs := []error{killAll(ctx, CgroupRoot())}
	for _, h := range append(leftoverHosts(), l.Config.Hosts...) {
		errs = append(errs, unpin(h.MountNS()), unpin(h.UTSNS()), h.removeNetNS())
	}
	return errors.Join(append(errs, bridgeHost.removeNetNS(), unmountBelow(runRoot), unmountBelow(stateRoot),
		detachLoops(stateRoot), removeCgroups(ctx, CgroupRoot()), os.RemoveAll(runRoot))...)
}
