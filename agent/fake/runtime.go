package fake

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Runtime simulates a container runtime in memory. It implements agent.Runtime. It outlives agents,
// as shims do: pass the same Runtime to a second agent to test the adoption of running pods.
type Runtime struct {
	Script
	Clock   Clock
	Network agent.Network // may be nil: sandboxes get addresses 10.88.x.y
	// Lifetime returns how long a container runs by itself and its exit code. With ok=false, or if
	// Lifetime is nil, it runs until it is stopped.
	Lifetime func(*cri.ContainerConfig) (d time.Duration, code int32, ok bool)
	// OnExec is called for ExecSync and Exec; nil: every command succeeds.
	OnExec func(container *cri.ContainerConfig, command []string) (stdout string, code int32, err error)
	// Handlers are the runtime's handlers besides "".
	Handlers []string
	// IgnoreTerm names containers that ignore SIGTERM: stopping them takes the whole grace period.
	IgnoreTerm map[string]bool
	// InUse is the memory usage in bytes by container name. A lower memory limit is refused.
	InUse map[string]int64

	mu         sync.Mutex
	seq        int
	sandboxes  map[string]*sandbox
	containers map[string]*container
	watchers   map[chan agent.RuntimeEvent]struct{}
	stages     map[string][]agent.StageTime
	maxRunning map[string]int // by pod UID/container name: maximum of concurrently running instances
}

var _ agent.EarlyRuntime = (*Runtime)(nil)

type sandbox struct {
	cfg     *cri.PodSandboxConfig
	id      string
	ready   bool
	half    bool // its network is still being attached
	created time.Time
	ips     []string
	handler string
	updated *cri.LinuxContainerResources // instead of the resources in cfg; nil: never updated
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
	updated  *cri.LinuxContainerResources // instead of the resources in cfg; nil: never updated
}

// RunPodSandbox creates a simulated sandbox. It implements agent.Runtime.
func (r *Runtime) RunPodSandbox(ctx context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	return r.RunPodSandboxEarly(ctx, q, func(string) {})
}

// RunPodSandboxEarly creates a simulated sandbox and calls prepared before it attaches the network.
// The Script's delay of "AttachNetwork" starts after that call. It implements agent.EarlyRuntime.
func (r *Runtime) RunPodSandboxEarly(ctx context.Context, q *cri.RunPodSandboxRequest, prepared func(id string)) (*cri.RunPodSandboxResponse, error) {
	m := q.Config.Metadata
	start := r.Clock.nowOrReal()
	if err := r.enterVerb(ctx, r.Clock, "RunPodSandbox", fmt.Sprintf("%s/%s#%d", m.Namespace, m.Name, m.Attempt)); err != nil {
		return nil, err
	}
	if h := q.RuntimeHandler; h != "" && !slices.Contains(r.Handlers, h) {
		return nil, status.Errorf(codes.InvalidArgument, "no runtime for handler %q is configured", h)
	}
	r.mu.Lock()
	r.seq++
	s := &sandbox{cfg: q.Config, handler: q.RuntimeHandler, id: fmt.Sprintf("sb%d", r.seq), ready: true, half: true, created: r.Clock.nowOrReal(), ips: []string{fmt.Sprintf("10.88.%d.%d", r.seq/250, r.seq%250+2)}}
	if r.sandboxes == nil {
		r.sandboxes, r.stages = map[string]*sandbox{}, map[string][]agent.StageTime{}
	}
	r.sandboxes[s.id] = s
	r.mu.Unlock()
	prepared(s.id)
	ips, err := r.attachNetwork(ctx, s)
	r.mu.Lock()
	defer r.mu.Unlock()
	if err != nil {
		r.dropSandbox(s.id)
		return nil, fmt.Errorf("attaching sandbox of pod %s/%s to the network: %w", m.Namespace, m.Name, err)
	}
	if ips != nil {
		s.ips = ips
	}
	s.half = false
	r.stages[s.id] = []agent.StageTime{{Name: "cni", Start: start, Duration: r.Clock.nowOrReal().Sub(start), Detail: strings.Join(s.ips, ",")}}
	r.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: types.UID(m.Uid)})
	return &cri.RunPodSandboxResponse{PodSandboxId: s.id}, nil
}

