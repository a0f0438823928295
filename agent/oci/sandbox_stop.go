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
	"keelson.dev/keelson/agent/oci/netns"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/safepath"
)

// StopPodSandbox implements agent.Runtime. It kills the containers, releases the network and shuts
// down the shim. The records of ended containers stay.
func (r *Runtime) StopPodSandbox(ctx context.Context,
	request *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	if err := r.runExclusively(ctx, request.GetPodSandboxId(), "stop", (*sandbox).stopSandbox); err != nil {
		return nil, err
	}
	return &cri.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox implements agent.Runtime. It also removes the sandbox's containers.
func (r *Runtime) RemovePodSandbox(ctx context.Context,
	request *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	if err := r.runExclusively(ctx, request.GetPodSandboxId(), "remove", (*sandbox).removeSandbox); err != nil {
		return nil, err
	}
	return &cri.RemovePodSandboxResponse{}, nil
}

// runExclusively calls operate while no other operation changes the sandbox with this ID. It
// returns nil if the sandbox does not exist. An error starts with verb and the sandbox's ID.
func (r *Runtime) runExclusively(ctx context.Context, id, verb string,
	operate func(*sandbox, context.Context) error) error {
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	s, err := r.findSandbox(id)
	if err != nil {
		return nil
	}
	s.lifecycle.Lock()
	defer s.lifecycle.Unlock()
	s.teardown.Lock()
	defer s.teardown.Unlock()
	if err := operate(s, ctx); err != nil {
		return fmt.Errorf("%s sandbox %s: %w", verb, s.rec.ID, err)
	}
	return nil
}

// containers returns the containers of the sandbox.
func (s *sandbox) containers() []*container {
	r := s.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	var out []*container
	for _, c := range r.containers {
		if c.rec.Sandbox == s.rec.ID {
			out = append(out, c)
		}
	}
	return out
}

// stopSandbox kills the containers, releases the network, stops the shim and pause, and makes the
// sandbox NotReady. It is safe in any state, and can be repeated after a failure. The caller holds
// s.teardown for writing.
func (s *sandbox) stopSandbox(ctx context.Context) error {
	r := s.runtime
	var errs []error
	for _, c := range s.containers() {
		errs = append(errs, c.killContainer(ctx))
	}
	if !s.usesHostNetwork() {
		r.mu.Lock()
		half := s.rec.State == SandboxCreating || s.rec.State == SandboxPrepared
		r.mu.Unlock()
		if _, err := os.Stat(r.paths.netnsPath(s.rec.ID)); err == nil || half {
			err := netns.RemoveUnpinned(r.paths.netnsPath(s.rec.ID))
			if err == nil {
				err = r.cfg.Network.Del(ctx, s.networkRequest())
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("release the network: %w", err))
			} else {
				errs = append(errs, netns.RemovePinned(r.paths.netnsPath(s.rec.ID)))
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
		shim.StopShim(ctx)
	}
	s.killShimAndPause()
	if err := unmountShm(r.paths.sandboxDir(s.rec.ID)); err != nil {
		return err
	}
	return s.applySandboxInput(SandboxStop)
}

// killShimAndPause kills the recorded shim and pause processes if they still run.
func (s *sandbox) killShimAndPause() {
	if s.rec.Boot != s.runtime.host.BootID {
		return
	}
	killIfNamed(s.rec.PausePID, "keelson-pause")
	killIfNamed(s.rec.ShimPID, "keelson-shim")
}

// killIfNamed kills the process with a recorded PID, unless the PID now belongs to a process of
// another name.
func killIfNamed(pid int, name string) {
	if pid <= 1 {
		return
	}
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return
	}
	defer unix.Close(fd)
	if isRunningProcess(pid, name) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
	}
}

// isRunningProcess reports whether the process with a recorded PID still runs under this name. It
// returns true if that cannot be determined.
func isRunningProcess(pid int, name string) bool {
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
	if err := unix.Unmount(shm, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW); err != nil && err != unix.EINVAL &&
		err != unix.ENOENT {
		return fmt.Errorf("unmount %s: %w", shm, err)
	}
	return nil
}

