package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// measured is a pod to measure, with its cgroup.
type measured struct {
	cgroup string // relative to the runtime's root
	pod    agent.PodUsage
	pid    int // a process in the pod's network namespace; 0 for the host's network
	inside []insideUsage
}

type insideUsage struct {
	cgroup    string
	container agent.ContainerUsage
}

// MeasureUsage implements agent.MeasuredRuntime.
func (r *Runtime) MeasureUsage(ctx context.Context) (*agent.UsageSnapshot, error) {
	if err := r.wait(ctx); err != nil {
		return nil, err
	}
	m := meter{tree: r.cgroups}
	out := &agent.UsageSnapshot{Machine: m.machine(), Root: m.usage("")}
	for _, p := range r.running() {
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		p.pod.Usage = m.usage(p.cgroup)
		if p.pid != 0 {
			p.pod.Network = m.network(p.pid)
		}
		for _, c := range p.inside {
			c.container.Usage = m.usage(c.cgroup)
			p.pod.Containers = append(p.pod.Containers, c.container)
		}
		if p.pod.HasCPU || p.pod.HasMemory { // the pod has not ended meanwhile
			out.Pods = append(out.Pods, p.pod)
		}
	}
	if m.err != nil {
		return out, fmt.Errorf("measuring: %w", m.err)
	}
	return out, nil
}

// running returns the ready sandboxes and their running containers, sorted by name.
func (r *Runtime) running() []*measured {
	r.mu.Lock()
	defer r.mu.Unlock()
	byID := make(map[string]*measured, len(r.sandboxes))
	all := make([]*measured, 0, len(r.sandboxes))
	for id, s := range r.sandboxes {
		if s.rec.State != SandboxReady {
			continue
		}
		meta := s.config.GetMetadata()
		m := &measured{cgroup: s.cgroup(), pod: agent.PodUsage{UID: types.UID(meta.GetUid()), Namespace: meta.GetNamespace(),
			Name: meta.GetName(), Started: time.Unix(0, s.rec.Created)}}
		if !s.hostNetwork() {
			m.pid = s.rec.PausePID
		}
		byID[id] = m
		all = append(all, m)
	}
	for _, c := range r.containers {
		if m := byID[c.rec.Sandbox]; m != nil && c.rec.State == ContainerRunning {
			m.inside = append(m.inside, insideUsage{c.rec.Cgroup, agent.ContainerUsage{Name: c.config.GetMetadata().GetName(),
				Started: time.Unix(0, max(c.rec.Started, c.rec.Created))}})
		}
	}
	slices.SortFunc(all, func(a, b *measured) int {
		return strings.Compare(a.pod.Namespace+"/"+a.pod.Name, b.pod.Namespace+"/"+b.pod.Name)
	})
	for _, m := range all {
		slices.SortFunc(m.inside, func(a, b insideUsage) int { return strings.Compare(a.container.Name, b.container.Name) })
	}
	return all
}

// meter reads usage from cgroups. It reuses one buffer for all files to produce little garbage.
type meter struct {
	tree *cgroupTree
	buf  [16 << 10]byte // memory.stat has 2 to 4 KiB
	err  error          // the first error, except for cgroups that no longer exist
}

// read returns the content of a file, valid until the next read; nil if the file does not exist.
func (m *meter) read(path ...string) []byte {
	name := filepath.Join(path...)
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
	if m.err == nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, unix.ENODEV) {
		m.err = fmt.Errorf("%s: %w", name, err)
	}
	return nil
}

// number reads a file with one number. It returns false for other content, such as "max".
func (m *meter) number(path ...string) (uint64, bool) {
	n, err := strconv.ParseUint(string(bytes.TrimSpace(m.read(path...))), 10, 64)
	return n, err == nil
}

// usage returns the usage of a cgroup, given relative to the runtime's root.
func (m *meter) usage(name string) agent.Usage {
	u := agent.Usage{At: time.Now()}
	at := func(mount string) string {
		if mount == "" {
			return ""
		}
		return filepath.Join(mount, m.tree.root, name)
	}
	if m.tree.unified {
		m.cpuStat(&u, at(m.tree.mounts[0]))
		m.memoryV2(&u, at(m.tree.memory))
	} else {
		if dir := at(m.tree.cpuacct); dir != "" {
			u.CPU, u.HasCPU = m.number(dir, "cpuacct.usage")
		}
		if dir := at(m.tree.memory); dir != "" {
			m.memoryV1(&u, dir)
		}
	}
	if dir := at(m.tree.controllers["pids"]); dir != "" {
		u.Processes, u.HasProcesses = m.number(dir, "pids.current")
	}
	return u
}