// attachNetwork attaches a sandbox to the Network and returns its addresses. If it returns none,
// the sandbox keeps the addresses that it has.
func (r *Runtime) attachNetwork(ctx context.Context, s *sandbox) ([]string, error) {
	if err := r.pauseVerb(ctx, r.Clock, "AttachNetwork"); err != nil {
		return nil, err
	}
	if r.Network == nil || hostNetwork(s.cfg) {
		return nil, nil
	}
	m := s.cfg.Metadata
	st, err := r.Network.Add(ctx, agent.NetworkRequest{SandboxID: s.id, Namespace: m.Namespace, Name: m.Name, UID: types.UID(m.Uid)})
	return st.IPs, err
}

// dropSandbox deletes a sandbox and its containers. The caller holds the lock.
func (r *Runtime) dropSandbox(sandbox string) {
	for id, c := range r.containers {
		if c.sbID == sandbox {
			r.exitContainer(c, 137, "Error", "")
			delete(r.containers, id)
		}
	}
	delete(r.sandboxes, sandbox)
	delete(r.stages, sandbox)
}

func hostNetwork(c *cri.PodSandboxConfig) bool {
	return c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_NODE
}

// StopPodSandbox stops a sandbox and its containers. It implements agent.Runtime.
func (r *Runtime) StopPodSandbox(ctx context.Context, q *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error) {
	if err := r.enterVerb(ctx, r.Clock, "StopPodSandbox", q.PodSandboxId); err != nil {
		return nil, err
	}
	r.mu.Lock()
	s := r.sandboxes[q.PodSandboxId]
	if s == nil {
		r.mu.Unlock()
		return &cri.StopPodSandboxResponse{}, nil
	}
	for _, c := range r.containers {
		if c.sbID == s.id {
			r.exitContainer(c, 137, "Error", "")
		}
	}
	s.ready = false
	r.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: types.UID(s.cfg.Metadata.Uid)})
	r.mu.Unlock()
	if r.Network != nil && !hostNetwork(s.cfg) {
		m := s.cfg.Metadata
		if err := r.Network.Del(ctx, agent.NetworkRequest{SandboxID: s.id, Namespace: m.Namespace, Name: m.Name, UID: types.UID(m.Uid)}); err != nil {
			return nil, err
		}
	}
	return &cri.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox removes a sandbox and its containers. It implements agent.Runtime.
func (r *Runtime) RemovePodSandbox(ctx context.Context, q *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error) {
	if err := r.enterVerb(ctx, r.Clock, "RemovePodSandbox", q.PodSandboxId); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropSandbox(q.PodSandboxId)
	return &cri.RemovePodSandboxResponse{}, nil
}

// PodSandboxStatus returns the status of a sandbox. It implements agent.Runtime.
func (r *Runtime) PodSandboxStatus(_ context.Context, q *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.PodSandboxId]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "sandbox %q not found", q.PodSandboxId)
	}
	st := &cri.PodSandboxStatus{Id: s.id, Metadata: s.cfg.Metadata, State: s.criState(), CreatedAt: s.created.UnixNano(), Labels: s.cfg.Labels, Annotations: s.cfg.Annotations,
		RuntimeHandler: s.handler, Linux: &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: s.cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()}}}
	if !hostNetwork(s.cfg) && len(s.ips) > 0 {
		st.Network = &cri.PodSandboxNetworkStatus{Ip: s.ips[0]}
		for _, ip := range s.ips[1:] {
			st.Network.AdditionalIps = append(st.Network.AdditionalIps, &cri.PodIP{Ip: ip})
		}
	}
	return &cri.PodSandboxStatusResponse{Status: st}, nil
}

