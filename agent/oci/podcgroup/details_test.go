package podcgroup

import (
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/opencontainers/cgroups"

	"keelson.dev/keelson/agent"
)

// Contents of detailFiles.
const (
	oomControl = "oom_kill_disable 0\nunder_oom 0\noom_kill 2\n"
	ioBytesV1  = "0:1048575 Read 4096\n0:1048575 Write 0\n0:1048575 Sync 4096\nTotal 4096\n"
	ioCountsV1 = "0:1048575 Read 1\n0:1048575 Write 0\nTotal 1\n"
	ioStat     = "0:1048575 rbytes=4096 wbytes=0 rios=1 wios=0 dbytes=0 dios=0\n" +
		"8:1048575 rbytes=0 wbytes=0 rios=0 wios=0\n8:2\n"
)

// pressureText returns the content of a pressure file.
func pressureText(some, full int) string {
	return fmt.Sprintf("some avg10=1.00 avg60=0.00 avg300=0.00 total=%d\n"+
		"full avg10=0.00 avg60=0.00 avg300=0.00 total=%d\n", some, full)
}

// detailFiles are the files of one cgroup, keelson/p, by cgroup version: true = v2.
var detailFiles = map[bool]map[string]string{
	false: {
		"cpuacct/keelson/p/cpuacct.usage": "2500000000\n",
		"cpuacct/keelson/p/cpuacct.stat":  "user 200\nsystem 50\n",
		"cpu/keelson/p/cpu.shares":        "512\n",
		"cpu/keelson/p/cpu.cfs_period_us": "100000\n",
		"cpu/keelson/p/cpu.cfs_quota_us":  "50000\n",
		"cpu/keelson/p/cpu.stat":          "nr_periods 40\nnr_throttled 4\nthrottled_time 3000000\n",
		"memory/keelson/p/memory.stat": "cache 1\npgfault 5\npgmajfault 1\ntotal_cache 300\ntotal_rss 200\n" +
			"total_mapped_file 30\ntotal_pgfault 7\ntotal_pgmajfault 3\n" +
			"total_inactive_file 100\ntotal_active_file 50\n",
		"memory/keelson/p/memory.usage_in_bytes":                        "5000\n",
		"memory/keelson/p/memory.max_usage_in_bytes":                    "6000\n",
		"memory/keelson/p/memory.failcnt":                               "9\n",
		"memory/keelson/p/memory.kmem.usage_in_bytes":                   "70\n",
		"memory/keelson/p/memory.soft_limit_in_bytes":                   "9223372036854771712\n",
		"memory/keelson/p/memory.oom_control":                           oomControl,
		"blkio/keelson/p/blkio.throttle.io_service_bytes_recursive":     ioBytesV1,
		"blkio/keelson/p/blkio.throttle.io_serviced_recursive":          ioCountsV1,
		"pids/keelson/p/pids.max":                                       "max\n",
		"cpu/keelson/free/cpu.shares":                                   "1024\n",
		"cpu/keelson/free/cpu.cfs_period_us":                            "100000\n",
		"cpu/keelson/free/cpu.cfs_quota_us":                             "-1\n",
		"blkio/keelson/free/blkio.throttle.io_service_bytes_recursive":  "Total 0\n",
		"cpuacct/keelson/free/cpuacct.usage":                            "0\n",
		"memory/keelson/free/memory.usage_in_bytes":                     "1\n",
		"blkio/keelson/other/blkio.throttle.io_service_bytes_recursive": "malformed\n",
	},
	true: {
		"keelson/p/cpu.stat": "usage_usec 2500000\nuser_usec 2000000\nsystem_usec 500000\nnr_periods 40\n" +
			"nr_throttled 4\nthrottled_usec 3000\n",
		"keelson/p/cpu.weight": "59\n",
		"keelson/p/cpu.max":    "50000 100000\n",
		"keelson/p/memory.stat": "anon 200\nfile 300\nkernel 70\nfile_mapped 30\npgfault 7\npgmajfault 3\n" +
			"inactive_file 100\nactive_file 50\n",
		"keelson/p/memory.current":    "5000\n",
		"keelson/p/memory.peak":       "6000\n",
		"keelson/p/memory.low":        "0\n",
		"keelson/p/memory.events":     "low 0\nhigh 4\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n",
		"keelson/p/io.stat":           ioStat,
		"keelson/p/cpu.pressure":      pressureText(11, 10),
		"keelson/p/memory.pressure":   pressureText(21, 20),
		"keelson/p/io.pressure":       pressureText(31, 30),
		"keelson/p/pids.max":          "64\n",
		"keelson/free/cpu.weight":     "100\n",
		"keelson/free/cpu.max":        "max 100000\n",
		"keelson/free/memory.current": "1\n",
	},
}

