package fake

import (
	"context"
	"fmt"

	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Events returns a channel with the events of simulated containers and sandboxes until ctx ends. It
// implements agent.Runtime.
func (r *Runtime) Events(ctx context.Context) <-chan agent.RuntimeEvent {
	ch := make(chan agent.RuntimeEvent, 256)
	r.state.mu.Lock()
	if r.state.watchers == nil {
		r.state.watchers = map[chan agent.RuntimeEvent]struct{}{}
	}
	r.state.watchers[ch] = struct{}{}
	r.state.mu.Unlock()
	context.AfterFunc(ctx, func() {
		r.state.mu.Lock()
		defer r.state.mu.Unlock()
		delete(r.state.watchers, ch)
		close(ch)
	})
	return ch
}

// Exit ends the running instance of a pod's container with an exit code; reason may be empty.
func (r *Runtime) Exit(pod types.UID, name string, code int32, reason string) error {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	for _, c := range r.state.containers {
		if c.cfg.Labels[agent.LabelPodUID] == string(pod) && c.cfg.Metadata.Name == name &&
			c.state == cri.ContainerState_CONTAINER_RUNNING {
			r.state.exitContainer(c, r.Clock.nowOrReal(), code, reason, "")
			return nil
		}
	}
	return fmt.Errorf("pod %s has no running container %q", pod, name)
}

// KillSandbox simulates the death of the pause process: the sandbox is no longer ready, but its
// containers continue to run.
func (r *Runtime) KillSandbox(pod types.UID) error {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	for _, s := range r.state.sandboxes {
		if s.cfg.Metadata.Uid == string(pod) && s.ready {
			s.ready = false
			r.state.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: pod})
			return nil
		}
	}
	return fmt.Errorf("pod %s has no ready sandbox", pod)
}

// Running returns the ID of the running instance of a container, or "".
func (r *Runtime) Running(pod types.UID, name string) string {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	for _, c := range r.state.containers {
		if c.cfg.Labels[agent.LabelPodUID] == string(pod) && c.cfg.Metadata.Name == name &&
			c.state == cri.ContainerState_CONTAINER_RUNNING {
			return c.id
		}
	}
	return ""
}

// ContainerConfig returns the configuration of a container, or nil for an unknown ID.
func (r *Runtime) ContainerConfig(id string) *cri.ContainerConfig {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if c := r.state.containers[id]; c != nil {
		return c.cfg
	}
	return nil
}

// SandboxConfig returns the configuration of the pod's newest sandbox, or nil.
func (r *Runtime) SandboxConfig(pod types.UID) *cri.PodSandboxConfig {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	var newest *sandbox
	for _, s := range r.state.sandboxes {
		if s.cfg.Metadata.Uid == string(pod) &&
			(newest == nil || s.cfg.Metadata.Attempt > newest.cfg.Metadata.Attempt) {
			newest = s
		}
	}
	if newest == nil {
		return nil
	}
	return newest.cfg
}

// Left returns the numbers of sandboxes and containers that still exist, running or not.
func (r *Runtime) Left() (sandboxes, containers int) {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	return len(r.state.sandboxes), len(r.state.containers)
}

// Poke sends an event about a pod although nothing has changed, so that receivers of events check
// the pod.
func (r *Runtime) Poke(pod types.UID) {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	r.state.sendEvent(agent.RuntimeEvent{PodUID: pod})
}
