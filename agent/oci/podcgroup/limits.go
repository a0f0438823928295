package podcgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// noLimit is the value of a CPU quota or memory limit that removes the limit.
const noLimit = -1

// UpdatedResources converts the resources of a resize to cgroup settings. If swap is true, memory
// plus swap is limited to the memory limit too, so no swap can be used.
func (t *Tree) UpdatedResources(requested *cri.LinuxContainerResources, swap bool) *cgroups.Resources {
	res := &cgroups.Resources{SkipDevices: true, MemoryCheckBeforeUpdate: true}
	if t.Controllers["cpu"] != "" {
		res.CpuShares = uint64(max(requested.GetCpuShares(), 0))
		res.CpuPeriod = uint64(max(requested.GetCpuPeriod(), 0))
		if res.CpuQuota = requested.GetCpuQuota(); res.CpuQuota <= 0 {
			res.CpuQuota = noLimit
		}
		if t.Unified && res.CpuShares > 0 {
			res.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(res.CpuShares)
			res.CpuShares = 0
		}
	}
	if t.Controllers["memory"] != "" {
		if res.Memory = requested.GetMemoryLimitInBytes(); res.Memory <= 0 {
			res.Memory = noLimit
		}
		if swap && res.Memory > 0 {
			res.MemorySwap = res.Memory
		}
	}
	return res
}

// UpdateCgroup changes the limits of an existing cgroup.
func (t *Tree) UpdateCgroup(name string, res *cgroups.Resources) error {
	if err := t.checkMemoryLimit(name, res); err != nil {
		return err
	}
	cg := &cgroups.Cgroup{Path: filepath.Join(t.Root, name), Resources: res}
	m, err := t.newManager(cg)
	if err == nil {
		err = m.Set(res)
	}
	if err != nil {
		return fmt.Errorf("set the limits of cgroup %s: %w", cg.Path, err)
	}
	return nil
}

// checkMemoryLimit returns an error if the new memory limit is below the cgroup's current usage. It
// is called before anything is changed: with cgroup v2, the kernel would kill processes until the
// usage is below the limit.
func (t *Tree) checkMemoryLimit(name string, res *cgroups.Resources) error {
	if res.Memory <= 0 {
		return nil
	}
	limit, usage := "memory.limit_in_bytes", "memory.usage_in_bytes"
	if t.Unified {
		limit, usage = "memory.max", "memory.current"
	}
	dir := filepath.Join(t.memory, t.Root, name)
	if current, limited, err := readNumber(filepath.Join(dir, limit)); err != nil || limited && res.Memory >= current {
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

// readNumber reads a cgroup file with one number. ok is false for "max", which means no limit.
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
