package podcgroup

import (
	"bytes"
	"cmp"
	"math"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/blockdevice"
)

// CgroupDetails returns the usage and the details of a cgroup, without its processes. name is the
// cgroup's path relative to the runtime's root.
func (m *Meter) CgroupDetails(name string) (agent.Usage, agent.CgroupDetails) {
	d := agent.CgroupDetails{Path: filepath.Join("/", m.Tree.Root, name)}
	u := m.readUsage(name, &d)
	dirOf := func(mount string) string { return m.cgroupDir(mount, name) }
	if m.Tree.Unified {
		m.addDetailsV2(&d, dirOf(m.Tree.mounts[0]))
	} else {
		m.addDetailsV1(&d, dirOf)
	}
	if dir := dirOf(m.Tree.Controllers["pids"]); dir != "" {
		d.ThreadsMax, _ = m.readNumber(dir, "pids.max")
	}
	return u, d
}

// MachineDetails returns the details of the root cgroup of the machine, and the traffic of the
// machine's interfaces. It omits the loopback and the veth interfaces, which carry the traffic of
// pods.
func (m *Meter) MachineDetails() (agent.CgroupDetails, []agent.InterfaceUsage) {
	d := agent.CgroupDetails{Path: "/"}
	if m.Tree.Unified {
		root := m.Tree.mounts[0]
		m.addCPUStat(&agent.Usage{}, &d, root)
		m.addMemoryStat(&agent.Usage{}, &d, root, "")
		m.addDetailsV2(&d, root)
	} else {
		if m.Tree.memory != "" {
			m.addMemoryStat(&agent.Usage{}, &d, m.Tree.memory, "total_")
		}
		m.addDetailsV1(&d, func(mount string) string { return mount })
	}
	interfaces := parseNetDev(m.readFile("/proc/self/net/dev"))
	return d, slices.DeleteFunc(interfaces, func(i agent.InterfaceUsage) bool {
		return strings.HasPrefix(i.Name, "veth")
	})
}

// maxCountedProcesses limits the time for counting the file descriptors of one cgroup.
const maxCountedProcesses = 256

// CgroupProcesses returns the processes of a cgroup and its child cgroups.
func (m *Meter) CgroupProcesses(name string) *agent.ProcessDetails {
	pids := m.Tree.ProcessIDs(name)
	out := &agent.ProcessDetails{Count: uint64(len(pids))}
	if len(pids) > maxCountedProcesses {
		return out
	}
	var descriptors uint64
	for _, pid := range pids {
		var st unix.Stat_t
		// The size of this directory is the number of descriptors since Linux 6.2, and 0 before.
		if unix.Stat("/proc/"+strconv.Itoa(pid)+"/fd", &st) == nil && st.Size > 0 {
			descriptors += uint64(st.Size)
		}
	}
	if descriptors > 0 {
		out.Descriptors = &descriptors
	}
	return out
}

func (m *Meter) addDetailsV2(d *agent.CgroupDetails, dir string) {
	if weight, ok := m.readNumber(dir, "cpu.weight"); ok {
		d.CPULimits = &agent.CPULimits{Shares: sharesFromWeight(weight)}
		quota, period, _ := strings.Cut(strings.TrimSpace(string(m.readFile(dir, "cpu.max"))), " ")
		d.CPULimits.Quota, _ = strconv.ParseUint(quota, 10, 64) // "max" is no number: no limit
		d.CPULimits.Period, _ = strconv.ParseUint(period, 10, 64)
	}
	if memory := d.Memory; memory != nil {
		memory.MaxUsage, _ = m.readNumber(dir, "memory.peak")
		memory.Reservation, _ = m.readNumber(dir, "memory.low")
		m.parseStat(m.readFile(dir, "memory.events"), func(key []byte, n uint64) {
			if memory.Events == nil {
				memory.Events = &agent.MemEvents{}
			}
			switch string(key) {
			case "high":
				memory.Events.High = n
			case "max":
				memory.Events.Max, memory.LimitHits = n, n
			case "oom_kill":
				memory.OOMKills = n
			}
		})
	}
	d.Devices = m.nameDevices(parseIOStat(m.readFile(dir, "io.stat")))
	var pressure agent.PressureDetails
	known := false
	for _, resource := range []struct {
		file string
		time *agent.StallTime
	}{{"cpu.pressure", &pressure.CPU}, {"memory.pressure", &pressure.Memory}, {"io.pressure", &pressure.IO}} {
		var ok bool
		*resource.time, ok = parsePressure(m.readFile(dir, resource.file))
		known = known || ok
	}
	if known {
		d.Pressure = &pressure
	}
}

