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
	Tree *Tree
	buf  [16 << 10]byte // memory.stat has 2 to 4 KiB
	Err  error          // the first error, except for cgroups that no longer exist
}

// readFile returns the content of the file with the joined path elements; nil if the file does not
// exist. The content is valid until the next call.
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
		if err == nil {
			return m.buf[:n]
		}
	}
	// Reading a cgroup that is being removed fails with ENODEV.
	if m.Err == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
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
	u := agent.Usage{At: time.Now()}
	at := func(mount string) string {
		if mount == "" {
			return ""
		}
		return filepath.Join(mount, m.Tree.Root, name)
	}
	if m.Tree.Unified {
		m.addCPUStat(&u, at(m.Tree.mounts[0]))
		m.addMemoryV2(&u, at(m.Tree.memory))
	} else {
		if dir := at(m.Tree.cpuacct); dir != "" {
			u.CPU, u.HasCPU = m.readNumber(dir, "cpuacct.usage")
		}
		if dir := at(m.Tree.memory); dir != "" {
			m.addMemoryV1(&u, dir)
		}
	}
	if dir := at(m.Tree.Controllers["pids"]); dir != "" {
		u.Processes, u.HasProcesses = m.readNumber(dir, "pids.current")
	}
	return u
}

func (m *Meter) addCPUStat(usage *agent.Usage, dir string) {
	m.parseStat(m.readFile(dir, "cpu.stat"), func(key []byte, n uint64) {
		if string(key) == "usage_usec" {
			usage.CPU, usage.HasCPU = n*1000, true
		}
	})
}

func (m *Meter) addMemoryV2(usage *agent.Usage, dir string) {
	usage.Memory, usage.HasMemory = m.readNumber(dir, "memory.current")
	if !usage.HasMemory {
		return
	}
	m.addMemoryStat(usage, dir, "anon", "")
	usage.Limit, _ = m.readNumber(dir, "memory.max")
	usage.Swap, usage.HasSwap = m.readNumber(dir, "memory.swap.current")
	usage.SwapLimit, usage.HasSwapLimit = m.readNumber(dir, "memory.swap.max")
}

// addMemoryStat reads values of dir's memory.stat into usage. resident is the key of resident
// memory, which differs between cgroup v1 and v2. With v1, the prefix "total_" selects the values
// that include child cgroups, and the file also contains the swap usage.
func (m *Meter) addMemoryStat(usage *agent.Usage, dir, resident, prefix string) {
	var inactive uint64
	m.parseStat(m.readFile(dir, "memory.stat"), func(line []byte, n uint64) {
		key, ok := bytes.CutPrefix(line, []byte(prefix))
		if !ok {
			return
		}
		switch string(key) {
		case "inactive_file":
			inactive = n
		case resident:
			usage.RSS = n
		case "pgfault":
			usage.Faults = n
		case "pgmajfault":
			usage.MajorFaults = n
		case "swap":
			usage.Swap, usage.HasSwap = n, true
		}
	})
	usage.WorkingSet = subtractSaturating(usage.Memory, inactive)
}

// unlimited is the smallest value of a cgroup v1 limit that means no limit.
const unlimited = 1 << 62

func (m *Meter) addMemoryV1(usage *agent.Usage, dir string) {
	usage.Memory, usage.HasMemory = m.readNumber(dir, "memory.usage_in_bytes")
	if !usage.HasMemory {
		return
	}
	m.addMemoryStat(usage, dir, "rss", "total_")
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
		m.addCPUStat(&u, m.Tree.mounts[0])
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
// multicast", then eight sent counters.
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
		out = append(out, agent.InterfaceUsage{Name: string(name), Received: n(0), ReceiveErrors: n(2), Sent: n(8),
			SendingErrors: n(10)})
	}
	return out
}