func (s *sandbox) criState() cri.PodSandboxState {
	if s.ready {
		return cri.PodSandboxState_SANDBOX_READY
	}
	return cri.PodSandboxState_SANDBOX_NOTREADY
}

// ListPodSandbox returns the sandboxes that match the filter. It implements agent.Runtime.
func (r *Runtime) ListPodSandbox(ctx context.Context, q *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	return r.listSandboxes(q), r.pauseVerb(ctx, r.Clock, "ListPodSandbox")
}

func (r *Runtime) listSandboxes(q *cri.ListPodSandboxRequest) *cri.ListPodSandboxResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &cri.ListPodSandboxResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.sandboxes)) {
		s := r.sandboxes[id]
		f := q.GetFilter()
		if s.half || f.GetId() != "" && f.GetId() != s.id || f.GetState() != nil && f.GetState().State != s.criState() || !matchesLabels(f.GetLabelSelector(), s.cfg.Labels) {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{Id: s.id, Metadata: s.cfg.Metadata, State: s.criState(), CreatedAt: s.created.UnixNano(), Labels: s.cfg.Labels, Annotations: s.cfg.Annotations,
			RuntimeHandler: s.handler})
	}
	return out
}

func matchesLabels(sel, labels map[string]string) bool {
	for k, v := range sel {
		if labels[k] != v {
			return false
		}
	}
	return true
}

// CreateContainer creates a simulated container in a sandbox. It implements agent.Runtime.
func (r *Runtime) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error) {
	if err := r.enterVerb(ctx, r.Clock, "CreateContainer", fmt.Sprintf("%s#%d", q.Config.Metadata.Name, q.Config.Metadata.Attempt)); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	s := r.sandboxes[q.PodSandboxId]
	if s == nil || !s.ready {
		return nil, status.Errorf(codes.NotFound, "sandbox %q is not running", q.PodSandboxId)
	}
	r.seq++
	c := &container{cfg: q.Config, id: fmt.Sprintf("c%d", r.seq), sbID: s.id, state: cri.ContainerState_CONTAINER_CREATED, created: r.Clock.nowOrReal(), done: make(chan struct{})}
	if r.containers == nil {
		r.containers = map[string]*container{}
	}
	r.containers[c.id] = c
	return &cri.CreateContainerResponse{ContainerId: c.id}, nil
}

// StartContainer starts a simulated container, which exits by itself after the time that Lifetime
// returns. It implements agent.Runtime.
func (r *Runtime) StartContainer(ctx context.Context, q *cri.StartContainerRequest) (*cri.StartContainerResponse, error) {
	c, err := r.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	if err := r.enterVerb(ctx, r.Clock, "StartContainer", fmt.Sprintf("%s#%d", c.cfg.Metadata.Name, c.cfg.Metadata.Attempt)); err != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		c.started = r.Clock.nowOrReal()
		r.exitContainer(c, 128, "StartError", err.Error())
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if s := r.sandboxes[c.sbID]; s != nil && s.half {
		return nil, status.Errorf(codes.FailedPrecondition, "sandbox %q of container %q has no network yet", s.id, c.id)
	}
	if c.state != cri.ContainerState_CONTAINER_CREATED {
		return nil, status.Errorf(codes.FailedPrecondition, "container %q is %s, not created", c.id, c.state)
	}
	c.state, c.started = cri.ContainerState_CONTAINER_RUNNING, r.Clock.nowOrReal()
	r.countRunning(c)
	r.sendEvent(r.containerEvent(c))
	if r.Lifetime != nil {
		if d, code, ok := r.Lifetime(c.cfg); ok {
			go r.exitAfterLifetime(c, d, code)
		}
	}
	return &cri.StartContainerResponse{}, nil
}

