package podcgroup

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
			"cpuacct/keelson/p/cpuacct.usage":        "2500000000\n",
			"memory/keelson/p/memory.usage_in_bytes": "5000000\n",
			"memory/keelson/p/memory.stat": "inactive_file 1\ntotal_rss 2000000\ntotal_pgfault " +
				"7\ntotal_pgmajfault 3\ntotal_inactive_file 1000000\ntotal_swap 4096\n",
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
		tree := &Tree{Root: "/keelson", Unified: unified, mounts: []string{dir}, memory: dir,
			Controllers: map[string]string{"pids": dir}}
		if !unified {
			tree.memory, tree.cpuacct, tree.Controllers["pids"] = filepath.Join(dir, "memory"),
				filepath.Join(dir, "cpuacct"), filepath.Join(dir, "pids")
		}
		m := Meter{Tree: tree}
		want := agent.Usage{HasCPU: true, CPU: 2500000000, HasMemory: true, Memory: 5000000, WorkingSet: 4000000,
			Limit: 8000000, RSS: 2000000,
			Faults: 7, MajorFaults: 3, HasSwap: true, Swap: 4096, HasSwapLimit: true, SwapLimit: 1000000,
			HasProcesses: true, Processes: 4}
		got := m.CgroupUsage("p")
		got.At = time.Time{}
		if got != want || m.Err != nil {
			t.Errorf("v2 %v: %+v, want %+v (%v)", unified, got, want, m.Err)
		}
		got = m.CgroupUsage("free")
		if !got.HasMemory || got.WorkingSet != 0 || got.Limit != 0 || got.HasCPU || got.HasSwap ||
			got.HasProcesses || m.Err != nil {
			t.Errorf("v2 %v: without limits %+v (%v)", unified, got, m.Err)
		}
		if got = m.CgroupUsage("gone"); got.HasCPU || got.HasMemory || m.Err != nil {
			t.Errorf("v2 %v: what has gone %+v (%v)", unified, got, m.Err)
		}
		broken := filepath.Join(dir, "broken")
		if err := os.Mkdir(broken, 0o755); err != nil {
			t.Fatal(err)
		}
		if m.readFile(broken); m.Err == nil {
			t.Errorf("v2 %v: what cannot be read is no error", unified)
		}
	}
}

func TestInterfaces(t *testing.T) {
	const text = "Inter-|   Receive                                                |  Transmit\n" +
		" face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls " +
		"carrier compressed\n" +
		"    lo:     99       1    0    0    0     0          0         0       99       1    0    0    0     0      " +
		" 0          0\n" +
		"  eth0:1296      16    2    3    0     0          0         0      866      13    5    6    0     0    " +
		"   0          0\n"
	got := parseNetDev([]byte(text))
	if len(got) != 1 ||
		got[0] != (agent.InterfaceUsage{Name: "eth0", Received: 1296, ReceivedPackets: 16, ReceiveErrors: 2,
			ReceiveDrops: 3, Sent: 866, SentPackets: 13, SendingErrors: 5, SendingDrops: 6}) {
		t.Errorf("%+v", got)
	}
}
