package podcgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
)

// The tiers are the cgroups of QoS classes below the runtime's root. Burstable and BestEffort pods
// are in the tier of their class. Guaranteed pods are directly in kubepods.
const (
	podsCgroup = "kubepods"
	Burstable  = "kubepods/burstable"
	BestEffort = "kubepods/besteffort"
)

const (
	MinShares = 2 // the minimum of the kernel
	maxShares = 262_144
)

// cpuShares converts millicores to cgroup v1 CPU shares.
func cpuShares(milli int64) uint64 { return uint64(min(max(milli*1024/1000, MinShares), maxShares)) }

// tierLimit is the value to write to one cgroup file of one tier.
type tierLimit struct{ tier, controller, file, value string }

// tierLimits returns the cgroup files of the tiers and the values to write to them. Pure.
func tierLimits(tiers agent.Tiers, unified bool) []tierLimit {
	cpuFile, memoryFile := "cpu.shares", "memory.limit_in_bytes"
	if unified {
		cpuFile, memoryFile = "cpu.weight", "memory.max"
	}
	weight := func(milli int64) string {
		shares := cpuShares(milli)
		if unified {
			shares = cgroups.ConvertCPUSharesToCgroupV2Value(shares)
		}
		return strconv.FormatUint(shares, 10)
	}
	limit := func(n int64, none string) string {
		if n <= 0 {
			return none
		}
		return strconv.FormatInt(n, 10)
	}
	noMemoryLimit := "-1"
	if unified {
		noMemoryLimit = "max"
	}
	return []tierLimit{
		{podsCgroup, "cpu", cpuFile, weight(tiers.CPU)},
		{podsCgroup, "memory", memoryFile, limit(tiers.Memory, noMemoryLimit)},
		{podsCgroup, "pids", "pids.max", limit(tiers.PIDs, "max")},
		{Burstable, "cpu", cpuFile, weight(tiers.Burstable)},
		{BestEffort, "cpu", cpuFile, weight(0)},
	}
}

// ApplyTiers creates the tiers and sets their limits. If one limit cannot be set, it sets the other
// limits and returns an error.
func (t *Tree) ApplyTiers(tiers agent.Tiers) error {
	var errs []error
	for _, l := range tierLimits(tiers, t.Unified) {
		mount, ok := t.Controllers[l.controller]
		if !ok {
			errs = append(errs, fmt.Errorf("the kernel has no %s cgroup controller: %s of pods is not limited",
				l.controller, l.file))
			continue
		}
		if err := t.createTier(mount, l.tier); err != nil {
			errs = append(errs, err)
			continue
		}
		file := filepath.Join(mount, t.Root, l.tier, l.file)
		if current, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(current)) == l.value {
			continue
		}
		err := os.WriteFile(file, []byte(l.value), 0o644)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: pods currently use more", err)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("limit the pods of %s: write %s to %s: %w", l.tier, l.value, l.file, err))
		}
	}
	return errors.Join(errs...)
}

// createTier creates the cgroup of a tier in one hierarchy. With cgroup v2, it also enables the
// controllers in its parents.
func (t *Tree) createTier(mount, tier string) error {
	dir := filepath.Join(mount, t.Root, tier)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("create cgroup %s: %w", tier, err)
	}
	if !t.Unified {
		return nil
	}
	var ancestors []string
	for d := filepath.Dir(dir); len(d) >= len(mount); d = filepath.Dir(d) {
		ancestors = append(ancestors, d)
	}
	// from the root down: a cgroup can only enable controllers that its parent has enabled
	for _, d := range slices.Backward(ancestors) {
		file := filepath.Join(d, "cgroup.subtree_control")
		current, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("enable controllers for cgroup %s: %w", tier, err)
		}
		for _, c := range []string{"cpu", "memory", "pids"} {
			if t.Controllers[c] == "" || slices.Contains(strings.Fields(string(current)), c) {
				continue
			}
			if err := os.WriteFile(file, []byte("+"+c), 0o644); err != nil {
				return fmt.Errorf("enable controller %s in cgroup %s: %w", c, d, err)
			}
		}
	}
	return nil
}