func (r *Runtime) exitAfterLifetime(c *container, d time.Duration, code int32) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-c.done:
			cancel()
		case <-ctx.Done():
		}
	}()
	if r.Clock.sleepFor(ctx, d) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exitContainer(c, code, "", "")
}

func (r *Runtime) countRunning(c *container) {
	if r.maxRunning == nil {
		r.maxRunning = map[string]int{}
	}
	key, n := c.cfg.Labels[agent.LabelPodUID]+"/"+c.cfg.Metadata.Name, 0
	for _, o := range r.containers {
		if o.state == cri.ContainerState_CONTAINER_RUNNING && o.cfg.Labels[agent.LabelPodUID]+"/"+o.cfg.Metadata.Name == key {
			n++
		}
	}
	r.maxRunning[key] = max(r.maxRunning[key], n)
}

// MaxRunning returns the maximum number of instances of one container that ever ran at the same
// time. A number above 1 is a defect of the agent.
func (r *Runtime) MaxRunning() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	n := 0
	for _, v := range r.maxRunning {
		n = max(n, v)
	}
	return n
}

// StopContainer stops a container. It implements agent.Runtime.
func (r *Runtime) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	c, err := r.getContainer(q.ContainerId)
	if err != nil {
		return &cri.StopContainerResponse{}, nil
	}
	if err := r.enterVerb(ctx, r.Clock, "StopContainer", fmt.Sprintf("%s#%d %ds", c.cfg.Metadata.Name, c.cfg.Metadata.Attempt, q.Timeout)); err != nil {
		return nil, err
	}
	code := int32(143)
	if q.Timeout == 0 {
		code = 137
	} else if r.IgnoreTerm[c.cfg.Metadata.Name] {
		if err := r.Clock.sleepFor(ctx, time.Duration(q.Timeout)*time.Second); err != nil {
			return nil, err
		}
		code = 137
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.exitContainer(c, code, "", "")
	return &cri.StopContainerResponse{}, nil
}

// RemoveContainer removes a container. It implements agent.Runtime.
func (r *Runtime) RemoveContainer(ctx context.Context, q *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error) {
	if err := r.enterVerb(ctx, r.Clock, "RemoveContainer", q.ContainerId); err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if c := r.containers[q.ContainerId]; c != nil {
		r.exitContainer(c, 137, "Error", "")
		delete(r.containers, q.ContainerId)
	}
	return &cri.RemoveContainerResponse{}, nil
}

// ListContainers returns the containers that match the filter. It implements agent.Runtime.
func (r *Runtime) ListContainers(ctx context.Context, q *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	return r.listContainers(q), r.pauseVerb(ctx, r.Clock, "ListContainers")
}

func (r *Runtime) listContainers(q *cri.ListContainersRequest) *cri.ListContainersResponse {
	r.mu.Lock()
	defer r.mu.Unlock()
	out := &cri.ListContainersResponse{}
	for _, id := range slices.Sorted(maps.Keys(r.containers)) {
		c, f := r.containers[id], q.GetFilter()
		if f.GetId() != "" && f.GetId() != c.id || f.GetPodSandboxId() != "" && f.GetPodSandboxId() != c.sbID ||
			f.GetState() != nil && f.GetState().State != c.state || !matchesLabels(f.GetLabelSelector(), c.cfg.Labels) {
			continue
		}
		out.Containers = append(out.Containers, &cri.Container{Id: c.id, PodSandboxId: c.sbID, Metadata: c.cfg.Metadata, Image: c.cfg.Image, ImageRef: c.cfg.GetImage().GetImage(),
			State: c.state, CreatedAt: c.created.UnixNano(), Labels: c.cfg.Labels, Annotations: c.cfg.Annotations})
	}
	return out
}