// sharesFromWeight returns the cgroup v1 CPU shares that correspond to a cgroup v2 CPU weight. It
// is the inverse of the conversion with which the weight was set, except for rounding.
func sharesFromWeight(weight uint64) uint64 {
	// weight = 10^((l² + 125 l)/612 - 7/34), where l is the binary logarithm of the shares
	square := 612 * (math.Log10(float64(max(weight, 1))) + 7.0/34)
	logarithm := (math.Sqrt(125*125+4*square) - 125) / 2
	return min(max(uint64(math.Round(math.Exp2(logarithm))), MinShares), maxShares)
}

// tick is the unit of cpuacct.stat in nanoseconds. The kernel's interface has 100 ticks per second.
const tick = 10_000_000

func (m *Meter) addDetailsV1(d *agent.CgroupDetails, dirOf func(mount string) string) {
	if dir := dirOf(m.Tree.cpuacct); dir != "" {
		modes := &agent.CPUDetails{}
		m.parseStat(m.readFile(dir, "cpuacct.stat"), func(key []byte, n uint64) {
			d.CPU = modes
			switch string(key) {
			case "user":
				modes.User = n * tick
			case "system":
				modes.System = n * tick
			}
		})
	}
	if dir := dirOf(m.Tree.Controllers["cpu"]); dir != "" {
		m.addCPULimitsV1(d, dir)
	}
	if dir := dirOf(m.Tree.memory); dir != "" && d.Memory != nil {
		d.Memory.MaxUsage, _ = m.readNumber(dir, "memory.max_usage_in_bytes")
		d.Memory.LimitHits, _ = m.readNumber(dir, "memory.failcnt")
		d.Memory.Kernel, _ = m.readNumber(dir, "memory.kmem.usage_in_bytes")
		if n, ok := m.readNumber(dir, "memory.soft_limit_in_bytes"); ok && n < unlimited {
			d.Memory.Reservation = n
		}
		m.parseStat(m.readFile(dir, "memory.oom_control"), func(key []byte, n uint64) {
			if string(key) == "oom_kill" {
				d.Memory.OOMKills = n
			}
		})
	}
	if dir := dirOf(m.Tree.blkio); dir != "" {
		d.Devices = addBlkio(nil, m.readFile(dir, "blkio.throttle.io_service_bytes_recursive"), ioBytes)
		d.Devices = addBlkio(d.Devices, m.readFile(dir, "blkio.throttle.io_serviced_recursive"), ioOperations)
		d.Devices = m.nameDevices(d.Devices)
	}
}

// addCPULimitsV1 reads the files of the cpu controller. A quota of -1, which is not an unsigned
// number, means no limit.
func (m *Meter) addCPULimitsV1(d *agent.CgroupDetails, dir string) {
	if shares, ok := m.readNumber(dir, "cpu.shares"); ok {
		d.CPULimits = &agent.CPULimits{Shares: shares}
		d.CPULimits.Quota, _ = m.readNumber(dir, "cpu.cfs_quota_us")
		d.CPULimits.Period, _ = m.readNumber(dir, "cpu.cfs_period_us")
	}
	throttling := &agent.ThrottlingDetails{}
	m.parseStat(m.readFile(dir, "cpu.stat"), func(key []byte, n uint64) {
		switch string(key) {
		case "nr_periods":
			throttling.Periods = n
			d.Throttling = throttling
		case "nr_throttled":
			throttling.ThrottledPeriods = n
		case "throttled_time":
			throttling.ThrottledTime = n
		}
	})
}

