package agent

// UsageDetails are values of a UsageSnapshot that only /metrics/cadvisor reports. They were read in
// the same pass as the snapshot.
type UsageDetails struct {
	Machine        CgroupDetails // the root cgroup of the machine
	MachineNetwork []InterfaceUsage
	Root           CgroupDetails // the cgroup of all pods and everything else in it
	Pods           []PodDetails  // parallel to UsageSnapshot.Pods
}

// PodDetails are the details of a pod's cgroup and of its containers.
type PodDetails struct {
	SandboxID string
	CgroupDetails
	Containers []ContainerDetails // parallel to PodUsage.Containers
}

// ContainerDetails are the details of a container's cgroup.
type ContainerDetails struct {
	ID    string
	Image string // reference of the image in the pod
	CgroupDetails
}

// CgroupDetails are values that the kernel accounts to a cgroup, and the cgroup's limits. A nil
// field means that the kernel does not account these values.
type CgroupDetails struct {
	Path       string // from the root of the hierarchy: "/keelson/kubepods/..."
	CPU        *CPUDetails
	Throttling *ThrottlingDetails
	CPULimits  *CPULimits
	Memory     *MemoryDetails
	Devices    []DeviceUsage // block devices with I/O of the cgroup, sorted by number
	Pressure   *PressureDetails
	Processes  *ProcessDetails
	ThreadsMax uint64 // limit of processes and threads; 0 = none
}

// CPUDetails is the CPU time of a cgroup by mode, in nanoseconds.
type CPUDetails struct{ User, System uint64 }

// ThrottlingDetails counts the enforcement periods of a CPU quota.
type ThrottlingDetails struct {
	Periods          uint64
	ThrottledPeriods uint64
	ThrottledTime    uint64 // nanoseconds
}

// CPULimits are the CPU settings of a cgroup, in the units of cgroup v1. With cgroup v2, Shares is
// computed from the weight.
type CPULimits struct {
	Shares uint64
	Period uint64 // microseconds
	Quota  uint64 // microseconds of CPU time per period; 0 = no limit
}

// MemoryDetails are memory values of a cgroup in bytes, unless stated otherwise. They include the
// child cgroups, unless stated otherwise.
type MemoryDetails struct {
	Cache, MappedFile        uint64
	ActiveFile, InactiveFile uint64
	Kernel                   uint64
	MaxUsage                 uint64 // 0 = not accounted
	Reservation              uint64 // memory.low, or the soft limit of cgroup v1; 0 = none
	// page faults of the cgroup itself; with cgroup v2 those of its child cgroups are included
	OwnFaults, OwnMajorFaults uint64
	LimitHits                 uint64     // how often usage reached the limit
	OOMKills                  uint64     // killed processes; with cgroup v1, those of the cgroup itself
	Events                    *MemEvents // nil with cgroup v1
}

// MemEvents counts how often a cgroup exceeded its thresholds (memory.events of cgroup v2).
type MemEvents struct{ High, Max uint64 }

// DeviceUsage is the I/O of a cgroup on a block device.
type DeviceUsage struct {
	Name                  string // "/dev/sda"; "8:0" if the device has no name
	Major, Minor          uint32
	ReadBytes, WriteBytes uint64
	Reads, Writes         uint64 // completed operations
}

// PressureDetails is the time for which tasks of a cgroup were delayed, by resource (cgroup v2).
type PressureDetails struct{ CPU, Memory, IO StallTime }

// StallTime is a time in microseconds: Waiting while some tasks were delayed, Stalled while all
// tasks were.
type StallTime struct{ Waiting, Stalled uint64 }

// ProcessDetails are the processes of a cgroup and its child cgroups.
type ProcessDetails struct {
	Count uint64
	// Descriptors is the number of open file descriptors of all processes. It is nil if the kernel
	// does not report it, or if the cgroup has more than 256 processes.
	Descriptors *uint64
}
