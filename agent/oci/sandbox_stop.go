package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/safepath"
)

// StopPodSandbox implements agent.Runtime. It kills the containers, releases the network and shuts
// down the shim. The records of ended containers stay.
func (r *Runtime) StopPodSandbox(ctx context.Context, q *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	if err := r.alone(ctx, q.GetPodSandboxId(), "stop", r.stopSandbox); err != nil {
		return nil, err
	}
	return &cri.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox implements agent.Runtime. It also removes the sandbox's containers.
func (r *Runtime) RemovePodSandbox(ctx context.Context, q *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	if err := r.alone(ctx, q.GetPodSandboxId(), "remove", r.dropSandbox); err != nil {
		return nil, err
	}
	return &cri.RemovePodSandboxResponse{}, nil
}

// alone calls do with exclusive access to a sandbox. It returns nil if the sandbox does not exist.
func (r *Runtime) alone(ctx context.Context, id, verb string, do func(context.Context, *sandbox) error) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	s, err := r.sandbox(id)
	if err != nil {
		return nil
	}
	s.life.Lock()
	defer s.life.Unlock()
	s.op.Lock()
	defer s.op.Unlock()
	if err := do(ctx, s); err != nil {
		return fmt.Errorf("%s sandbox %s: %w", verb, s.rec.ID, err)
	}
	return nil
}

// containersOf returns the containers of a sandbox.
func (r *Runtime) containersOf(id string) []*ctr {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*ctr
	for _, c := range r.containers {
		if c.rec.Sandbox == id {
			out = append(out, c)
		}
	}
	return out
}

// stopSandbox stops a sandbox. It is safe in any state, and can be repeated after a failure. The
// caller holds s.op for writing.
func (r *Runtime) stopSandbox(ctx context.Context, s *sandbox) error {
	var errs []error
	for _, c := range r.containersOf(s.rec.ID) {
		errs = append(errs, r.killContainer(ctx, c))
	}
	if !s.hostNetwork() {
		r.mu.Lock()
		half := s.rec.State == SandboxCreating || s.rec.State == SandboxPrepared
		r.mu.Unlock()
		if _, err := os.Stat(r.netnsPath(s.rec.ID)); err == nil || half {
			err := removeUnpinned(r.netnsPath(s.rec.ID))
			if err == nil {
				err = r.cfg.Network.Del(ctx, s.networkRequest(r))
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("give the network back: %w", err))
			} else {
				errs = append(errs, removeNetns(r.netnsPath(s.rec.ID)))
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return err // the shim or the network is still needed
	}
	r.mu.Lock()
	shim := s.shim
	s.shim = nil
	r.mu.Unlock()
	if shim != nil {
		shim.shutdown(ctx)
	}
	r.killRemains(s)
	if err := unmountShm(r.sandboxDir(s.rec.ID)); err != nil {
		return err
	}
	return r.setSandbox(s, SandboxStop)
}

// killRemains kills the shim and pause if the shim has not exited by itself.
func (r *Runtime) killRemains(s *sandbox) {
	if s.rec.Boot != r.host.boot {
		return
	}
	killIfNamed(s.rec.PausePID, "keelson-pause")
	killIfNamed(s.rec.ShimPID, "keelson-shim")
}

// killIfNamed kills a recorded process, unless its PID now belongs to a process of another name.
func killIfNamed(pid int, name string) {
	if pid <= 1 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if lives(pid, name) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// lives reports whether a recorded process still runs under this name. It returns true if that
// cannot be determined.
func lives(pid int, name string) bool {
	if pid <= 1 {
		return false
	}
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.ESRCH)
	}
	// "PID (NAME) STATE ...": in states Z and X it has ended. The kernel truncates names to 15
	// bytes.
	open, end := bytes.IndexByte(stat, '('), bytes.LastIndexByte(stat, ')')
	if open < 0 || end+2 >= len(stat) || string(stat[open+1:end]) != name[:min(15, len(name))] {
		return false
	}
	return stat[end+2] != 'Z' && stat[end+2] != 'X'
}

