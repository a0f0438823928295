package fake

import (
	"context"
	"fmt"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdateContainerResources stores the new resource limits of a container. It returns an error if
// the memory limit is below the usage in InUse. It implements agent.Runtime.
func (r *Runtime) UpdateContainerResources(
	ctx context.Context, q *cri.UpdateContainerResourcesRequest,
) (*cri.UpdateContainerResourcesResponse, error) {
	c, err := r.state.getContainer(q.ContainerId)
	if err != nil {
		return nil, err
	}
	if err := r.enterVerb(ctx, r.Clock, "UpdateContainerResources", c.cfg.Metadata.Name); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	if c.state == cri.ContainerState_CONTAINER_EXITED {
		return nil, status.Errorf(codes.FailedPrecondition, "container %q has ended", c.id)
	}
	limit := q.GetLinux().GetMemoryLimitInBytes()
	if used := r.InUse[c.cfg.Metadata.Name]; limit > 0 && used > limit {
		return nil, fmt.Errorf("attempting to set a memory limit (%d) below current usage (%d)", limit, used)
	}
	c.updated = proto.CloneOf(q.GetLinux())
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// UpdatePodSandboxResources stores the new resource limits of a sandbox. It implements
// agent.Runtime.
func (r *Runtime) UpdatePodSandboxResources(
	ctx context.Context, q *cri.UpdatePodSandboxResourcesRequest,
) (*cri.UpdatePodSandboxResourcesResponse, error) {
	if err := r.enterVerb(ctx, r.Clock, "UpdatePodSandboxResources", q.PodSandboxId); err != nil {
		return nil, err
	}
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	s := r.state.sandboxes[q.PodSandboxId]
	if s == nil {
		return nil, status.Errorf(codes.NotFound, "sandbox %q not found", q.PodSandboxId)
	}
	s.updated = proto.CloneOf(q.GetResources())
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}

func (c *container) currentResources() *cri.LinuxContainerResources {
	if c.updated != nil {
		return c.updated
	}
	return c.cfg.GetLinux().GetResources()
}

// PodLimits returns the limits of a pod's cgroup, or nil if it has no ready sandbox.
func (r *Runtime) PodLimits(uid types.UID) *cri.LinuxContainerResources {
	r.state.mu.Lock()
	defer r.state.mu.Unlock()
	for _, s := range r.state.sandboxes {
		if s.cfg.GetMetadata().GetUid() != string(uid) || !s.ready {
			continue
		}
		if s.updated != nil {
			return proto.CloneOf(s.updated)
		}
		return proto.CloneOf(s.cfg.GetLinux().GetResources())
	}
	return nil
}
