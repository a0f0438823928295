package fake

import (
	"maps"
	"slices"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// runtimeState contains the sandboxes and containers of a Runtime, and notifies the watchers of
// their events. The zero value is empty. mu protects all fields.
type runtimeState struct {
	mu         sync.Mutex
	seq        int
	sandboxes  map[string]*sandbox
	containers map[string]*container
	watchers   map[chan agent.RuntimeEvent]struct{}
	stages     map[string][]agent.StageTime
	maxRunning map[string]int // by pod UID/container name: maximum of concurrently running instances
}

type sandbox struct {
	cfg     *cri.PodSandboxConfig
	id      string
	ready   bool
	half    bool // the sandbox's network is still being attached
	created time.Time
	ips     []string
	handler string
	updated *cri.LinuxContainerResources // resources of the last update, which replace those in cfg; nil: never updated
}

type container struct {
	cfg      *cri.ContainerConfig
	id, sbID string
	state    cri.ContainerState
	created  time.Time
	started  time.Time
	finished time.Time
	code     int32
	reason   string
	message  string
	done     chan struct{}
	// resources of the last update, which replace those in cfg; nil: never updated
	updated *cri.LinuxContainerResources
}

func matchesLabels(sel, labels map[string]string) bool {
	for k, v := range sel {
		if labels[k] != v {
			return false
		}
	}
	return true
}

func (s *sandbox) criState() cri.PodSandboxState {
	if s.ready {
		return cri.PodSandboxState_SANDBOX_READY
	}
	return cri.PodSandboxState_SANDBOX_NOTREADY
}

// sendEvent sends an event to all watchers. If a watcher is slow, it drops the event, because real
// runtimes may also lose events. The caller holds the lock.
func (r *runtimeState) sendEvent(e agent.RuntimeEvent) {
	for ch := range r.watchers {
		select {
		case ch <- e:
		default:
		}
	}
}

func (r *runtimeState) containerEvent(c *container) agent.RuntimeEvent {
	return agent.RuntimeEvent{SandboxID: c.sbID, ContainerID: c.id, PodUID: types.UID(c.cfg.Labels[agent.LabelPodUID])}
}

func (r *runtimeState) getContainer(id string) (*container, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.containers[id]
	if c == nil {
		return nil, status.Errorf(codes.NotFound, "container %q not found", id)
	}
	return c, nil
}

// exitContainer ends a container that has not exited. The caller holds the lock.
func (r *runtimeState) exitContainer(c *container, now time.Time, code int32, reason, message string) {
	if c.state == cri.ContainerState_CONTAINER_EXITED {
		return
	}
	if reason == "" {
		reason = "Error"
		if code == 0 {
			reason = "Completed"
		}
	}
	c.state, c.code, c.reason, c.message, c.finished = cri.ContainerState_CONTAINER_EXITED, code, reason, message, now
	close(c.done)
	r.sendEvent(r.containerEvent(c))
}

// dropSandbox deletes a sandbox and its containers. The caller holds the lock.
func (r *runtimeState) dropSandbox(sandbox string, now time.Time) {
	for id, c := range r.containers {
		if c.sbID == sandbox {
			r.exitContainer(c, now, 137, "Error", "")
			delete(r.containers, id)
		}
	}
	delete(r.sandboxes, sandbox)
	delete(r.stages, sandbox)
}

func (r *runtimeState) listSandboxes(q *cri.ListPodSandboxRequest) *cri.ListPodSandboxResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &cri.ListPodSandboxResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.sandboxes)) {
		s := r.sandboxes[id]
		f := q.GetFilter()
		if s.half || f.GetId() != "" && f.GetId() != s.id ||
			f.GetState() != nil && f.GetState().State != s.criState() ||
			!matchesLabels(f.GetLabelSelector(), s.cfg.Labels) {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{Id: s.id, Metadata: s.cfg.Metadata, State: s.criState(),
			CreatedAt: s.created.UnixNano(), Labels: s.cfg.Labels, Annotations: s.cfg.Annotations,
			RuntimeHandler: s.handler})
	}
	return out
}

func (r *runtimeState) listContainers(q *cri.ListContainersRequest) *cri.ListContainersResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &cri.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		c, f := r.containers[id], q.GetFilter()
		if f.GetId() != "" && f.GetId() != c.id || f.GetPodSandboxId() != "" && f.GetPodSandboxId() != c.sbID ||
			f.GetState() != nil && f.GetState().State != c.state || !matchesLabels(f.GetLabelSelector(), c.cfg.Labels) {
			continue
		}
		out.Containers = append(out.Containers, &cri.Container{Id: c.id, PodSandboxId: c.sbID, Metadata: c.cfg.Metadata,
			Image: c.cfg.Image, ImageRef: c.cfg.GetImage().GetImage(),
			State: c.state, CreatedAt: c.created.UnixNano(), Labels: c.cfg.Labels, Annotations: c.cfg.Annotations})
	}
	return out
}

// countRunning updates the maximum number of running instances of c. The caller holds the lock.
func (r *runtimeState) countRunning(c *container) {
	if r.maxRunning == nil {
		r.maxRunning = map[string]int{}
	}
	key, n := c.cfg.Labels[agent.LabelPodUID]+"/"+c.cfg.Metadata.Name, 0
	for _, o := range r.containers {
		if o.state == cri.ContainerState_CONTAINER_RUNNING &&
			o.cfg.Labels[agent.LabelPodUID]+"/"+o.cfg.Metadata.Name == key {
			n++
		}
	}
	r.maxRunning[key] = max(r.maxRunning[key], n)
}
