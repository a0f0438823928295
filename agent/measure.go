package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// MeasuredRuntime is a Runtime that measures what runs.
type MeasuredRuntime interface {
	Runtime
	// Measure reads what the machine, all pods and each pod that runs have used up to now. It reads some files for each
	// and keeps nothing: who asks often remembers the answer. What ends meanwhile is left out.
	Measure(context.Context) (*Measured, error)
}

// Measured is one look at everything.
type Measured struct {
	Machine Usage // all that runs on the machine
	Root    Usage // the cgroup of pods, with what else the node keeps in it
	Pods    []PodUsage
}

// PodUsage is what a pod has used, its sandbox included, and which of its containers used what.
type PodUsage struct {
	UID             types.UID
	Namespace, Name string
	Started         time.Time
	Usage
	Network    []InterfaceUsage // none for a pod on the host's network
	Containers []ContainerUsage // those that run
}

// PodStorage is what a pod has on disk and in its volumes.
type PodStorage struct {
	// At is when the pod's files were measured last; zero when they are not: pods without limits of storage are not.
	At         time.Time
	Used       uint64 // all that counts as local ephemeral storage
	Inodes     uint64 // of the same
	Containers map[string]ContainerStorage
	Volumes    []VolumeStorage
}

// ContainerStorage is what the newest instance of a container has written.
type ContainerStorage struct{ Layer, Logs uint64 }

// VolumeStorage is what is in a volume.
type VolumeStorage struct {
	Name, Claim string // Claim is that of a persistent volume; "" = it is none
	At          time.Time
	Used        uint64
	// Own is the file system that the volume is; nil = it lies on the node's disk.
	Own *Disk
}

// Disk is how full a file system is, in bytes and in files.
type Disk struct {
	Capacity, Available uint64
	Inodes, InodesFree  uint64
}

// ContainerUsage is what a container has used since it started.
type ContainerUsage struct {
	Name    string
	Started time.Time
	Usage
}

// Usage is what the kernel has accounted to a cgroup, in bytes where nothing else is said. What is not accounted is
// absent as a whole: HasCPU and so on.
type Usage struct {
	At time.Time // of the reading

	HasCPU bool
	CPU    uint64 // nanoseconds of processors, since the cgroup was made

	HasMemory           bool
	Memory, WorkingSet  uint64 // all memory; without the files that were not used lately
	Limit               uint64 // of memory; 0 = none
	RSS                 uint64
	Faults, MajorFaults uint64 // page faults
	HasSwap             bool
	Swap                uint64
	HasSwapLimit        bool
	SwapLimit           uint64
	HasProcesses        bool
	Processes           uint64 // and threads
}

// InterfaceUsage is what has passed a network interface.
type InterfaceUsage struct {
	Name                         string
	Received, Sent               uint64 // bytes
	ReceiveErrors, SendingErrors uint64
}

// NodeUsed is what a node and its pods used lately. It is shared: do not modify.
type NodeUsed struct {
	At   time.Time // of the measurement
	Node *Used     // nil while there was one measurement only
	Pods []PodUsed // those all of whose containers were measured over a window
}

// UsageReporter is a Reporter that also says what was used.
type UsageReporter interface {
	// Used replaces what was said before. It never blocks.
	Used(u *NodeUsed)
}

// PodUsed is what the running containers of a pod used.
type PodUsed struct {
	UID        types.UID
	Containers []ContainerUsed
}

// ContainerUsed is what a container used.
type ContainerUsed struct {
	Name string
	Used
}

// Used is a use of processors and memory.
type Used struct {
	CPU    uint64        // billionths of a processor, on average over Window
	Memory uint64        // working set in bytes, at the end of Window
	Window time.Duration // ends with the measurement
}

// Trust is how a node's own HTTPS server shows who it is and learns who asks.
type Trust interface {
	// Serving returns the server's certificate: the cluster's, or one that the node made itself while it has none.
	Serving() (*tls.Certificate, error)
	// Authorities returns whose client certificates are believed; nil while that is not known.
	Authorities() *x509.CertPool
	// Review asks the control plane. ErrNoReview is wrapped by errors that say nothing about who asks.
	Review(ctx context.Context, q Review) (Verdict, error)
}

// Review asks whether somebody may use any of some subresources of this node.
type Review struct {
	Token        string // shown by who asks; otherwise a certificate names User and Groups
	User         string
	Groups       []string
	Certificate  []byte // DER of the client certificate that names User and Groups
	Verb         string // the API's: get, create ...
	Subresources []string
}

// Verdict answers a Review. Who is not authenticated is not allowed anything.
type Verdict struct {
	Authenticated bool
	User          string
	Allowed       bool
	Reason        string // may be empty
}

// ErrNoReview says that nobody who could judge was reached.
var ErrNoReview = errors.New("no control plane has judged this")
