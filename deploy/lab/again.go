package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"keelson.dev/keelson/internal/wait"
)

// StartAgain starts a lab none of whose processes lives from the disks of its hosts, as machines that get their power
// back, and returns when every replica and every worker is ready. When it fails it ends nothing and removes nothing: what
// has started can be looked at, and what is on the disks stays.
func (l *Lab) StartAgain(ctx context.Context) (err error) {
	if err := needRoot(); err != nil {
		return err
	}
	if err := l.begin(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.done()) }()
	// Of what the machine itself lost nothing is there; of what was killed there are namespaces and mounts.
	if err := l.powerOff(ctx); err != nil {
		return fmt.Errorf("lab: taking away what is left of its hosts' memory: %w", err)
	}
	if err := l.Preflight(); err != nil {
		return err
	}
	step := l.steps()
	if err := l.powerOnAll(func(Host) error { return nil }); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("%d hosts on %s have power again", len(l.Config.Hosts), l.Config.network())
	if err := l.startHosts(ctx, step); err != nil {
		return fmt.Errorf("lab: starting it again: %w", err)
	}
	step("lab is up again: API at https://%s, kubeconfig %s", l.Config.Listen, l.Config.Kubeconfig)
	return nil
}

// startHosts starts the daemons of hosts that were part of the cluster before. One that does not become ready (an operator
// may have put it out of the cluster) keeps no other from it.
func (l *Lab) startHosts(ctx context.Context, step func(string, ...any)) error {
	if err := l.restoreKubeconfig(); err != nil {
		return err
	}
	replicas := l.hosts(RoleControlPlane)
	for _, h := range append(l.hosts(RoleRegistry), replicas...) {
		if err := l.start(h); err != nil {
			return err
		}
	}
	if err := l.startSupervisor(); err != nil {
		return err
	}
	missing := l.waitReplicas(ctx, replicas, step)
	if len(missing) == len(replicas) {
		return errors.Join(missing...)
	}
	before, err := l.sessionsOnceServed(ctx)
	if err != nil {
		return errors.Join(append(missing, err)...)
	}
	for _, h := range l.hosts(RoleWorker) {
		if err := l.start(h); err != nil {
			missing = append(missing, err)
		}
	}
	return errors.Join(append(missing, l.waitRegistry(ctx), l.waitNodes(ctx, before, step))...)
}

// waitReplicas waits until each replica is ready, and returns the errors of those that do not become so.
func (l *Lab) waitReplicas(ctx context.Context, replicas []Host, step func(string, ...any)) []error {
	var mu sync.Mutex
	var missing []error
	var wg sync.WaitGroup
	for _, h := range replicas {
		wg.Go(func() {
			err := l.waitReady(ctx, h)
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				missing = append(missing, err)
				return
			}
			step("replica %s serves", h.Name)
		})
	}
	wg.Wait()
	return missing
}

// sessionsOnceServed is sessions as soon as the forwarder leads to a replica that serves.
func (l *Lab) sessionsOnceServed(ctx context.Context) (found map[string]string, err error) {
	cs, err := l.client()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err = wait.For(ctx, 50*time.Millisecond, func() (err error) {
		found, err = sessions(ctx, cs)
		return err
	})
	return found, err
}

// restoreKubeconfig writes the administrator's kubeconfig again where it has gone, as files below /tmp do with a reboot.
func (l *Lab) restoreKubeconfig() error {
	if exists(l.Config.Kubeconfig) {
		return nil
	}
	first := l.hosts(RoleControlPlane)[0]
	raw, err := os.ReadFile(filepath.Join(first.stateDir(), adminKubeconfig))
	if err != nil {
		return fmt.Errorf("the administrator's kubeconfig on host %s: %w", first.Name, err)
	}
	return l.writeKubeconfig(raw)
}