// parseDevice parses a device number, "major:minor".
func parseDevice(text []byte) (device agent.DeviceUsage, ok bool) {
	major, minor, _ := strings.Cut(string(text), ":")
	a, err := strconv.ParseUint(major, 10, 32)
	b, err2 := strconv.ParseUint(minor, 10, 32)
	return agent.DeviceUsage{Major: uint32(a), Minor: uint32(b)}, err == nil && err2 == nil
}

// parseIOStat parses io.stat of cgroup v2: a device number, and pairs of a key and a number.
func parseIOStat(text []byte) (devices []agent.DeviceUsage) {
	for line := range bytes.Lines(text) {
		number, rest, _ := bytes.Cut(line, []byte(" "))
		device, ok := parseDevice(number)
		if !ok {
			continue
		}
		for field := range bytes.FieldsSeq(rest) {
			key, value, _ := bytes.Cut(field, []byte("="))
			n, err := strconv.ParseUint(string(value), 10, 64)
			if err != nil {
				continue
			}
			switch string(key) {
			case "rbytes":
				device.ReadBytes = n
			case "wbytes":
				device.WriteBytes = n
			case "rios":
				device.Reads = n
			case "wios":
				device.Writes = n
			}
		}
		if device.Reads > 0 || device.Writes > 0 {
			devices = append(devices, device)
		}
	}
	return devices
}

// ioBytes returns the numbers of bytes that were read from and written to a device.
func ioBytes(u *agent.DeviceUsage) (read, written *uint64) { return &u.ReadBytes, &u.WriteBytes }

// ioOperations returns the numbers of completed reads and writes of a device.
func ioOperations(u *agent.DeviceUsage) (read, written *uint64) { return &u.Reads, &u.Writes }

// addBlkio adds the values of a blkio file of cgroup v1 to devices. The lines of the file are
// "major:minor Operation number". selectValues returns the values of a device for the operations
// Read and Write; other operations are ignored.
func addBlkio(devices []agent.DeviceUsage, text []byte,
	selectValues func(*agent.DeviceUsage) (read, written *uint64)) []agent.DeviceUsage {
	for line := range bytes.Lines(text) {
		f := bytes.Fields(line)
		if len(f) != 3 {
			continue // the total of all devices
		}
		device, ok := parseDevice(f[0])
		n, err := strconv.ParseUint(string(f[2]), 10, 64)
		if !ok || err != nil {
			continue
		}
		i := slices.IndexFunc(devices, func(u agent.DeviceUsage) bool {
			return u.Major == device.Major && u.Minor == device.Minor
		})
		if i < 0 {
			i = len(devices)
			devices = append(devices, device)
		}
		read, written := selectValues(&devices[i])
		switch string(f[1]) {
		case "Read":
			*read = n
		case "Write":
			*written = n
		}
	}
	return devices
}

// nameDevices sorts devices by number and sets their names.
func (m *Meter) nameDevices(devices []agent.DeviceUsage) []agent.DeviceUsage {
	slices.SortFunc(devices, func(a, b agent.DeviceUsage) int {
		return cmp.Or(cmp.Compare(a.Major, b.Major), cmp.Compare(a.Minor, b.Minor))
	})
	for i := range devices {
		d := &devices[i]
		number := [2]uint32{d.Major, d.Minor}
		name, ok := m.devices[number]
		if !ok {
			if m.devices == nil {
				m.devices = map[[2]uint32]string{}
			}
			name = blockdevice.Name(d.Major, d.Minor)
			m.devices[number] = name
		}
		d.Name = name
	}
	return devices
}

// parsePressure parses a pressure file. Its lines are "some avg10=0.00 ... total=MICROSECONDS" and
// "full ...". It returns false if the file has no such line.
func parsePressure(text []byte) (out agent.StallTime, ok bool) {
	for line := range bytes.Lines(text) {
		_, total, found := bytes.Cut(line, []byte(" total="))
		n, err := strconv.ParseUint(string(bytes.TrimSpace(total)), 10, 64)
		if !found || err != nil {
			continue
		}
		switch {
		case bytes.HasPrefix(line, []byte("some ")):
			out.Waiting, ok = n, true
		case bytes.HasPrefix(line, []byte("full ")):
			out.Stalled, ok = n, true
		}
	}
	return out, ok
}
