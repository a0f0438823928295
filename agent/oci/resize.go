package oci

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// UpdateContainerResources implements agent.Runtime.
func (r *Runtime) UpdateContainerResources(ctx context.Context, q *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error) {
	c, err := r.lockContainer(ctx, q.GetContainerId())
	if err != nil {
		return nil, err
	}
	defer c.op.Unlock()
	r.mu.Lock()
	state := c.rec.State
	r.mu.Unlock()
	if state != ContainerCreated && state != ContainerRunning {
		return nil, status.Errorf(codes.FailedPrecondition, "update container %s: it is %s", c.rec.ID, state)
	}
	if err := r.cgroups.update(c.rec.Cgroup, r.cgroups.limits(q.GetLinux(), r.host.swapAccounting())); err != nil {
		return nil, fmt.Errorf("update container %s: %w", c.rec.ID, err)
	}
	// Store the resources in the record's config, so that an older release finds them too.
	config := proto.CloneOf(c.config)
	if config.Linux == nil {
		config.Linux = &cri.LinuxContainerConfig{}
	}
	config.Linux.Resources = withLimits(c.resources(), q.GetLinux())
	data, err := proto.Marshal(config)
	if err != nil {
		return nil, err
	}
	c.updated.Store(config.Linux.Resources)
	rec := r.amend(c, func(rec *containerRecord) { rec.Config = data })
	if err := r.saveContainer(&rec); err != nil {
		return nil, err
	}
	return &cri.UpdateContainerResourcesResponse{}, nil
}

// UpdatePodSandboxResources implements agent.Runtime.
func (r *Runtime) UpdatePodSandboxResources(ctx context.Context, q *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	s, err := r.sandbox(q.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	s.op.RLock()
	defer s.op.RUnlock()
	r.mu.Lock()
	state := s.rec.State
	r.mu.Unlock()
	if state != SandboxReady {
		return nil, status.Errorf(codes.FailedPrecondition, "update sandbox %s: it is %s", s.rec.ID, state)
	}
	// Swap is limited in the containers' cgroups only, as at creation.
	if err := r.cgroups.update(s.cgroup(), r.cgroups.limits(q.GetResources(), false)); err != nil {
		return nil, fmt.Errorf("update sandbox %s: %w", s.rec.ID, err)
	}
	return &cri.UpdatePodSandboxResourcesResponse{}, nil
}

// resources returns the container's current resources: the last update, or those at creation.
func (c *ctr) resources() *cri.LinuxContainerResources {
	if r := c.updated.Load(); r != nil {
		return r
	}
	return c.config.GetLinux().GetResources()
}

// withLimits returns the resources before with the CPU and memory limits of want.
func withLimits(before, want *cri.LinuxContainerResources) *cri.LinuxContainerResources {
	have := &cri.LinuxContainerResources{}
	if before != nil {
		have = proto.CloneOf(before)
	}
	have.CpuShares, have.CpuQuota, have.CpuPeriod = want.GetCpuShares(), want.GetCpuQuota(), want.GetCpuPeriod()
	have.MemoryLimitInBytes = want.GetMemoryLimitInBytes()
	return have
}

// noLimit removes a limit of CPU or memory.
const noLimit = -1

// limits returns the cgroup settings of an update. With swap, memory plus swap is limited to the
// memory limit too, so no swap can be used.
func (t *cgroupTree) limits(r *cri.LinuxContainerResources, swap bool) *cgroups.Resources {
	res := &cgroups.Resources{SkipDevices: true, MemoryCheckBeforeUpdate: true}
	if t.controllers["cpu"] != "" {
		res.CpuShares = uint64(max(r.GetCpuShares(), 0))
		res.CpuPeriod = uint64(max(r.GetCpuPeriod(), 0))
		if res.CpuQuota = r.GetCpuQuota(); res.CpuQuota <= 0 {
			res.CpuQuota = noLimit
		}
		if t.unified && res.CpuShares > 0 {
			res.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(res.CpuShares)
			res.CpuShares = 0
		}
	}
	if t.controllers["memory"] != "" {
		if res.Memory = r.GetMemoryLimitInBytes(); res.Memory <= 0 {
			res.Memory = noLimit
		}
		if swap && res.Memory > 0 {
			res.MemorySwap = res.Memory
		}
	}
	return res
}

// update changes the limits of an existing cgroup.
func (t *cgroupTree) update(name string, res *cgroups.Resources) error {
	if err := t.checkMemory(name, res); err != nil {
		return err
	}
	cg := &cgroups.Cgroup{Path: filepath.Join(t.root, name), Resources: res}
	m, err := t.manager(cg)
	if err == nil {
		err = m.Set(res)
	}
	if err != nil {
		return fmt.Errorf("set the limits of cgroup %s: %w", cg.Path, err)
	}
	return nil
}

// checkMemory returns an error for a limit below the current usage, before anything is changed.
// With cgroup v2, the kernel would kill processes until the limit holds.
func (t *cgroupTree) checkMemory(name string, res *cgroups.Resources) error {
	if res.Memory <= 0 {
		return nil
	}
	limit, usage := "memory.limit_in_bytes", "memory.usage_in_bytes"
	if t.unified {
		limit, usage = "memory.max", "memory.current"
	}
	dir := filepath.Join(t.memory, t.root, name)
	if now, limited, err := readNumber(filepath.Join(dir, limit)); err != nil || limited && res.Memory >= now {
		return err
	}
	used, _, err := readNumber(filepath.Join(dir, usage))
	if err != nil {
		return err
	}
	if used > res.Memory {
		return fmt.Errorf("attempting to set a memory limit (%d) below current usage (%d)", res.Memory, used)
	}
	return nil
}

// readNumber reads a kernel file with one number. ok is false for "max", which means no limit.
func readNumber(file string) (n int64, ok bool, err error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, false, fmt.Errorf("read a limit: %w", err)
	}
	text := strings.TrimSpace(string(b))
	if text == "max" {
		return 0, false, nil
	}
	n, err = strconv.ParseInt(text, 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return 0, false, nil // larger than any memory
	}
	if err != nil {
		return 0, false, fmt.Errorf("read %s: %w", file, err)
	}
	return n, true, nil
}
