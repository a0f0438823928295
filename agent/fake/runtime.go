package fake

import (
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Runtime simulates a container runtime in memory. It implements agent.Runtime. Like the shims of
// the real runtime, it outlives the agent. To test the adoption of running pods, pass the same
// Runtime to a second agent.
type Runtime struct {
	Script
	Clock   Clock
	Network agent.Network // attaches sandboxes; nil: sandboxes get addresses 10.88.x.y
	// Lifetime returns the time after which a container exits by itself, and its exit code. If ok
	// is false or Lifetime is nil, the container runs until it is stopped.
	Lifetime func(*cri.ContainerConfig) (d time.Duration, code int32, ok bool)
	// OnExec is called for ExecSync and Exec; nil: every command succeeds.
	OnExec func(container *cri.ContainerConfig, command []string) (stdout string, code int32, err error)
	// Handlers are the names of the runtime handlers, besides the default handler "".
	Handlers []string
	// IgnoreTerm names containers that ignore SIGTERM: stopping them takes the whole grace period.
	IgnoreTerm map[string]bool
	// InUse is the memory usage in bytes by container name. A lower memory limit is refused.
	InUse map[string]int64

	state runtimeState
}

var _ agent.EarlyRuntime = (*Runtime)(nil)

// RunPodSandbox creates a simulated sandbox. It implements agent.Runtime.
func (r *Runtime) RunPodSandbox(ctx context.Context, q *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error) {
	return r.RunPodSandboxEarly(ctx, q, func(string) {})
}

// RunPodSandboxEarly creates a simulated sandbox and calls prepared before it attaches the network.
// The Script's delay of "AttachNetwork" starts after that call. It implements agent.EarlyRuntime.
func (r *Runtime) RunPodSandboxEarly(ctx context.Context, q *cri.RunPodSandboxRequest, prepared func(id string)) (
	*cri.RunPodSandboxResponse, error,
) {
	m := q.Config.Metadata
	start := r.Clock.nowOrReal()
	if err := r.enterVerb(ctx, r.Clock, "RunPodSandbox",
		fmt.Sprintf("%s/%s#%d", m.Namespace, m.Name, m.Attempt)); err != nil {
		return nil, err
	}
	if h := q.RuntimeHandler; h != "" && !slices.Contains(r.Handlers, h) {
		return nil, status.Errorf(codes.InvalidArgument, "no runtime for handler %q is configured", h)
	}
	r.state.mu.Lock()
	r.state.seq++
	s := &sandbox{cfg: q.Config, handler: q.RuntimeHandler, id: fmt.Sprintf("sb%d", r.state.seq), ready: true,
		half: true, created: r.Clock.nowOrReal(),
		ips: []string{fmt.Sprintf("10.88.%d.%d", r.state.seq/250, r.state.seq%250+2)}}
	if r.state.sandboxes == nil {
		r.state.sandboxes, r.state.stages = map[string]*sandbox{}, map[string][]agent.StageTime{}
	}
	r.state.sandboxes[s.id] = s
	r.state.mu.Unlock()
	prepared(s.id)
	ips, err := r.attachNetwork(ctx, s)
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if err != nil {
		r.state.dropSandbox(s.id, r.Clock.nowOrReal())
		return nil, fmt.Errorf("attaching sandbox of pod %s/%s to the network: %w", m.Namespace, m.Name, err)
	}
	if ips != nil {
		s.ips = ips
	}
	s.half = false
	r.state.stages[s.id] = []agent.StageTime{{Name: "cni", Start: start, Duration: r.Clock.nowOrReal().Sub(start),
		Detail: strings.Join(s.ips, ",")}}
	r.state.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: types.UID(m.Uid)})
	return &cri.RunPodSandboxResponse{PodSandboxId: s.id}, nil
}

// attachNetwork attaches a sandbox to the Network and returns its addresses. If the result is
// empty, the sandbox keeps the addresses that it has.
func (r *Runtime) attachNetwork(ctx context.Context, s *sandbox) ([]string, error) {
	if err := r.pauseVerb(ctx, r.Clock, "AttachNetwork"); err != nil {
		return nil, err
	}
	if r.Network == nil || hostNetwork(s.cfg) {
		return nil, nil
	}
	m := s.cfg.Metadata
	st, err := r.Network.Add(ctx, agent.NetworkRequest{SandboxID: s.id, Namespace: m.Namespace, Name: m.Name,
		UID: types.UID(m.Uid)})
	return st.IPs, err
}

func hostNetwork(c *cri.PodSandboxConfig) bool {
	return c.GetLinux().GetSecurityContext().GetNamespaceOptions().GetNetwork() == cri.NamespaceMode_NODE
}

