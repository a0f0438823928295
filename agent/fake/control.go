package fake

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Events returns a channel with the events of simulated containers and sandboxes until ctx ends. It
// implements agent.Runtime.
func (r *Runtime) Events(ctx context.Context) <-chan agent.RuntimeEvent {
	ch := make(chan agent.RuntimeEvent, 256)
	r.mu.Lock()
	if r.watchers == nil {
		r.watchers = map[chan agent.RuntimeEvent]struct{}{}
	}
	r.watchers[ch] = struct{}{}
	r.mu.Unlock()
	context.AfterFunc(ctx, func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.watchers, ch)
		close(ch)
	})
	return ch
}

// sendEvent sends an event to all watchers. It drops the event for a slow watcher, as runtimes may
// lose events.
func (r *Runtime) sendEvent(e agent.RuntimeEvent) {
	for ch := range r.watchers {
		select {
		case ch <- e:
		default:
		}
	}
}

func (r *Runtime) containerEvent(c *container) agent.RuntimeEvent {
	return agent.RuntimeEvent{SandboxID: c.sbID, ContainerID: c.id, PodUID: types.UID(c.cfg.Labels[agent.LabelPodUID])}
}

func (r *Runtime) getContainer(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[id]
	if c == nil {
		return nil, status.Errorf(codes.NotFound, "container %q not found", id)
	}
	return c, nil
}

// exitContainer ends a container that has not exited. The caller holds the lock.
func (r *Runtime) exitContainer(c *container, code int32, reason, message string) {
	if c.state == cri.ContainerState_CONTAINER_EXITED {
		return
	}
	if reason == "" {
		reason = "Error"
		if code == 0 {
			reason = "Completed"
		}
	}
	c.state, c.code, c.reason, c.message, c.finished = cri.ContainerState_CONTAINER_EXITED, code, reason, message, r.Clock.nowOrReal()
	close(c.done)
	r.sendEvent(r.containerEvent(c))
}

// Exit ends the running instance of a pod's container with an exit code; reason may be empty.
func (r *Runtime) Exit(pod types.UID, name string, code int32, reason string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		if c.cfg.Labels[agent.LabelPodUID] == string(pod) && c.cfg.Metadata.Name == name && c.state == cri.ContainerState_CONTAINER_RUNNING {
			r.exitContainer(c, code, reason, "")
			return nil
		}
	}
	return fmt.Errorf("pod %s has no running container %q", pod, name)
}

// KillSandbox simulates the death of the pause process: the sandbox is no longer ready, its
// containers continue.
func (r *Runtime) KillSandbox(pod types.UID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		if s.cfg.Metadata.Uid == string(pod) && s.ready {
			s.ready = false
			r.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: pod})
			return nil
		}
	}
	return fmt.Errorf("pod %s has no ready sandbox", pod)
}

// Running returns the ID of the running instance of a container, or "".
func (r *Runtime) Running(pod types.UID, name string) string {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		if c.cfg.Labels[agent.LabelPodUID] == string(pod) && c.cfg.Metadata.Name == name && c.state == cri.ContainerState_CONTAINER_RUNNING {
			return c.id
		}
	}
	return ""
}

// ContainerConfig returns the configuration of a container, or nil for an unknown ID.
func (r *Runtime) ContainerConfig(id string) *cri.ContainerConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c.cfg
	}
	return nil
}

// SandboxConfig returns the configuration of the pod's newest sandbox, or nil.
func (r *Runtime) SandboxConfig(pod types.UID) *cri.PodSandboxConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	var newest *sandbox
	for _, s := range r.sandboxes {
		if s.cfg.Metadata.Uid == string(pod) && (newest == nil || s.cfg.Metadata.Attempt > newest.cfg.Metadata.Attempt) {
			newest = s
		}
	}
	if newest == nil {
		return nil
	}
	return newest.cfg
}

// Left returns the numbers of sandboxes and containers that exist, running or not.
func (r *Runtime) Left() (sandboxes, containers int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sandboxes), len(r.containers)
}

// Poke sends an event of a pod although nothing has changed, so that its watchers check the pod.
func (r *Runtime) Poke(pod types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.sendEvent(agent.RuntimeEvent{PodUID: pod})
}
