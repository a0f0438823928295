package oci

import (
	"testing"
	"time"
)

// The CPU time and memory of a container are measured. The pod's figures include its sandbox, which
// is not a container. Ended containers are left out.
func TestMeasure(t *testing.T) {
	r := newRig(t)
	sb, sc := r.runSandbox()
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
	if age := time.Since(c.Started); age < 0 || age > time.Minute {
		t.Errorf("started %s ago", age)
	}
}