// StopPodSandbox stops a sandbox and its containers. It implements agent.Runtime.
func (r *Runtime) StopPodSandbox(ctx context.Context, q *cri.StopPodSandboxRequest) (
	*cri.StopPodSandboxResponse, error,
) {
	if err := r.enterVerb(ctx, r.Clock, "StopPodSandbox", q.PodSandboxId); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	s := r.state.sandboxes[q.PodSandboxId]
	if s == nil {
		r.state.mu.Unlock()
		return &cri.StopPodSandboxResponse{}, nil
	}
	for _, c := range r.state.containers {
		if c.sbID == s.id {
			r.state.exitContainer(c, r.Clock.nowOrReal(), 137, "Error", "")
		}
	}
	s.ready = false
	r.state.sendEvent(agent.RuntimeEvent{SandboxID: s.id, PodUID: types.UID(s.cfg.Metadata.Uid)})
	r.state.mu.Unlock()
	if r.Network != nil && !hostNetwork(s.cfg) {
		m := s.cfg.Metadata
		if err := r.Network.Del(ctx, agent.NetworkRequest{SandboxID: s.id, Namespace: m.Namespace, Name: m.Name,
			UID: types.UID(m.Uid)}); err != nil {
			return nil, err
		}
	}
	return &cri.StopPodSandboxResponse{}, nil
}

// RemovePodSandbox removes a sandbox and its containers. It implements agent.Runtime.
func (r *Runtime) RemovePodSandbox(ctx context.Context, q *cri.RemovePodSandboxRequest) (
	*cri.RemovePodSandboxResponse, error,
) {
	if err := r.enterVerb(ctx, r.Clock, "RemovePodSandbox", q.PodSandboxId); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	r.state.dropSandbox(q.PodSandboxId, r.Clock.nowOrReal())
	return &cri.RemovePodSandboxResponse{}, nil
}

// PodSandboxStatus returns the status of a sandbox. It implements agent.Runtime.
func (r *Runtime) PodSandboxStatus(_ context.Context, q *cri.PodSandboxStatusRequest) (
	*cri.PodSandboxStatusResponse, error,
) {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	s := r.state.sandboxes[q.PodSandboxId]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "sandbox %q not found", q.PodSandboxId)
	}
	st := &cri.PodSandboxStatus{Id: s.id, Metadata: s.cfg.Metadata, State: s.criState(),
		CreatedAt: s.created.UnixNano(), Labels: s.cfg.Labels, Annotations: s.cfg.Annotations,
		RuntimeHandler: s.handler,
		Linux: &cri.LinuxPodSandboxStatus{
			Namespaces: &cri.Namespace{Options: s.cfg.GetLinux().GetSecurityContext().GetNamespaceOptions()}}}
	if !hostNetwork(s.cfg) && len(s.ips) > 0 {
		st.Network = &cri.PodSandboxNetworkStatus{Ip: s.ips[0]}
		for _, ip := range s.ips[1:] {
			st.Network.AdditionalIps = append(st.Network.AdditionalIps, &cri.PodIP{Ip: ip})
		}
	}
	return &cri.PodSandboxStatusResponse{Status: st}, nil
}

// ListPodSandbox returns the sandboxes that match the filter. It implements agent.Runtime.
func (r *Runtime) ListPodSandbox(ctx context.Context, q *cri.ListPodSandboxRequest) (
	*cri.ListPodSandboxResponse, error,
) {
	return r.state.listSandboxes(q), r.pauseVerb(ctx, r.Clock, "ListPodSandbox")
}

// CreateContainer creates a simulated container in a sandbox. It implements agent.Runtime.
func (r *Runtime) CreateContainer(ctx context.Context, q *cri.CreateContainerRequest) (
	*cri.CreateContainerResponse, error,
) {
	if err := r.enterVerb(ctx, r.Clock, "CreateContainer",
		fmt.Sprintf("%s#%d", q.Config.Metadata.Name, q.Config.Metadata.Attempt)); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	s := r.state.sandboxes[q.PodSandboxId]
	if s == nil || !s.ready {
		return nil, status.Errorf(codes.NotFound, "sandbox %q is not running", q.PodSandboxId)
	}
	r.state.seq++
	c := &container{cfg: q.Config, id: fmt.Sprintf("c%d", r.state.seq), sbID: s.id,
		state: cri.ContainerState_CONTAINER_CREATED, created: r.Clock.nowOrReal(), done: make(chan struct{})}
	if r.state.containers == nil {
		r.state.containers = map[string]*container{}
	}
	r.state.containers[c.id] = c
	return &cri.CreateContainerResponse{ContainerId: c.id}, nil
}

