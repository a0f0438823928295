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

// Events implements agent.Runtime.
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

// notify drops an event for a watcher that does not keep up: losing one is allowed.
func (r *Runtime) notify(e agent.RuntimeEvent) {
	for ch := range r.watchers {
		select {
		case ch <- e:
		default:
		}
	}
}

func (r *Runtime) event(c *container) agent.RuntimeEvent {
	return agent.RuntimeEvent{SandboxID: c.sbID, ContainerID: c.id, PodUID: types.UID(c.cfg.Labels[agent.LabelPodUID])}
}

func (r *Runtime) get(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[id]
	if c == nil {
		return nil, status.Errorf(codes.NotFound, "container %q not found", id)
	}
	return c, nil
}

// exit ends a container that is not ended yet. The lock is held.
func (r *Runtime) exit(c *container, code int32, reason, message string) {
	if c.state == cri.ContainerState_CONTAINER_EXITED {
		return
	}
	if reason == "" {
		reason = "Error"
		if code == 0 {
			reason = "Completed"
		}
	}
	c.state, c.code, c.reason, c.message, c.finished = cri.ContainerState_CONTAINER_EXITED, code, reason, message, r.Clock.now()
	close(c.done)
	r.notify(r.event(c))
}

// Exit ends the running instance of a pod's container with a code; reason may be empty.
func (r *Runtime) Exit(pod types.UID, name string, code int32, reason string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		if c.cfg.Labels[agent.LabelPodUID] == string(pod) && c.cfg.Metadata.Name == name && c.state == cri.ContainerState_CONTAINER_RUNNING {
			r.exit(c, code, reason, "")
			return nil
		}
	}
	return fmt.Errorf("pod %s has no running container %q", pod, name)
}

// KillSandbox is the death of pause: the sandbox is no longer ready, its containers run on.
func (r *Runtime) KillSandbox(pod types.UID) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		if s.cfg.Metadata.Uid == string(pod) && s.ready {
			s.ready = false
			r.notify(agent.RuntimeEvent{SandboxID: s.id, PodUID: pod})
			return nil
		}
	}
	return fmt.Errorf("pod %s has no ready sandbox", pod)
}

// Running returns the id of the running instance of a container, "" when there is none.
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

// ContainerConfig returns what a container was created with, nil for an unknown id.
func (r *Runtime) ContainerConfig(id string) *cri.ContainerConfig {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[id]; c != nil {
		return c.cfg
	}
	return nil
}

// SandboxConfig returns what the pod's newest sandbox was made with, nil when there is none.
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

// Left says how many sandboxes and containers exist, running or not.
func (r *Runtime) Left() (sandboxes, containers int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.sandboxes), len(r.containers)
}

// Poke delivers an event of a pod although nothing changed: whoever listens looks again.
func (r *Runtime) Poke(pod types.UID) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.notify(agent.RuntimeEvent{PodUID: pod})
}