// ContainerStatus returns the status of a container. It implements agent.Runtime.
func (r *Runtime) ContainerStatus(_ context.Context, q *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	c, err := r.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	st := &cri.ContainerStatus{Id: c.id, Metadata: c.cfg.Metadata, State: c.state, CreatedAt: c.created.UnixNano(), ExitCode: c.code, Reason: c.reason, Message: c.message,
		Image: proto.Clone(c.cfg.Image).(*cri.ImageSpec), ImageRef: c.cfg.GetImage().GetImage(), Labels: c.cfg.Labels, Annotations: c.cfg.Annotations, Mounts: c.cfg.Mounts, LogPath: c.cfg.LogPath,
		Resources: &cri.ContainerResources{Linux: proto.CloneOf(c.currentResources())}}
	if !c.started.IsZero() {
		st.StartedAt = c.started.UnixNano()
	}
	if !c.finished.IsZero() {
		st.FinishedAt = c.finished.UnixNano()
	}
	return &cri.ContainerStatusResponse{Status: st}, nil
}

// ExecSync returns the output and exit code that OnExec returns for a command. It implements
// agent.Runtime.
func (r *Runtime) ExecSync(ctx context.Context, q *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error) {
	c, err := r.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	if err := r.enterVerb(ctx, r.Clock, "ExecSync", c.cfg.Metadata.Name+" "+strings.Join(q.Cmd, " ")); err != nil {
		return nil, err
	}
	if r.OnExec == nil {
		return &cri.ExecSyncResponse{}, nil
	}
	out, code, err := r.OnExec(c.cfg, q.Cmd)
	if err != nil {
		return nil, err
	}
	return &cri.ExecSyncResponse{Stdout: []byte(out), ExitCode: code}, nil
}

// Status returns that the runtime is ready, whether the Network is ready, and the Handlers. It
// implements agent.Runtime.
func (r *Runtime) Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error) {
	cond := []*cri.RuntimeCondition{{Type: cri.RuntimeReady, Status: true}, {Type: cri.NetworkReady, Status: true}}
	if r.Network != nil {
		if err := r.Network.Ready(); err != nil {
			cond[1].Status, cond[1].Message = false, err.Error()
		}
	}
	res := &cri.StatusResponse{Status: &cri.RuntimeStatus{Conditions: cond}, RuntimeHandlers: []*cri.RuntimeHandler{{}}}
	for _, h := range r.Handlers {
		res.RuntimeHandlers = append(res.RuntimeHandlers, &cri.RuntimeHandler{Name: h})
	}
	return res, nil
}

// Exec writes the output that OnExec returns for a command. It implements agent.Runtime.
func (r *Runtime) Exec(ctx context.Context, id string, command []string, _ bool, s agent.Streams) error {
	res, err := r.ExecSync(ctx, &cri.ExecSyncRequest{ContainerId: id, Cmd: command})
	if err != nil {
		return err
	}
	if s.Stdout != nil {
		if _, err := s.Stdout.Write(res.Stdout); err != nil {
			return err
		}
	}
	if res.ExitCode != 0 {
		return &agent.ExitError{Code: int(res.ExitCode)}
	}
	return nil
}

// Attach copies stdin to stdout until stdin ends. Without these streams, it waits until the
// container exits. It implements agent.Runtime.
func (r *Runtime) Attach(ctx context.Context, id string, _ bool, s agent.Streams) error {
	c, err := r.getContainer(id)
	if err != nil {
		return err
	}
	if s.Stdin != nil && s.Stdout != nil {
		_, err := io.Copy(s.Stdout, s.Stdin)
		return err
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-c.done:
		return nil
	}
}

// PortForward sends the data received from conn back to conn. It implements agent.Runtime.
func (r *Runtime) PortForward(_ context.Context, _ string, _ int32, conn io.ReadWriteCloser) error {
	defer conn.Close()
	_, err := io.Copy(conn, conn)
	return err
}

// StageTimes returns and deletes the stages of a sandbox. It implements agent.Runtime.
func (r *Runtime) StageTimes(id string) []agent.StageTime {
	r.mu.Lock()
	defer r.mu.Unlock()
	st := r.stages[id]
	delete(r.stages, id)
	return st
}
