package oci

import (
	"context"
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

// The tiers are cgroups below the runtime's root. Burstable and BestEffort pods are in the tier of
// their QoS class. Guaranteed pods are directly in kubepods.
const (
	allPods    = "kubepods"
	burstable  = "kubepods/burstable"
	bestEffort = "kubepods/besteffort"
)

const (
	minShares = 2 // the minimum of the kernel
	maxShares = 262_144
)

// sharesOf converts millicores to cgroup v1 CPU shares.
func sharesOf(milli int64) uint64 { return uint64(min(max(milli*1024/1000, minShares), maxShares)) }

// tierLimit is the value of one cgroup file of one tier.
type tierLimit struct{ tier, controller, file, value string }

// tierLimits returns the values to write for the tiers. Pure.
func tierLimits(t agent.Tiers, unified bool) []tierLimit {
	cpuFile, memoryFile := "cpu.shares", "memory.limit_in_bytes"
	if unified {
		cpuFile, memoryFile = "cpu.weight", "memory.max"
	}
	weight := func(milli int64) string {
		shares := sharesOf(milli)
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
		{allPods, "cpu", cpuFile, weight(t.CPU)},
		{allPods, "memory", memoryFile, limit(t.Memory, noMemoryLimit)},
		{allPods, "pids", "pids.max", limit(t.PIDs, "max")},
		{burstable, "cpu", cpuFile, weight(t.Burstable)},
		{bestEffort, "cpu", cpuFile, weight(0)},
	}
}

// SetTiers implements agent.TieredRuntime.
func (r *Runtime) SetTiers(ctx context.Context, t agent.Tiers) error {
	if err := r.wait(ctx); err != nil {
		return err
	}
	return r.cgroups.setTiers(t)
}

// setTiers creates the tiers and sets their limits. An error in one tier does not prevent the
// others.
func (t *cgroupTree) setTiers(want agent.Tiers) error {
	var errs []error
	for _, l := range tierLimits(want, t.unified) {
		mount, ok := t.controllers[l.controller]
		if !ok {
			errs = append(errs, fmt.Errorf("the kernel has no %s cgroup controller: pods are not held to %s",
				l.controller, l.file))
			continue
		}
		if err := t.makeTier(mount, l.tier); err != nil {
			errs = append(errs, err)
			continue
		}
		file := filepath.Join(mount, t.root, l.tier, l.file)
		if have, err := os.ReadFile(file); err == nil && strings.TrimSpace(string(have)) == l.value {
			continue
		}
		err := os.WriteFile(file, []byte(l.value), 0o644)
		if errors.Is(err, unix.EBUSY) {
			err = fmt.Errorf("%w: pods use more than that now", err)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("limit the pods of %s: write %s to %s: %w", l.tier, l.value, l.file, err))
		}
	}
	return errors.Join(errs...)
}

// makeTier creates the cgroup of a tier in one hierarchy. With cgroup v2, it also enables the
// controllers in its parents.
func (t *cgroupTree) makeTier(mount, tier string) error {
	dir := filepath.Join(mount, t.root, tier)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return fmt.Errorf("make cgroup %s: %w", tier, err)
	}
	if !t.unified {
		return nil
	}
	var above []string
	for d := filepath.Dir(dir); len(d) >= len(mount); d = filepath.Dir(d) {
		above = append(above, d)
	}
	for _, d := range slices.Backward(above) { // from the root down: a cgroup can only enable controllers that its parent has enabled
		file := filepath.Join(d, "cgroup.subtree_control")
		have, err := os.ReadFile(file)
		if err != nil {
			return fmt.Errorf("hand controllers down to cgroup %s: %w", tier, err)
		}
		for _, c := range []string{"cpu", "memory", "pids"} {
			if t.controllers[c] == "" || slices.Contains(strings.Fields(string(have)), c) {
				continue
			}
			if err := os.WriteFile(file, []byte("+"+c), 0o644); err != nil {
				return fmt.Errorf("hand controller %s down in cgroup %s: %w", c, d, err)
			}
		}
	}
	return nil
}