// newDetailTree writes detailFiles of a cgroup version to a new directory and returns its Tree.
func newDetailTree(t *testing.T, unified bool) *Tree {
	t.Helper()
	dir := t.TempDir()
	for name, text := range detailFiles[unified] {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if unified {
		return &Tree{Root: "/keelson", Unified: true, mounts: []string{dir}, memory: dir,
			Controllers: map[string]string{"cpu": dir, "pids": dir}}
	}
	sub := func(name string) string { return filepath.Join(dir, name) }
	return &Tree{Root: "/keelson", mounts: []string{sub("cpu")}, memory: sub("memory"), cpuacct: sub("cpuacct"),
		blkio: sub("blkio"), Controllers: map[string]string{"cpu": sub("cpu"), "pids": sub("pids")}}
}

// The details of a cgroup are the same with both cgroup versions, except for values that only one
// of them accounts. F133
func TestDetailFiles(t *testing.T) {
	for unified := range detailFiles {
		m := Meter{Tree: newDetailTree(t, unified)}
		want := agent.CgroupDetails{Path: "/keelson/p",
			CPU:        &agent.CPUDetails{User: 2e9, System: 5e8},
			Throttling: &agent.ThrottlingDetails{Periods: 40, ThrottledPeriods: 4, ThrottledTime: 3e6},
			CPULimits:  &agent.CPULimits{Shares: 512, Period: 100000, Quota: 50000},
			Memory: &agent.MemoryDetails{Cache: 300, MappedFile: 30, ActiveFile: 50, InactiveFile: 100, Kernel: 70,
				MaxUsage: 6000, OwnFaults: 5, OwnMajorFaults: 1, LimitHits: 9, OOMKills: 2},
			Devices: []agent.DeviceUsage{{Name: "0:1048575", Minor: 1048575, ReadBytes: 4096, Reads: 1}}}
		if unified {
			want.Memory.OwnFaults, want.Memory.OwnMajorFaults = 7, 3
			want.Memory.Events = &agent.MemEvents{High: 4, Max: 9}
			want.Pressure = &agent.PressureDetails{CPU: agent.StallTime{Waiting: 11, Stalled: 10},
				Memory: agent.StallTime{Waiting: 21, Stalled: 20}, IO: agent.StallTime{Waiting: 31, Stalled: 30}}
			want.CPULimits.Shares, want.ThreadsMax = sharesFromWeight(59), 64
		}
		usage, got := m.CgroupDetails("p")
		if !reflect.DeepEqual(got, want) || m.Err != nil {
			t.Errorf("v2 %v: %+v, want %+v (%v)", unified, got, want, m.Err)
		}
		if simple := m.CgroupUsage("p"); usage.CPU != simple.CPU || usage.Memory != simple.Memory ||
			usage.WorkingSet != 4900 || usage.RSS != 200 {
			t.Errorf("v2 %v: the usage beside the details is %+v, without details %+v", unified, usage, simple)
		}
		if _, free := m.CgroupDetails("free"); free.CPULimits == nil || free.CPULimits.Quota != 0 ||
			free.CPULimits.Shares != 1024 || free.CPULimits.Period != 100000 || free.Pressure != nil || m.Err != nil {
			t.Errorf("v2 %v: without limits %+v (%v)", unified, free.CPULimits, m.Err)
		}
		if _, gone := m.CgroupDetails("gone"); gone.CPU != nil || gone.Memory != nil || gone.CPULimits != nil ||
			gone.Throttling != nil || gone.Devices != nil || m.Err != nil {
			t.Errorf("v2 %v: a removed cgroup has %+v (%v)", unified, gone, m.Err)
		}
	}
}

// The machine has details of its root cgroup, and its interfaces without those of pods.
func TestMachineDetails(t *testing.T) {
	tree, err := Detect("/keelson-of-no-test")
	if err != nil {
		t.Skip(err)
	}
	m := Meter{Tree: tree}
	got, interfaces := m.MachineDetails()
	if got.Path != "/" || got.CPU == nil || got.CPU.User == 0 || m.Err != nil {
		t.Errorf("%+v (%v)", got, m.Err)
	}
	for _, i := range interfaces {
		if i.Name == "lo" || strings.HasPrefix(i.Name, "veth") {
			t.Errorf("interface %s", i.Name)
		}
	}
}

// Shares that are converted to a weight and back are the same within the precision of the weight.
func TestSharesFromWeight(t *testing.T) {
	for _, shares := range []uint64{2, 102, 512, 1024, 4096, 262144} {
		got := sharesFromWeight(cgroups.ConvertCPUSharesToCgroupV2Value(shares))
		if low, high := shares, shares+shares/10+1; got < low || got > high {
			t.Errorf("%d shares become %d", shares, got)
		}
	}
}

// A file beyond the buffer is cut after a complete line, so that no number is cut.
func TestLongFileIsCutAfterALine(t *testing.T) {
	dir := t.TempDir()
	line := "8:16 rbytes=1234567890 wbytes=1 rios=1 wios=1\n"
	if err := os.WriteFile(filepath.Join(dir, "io.stat"), []byte(strings.Repeat(line, 1000)), 0o644); err != nil {
		t.Fatal(err)
	}
	m := Meter{}
	text := m.readFile(dir, "io.stat")
	if len(text) == 0 || len(text)%len(line) != 0 {
		t.Errorf("%d bytes of lines of %d bytes (%v)", len(text), len(line), m.Err)
	}
}

// The processes of a cgroup are counted, and their descriptors where the kernel reports the number.
func TestCgroupProcesses(t *testing.T) {
	dir := t.TempDir()
	if err := os.MkdirAll(filepath.Join(dir, "keelson/p"), 0o755); err != nil {
		t.Fatal(err)
	}
	processes := []byte("0\n1\n") // 0 is a process of another PID namespace
	if err := os.WriteFile(filepath.Join(dir, "keelson/p/cgroup.procs"), processes, 0o644); err != nil {
		t.Fatal(err)
	}
	m := Meter{Tree: &Tree{Root: "/keelson", mounts: []string{dir}}}
	got := m.CgroupProcesses("p")
	if got.Count != 1 {
		t.Errorf("%d processes", got.Count)
	}
	info, err := os.Stat("/proc/1/fd")
	if reported := err == nil && info.Size() > 0; reported != (got.Descriptors != nil) {
		t.Errorf("descriptors %v, reported by the kernel %v", got.Descriptors, reported)
	}
	if none := m.CgroupProcesses("gone"); none.Count != 0 || none.Descriptors != nil {
		t.Errorf("a removed cgroup has %+v", none)
	}
}
