package oci

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// TestSpeedAndMemory prints the time and memory of a sandbox and a container. It fails only far
// beyond the budget, because machines differ.
func TestSpeedAndMemory(t *testing.T) {
	r := newRig(t)
	const rounds = 15
	var sandboxes, containers, starts, stops []time.Duration
	stages := map[string][]time.Duration{}
	var pss, pausePSS int
	for i := range rounds {
		begin := time.Now()
		sb, sc := r.runSandbox()
		sandboxes = append(sandboxes, time.Since(begin))
		begin = time.Now()
		id := r.createContainer(sb, sc, r.containerConfig(fmt.Sprint("c", i), "exec sleep 1000",
			func(c *cri.ContainerConfig) {
				c.Linux.SecurityContext.Seccomp = &cri.SecurityProfile{ProfileType: cri.SecurityProfile_RuntimeDefault}
				c.Linux.Resources = &cri.LinuxContainerResources{MemoryLimitInBytes: 64 << 20, CpuShares: 100}
			}))
		containers = append(containers, time.Since(begin))
		begin = time.Now()
		if _, err := r.StartContainer(r.ctx(), &cri.StartContainerRequest{ContainerId: id}); err != nil {
			t.Fatal(err)
		}
		starts = append(starts, time.Since(begin))
		for _, list := range [][]string{{sb}, {id}} {
			for _, st := range r.StageTimes(list[0]) {
				stages[st.Name] = append(stages[st.Name], st.Duration)
			}
		}
		if i == 5 {
			s, _ := r.Runtime.findSandbox(sb)
			pss, pausePSS = readPSS(t, s.rec.ShimPID), readPSS(t, s.rec.PausePID)
		}
		if i%3 == 2 {
			begin = time.Now()
			if _, err := r.RemovePodSandbox(r.ctx(), &cri.RemovePodSandboxRequest{PodSandboxId: sb}); err != nil {
				t.Fatal(err)
			}
			stops = append(stops, time.Since(begin))
		}
	}
	t.Logf("sandbox %v, create %v, start %v, remove sandbox with container %v", median(sandboxes), median(containers),
		median(starts), median(stops))
	for name, d := range stages {
		t.Logf("stage %s: %v", name, median(d))
	}
	t.Logf("PSS: shim %d KiB, pause %d KiB", pss, pausePSS)
	if m := median(sandboxes); m > 250*time.Millisecond {
		t.Errorf("a sandbox takes %v", m)
	}
	if pss+pausePSS > 2048 {
		t.Errorf("shim and pause take %d KiB", pss+pausePSS)
	}
}

func median(d []time.Duration) time.Duration {
	d = slices.Sorted(slices.Values(d))
	return d[len(d)/2].Round(10 * time.Microsecond)
}

func readPSS(t *testing.T, pid int) int {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(b), "\n") {
		var kib int
		if n, _ := fmt.Sscanf(line, "Pss: %d kB", &kib); n == 1 {
			return kib
		}
	}
	t.Fatal("no Pss")
	return 0
}
