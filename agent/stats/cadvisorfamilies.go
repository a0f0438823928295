package stats

import (
	"strconv"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/promtext"
)

// putSample writes a sample of the current metric family. pairs are alternating names and values of
// labels.
type putSample func(value float64, pairs ...string)

// cadvisorFamily is a metric family of /metrics/cadvisor.
type cadvisorFamily struct {
	name, kind, help string
	untimed          bool // without a timestamp, because the values change rarely
	write            func(s *subject, put putSample)
}

// cadvisorFamilies are the metric families of /metrics/cadvisor, sorted by name. The names are
// those of cAdvisor.
var cadvisorFamilies = []cadvisorFamily{
	{name: "container_blkio_device_usage_total", kind: promtext.Counter,
		help:  "Bytes read from and written to a block device.",
		write: writeBlkio},
	{name: "container_cpu_cfs_periods_total", kind: promtext.Counter, write: throttlingValue(
		func(d *agent.ThrottlingDetails) float64 { return float64(d.Periods) }),
		help: "Enforcement periods of the CPU limit."},
	{name: "container_cpu_cfs_throttled_periods_total", kind: promtext.Counter, write: throttlingValue(
		func(d *agent.ThrottlingDetails) float64 { return float64(d.ThrottledPeriods) }),
		help: "Enforcement periods of the CPU limit in which tasks were throttled."},
	{name: "container_cpu_cfs_throttled_seconds_total", kind: promtext.Counter, write: throttlingValue(
		func(d *agent.ThrottlingDetails) float64 { return float64(d.ThrottledTime) / 1e9 }),
		help: "Time for which tasks were throttled."},
	{name: "container_cpu_system_seconds_total", kind: promtext.Counter, write: cpuModeValue(
		func(d *agent.CPUDetails) uint64 { return d.System }), help: "CPU time in kernel mode."},
	{name: "container_cpu_usage_seconds_total", kind: promtext.Counter, help: "CPU time.",
		write: func(s *subject, put putSample) {
			if s.usage.HasCPU {
				put(float64(s.usage.CPU)/1e9, "cpu", "total")
			}
		}},
	{name: "container_cpu_user_seconds_total", kind: promtext.Counter, write: cpuModeValue(
		func(d *agent.CPUDetails) uint64 { return d.User }), help: "CPU time in user mode."},
	{name: "container_file_descriptors", kind: promtext.Gauge, help: "Open file descriptors of all processes.",
		write: func(s *subject, put putSample) {
			if p := s.details.Processes; p != nil && p.Descriptors != nil {
				put(float64(*p.Descriptors))
			}
		}},
	{name: "container_fs_inodes_free", kind: promtext.Gauge, help: "Free inodes of the file system.",
		write: wholeDiskValue(func(d *agent.Disk) uint64 { return d.InodesFree })},
	{name: "container_fs_inodes_total", kind: promtext.Gauge, help: "Inodes of the file system.",
		write: wholeDiskValue(func(d *agent.Disk) uint64 { return d.Inodes })},
	{name: "container_fs_limit_bytes", kind: promtext.Gauge, help: "Size of the file system in bytes.",
		write: diskValue(func(d *diskUse) uint64 { return d.size.Capacity })},
	{name: "container_fs_reads_bytes_total", kind: promtext.Counter, help: "Bytes read from a block device.",
		write: deviceValue(func(d *agent.DeviceUsage) uint64 { return d.ReadBytes })},
	{name: "container_fs_reads_total", kind: promtext.Counter, help: "Completed reads from a block device.",
		write: deviceValue(func(d *agent.DeviceUsage) uint64 { return d.Reads })},
	{name: "container_fs_usage_bytes", kind: promtext.Gauge,
		help:  "Bytes of the file system that are used: of a container, in its writable layer.",
		write: diskValue(func(d *diskUse) uint64 { return d.used })},
	{name: "container_fs_writes_bytes_total", kind: promtext.Counter, help: "Bytes written to a block device.",
		write: deviceValue(func(d *agent.DeviceUsage) uint64 { return d.WriteBytes })},
	{name: "container_fs_writes_total", kind: promtext.Counter, help: "Completed writes to a block device.",
		write: deviceValue(func(d *agent.DeviceUsage) uint64 { return d.Writes })},
	{name: "container_last_seen", kind: promtext.Gauge, help: "Time of the measurement in seconds since 1970.",
		write: func(s *subject, put putSample) {
			if s.usage.HasCPU || s.usage.HasMemory {
				put(float64(s.at.Unix()))
			}
		}},
	{name: "container_memory_cache", kind: promtext.Gauge, help: "Page cache in bytes.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.Cache })},
	{name: "container_memory_events_high_total", kind: promtext.Counter,
		help:  "How often memory usage exceeded memory.high.",
		write: memoryEvent(func(e *agent.MemEvents) uint64 { return e.High })},
	{name: "container_memory_events_max_total", kind: promtext.Counter,
		help:  "How often memory usage was about to exceed memory.max.",
		write: memoryEvent(func(e *agent.MemEvents) uint64 { return e.Max })},
	{name: "container_memory_failcnt", kind: promtext.Counter, help: "How often memory usage reached the limit.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.LimitHits })},
	{name: "container_memory_failures_total", kind: promtext.Counter, help: "Page faults.", write: writeFaults},
	{name: "container_memory_kernel_usage", kind: promtext.Gauge, help: "Kernel memory in bytes.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.Kernel })},
	{name: "container_memory_mapped_file", kind: promtext.Gauge, help: "Memory-mapped files in bytes.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.MappedFile })},
	{name: "container_memory_max_usage_bytes", kind: promtext.Gauge, help: "Highest memory usage in bytes.",
		write: func(s *subject, put putSample) {
			if m := s.details.Memory; m != nil && m.MaxUsage > 0 {
				put(float64(m.MaxUsage))
			}
		}},
	{name: "container_memory_rss", kind: promtext.Gauge, help: "Anonymous memory in bytes.",
		write: memoryUsage(func(u *agent.Usage) uint64 { return u.RSS })},
	{name: "container_memory_swap", kind: promtext.Gauge, help: "Swap usage in bytes.",
		write: func(s *subject, put putSample) {
			if s.usage.HasSwap {
				put(float64(s.usage.Swap))
			}
		}},
	{name: "container_memory_total_active_file_bytes", kind: promtext.Gauge, help: "Active page cache in bytes.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.ActiveFile })},
	{name: "container_memory_total_inactive_file_bytes", kind: promtext.Gauge, help: "Inactive page cache in bytes.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.InactiveFile })},
	{name: "container_memory_usage_bytes", kind: promtext.Gauge, help: "Memory usage in bytes, with the page cache.",
		write: memoryUsage(func(u *agent.Usage) uint64 { return u.Memory })},
	{name: "container_memory_working_set_bytes", kind: promtext.Gauge,
		help:  "Memory usage in bytes, without the inactive page cache.",
		write: memoryUsage(func(u *agent.Usage) uint64 { return u.WorkingSet })},
	{name: "container_network_receive_bytes_total", kind: promtext.Counter, help: "Received bytes.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.Received })},
	{name: "container_network_receive_errors_total", kind: promtext.Counter, help: "Errors in receiving.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.ReceiveErrors })},
	{name: "container_network_receive_packets_dropped_total", kind: promtext.Counter,
		help:  "Packets dropped in receiving.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.ReceiveDrops })},
	{name: "container_network_receive_packets_total", kind: promtext.Counter, help: "Received packets.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.ReceivedPackets })},
	{name: "container_network_transmit_bytes_total", kind: promtext.Counter, help: "Sent bytes.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.Sent })},
	{name: "container_network_transmit_errors_total", kind: promtext.Counter, help: "Errors in sending.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.SendingErrors })},
	{name: "container_network_transmit_packets_dropped_total", kind: promtext.Counter,
		help:  "Packets dropped in sending.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.SendingDrops })},
	{name: "container_network_transmit_packets_total", kind: promtext.Counter, help: "Sent packets.",
		write: interfaceValue(func(i *agent.InterfaceUsage) uint64 { return i.SentPackets })},
	{name: "container_oom_events_total", kind: promtext.Counter,
		help:  "Processes that the kernel killed for lack of memory.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.OOMKills })},
	{name: "container_pressure_cpu_stalled_seconds_total", kind: promtext.Counter,
		help:  "Time for which all tasks were delayed by lack of CPU time.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.CPU.Stalled })},
	{name: "container_pressure_cpu_waiting_seconds_total", kind: promtext.Counter,
		help:  "Time for which some tasks were delayed by lack of CPU time.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.CPU.Waiting })},
	{name: "container_pressure_io_stalled_seconds_total", kind: promtext.Counter,
		help:  "Time for which all tasks were delayed by I/O.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.IO.Stalled })},
	{name: "container_pressure_io_waiting_seconds_total", kind: promtext.Counter,
		help:  "Time for which some tasks were delayed by I/O.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.IO.Waiting })},
	{name: "container_pressure_memory_stalled_seconds_total", kind: promtext.Counter,
		help:  "Time for which all tasks were delayed by lack of memory.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.Memory.Stalled })},
	{name: "container_pressure_memory_waiting_seconds_total", kind: promtext.Counter,
		help:  "Time for which some tasks were delayed by lack of memory.",
		write: pressureValue(func(d *agent.PressureDetails) uint64 { return d.Memory.Waiting })},
	{name: "container_processes", kind: promtext.Gauge, help: "Number of processes.",
		write: func(s *subject, put putSample) {
			if p := s.details.Processes; p != nil {
				put(float64(p.Count))
			}
		}},
	{name: "container_spec_cpu_period", kind: promtext.Gauge, untimed: true,
		help:  "Enforcement period of the CPU limit in microseconds.",
		write: cpuLimit(func(l *agent.CPULimits) (uint64, bool) { return l.Period, l.Period > 0 })},
	{name: "container_spec_cpu_quota", kind: promtext.Gauge, untimed: true,
		help:  "CPU limit in microseconds per period.",
		write: cpuLimit(func(l *agent.CPULimits) (uint64, bool) { return l.Quota, l.Quota > 0 })},
	{name: "container_spec_cpu_shares", kind: promtext.Gauge, untimed: true, help: "CPU shares.",
		write: cpuLimit(func(l *agent.CPULimits) (uint64, bool) { return l.Shares, true })},
	{name: "container_spec_memory_limit_bytes", kind: promtext.Gauge, untimed: true,
		help:  "Memory limit in bytes; 0 if there is none.",
		write: memoryUsage(func(u *agent.Usage) uint64 { return u.Limit })},
	{name: "container_spec_memory_reservation_limit_bytes", kind: promtext.Gauge, untimed: true,
		help:  "Reserved memory in bytes; 0 if there is none.",
		write: memoryDetail(func(d *agent.MemoryDetails) uint64 { return d.Reservation })},
	{name: "container_spec_memory_swap_limit_bytes", kind: promtext.Gauge, untimed: true,
		help:  "Swap limit in bytes; 0 if there is none.",
		write: memoryUsage(func(u *agent.Usage) uint64 { return u.SwapLimit })},
	{name: "container_start_time_seconds", kind: promtext.Gauge, untimed: true,
		help: "Start time in seconds since 1970.", write: func(s *subject, put putSample) {
			if s.started.Unix() > 0 {
				put(float64(s.started.UnixNano()) / 1e9)
			}
		}},
	{name: "container_threads", kind: promtext.Gauge, help: "Number of threads.",
		write: func(s *subject, put putSample) {
			if s.usage.HasProcesses {
				put(float64(s.usage.Processes))
			}
		}},
	{name: "container_threads_max", kind: promtext.Gauge, help: "Limit of threads; 0 if there is none.",
		write: func(s *subject, put putSample) {
			if s.usage.HasProcesses {
				put(float64(s.details.ThreadsMax))
			}
		}},
}

// The following functions return functions for cadvisorFamily.write. They write the value that get
// returns, for the subjects that have it.

// throttlingValue writes a value of a subject with a CPU limit.
func throttlingValue(get func(*agent.ThrottlingDetails) float64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d, l := s.details.Throttling, s.details.CPULimits; d != nil && l != nil && l.Quota > 0 {
			put(get(d))
		}
	}
}

// cpuModeValue writes a time in seconds, which get returns in nanoseconds.
func cpuModeValue(get func(*agent.CPUDetails) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d := s.details.CPU; d != nil {
			put(float64(get(d)) / 1e9)
		}
	}
}

func cpuLimit(get func(*agent.CPULimits) (uint64, bool)) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if s.details.CPULimits == nil {
			return
		}
		if n, ok := get(s.details.CPULimits); ok {
			put(float64(n))
		}
	}
}

func memoryUsage(get func(*agent.Usage) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if s.usage.HasMemory {
			put(float64(get(s.usage)))
		}
	}
}

func memoryDetail(get func(*agent.MemoryDetails) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d := s.details.Memory; d != nil {
			put(float64(get(d)))
		}
	}
}

func memoryEvent(get func(*agent.MemEvents) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d := s.details.Memory; d != nil && d.Events != nil {
			put(float64(get(d.Events)))
		}
	}
}

// pressureValue writes a time in seconds, which get returns in microseconds.
func pressureValue(get func(*agent.PressureDetails) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d := s.details.Pressure; d != nil {
			put(float64(get(d)) / 1e6)
		}
	}
}

func interfaceValue(get func(*agent.InterfaceUsage) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		for i := range s.network {
			put(float64(get(&s.network[i])), "interface", s.network[i].Name)
		}
	}
}

func deviceValue(get func(*agent.DeviceUsage) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		for i := range s.details.Devices {
			put(float64(get(&s.details.Devices[i])), "device", s.details.Devices[i].Name)
		}
	}
}

func diskValue(get func(*diskUse) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if s.disk != nil {
			put(float64(get(s.disk)), "device", s.disk.device)
		}
	}
}

// wholeDiskValue writes a value of the subject of the whole file system.
func wholeDiskValue(get func(*agent.Disk) uint64) func(*subject, putSample) {
	return func(s *subject, put putSample) {
		if d := s.disk; d != nil && d.ofWholeDevice {
			put(float64(get(d.size)), "device", d.device)
		}
	}
}

// writeBlkio writes the bytes of each block device and direction.
func writeBlkio(s *subject, put putSample) {
	for i := range s.details.Devices {
		d := &s.details.Devices[i]
		major, minor := strconv.FormatUint(uint64(d.Major), 10), strconv.FormatUint(uint64(d.Minor), 10)
		put(float64(d.ReadBytes), "device", d.Name, "major", major, "minor", minor, "operation", "Read")
		put(float64(d.WriteBytes), "device", d.Name, "major", major, "minor", minor, "operation", "Write")
	}
}

// writeFaults writes the page faults of the cgroup itself (scope container) and with its child
// cgroups (scope hierarchy).
func writeFaults(s *subject, put putSample) {
	if d := s.details.Memory; d != nil {
		put(float64(d.OwnFaults), "failure_type", "pgfault", "scope", "container")
		put(float64(d.OwnMajorFaults), "failure_type", "pgmajfault", "scope", "container")
	}
	if s.usage.HasMemory {
		put(float64(s.usage.Faults), "failure_type", "pgfault", "scope", "hierarchy")
		put(float64(s.usage.MajorFaults), "failure_type", "pgmajfault", "scope", "hierarchy")
	}
}