// StartContainer starts a simulated container, which exits by itself after the time that Lifetime
// returns. It implements agent.Runtime.
func (r *Runtime) StartContainer(ctx context.Context, q *cri.StartContainerRequest) (
	*cri.StartContainerResponse, error,
) {
	c, err := r.state.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	if err := r.enterVerb(ctx, r.Clock, "StartContainer",
		fmt.Sprintf("%s#%d", c.cfg.Metadata.Name, c.cfg.Metadata.Attempt)); err != nil {
		r.state.mu.Lock()
		defer r.state.mu.Unlock()
		c.started = r.Clock.nowOrReal()
		r.state.exitContainer(c, r.Clock.nowOrReal(), 128, "StartError", err.Error())
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if s := r.state.sandboxes[c.sbID]; s != nil && s.half {
		return nil, status.Errorf(codes.FailedPrecondition, "sandbox %q of container %q has no network yet", s.id, c.id)
	}
	if c.state != cri.ContainerState_CONTAINER_CREATED {
		return nil, status.Errorf(codes.FailedPrecondition, "container %q is %s, not created", c.id, c.state)
	}
	c.state, c.started = cri.ContainerState_CONTAINER_RUNNING, r.Clock.nowOrReal()
	r.state.countRunning(c)
	r.state.sendEvent(r.state.containerEvent(c))
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
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	r.state.exitContainer(c, r.Clock.nowOrReal(), code, "", "")
}

// MaxRunning returns the maximum number of instances of one container that ever ran at the same
// time. A number above 1 is a defect of the agent.
func (r *Runtime) MaxRunning() int {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	n := 0
	for _, v := range r.state.maxRunning {
		n = max(n, v)
	}
	return n
}

// StopContainer stops a container. It implements agent.Runtime.
func (r *Runtime) StopContainer(ctx context.Context, q *cri.StopContainerRequest) (*cri.StopContainerResponse, error) {
	c, err := r.state.getContainer(q.ContainerId)
	if err != nil {
		return &cri.StopContainerResponse{}, nil
	}
	if err := r.enterVerb(ctx, r.Clock, "StopContainer",
		fmt.Sprintf("%s#%d %ds", c.cfg.Metadata.Name, c.cfg.Metadata.Attempt, q.Timeout)); err != nil {
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
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	r.state.exitContainer(c, r.Clock.nowOrReal(), code, "", "")
	return &cri.StopContainerResponse{}, nil
}

// RemoveContainer removes a container. It implements agent.Runtime.
func (r *Runtime) RemoveContainer(ctx context.Context, q *cri.RemoveContainerRequest) (
	*cri.RemoveContainerResponse, error,
) {
	if err := r.enterVerb(ctx, r.Clock, "RemoveContainer", q.ContainerId); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if c := r.state.containers[q.ContainerId]; c != nil {
		r.state.exitContainer(c, r.Clock.nowOrReal(), 137, "Error", "")
		delete(r.state.containers, q.ContainerId)
	}
	return &cri.RemoveContainerResponse{}, nil
}

// ListContainers returns the containers that match the filter. It implements agent.Runtime.
func (r *Runtime) ListContainers(ctx context.Context, q *cri.ListContainersRequest) (
	*cri.ListContainersResponse, error,
) {
	return r.state.listContainers(q), r.pauseVerb(ctx, r.Clock, "ListContainers")
}

// ContainerStatus returns the status of a container. It implements agent.Runtime.
func (r *Runtime) ContainerStatus(_ context.Context, q *cri.ContainerStatusRequest) (
	*cri.ContainerStatusResponse, error,
) {
	c, err := r.state.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	st := &cri.ContainerStatus{Id: c.id, Metadata: c.cfg.Metadata, State: c.state, CreatedAt: c.created.UnixNano(),
		ExitCode: c.code, Reason: c.reason, Message: c.message,
		Image: proto.Clone(c.cfg.Image).(*cri.ImageSpec), ImageRef: c.cfg.GetImage().GetImage(), Labels: c.cfg.Labels,
		Annotations: c.cfg.Annotations, Mounts: c.cfg.Mounts, LogPath: c.cfg.LogPath,
		Resources: &cri.ContainerResources{Linux: proto.CloneOf(c.currentResources())},
		User: &cri.ContainerUser{Linux: &cri.LinuxContainerUser{
			Uid: c.cfg.GetLinux().GetSecurityContext().GetRunAsUser().GetValue(),
			Gid: c.cfg.GetLinux().GetSecurityContext().GetRunAsGroup().GetValue()}}, StopSignal: c.cfg.StopSignal}
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
	c, err := r.state.getContainer(q.ContainerId)
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

// Status reports that the runtime is ready, whether the Network is ready, and the Handlers. It
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

// Attach copies stdin to stdout until stdin ends. If one of these streams is nil, it waits until
// the container exits. It implements agent.Runtime.
func (r *Runtime) Attach(ctx context.Context, id string, _ bool, s agent.Streams) error {
	c, err := r.state.getContainer(id)
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
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	st := r.state.stages[id]
	delete(r.state.stages, id)
	return st
}
