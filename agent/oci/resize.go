package oci

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// UpdateContainerResources implements agent.Runtime.
func (r *Runtime) UpdateContainerResources(ctx context.Context,
	request *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	c, err := r.lockContainer(ctx, request.GetContainerId())
	if err != nil {
		return nil, err
	}
	defer c.operation.Unlock()
	r.mu.Lock()
	state := c.rec.State
	r.mu.Unlock()
	if state != ContainerCreated && state != ContainerRunning {
		return nil, status.Errorf(codes.FailedPrecondition, "update container %s: it is %s", c.rec.ID, state)
	}
	if err := r.cgroups.UpdateCgroup(c.rec.Cgroup, r.cgroups.UpdatedResources(request.GetLinux(),
		r.host.HasSwapAccounting())); err != nil {
		return nil, fmt.Errorf("update container %s: %w", c.rec.ID, err)
	}
	// Store the resources in the record's config, so that an older release finds them too.
	config := proto.CloneOf(c.config)
	if config.Linux == nil {
		config.Linux = &cri.LinuxContainerConfig{}
	}
	config.Linux.Resources = mergeLimits(c.currentResources(), request.GetLinux())
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	c.updated.Store(config.Linux.Resources)
	rec := c.updateRecord(func(rec *containerRecord) { rec.Config = data })
	if err := r.paths.saveContainer(&rec); err != nil {
		return nil, err
	}
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// UpdatePodSandboxResources implements agent.Runtime.
func (r *Runtime) UpdatePodSandboxResources(ctx context.Context,
	request *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error) {
	if err := r.awaitReady(ctx); err != nil {
		return nil, err
	}
	s, err := r.findSandbox(request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	s.teardown.RLock()
	defer s.teardown.RUnlock()
	r.mu.Lock()
	state := s.rec.State
	r.mu.Unlock()
	if state != SandboxReady {
		return nil, status.Errorf(codes.FailedPrecondition, "update sandbox %s: it is %s", s.rec.ID, state)
	}
	// Swap is limited in the containers' cgroups only, as at creation.
	if err := r.cgroups.UpdateCgroup(s.cgroupPath(),
		r.cgroups.UpdatedResources(request.GetResources(), false)); err != nil {
		return nil, fmt.Errorf("update sandbox %s: %w", s.rec.ID, err)
	}
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}

// currentResources returns the container's resources after the last update. If there was no update,
// it returns the resources of its creation.
func (c *container) currentResources() *cri.LinuxContainerResources {
	if r := c.updated.Load(); r != nil {
		return r
	}
	return c.config.GetLinux().GetResources()
}

// mergeLimits returns a copy of current in which update has replaced the CPU and memory limits.
// current may be nil.
func mergeLimits(current, update *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	held := &cri.LinuxContainerResources{}
	if current != nil {
		held = proto.CloneOf(current)
	}
	held.CpuShares, held.CpuQuota, held.CpuPeriod = update.GetCpuShares(), update.GetCpuQuota(), update.GetCpuPeriod()
	held.MemoryLimitInBytes = update.GetMemoryLimitInBytes()
	return held
}

// SetTiers implements agent.TieredRuntime.
func (r *Runtime) SetTiers(ctx context.Context, tiers agent.Tiers) error {
	if err := r.awaitReady(ctx); err != nil {
		return err
	}
	return r.cgroups.ApplyTiers(tiers)
}