func (m *meter) cpuStat(u *agent.Usage, dir string) {
	m.stat(m.read(dir, "cpu.stat"), func(key []byte, n uint64) {
		if string(key) == "usage_usec" {
			u.CPU, u.HasCPU = n*1000, true
		}
	})
}

func (m *meter) memoryV2(u *agent.Usage, dir string) {
	u.Memory, u.HasMemory = m.number(dir, "memory.current")
	if !u.HasMemory {
		return
	}
	m.memoryStat(u, dir, "anon", "")
	u.Limit, _ = m.number(dir, "memory.max")
	u.Swap, u.HasSwap = m.number(dir, "memory.swap.current")
	u.SwapLimit, u.HasSwapLimit = m.number(dir, "memory.swap.max")
}

// memoryStat reads memory.stat. The key of resident memory differs between cgroup v1 and v2. With
// v1, the prefix "total_" selects the values that include child cgroups, and the file also contains
// the swap usage.
func (m *meter) memoryStat(u *agent.Usage, dir, resident, prefix string) {
	var inactive uint64
	m.stat(m.read(dir, "memory.stat"), func(line []byte, n uint64) {
		key, ok := bytes.CutPrefix(line, []byte(prefix))
		if !ok {
			return
		}
		switch string(key) {
		case "inactive_file":
			inactive = n
		case resident:
			u.RSS = n
		case "pgfault":
			u.Faults = n
		case "pgmajfault":
			u.MajorFaults = n
		case "swap":
			u.Swap, u.HasSwap = n, true
		}
	})
	u.WorkingSet = less(u.Memory, inactive)
}

// unlimited is the value from which a cgroup v1 limit means no limit.
const unlimited = 1 << 62

func (m *meter) memoryV1(u *agent.Usage, dir string) {
	u.Memory, u.HasMemory = m.number(dir, "memory.usage_in_bytes")
	if !u.HasMemory {
		return
	}
	m.memoryStat(u, dir, "rss", "total_")
	if n, ok := m.number(dir, "memory.limit_in_bytes"); ok && n < unlimited {
		u.Limit = n
	}
	if n, ok := m.number(dir, "memory.memsw.limit_in_bytes"); ok && n < unlimited {
		u.SwapLimit, u.HasSwapLimit = less(n, u.Limit), true
	}
}

// machine returns the usage of the whole machine. CPU usage comes from the root cgroup. Memory
// comes from /proc/meminfo, because the root of cgroup v2 has no memory accounting.
func (m *meter) machine() agent.Usage {
	u := agent.Usage{At: time.Now()}
	if m.tree.unified {
		m.cpuStat(&u, m.tree.mounts[0])
	} else if m.tree.cpuacct != "" {
		u.CPU, u.HasCPU = m.number(m.tree.cpuacct, "cpuacct.usage")
	}
	kib := map[string]uint64{}
	m.stat(m.read("/proc/meminfo"), func(key []byte, n uint64) { kib[string(key)] = n << 10 })
	total := kib["MemTotal:"]
	u.Limit, u.Memory, u.HasMemory = total, less(total, kib["MemFree:"]), total > 0
	u.WorkingSet = less(u.Memory, kib["Inactive(file):"])
	u.RSS = kib["AnonPages:"]
	u.SwapLimit, u.HasSwapLimit = kib["SwapTotal:"], true
	u.Swap, u.HasSwap = less(kib["SwapTotal:"], kib["SwapFree:"]), true
	return u
}

func less(a, b uint64) uint64 {
	if b > a {
		return 0
	}
	return a - b
}

// stat calls f for each line "key number ...".
func (m *meter) stat(text []byte, f func(key []byte, n uint64)) {
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

// network returns the traffic of the interfaces in a process's network namespace, except the
// loopback.
func (m *meter) network(pid int) []agent.InterfaceUsage {
	return interfaces(m.read("/proc", strconv.Itoa(pid), "net", "dev"))
}

// interfaces parses /proc/net/dev: "name: bytes packets errs drop fifo frame compressed multicast",
// then eight sent counters.
func interfaces(text []byte) (out []agent.InterfaceUsage) {
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
		out = append(out, agent.InterfaceUsage{Name: string(name), Received: n(0), ReceiveErrors: n(2), Sent: n(8), SendingErrors: n(10)})
	}
	return out
}