// applySandboxInput applies an input to the sandbox's state. If the state changes, it saves the
// record and sends an event.
func (s *sandbox) applySandboxInput(input SandboxInput) error {
	r := s.runtime
	r.mu.Lock()
	next, err := s.rec.State.NextState(input)
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
	if err := ignoreMissing(r.paths.saveSandbox(&rec)); err != nil {
		return err
	}
	r.broadcastEvent(agent.RuntimeEvent{SandboxID: rec.ID, PodUID: podUID(s.config.GetMetadata().GetUid())})
	return nil
}

// removeSandbox stops a sandbox and removes everything of it, including its containers. It removes
// the record last, so that a failed removal can be repeated. The caller holds s.teardown for
// writing.
func (s *sandbox) removeSandbox(ctx context.Context) error {
	r := s.runtime
	id := s.rec.ID
	if err := s.stopSandbox(ctx); err != nil {
		return err
	}
	for _, c := range s.containers() {
		if err := c.removeContainer(ctx); err != nil {
			return err
		}
	}
	if s.isLastOfCgroup() {
		if err := r.cgroups.KillProcesses(ctx, s.cgroupPath()); err != nil {
			return err
		}
		if err := r.cgroups.RemoveCgroup(ctx, s.cgroupPath()); err != nil {
			return err
		}
	}
	for _, dir := range []string{r.paths.etcDir(id), r.paths.sandboxDir(id)} {
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

// isLastOfCgroup reports whether no other sandbox uses the cgroup of s. All sandboxes of one pod
// use the same cgroup.
func (s *sandbox) isLastOfCgroup() bool {
	r := s.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, other := range r.sandboxes {
		if other != s && other.cgroupPath() == s.cgroupPath() {
			return false
		}
	}
	return true
}

// handleProcessEnd handles the shim's message that a container or the pause process has exited: it
// records the container's exit, or makes the sandbox NotReady.
func (s *sandbox) handleProcessEnd(exited wire.Exited) {
	r := s.runtime
	if exited.Container == "" {
		s.handlePauseLoss()
		return
	}
	c, err := r.findContainer(exited.Container)
	if err != nil {
		return
	}
	rec := exitRecord{Code: int32(exited.Code), Finished: exited.Time, OOM: exited.OOM}
	r.mu.Lock()
	starting := c.rec.Started == 0
	r.mu.Unlock()
	if starting { // the end arrived before the response to the start: the shim's file has the start time
		if written, err := r.paths.readExitRecord(exited.Container); err == nil {
			rec.Started = written.Started
		}
	}
	c.recordContainerEnd(rec)
}

// handlePauseLoss handles the exit of the pause process: it makes a ready sandbox NotReady, because
// the sandbox's namespaces disappear with pause.
func (s *sandbox) handlePauseLoss() {
	r := s.runtime
	r.mu.Lock()
	ready := s.rec.State == SandboxReady
	s.lost = s.lost || !ready // RunPodSandbox checks this itself
	r.mu.Unlock()
	if !ready {
		return
	}
	if err := s.applySandboxInput(SandboxLost); err != nil {
		r.log.Error("cannot record that a sandbox has lost its pause process", "sandbox", s.rec.ID, "error", err)
	}
}

// handleShimLoss handles the end of the connection to the shim. For a completely created sandbox it
// reconnects in the background, which also shows whether the shim has exited.
func (s *sandbox) handleShimLoss() {
	r := s.runtime
	r.mu.Lock()
	s.shim = nil
	state := s.rec.State
	half := state != SandboxReady && state != SandboxNotReady
	s.lost = s.lost || half // RunPodSandbox checks this itself
	r.mu.Unlock()
	if half {
		return
	}
	r.log.Error("lost the connection to a shim", "sandbox", s.rec.ID)
	r.life.background.Go(func() { s.retryReconnect() })
}

// endOrphan kills the remaining processes of a container without a shim, and marks the container as
// exited. It uses the exit code that the shim recorded, or 137 if the shim recorded none.
func (c *container) endOrphan(ctx context.Context) {
	r := c.runtime
	if err := r.cgroups.KillProcesses(ctx, c.rec.Cgroup); err != nil {
		r.log.Error("cannot kill the processes of a container without a shim", "container", c.rec.ID, "error", err)
	}
	e, err := r.paths.readExitRecord(c.rec.ID)
	if err != nil {
		e = exitRecord{Code: 137, Finished: time.Now().UnixNano()}
		c.exitUnknown.Store(true)
	}
	c.recordContainerEnd(e)
}
