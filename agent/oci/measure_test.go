package oci

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"keelson.dev/keelson/agent"
)

// Measurements are the same with both cgroup versions, from different files and units. A missing
// value is absent, not an error.
func TestMeasureFiles(t *testing.T) {
	for unified, files := range map[bool]map[string]string{
		false: {
			"cpuacct/keelson/p/cpuacct.usage":                "2500000000\n",
			"memory/keelson/p/memory.usage_in_bytes":         "5000000\n",
			"memory/keelson/p/memory.stat":                   "inactive_file 1\ntotal_rss 2000000\ntotal_pgfault 7\ntotal_pgmajfault 3\ntotal_inactive_file 1000000\ntotal_swap 4096\n",
			"memory/keelson/p/memory.limit_in_bytes":         "8000000\n",
			"memory/keelson/p/memory.memsw.limit_in_bytes":   "9000000\n",
			"pids/keelson/p/pids.current":                    "4\n",
			"memory/keelson/free/memory.usage_in_bytes":      "5\n",
			"memory/keelson/free/memory.stat":                "total_inactive_file 9\n",
			"memory/keelson/free/memory.limit_in_bytes":      "9223372036854771712\n",
			"memory/keelson/free/memory.kmem.usage_in_bytes": "0\n",
		},
		true: {
			"keelson/p/cpu.stat":            "usage_usec 2500000\nuser_usec 1\nsystem_usec 2\n",
			"keelson/p/memory.current":      "5000000\n",
			"keelson/p/memory.stat":         "anon 2000000\nfile 3\ninactive_file 1000000\npgfault 7\npgmajfault 3\n",
			"keelson/p/memory.max":          "8000000\n",
			"keelson/p/memory.swap.current": "4096\n",
			"keelson/p/memory.swap.max":     "1000000\n",
			"keelson/p/pids.current":        "4\n",
			"keelson/free/memory.current":   "5\n",
			"keelson/free/memory.stat":      "inactive_file 9\n",
			"keelson/free/memory.max":       "max\n",
		},
	} {
		dir := t.TempDir()
		for name, text := range files {
			file := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
				t.Fatal(err)
			}
		}
		tree := &cgroupTree{root: "/keelson", unified: unified, mounts: []string{dir}, memory: dir, controllers: map[string]string{"pids": dir}}
		if !unified {
			tree.memory, tree.cpuacct, tree.controllers["pids"] = filepath.Join(dir, "memory"), filepath.Join(dir, "cpuacct"), filepath.Join(dir, "pids")
		}
		m := meter{tree: tree}
		want := agent.Usage{HasCPU: true, CPU: 2500000000, HasMemory: true, Memory: 5000000, WorkingSet: 4000000, Limit: 8000000, RSS: 2000000,
			Faults: 7, MajorFaults: 3, HasSwap: true, Swap: 4096, HasSwapLimit: true, SwapLimit: 1000000, HasProcesses: true, Processes: 4}
		got := m.usage("p")
		got.At = time.Time{}
		if got != want || m.err != nil {
			t.Errorf("v2 %v: %+v, want %+v (%v)", unified, got, want, m.err)
		}
		got = m.usage("free")
		if !got.HasMemory || got.WorkingSet != 0 || got.Limit != 0 || got.HasCPU || got.HasSwap || got.HasProcesses || m.err != nil {
			t.Errorf("v2 %v: without limits %+v (%v)", unified, got, m.err)
		}
		if got = m.usage("gone"); got.HasCPU || got.HasMemory || m.err != nil {
			t.Errorf("v2 %v: what has gone %+v (%v)", unified, got, m.err)
		}
		broken := filepath.Join(dir, "broken")
		if err := os.Mkdir(broken, 0o755); err != nil {
			t.Fatal(err)
		}
		if m.read(broken); m.err == nil {
			t.Errorf("v2 %v: what cannot be read is no error", unified)
		}
	}
}

func TestInterfaces(t *testing.T) {
	const text = "Inter-|   Receive                                                |  Transmit\n" +
		" face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls carrier compressed\n" +
		"    lo:     99       1    0    0    0     0          0         0       99       1    0    0    0     0       0          0\n" +
		"  eth0:1296      16    2    0    0     0          0         0      866      13    5    0    0     0       0          0\n"
	got := interfaces([]byte(text))
	if len(got) != 1 || got[0] != (agent.InterfaceUsage{Name: "eth0", Received: 1296, ReceiveErrors: 2, Sent: 866, SendingErrors: 5}) {
		t.Errorf("%+v", got)
	}
}

// The CPU time and memory of a container are measured. The pod's figures include its sandbox, which
// is not a container. Ended containers are left out.
func TestMeasure(t *testing.T) {
	r := newRig(t)
	sb, sc := r.sandbox()
	r.run(sb, sc, r.containerConfig("busy", "x=$(head -c 20000000 /dev/zero | tr '\\0' a); i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo burnt; exec sleep 1000"))
	r.waitLog("busy", "burnt")
	r.output(sb, sc, "over", "true")
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
		t.Errorf("processors: container %d, pod %d, all pods %d, machine %d ns", c.CPU, p.CPU, got.Root.CPU, got.Machine.CPU)
	}
	if c.WorkingSet == 0 || p.WorkingSet < c.WorkingSet || got.Machine.WorkingSet < p.WorkingSet || got.Machine.Limit < 64<<20 {
		t.Errorf("memory: container %d, pod %d, machine %d of %d", c.WorkingSet, p.WorkingSet, got.Machine.WorkingSet, got.Machine.Limit)
	}
	if age := time.Since(c.Started); age < 0 || age > time.Minute {
		t.Errorf("started %s ago", age)
	}
}
