package podcgroup

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strconv"
	"time"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
)

// Meter reads the usage of cgroups. It reuses one buffer for all files, so that it allocates little
// memory.
type Meter struct {
	Tree    *Tree
	buf     [16 << 10]byte       // memory.stat has 2 to 4 KiB
	Err     error                // the first error, except for cgroups that no longer exist
	devices map[[2]uint32]string // names of block devices by major and minor number
}

// readFile returns the content of the file with the joined path elements; nil if the file does not
// exist. Content beyond the buffer is cut after a complete line. The content is valid until the
// next call.
func (m *Meter) readFile(elements ...string) []byte {
	name := filepath.Join(elements...)
	fd, err := unix.Open(name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err == nil {
		defer unix.Close(fd)
		n := 0
		for n < len(m.buf) {
			var got int
			got, err = unix.Read(fd, m.buf[n:])
			if err == unix.EINTR {
				continue
			}
			if err != nil || got == 0 {
				break
			}
			n += got
		}
		if err == nil && n == len(m.buf) {
			n = bytes.LastIndexByte(m.buf[:], '\n') + 1
		}
		if err == nil {
			return m.buf[:n]
		}
	}
	// Reading a cgroup that is being removed fails with ENODEV, and reading pressure fails with
	// EOPNOTSUPP if the kernel's command line disables its accounting.
	if m.Err == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) &&
		!errors.Is(err, unix.EOPNOTSUPP) {
		m.Err = fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// readNumber reads the number in the file with the joined path elements. It returns false if the
// content is not a number, for example "max".
func (m *Meter) readNumber(elements ...string) (uint64, bool) {
	n, err := strconv.ParseUint(string(bytes.TrimSpace(m.readFile(elements...))), 10, 64)
	return n, err == nil
}

// CgroupUsage returns the usage of a cgroup. name is the cgroup's path relative to the runtime's
// root.
func (m *Meter) CgroupUsage(name string) agent.Usage {
	return m.readUsage(name, &agent.CgroupDetails{})
}

// readUsage returns the usage of a cgroup. It stores the details that are in the same files in
// details.
func (m *Meter) readUsage(name string, details *agent.CgroupDetails) agent.Usage {
	u := agent.Usage{At: time.Now()}
	if m.Tree.Unified {
		m.addCPUStat(&u, details, m.cgroupDir(m.Tree.mounts[0], name))
		m.addMemoryV2(&u, details, m.cgroupDir(m.Tree.memory, name))
	} else {
		if dir := m.cgroupDir(m.Tree.cpuacct, name); dir != "" {
			u.CPU, u.HasCPU = m.readNumber(dir, "cpuacct.usage")
		}
		if dir := m.cgroupDir(m.Tree.memory, name); dir != "" {
			m.addMemoryV1(&u, details, dir)
		}
	}
	if dir := m.cgroupDir(m.Tree.Controllers["pids"], name); dir != "" {
		u.Processes, u.HasProcesses = m.readNumber(dir, "pids.current")
	}
	return u
}

// cgroupDir returns the directory of a cgroup in the hierarchy with a mount point; "" if mount is
// "".
func (m *Meter) cgroupDir(mount, name string) string {
	if mount == "" {
		return ""
	}
	return filepath.Join(mount, m.Tree.Root, name)
}

// addCPUStat reads cpu.stat of cgroup v2.
func (m *Meter) addCPUStat(usage *agent.Usage, details *agent.CgroupDetails, dir string) {
	var modes agent.CPUDetails
	var throttling agent.ThrottlingDetails
	counted := false
	m.parseStat(m.readFile(dir, "cpu.stat"), func(key []byte, n uint64) {
		switch string(key) {
		case "usage_usec":
			usage.CPU, usage.HasCPU = n*1000, true
		case "user_usec":
			modes.User = n * 1000
		case "system_usec":
			modes.System = n * 1000
		case "nr_periods":
			throttling.Periods, counted = n, true
		case "nr_throttled":
			throttling.ThrottledPeriods = n
		case "throttled_usec":
			throttling.ThrottledTime = n * 1000
		}
	})
	if usage.HasCPU {
		details.CPU = &modes
	}
	if counted {
		details.Throttling = &throttling
	}
}

func (m *Meter) addMemoryV2(usage *agent.Usage, details *agent.CgroupDetails, dir string) {
	usage.Memory, usage.HasMemory = m.readNumber(dir, "memory.current")
	if !usage.HasMemory {
		return
	}
	m.addMemoryStat(usage, details, dir, "")
	usage.Limit, _ = m.readNumber(dir, "memory.max")
	usage.Swap, usage.HasSwap = m.readNumber(dir, "memory.swap.current")
	usage.SwapLimit, usage.HasSwapLimit = m.readNumber(dir, "memory.swap.max")
}

// addMemoryStat reads values of dir's memory.stat. Some keys differ between cgroup v1 and v2. With
// v1, the prefix "total_" selects the values that include child cgroups, and the file also contains
// the swap usage.
func (m *Meter) addMemoryStat(usage *agent.Usage, details *agent.CgroupDetails, dir, prefix string) {
	d := &agent.MemoryDetails{}
	text := m.readFile(dir, "memory.stat")
	if len(text) > 0 {
		details.Memory = d
	}
	m.parseStat(text, func(line []byte, n uint64) {
		switch string(line) { // values of the cgroup itself
		case "pgfault":
			d.OwnFaults = n
		case "pgmajfault":
			d.OwnMajorFaults = n
		}
		key, ok := bytes.CutPrefix(line, []byte(prefix))
		if !ok {
			return
		}
		switch string(key) {
		case "inactive_file":
			d.InactiveFile = n
		case "active_file":
			d.ActiveFile = n
		case "cache", "file":
			d.Cache = n
		case "mapped_file", "file_mapped":
			d.MappedFile = n
		case "kernel":
			d.Kernel = n
		case "rss", "anon":
			usage.RSS = n
		case "pgfault":
			usage.Faults = n
		case "pgmajfault":
			usage.MajorFaults = n
		case "swap":
			usage.Swap, usage.HasSwap = n, true
		}
	})
	usage.WorkingSet = subtractSaturating(usage.Memory, d.InactiveFile)
}

// unlimited is the smallest value of a cgroup v1 limit that means no limit.
const unlimited = 1 << 62

func (m *Meter) addMemoryV1(usage *agent.Usage, details *agent.CgroupDetails, dir string) {
	usage.Memory, usage.HasMemory = m.readNumber(dir, "memory.usage_in_bytes")
	if !usage.HasMemory {
		return
	}
	m.addMemoryStat(usage, details, dir, "total_")
	if n, ok := m.readNumber(dir, "memory.limit_in_bytes"); ok && n < unlimited {
		usage.Limit = n
	}
	if n, ok := m.readNumber(dir, "memory.memsw.limit_in_bytes"); ok && n < unlimited {
		usage.SwapLimit, usage.HasSwapLimit = subtractSaturating(n, usage.Limit), true
	}
}

// MachineUsage returns the usage of the whole machine. CPU usage comes from the root cgroup. Memory
// comes from /proc/meminfo, because the root of cgroup v2 has no memory accounting.
func (m *Meter) MachineUsage() agent.Usage {
	u := agent.Usage{At: time.Now()}
	if m.Tree.Unified {
		m.addCPUStat(&u, &agent.CgroupDetails{}, m.Tree.mounts[0])
	} else if m.Tree.cpuacct != "" {
		u.CPU, u.HasCPU = m.readNumber(m.Tree.cpuacct, "cpuacct.usage")
	}
	kib := map[string]uint64{}
	m.parseStat(m.readFile("/proc/meminfo"), func(key []byte, n uint64) { kib[string(key)] = n << 10 })
	total := kib["MemTotal:"]
	u.Limit, u.Memory, u.HasMemory = total, subtractSaturating(total, kib["MemFree:"]), total > 0
	u.WorkingSet = subtractSaturating(u.Memory, kib["Inactive(file):"])
	u.RSS = kib["AnonPages:"]
	u.SwapLimit, u.HasSwapLimit = kib["SwapTotal:"], true
	u.Swap, u.HasSwap = subtractSaturating(kib["SwapTotal:"], kib["SwapFree:"]), true
	return u
}

func subtractSaturating(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

// parseStat calls f for each line "key number ..." of text.
func (m *Meter) parseStat(text []byte, f func(key []byte, n uint64)) {
	for line := range bytes.Lines(text) {
		key, rest, ok := bytes.Cut(line, []byte(" "))
		if !ok {
			continue
		}
		rest = bytes.TrimLeft(rest, " ")
		if end := bytes.IndexAny(rest, " \n"); end >= 0 {
			rest = rest[:end]
		}
		if n, err := strconv.ParseUint(string(rest), 10, 64); err == nil {
			f(key, n)
		}
	}
}

// NetworkUsage returns the traffic of the interfaces in a process's network namespace, except the
// loopback.
func (m *Meter) NetworkUsage(pid int) []agent.InterfaceUsage {
	return parseNetDev(m.readFile("/proc", strconv.Itoa(pid), "net", "dev"))
}

// parseNetDev parses /proc/net/dev: "name: bytes packets errs drop fifo frame compressed
// multicast", then eight sent counters in the same order of their first four.
func parseNetDev(text []byte) (out []agent.InterfaceUsage) {
	for line := range bytes.Lines(text) {
		name, rest, ok := bytes.Cut(line, []byte(":"))
		f := bytes.Fields(rest)
		if name = bytes.TrimSpace(name); !ok || len(f) < 16 || string(name) == "lo" {
			continue
		}
		n := func(i int) uint64 {
			v, _ := strconv.ParseUint(string(f[i]), 10, 64) // the kernel writes valid numbers
			return v
		}
		out = append(out, agent.InterfaceUsage{Name: string(name), Received: n(0), ReceivedPackets: n(1),
			ReceiveErrors: n(2), ReceiveDrops: n(3), Sent: n(8), SentPackets: n(9), SendingErrors: n(10),
			SendingDrops: n(11)})
	}
	return out
}
