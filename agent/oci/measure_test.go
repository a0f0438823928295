package oci

import (
	"strings"
	"testing"
	"time"

	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// The CPU time and memory of a container are measured. The pod's figures include its sandbox, which
// is not a container. Ended containers are left out.
func TestMeasure(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	earliest := time.Now()
	r.runContainer(sb, sc, r.containerConfig("busy",
		"x=$(head -c 20000000 /dev/zero | tr '\\0' a); i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo burnt; "+
			"exec sleep 1000"))
	r.waitLog("busy", "burnt")
	r.runToEnd(sb, sc, "over", "true")
	got, err := r.MeasureUsage(r.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Pods) != 1 || len(got.Pods[0].Containers) != 1 || got.Pods[0].Containers[0].Name != "busy" {
		t.Fatalf("%+v", got.Pods)
	}
	p := got.Pods[0]
	c := p.Containers[0]
	if p.Namespace != sc.Metadata.Namespace || p.Name != sc.Metadata.Name || string(p.UID) != sc.Metadata.Uid {
		t.Errorf("whose it is: %+v", p)
	}
	if c.CPU < uint64(20*time.Millisecond) || p.CPU < c.CPU || got.Root.CPU < p.CPU || got.Machine.CPU < got.Root.CPU {
		t.Errorf("processors: container %d, pod %d, all pods %d, machine %d ns", c.CPU, p.CPU, got.Root.CPU,
			got.Machine.CPU)
	}
	if c.WorkingSet == 0 || p.WorkingSet < c.WorkingSet || got.Machine.WorkingSet < p.WorkingSet ||
		got.Machine.Limit < 64<<20 {
		t.Errorf("memory: container %d, pod %d, machine %d of %d", c.WorkingSet, p.WorkingSet, got.Machine.WorkingSet,
			got.Machine.Limit)
	}
	if now := time.Now(); c.Started.Before(earliest) || c.Started.After(now) {
		t.Errorf("started at %s, not between %s and %s", c.Started, earliest, now)
	}
}

// The details of a pod with a CPU limit include throttling, processes and I/O accounting beside the
// usage, and the identity of its sandbox and container. F133
func TestMeasureDetails(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
	id := r.runContainer(sb, sc, r.containerConfig("busy",
		"sleep 1000 & i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo burnt; exec sleep 1000",
		func(c *cri.ContainerConfig) {
			c.Linux.Resources = &cri.LinuxContainerResources{CpuPeriod: 10000, CpuQuota: 5000, CpuShares: 512,
				MemoryLimitInBytes: 64 << 20}
		}))
	r.waitLog("busy", "burnt")
	got, err := r.MeasureDetails(r.ctx())
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Pods) != 1 || len(got.Details.Pods) != 1 || len(got.Details.Pods[0].Containers) != 1 {
		t.Fatalf("%+v %+v", got.Pods, got.Details.Pods)
	}
	pod, d := got.Details.Pods[0], got.Details.Pods[0].Containers[0]
	if pod.SandboxID != sb || d.ID != id || d.Image != "tools" || d.Path != pod.Path+"/"+id ||
		got.Details.Machine.Path != "/" || !strings.HasPrefix(d.Path, got.Details.Root.Path+"/") {
		t.Errorf("identity: pod %+v, container %+v", pod, d)
	}
	if d.CPU == nil || d.CPU.User == 0 || d.Throttling == nil || d.Throttling.Periods == 0 ||
		d.Throttling.ThrottledTime == 0 || d.CPULimits == nil || d.CPULimits.Quota != 5000 ||
		d.CPULimits.Period != 10000 || d.CPULimits.Shares < 512 || d.CPULimits.Shares > 540 {
		t.Errorf("CPU: %+v %+v %+v", d.CPU, d.Throttling, d.CPULimits)
	}
	if c := got.Pods[0].Containers[0]; d.Memory == nil || d.Memory.OwnFaults == 0 || d.Memory.MaxUsage < c.Memory ||
		c.Limit != 64<<20 || c.CPU == 0 {
		t.Errorf("memory: %+v of %+v", d.Memory, c)
	}
	if d.Processes == nil || d.Processes.Count != 2 || pod.Processes.Count != 2 {
		t.Errorf("processes: container %+v, pod %+v", d.Processes, pod.Processes)
	}
	if (d.Pressure != nil) != (got.Details.Machine.Pressure != nil) {
		t.Errorf("pressure: container %+v, machine %+v", d.Pressure, got.Details.Machine.Pressure)
	}
}
