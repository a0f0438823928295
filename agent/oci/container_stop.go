package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/oci/shimclient"
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/safepath"
	"keelson.dev/keelson/internal/wait"
)

// StopContainer implements agent.Runtime: it sends the stop signal, and SIGKILL after the timeout.
func (r *Runtime) StopContainer(ctx context.Context,
	request *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	c, err := r.findContainer(request.GetContainerId())
	if err != nil {
		return &cri.StopContainerResponse{}, nil
	}
	if request.GetTimeout() > 0 && c.containerState() == ContainerRunning {
		sig := c.rec.Stop
		if sig == 0 {
			sig = int(unix.SIGTERM)
		}
		grace, cancel := context.WithTimeout(ctx, time.Duration(request.GetTimeout())*time.Second)
		defer cancel()
		if err := c.sendStopSignal(grace, sig); err != nil {
			return nil, fmt.Errorf("stop container %s: %w", c.rec.ID, err)
		}
		select {
		case <-c.ended:
			return &cri.StopContainerResponse{}, nil
		case <-grace.Done():
		}
		if ctx.Err() != nil {
			return nil, fmt.Errorf("stop container %s: %w", c.rec.ID, ctx.Err())
		}
	}
	if err := c.killContainer(ctx); err != nil {
		return nil, fmt.Errorf("stop container %s: %w", c.rec.ID, err)
	}
	return &cri.StopContainerResponse{}, nil
}

// sendStopSignal sends the stop signal to the container's first process. If the shim is not
// connected, as after a restart of the agent, it retries until the container has exited or the
// grace period is over. It returns an error only if the shim refuses the signal.
func (c *container) sendStopSignal(grace context.Context, sig int) error {
	var refused error
	_ = wait.For(grace, 20*time.Millisecond, func() error {
		select {
		case <-c.ended:
			return nil
		default:
		}
		shim := c.containerShim()
		if shim == nil {
			return shimclient.ErrDisconnected
		}
		err := shim.SignalProcess(grace, c.rec.ID, sig)
		if errors.Is(err, shimclient.ErrDisconnected) || grace.Err() != nil {
			return err
		}
		refused = err
		return nil
	})
	return refused
}

func (c *container) containerState() ContainerState {
	r := c.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	return c.rec.State
}

// containerShim returns the connection to the shim of the container's sandbox; nil if it is not
// connected.
func (c *container) containerShim() *shimclient.Client {
	r := c.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[c.rec.Sandbox]; s != nil {
		return s.shim
	}
	return nil
}

// signalContainer sends a signal to the container's first process. It returns nil if the process
// has ended.
func (c *container) signalContainer(ctx context.Context, sig int) error {
	shim := c.containerShim()
	if shim == nil {
		return nil
	}
	return shim.SignalProcess(ctx, c.rec.ID, sig)
}

// killContainer kills a container, whether it was started or not, and waits until it has exited. It
// returns ErrStillRunning if the container does not exit within teardownTimeout.
func (c *container) killContainer(ctx context.Context) error {
	r := c.runtime
	ctx, cancel := context.WithTimeout(ctx, teardownTimeout)
	defer cancel()
	switch c.containerState() {
	case ContainerExited:
		return nil
	case ContainerCreated:
		if c.rec.StartError != "" { // a container that cannot be started has no process
			return c.failStart()
		}
	case ContainerCreating: // keelson-oci creates it, or did when an earlier agent process died
		return r.cgroups.KillProcesses(ctx, c.rec.Cgroup)
	}
	if c.containerShim() == nil {
		c.endOrphan(ctx)
		return nil
	}
	if err := c.signalContainer(ctx, int(unix.SIGKILL)); errors.Is(err, shimclient.ErrDisconnected) {
		c.endOrphan(ctx)
		return nil
	} else if err != nil {
		return err
	}
	if c.rec.SharePID {
		if err := r.cgroups.KillProcesses(ctx, c.rec.Cgroup); err != nil {
			return err
		}
	}
	select {
	case <-c.ended:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill container %s: %w: %w", c.rec.ID, agent.ErrStillRunning, ctx.Err())
	}
}

// RemoveContainer implements agent.Runtime. A running container is killed first.
func (r *Runtime) RemoveContainer(ctx context.Context,
	request *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	c, err := r.findContainer(request.GetContainerId())
	if err != nil {
		return &cri.RemoveContainerResponse{}, nil
	}
	if err := c.removeContainer(ctx); err != nil {
		return nil, fmt.Errorf("remove container %s: %w", c.rec.ID, err)
	}
	return &cri.RemoveContainerResponse{}, nil
}

func (c *container) removeContainer(ctx context.Context) error {
	c.operation.Lock()
	defer c.operation.Unlock()
	if err := c.killContainer(ctx); err != nil {
		return err
	}
	return c.eraseContainer(ctx)
}

// eraseContainer removes everything of an exited or partly created container. It removes the record
// last, so it can be repeated after a failure. The caller holds c.operation.
func (c *container) eraseContainer(ctx context.Context) error {
	r := c.runtime
	id := c.rec.ID
	if err := c.killUntilForgotten(ctx); err != nil {
		return err
	}
	if err := r.cgroups.RemoveCgroup(ctx, c.rec.Cgroup); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Join(r.paths.libcontainerDir(), id), r.paths.imageVolumes(id)} {
		if err := safepath.RemoveAll(dir); err != nil {
			return err
		}
	}
	if err := r.cfg.Images.RemoveRootFS(ctx, id); err != nil {
		return fmt.Errorf("remove the root file system: %w", err)
	}
	// Either of the two records is enough to find the container again.
	if err := ignoreMissing(os.Remove(r.paths.endFile(id))); err != nil {
		return err
	}
	if err := safepath.RemoveAll(r.paths.containerDir(id)); err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.containers, id)
	delete(r.stages, id)
	if name := containerName(c.rec.Sandbox, c.config.GetMetadata()); r.names[name] == id {
		delete(r.names, name)
	}
	return nil
}

// killUntilForgotten kills the processes in the container's cgroup until the shim confirms that it
// has forgotten the container, that is, no process of it runs. It repeats the kill because
// keelson-oci may still be creating the container.
func (c *container) killUntilForgotten(ctx context.Context) error {
	m := wire.Target{Container: c.rec.ID}
	return wait.For(ctx, 2*time.Millisecond, func() error {
		if err := c.runtime.cgroups.KillProcesses(ctx, c.rec.Cgroup); err != nil {
			return err
		}
		shim := c.containerShim()
		if shim == nil {
			return nil
		}
		_, err := shim.CallDone(ctx, wire.KindForget, &m)
		if errors.Is(err, shimclient.ErrDisconnected) {
			return nil
		}
		return err
	})
}

// ReopenContainerLog makes the shim reopen the log file by its path, after an external rotation.
func (r *Runtime) ReopenContainerLog(ctx context.Context,
	request *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	c, err := r.findContainer(request.GetContainerId())
	if err != nil {
		return nil, err
	}
	shim := c.containerShim()
	if shim == nil {
		return nil, fmt.Errorf("reopen the log of container %s: %w", c.rec.ID, shimclient.ErrDisconnected)
	}
	m := wire.Target{Container: c.rec.ID}
	if _, err := shim.CallDone(ctx, wire.KindReopen, &m); err != nil {
		return nil, fmt.Errorf("reopen the log of container %s: %w", c.rec.ID, err)
	}
	return &cri.ReopenContainerLogResponse{}, nil
}
