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

// StartAgain starts a stopped lab from the disks of its hosts, like machines after a power failure.
// It returns when every replica and every worker is ready. After an error, it leaves the lab
// unchanged, so that it can be inspected.
func (l *Lab) StartAgain(ctx context.Context) (err error) {
	if err := needRoot(); err != nil {
		return err
	}
	if err := l.markBusy(); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, l.clearBusy()) }()
	// After a reboot, the machine has no remains. After a kill, it has namespaces and mounts.
	if err := l.releaseAll(ctx); err != nil {
		return fmt.Errorf("lab: removing the remains of its hosts: %w", err)
	}
	if err := l.Preflight(); err != nil {
		return err
	}
	step := l.stepPrinter()
	if err := l.createHosts(func(Host) error { return nil }); err != nil {
		return fmt.Errorf("lab: %w", err)
	}
	step("%d hosts on %s are powered on again", len(l.Config.Hosts), l.Config.describeNetwork())
	if err := l.startHosts(ctx, step); err != nil {
		return fmt.Errorf("lab: starting it again: %w", err)
	}
	step("lab is up again: API at https://%s, kubeconfig %s", l.Config.Listen, l.Config.Kubeconfig)
	return nil
}

// startHosts starts the daemons of hosts that have already joined the cluster, and waits until they
// are ready. If a daemon does not become ready, startHosts still starts the others, because an
// operator may have removed its host from the cluster. The error contains all daemons that are not
// ready. step prints progress.
func (l *Lab) startHosts(ctx context.Context, step func(string, ...any)) error {
	if err := l.hosts().restoreKubeconfig(); err != nil {
		return err
	}
	replicas := l.hosts().hostsWithRole(RoleControlPlane)
	for _, h := range append(l.hosts().hostsWithRole(RoleRegistry), replicas...) {
		if err := l.hosts().startDaemon(h); err != nil {
			return err
		}
	}
	if err := l.hosts().startSupervisor(); err != nil {
		return err
	}
	missing := l.readiness().waitReplicas(ctx, replicas, step)
	if len(missing) == len(replicas) {
		return errors.Join(missing...)
	}
	before, err := l.readiness().awaitSessions(ctx)
	if err != nil {
		return errors.Join(append(missing, err)...)
	}
	for _, h := range l.hosts().hostsWithRole(RoleWorker) {
		if err := l.hosts().startDaemon(h); err != nil {
			missing = append(missing, err)
		}
	}
	return errors.Join(append(missing, l.registry().waitRegistry(ctx), l.readiness().waitNodes(ctx, before, step))...)
}

// waitReplicas waits until each of the replicas is ready or its wait fails, and returns the errors.
func (r readiness) waitReplicas(ctx context.Context, replicas []Host, step func(string, ...any)) []error {
	var mu sync.Mutex
	var missing []error
	var wg sync.WaitGroup
	for _, h := range replicas {
		wg.Go(func() {
			err := r.waitReady(ctx, h)
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

// awaitSessions returns the result of nodeSessions: the resource version of each node's Lease by
// node name. It retries for 30 seconds until a replica responds through the forwarder.
func (r readiness) awaitSessions(ctx context.Context) (found map[string]string, err error) {
	cs, err := r.adminClient()
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	err = wait.For(ctx, 50*time.Millisecond, func() (err error) {
		found, err = nodeSessions(ctx, cs)
		return err
	})
	return found, err
}

// restoreKubeconfig writes the administrator's kubeconfig to Config.Kubeconfig if this file no
// longer exists, for example below /tmp after a reboot.
func (hb hostBuilder) restoreKubeconfig() error {
	if fileExists(hb.config.Kubeconfig) {
		return nil
	}
	first := hb.hostsWithRole(RoleControlPlane)[0]
	raw, err := os.ReadFile(filepath.Join(first.stateDir(), adminKubeconfig))
	if err != nil {
		return fmt.Errorf("the administrator's kubeconfig on host %s: %w", first.Name, err)
	}
	return hb.writeKubeconfig(raw)
}
