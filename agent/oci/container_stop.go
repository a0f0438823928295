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
	"keelson.dev/keelson/agent/oci/wire"
	"keelson.dev/keelson/internal/safepath"
	"keelson.dev/keelson/internal/wait"
)

// StopContainer implements agent.Runtime: it sends the stop signal, and SIGKILL after the timeout.
func (r *Runtime) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	c, err := r.container(q.GetContainerId())
	if err != nil {
		return &cri.StopContainerResponse{}, nil
	}
	if q.GetTimeout() > 0 && r.stateOf(c) == ContainerRunning {
		sig := c.rec.Stop
		if sig == 0 {
			sig = int(unix.SIGTERM)
		}
		grace, cancel := context.WithTimeout(ctx, time.Duration(q.GetTimeout())*time.Second)
		defer cancel()
		if err := r.askToStop(grace, c, sig); err != nil {
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
	if err := r.killContainer(ctx, c); err != nil {
		return nil, fmt.Errorf("stop container %s: %w", c.rec.ID, err)
	}
	return &cri.StopContainerResponse{}, nil
}

// askToStop sends the stop signal to the container's first process. If the shim does not respond,
// as after a restart of the agent or during a reconnect, it retries. It gives up when the container
// has ended or the grace period is over. If there is certainly no shim, the container is soon
// marked as ended.
func (r *Runtime) askToStop(grace context.Context, c *ctr, sig int) error {
	var refused error
	_ = wait.For(grace, 20*time.Millisecond, func() error {
		select {
		case <-c.ended:
			return nil
		default:
		}
		shim := r.shimOf(c)
		if shim == nil {
			return errShimGone
		}
		err := shim.signal(grace, c.rec.ID, sig)
		if errors.Is(err, errShimGone) || grace.Err() != nil {
			return err
		}
		refused = err
		return nil
	})
	return refused
}

func (r *Runtime) stateOf(c *ctr) ContainerState {
	r.mu.Lock()
	defer r.mu.Unlock()
	return c.rec.State
}

// shimOf returns the shim of the container's sandbox; nil if it is not connected.
func (r *Runtime) shimOf(c *ctr) *shimClient {
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[c.rec.Sandbox]; s != nil {
		return s.shim
	}
	return nil
}

// signal sends a signal to the container's first process. It returns nil if the process has ended.
func (r *Runtime) signal(ctx context.Context, c *ctr, sig int) error {
	shim := r.shimOf(c)
	if shim == nil {
		return nil
	}
	return shim.signal(ctx, c.rec.ID, sig)
}

// killContainer kills a container, started or not, and waits until it has ended.
func (r *Runtime) killContainer(ctx context.Context, c *ctr) error {
	ctx, cancel := context.WithTimeout(ctx, teardownTimeout)
	defer cancel()
	switch r.stateOf(c) {
	case ContainerExited:
		return nil
	case ContainerCreated:
		if c.rec.StartError != "" { // it has no process
			return r.failStart(c)
		}
	case ContainerCreating: // keelson-oci creates it, or did when an earlier agent process died
		return r.cgroups.kill(ctx, c.rec.Cgroup)
	}
	if r.shimOf(c) == nil {
		r.orphanEnded(ctx, c)
		return nil
	}
	if err := r.signal(ctx, c, int(unix.SIGKILL)); errors.Is(err, errShimGone) {
		r.orphanEnded(ctx, c)
		return nil
	} else if err != nil {
		return err
	}
	if c.rec.SharePID {
		if err := r.cgroups.kill(ctx, c.rec.Cgroup); err != nil {
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
func (r *Runtime) RemoveContainer(ctx context.Context, q *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	c, err := r.container(q.GetContainerId())
	if err != nil {
		return &cri.RemoveContainerResponse{}, nil
	}
	if err := r.removeContainer(ctx, c); err != nil {
		return nil, fmt.Errorf("remove container %s: %w", c.rec.ID, err)
	}
	return &cri.RemoveContainerResponse{}, nil
}

func (r *Runtime) removeContainer(ctx context.Context, c *ctr) error {
	c.op.Lock()
	defer c.op.Unlock()
	if err := r.killContainer(ctx, c); err != nil {
		return err
	}
	return r.eraseContainer(ctx, c)
}

// eraseContainer removes everything of a dead container, its record last. It is safe at any point,
// and can be repeated after a failure. The caller holds c.op.
func (r *Runtime) eraseContainer(ctx context.Context, c *ctr) error {
	id := c.rec.ID
	if err := r.endForGood(ctx, c); err != nil {
		return err
	}
	if err := r.cgroups.remove(ctx, c.rec.Cgroup); err != nil {
		return err
	}
	for _, dir := range []string{filepath.Join(r.libcontainerDir(), id), r.imageVolumes(id)} {
		if err := safepath.RemoveAll(dir); err != nil {
			return err
		}
	}
	if err := r.cfg.Images.RemoveRootFS(ctx, id); err != nil {
		return fmt.Errorf("remove the root file system: %w", err)
	}
	// Either of the two records is enough to find the container again.
	if err := ignoreMissing(os.Remove(r.endFile(id))); err != nil {
		return err
	}
	if err := safepath.RemoveAll(r.containerDir(id)); err != nil {
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

// endForGood kills the processes in the container's cgroup until the shim confirms that the
// container has ended. keelson-oci may still be creating it.
func (r *Runtime) endForGood(ctx context.Context, c *ctr) error {
	m := wire.Target{Container: c.rec.ID}
	return wait.For(ctx, 2*time.Millisecond, func() error {
		if err := r.cgroups.kill(ctx, c.rec.Cgroup); err != nil {
			return err
		}
		shim := r.shimOf(c)
		if shim == nil {
			return nil
		}
		_, err := shim.done(ctx, wire.KindForget, &m)
		if errors.Is(err, errShimGone) {
			return nil
		}
		return err
	})
}

// ReopenContainerLog makes the shim reopen the log file by its path, after an external rotation.
func (r *Runtime) ReopenContainerLog(ctx context.Context, q *cri.ReopenContainerLogRequest) (*cri.ReopenContainerLogResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	c, err := r.container(q.GetContainerId())
	if err != nil {
		return nil, err
	}
	shim := r.shimOf(c)
	if shim == nil {
		return nil, fmt.Errorf("reopen the log of container %s: %w", c.rec.ID, errShimGone)
	}
	m := wire.Target{Container: c.rec.ID}
	if _, err := shim.done(ctx, wire.KindReopen, &m); err != nil {
		return nil, fmt.Errorf("reopen the log of container %s: %w", c.rec.ID, err)
	}
	return &cri.ReopenContainerLogResponse{}, nil
}