func unmountShm(dir string) error {
	shm := filepath.Join(dir, "shm")
	if err := unix.Unmount(shm, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL && err != unix.ENOENT {
		return fmt.Errorf("unmount %s: %w", shm, err)
	}
	return nil
}

// setSandbox applies an input to the sandbox's state, saves a change and announces it.
func (r *Runtime) setSandbox(s *sandbox, in SandboxInput) error {
	r.mu.Lock()
	next, err := s.rec.State.Next(in)
	if err != nil {
		r.mu.Unlock()
		return err
	}
	changed := next != s.rec.State
	s.rec.State = next
	rec := s.rec
	r.mu.Unlock()
	if !changed {
		return nil
	}
	if err := ignoreMissing(r.saveSandbox(&rec)); err != nil {
		return err
	}
	r.announce(agent.RuntimeEvent{SandboxID: rec.ID, PodUID: podUID(s.config.GetMetadata().GetUid())})
	return nil
}

// dropSandbox stops a sandbox and removes everything of it. The record is removed last, so that a
// failed removal can be repeated. The caller holds s.op for writing.
func (r *Runtime) dropSandbox(ctx context.Context, s *sandbox) error {
	id := s.rec.ID
	if err := r.stopSandbox(ctx, s); err != nil {
		return err
	}
	for _, c := range r.containersOf(id) {
		if err := r.removeContainer(ctx, c); err != nil {
			return err
		}
	}
	if r.lastOfCgroup(s) {
		if err := r.cgroups.kill(ctx, s.cgroup()); err != nil {
			return err
		}
		if err := r.cgroups.remove(ctx, s.cgroup()); err != nil {
			return err
		}
	}
	for _, dir := range []string{r.etcDir(id), r.sandboxDir(id)} {
		if err := safepath.RemoveAll(dir); err != nil {
			return err
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s.rec.State = SandboxRemoved
	delete(r.sandboxes, id)
	delete(r.stages, id)
	if name := sandboxName(s.config.Metadata); r.names[name] == id {
		delete(r.names, name)
	}
	return nil
}

// lastOfCgroup reports whether no other sandbox uses the same cgroup. The next sandbox of a pod
// uses the same one.
func (r *Runtime) lastOfCgroup(s *sandbox) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.sandboxes {
		if other != s && other.cgroup() == s.cgroup() {
			return false
		}
	}
	return true
}

// processEnded handles the shim's message that a process has ended.
func (r *Runtime) processEnded(s *sandbox, e wire.Exited) {
	if e.Container == "" {
		r.pauseLost(s)
		return
	}
	c, err := r.container(e.Container)
	if err != nil {
		return
	}
	rec := exitRecord{Code: int32(e.Code), Finished: e.Time, OOM: e.OOM}
	r.mu.Lock()
	starting := c.rec.Started == 0
	r.mu.Unlock()
	if starting { // the end arrived before the response to the start: the shim's file has the start time
		if written, err := r.readExit(e.Container); err == nil {
			rec.Started = written.Started
		}
	}
	r.containerEnded(c, rec)
}

// pauseLost makes the sandbox NotReady, because its namespaces end with pause.
func (r *Runtime) pauseLost(s *sandbox) {
	r.mu.Lock()
	ready := s.rec.State == SandboxReady
	s.lost = s.lost || !ready // RunPodSandbox checks this itself
	r.mu.Unlock()
	if !ready {
		return
	}
	if err := r.setSandbox(s, SandboxLost); err != nil {
		r.log.Error("sandbox lost its pause", "sandbox", s.rec.ID, "error", err)
	}
}

// shimLost is called when the connection to a shim has ended. It reconnects, which shows whether
// the shim has ended too.
func (r *Runtime) shimLost(s *sandbox) {
	r.mu.Lock()
	s.shim = nil
	state := s.rec.State
	half := state != SandboxReady && state != SandboxNotReady
	s.lost = s.lost || half // RunPodSandbox checks this itself
	r.mu.Unlock()
	if half {
		return
	}
	r.log.Error("the connection to a shim ended", "sandbox", s.rec.ID)
	r.background.Go(func() { r.rejoin(s) })
}

// orphanEnded ends a container without a shim. It kills its remaining processes and uses the exit
// code that the shim recorded, or 137 if none exists.
func (r *Runtime) orphanEnded(ctx context.Context, c *ctr) {
	if err := r.cgroups.kill(ctx, c.rec.Cgroup); err != nil {
		r.log.Error("a container without shim resists", "container", c.rec.ID, "error", err)
	}
	e, err := r.readExit(c.rec.ID)
	if err != nil {
		e = exitRecord{Code: 137, Finished: time.Now().UnixNano()}
		c.lost.Store(true)
	}
	r.containerEnded(c, e)
}
