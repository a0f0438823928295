package oci

import (
	"cmp"
	"context"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent/oci/containerspec"
)

// PodSandboxStatus implements agent.Runtime.
func (r *Runtime) PodSandboxStatus(ctx context.Context,
	request *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	s, err := r.findSandbox(request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	state, ips := s.rec.State, s.rec.IPs
	r.mu.Unlock()
	st := &cri.PodSandboxStatus{
		Id: s.rec.ID, Metadata: s.config.GetMetadata(), State: criSandboxState(state), CreatedAt: s.rec.Created,
		Labels: s.config.GetLabels(), Annotations: s.config.GetAnnotations(), RuntimeHandler: s.rec.Handler,
		Linux:   &cri.LinuxPodSandboxStatus{Namespaces: &cri.Namespace{Options: s.namespaceOptions()}},
		Network: &cri.PodSandboxNetworkStatus{},
	}
	for i, ip := range ips {
		if i == 0 {
			st.Network.Ip = ip
		} else {
			st.Network.AdditionalIps = append(st.Network.AdditionalIps, &cri.PodIP{Ip: ip})
		}
	}
	out := &cri.PodSandboxStatusResponse{Status: st, Timestamp: time.Now().UnixNano()}
	for _, c := range s.containers() {
		if cs := c.containerStatus(); cs != nil {
			out.ContainersStatuses = append(out.ContainersStatuses, cs)
		}
	}
	slices.SortFunc(out.ContainersStatuses, func(a, b *cri.ContainerStatus) int {
		return cmp.Compare(a.CreatedAt, b.CreatedAt)
	})
	return out, nil
}

func criSandboxState(s SandboxState) cri.PodSandboxState {
	if s == SandboxReady {
		return cri.PodSandboxState_SANDBOX_READY
	}
	return cri.PodSandboxState_SANDBOX_NOTREADY
}

func criContainerState(s ContainerState) cri.ContainerState {
	switch s {
	case ContainerCreated:
		return cri.ContainerState_CONTAINER_CREATED
	case ContainerRunning:
		return cri.ContainerState_CONTAINER_RUNNING
	case ContainerExited:
		return cri.ContainerState_CONTAINER_EXITED
	}
	return cri.ContainerState_CONTAINER_UNKNOWN
}

// ListPodSandbox implements agent.Runtime. It omits sandboxes that are being created, because
// RunPodSandbox has not returned yet.
func (r *Runtime) ListPodSandbox(ctx context.Context,
	request *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	f := request.GetFilter()
	out := &cri.ListPodSandboxResponse{}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, s := range r.sandboxes {
		state := criSandboxState(s.rec.State)
		if s.rec.State == SandboxCreating || s.rec.State == SandboxPrepared ||
			!strings.HasPrefix(s.rec.ID, f.GetId()) || !matchesLabels(f.GetLabelSelector(), s.config.GetLabels()) {
			continue
		}
		if f.GetState() != nil && f.GetState().GetState() != state {
			continue
		}
		out.Items = append(out.Items, &cri.PodSandbox{Id: s.rec.ID, Metadata: s.config.GetMetadata(), State: state,
			CreatedAt: s.rec.Created, Labels: s.config.GetLabels(), Annotations: s.config.GetAnnotations(),
			RuntimeHandler: s.rec.Handler})
	}
	slices.SortFunc(out.Items, func(a, b *cri.PodSandbox) int { return cmp.Compare(a.CreatedAt, b.CreatedAt) })
	return out, nil
}

func matchesLabels(selector, labels map[string]string) bool {
	for k, v := range selector {
		if value, ok := labels[k]; !ok || value != v {
			return false
		}
	}
	return true
}

// ListContainers implements agent.Runtime.
func (r *Runtime) ListContainers(ctx context.Context,
	request *cri.ListContainersRequest) (*cri.ListContainersResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	f := request.GetFilter()
	out := &cri.ListContainersResponse{}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, c := range r.containers {
		state := criContainerState(c.rec.State)
		if c.rec.State == ContainerCreating || !strings.HasPrefix(c.rec.ID, f.GetId()) ||
			!strings.HasPrefix(c.rec.Sandbox, f.GetPodSandboxId()) ||
			!matchesLabels(f.GetLabelSelector(), c.config.GetLabels()) {
			continue
		}
		if f.GetState() != nil && f.GetState().GetState() != state {
			continue
		}
		out.Containers = append(out.Containers, &cri.Container{Id: c.rec.ID, PodSandboxId: c.rec.Sandbox,
			Metadata: c.config.GetMetadata(), Image: c.config.GetImage(), ImageRef: c.imageRef(),
			ImageId: c.rec.ImageID, State: state, CreatedAt: c.rec.Created, Labels: c.config.GetLabels(),
			Annotations: c.config.GetAnnotations()})
	}
	slices.SortFunc(out.Containers, func(a, b *cri.Container) int { return cmp.Compare(a.CreatedAt, b.CreatedAt) })
	return out, nil
}

// imageRef returns the digest reference of the container's image, or its ID if it has no digest.
func (c *container) imageRef() string {
	if c.rec.ImageRef != "" {
		return c.rec.ImageRef
	}
	return c.rec.ImageID
}

// ContainerStatus implements agent.Runtime.
func (r *Runtime) ContainerStatus(ctx context.Context,
	request *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	c, err := r.findContainer(request.GetContainerId())
	if err != nil {
		return nil, err
	}
	st := c.containerStatus()
	if st == nil {
		return nil, status.Errorf(codes.NotFound, "container %q is still being created", c.rec.ID)
	}
	return &cri.ContainerStatusResponse{Status: st}, nil
}

// containerStatus returns the CRI status of a container; nil while it is being created.
func (c *container) containerStatus() *cri.ContainerStatus {
	r := c.runtime
	r.mu.Lock()
	defer r.mu.Unlock()
	if c.rec.State == ContainerCreating {
		return nil
	}
	st := &cri.ContainerStatus{
		Id: c.rec.ID, Metadata: c.config.GetMetadata(), State: criContainerState(c.rec.State), CreatedAt: c.rec.Created,
		StartedAt: c.rec.Started, Image: c.config.GetImage(), ImageRef: c.imageRef(), ImageId: c.rec.ImageID,
		Labels: c.config.GetLabels(), Annotations: c.config.GetAnnotations(), Mounts: c.config.GetMounts(),
		LogPath: c.rec.Log, Resources: &cri.ContainerResources{Linux: c.currentResources()},
		User: &cri.ContainerUser{Linux: &cri.LinuxContainerUser{Uid: int64(c.rec.User.UID),
			Gid: int64(c.rec.User.GID)}},
		StopSignal: containerspec.SignalToCRI(c.rec.Stop),
	}
	for _, g := range c.rec.User.Groups {
		st.User.Linux.SupplementalGroups = append(st.User.Linux.SupplementalGroups, int64(g))
	}
	if c.rec.State == ContainerExited {
		st.FinishedAt, st.ExitCode, st.Reason = c.exit.Finished, c.exit.Code, terminationReason(c.exit.Code, c.exit.OOM)
		if c.rec.StartError != "" {
			st.Reason, st.Message = startErrorReason, c.rec.StartError
		}
		if c.exitUnknown.Load() {
			st.Reason, st.Message = "ContainerStatusUnknown",
				"the shim of the container was killed; the container's exit code is unknown"
		}
	}
	return st
}

// Status implements agent.Runtime.
func (r *Runtime) Status(ctx context.Context, request *cri.StatusRequest) (*cri.StatusResponse, error) {
	ready := &cri.RuntimeCondition{Type: cri.RuntimeReady, Status: true}
	select {
	case <-r.life.ready:
	default:
		ready.Status, ready.Reason, ready.Message = false,
			"Starting", "containers of an earlier agent process are being adopted"
	}
	network := &cri.RuntimeCondition{Type: cri.NetworkReady, Status: true}
	if err := r.cfg.Network.Ready(); err != nil {
		network.Status, network.Reason, network.Message = false, "NetworkPluginNotReady", err.Error()
	}
	return &cri.StatusResponse{
		Status:          &cri.RuntimeStatus{Conditions: []*cri.RuntimeCondition{ready, network}},
		RuntimeHandlers: r.cfg.describeHandlers(),
		Features:        &cri.RuntimeFeatures{SupplementalGroupsPolicy: true},
	}, nil
}
