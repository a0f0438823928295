package agent

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"time"

	"k8s.io/apimachinery/pkg/types"
)

// MeasuredRuntime is a Runtime that measures the resource usage of pods.
type MeasuredRuntime interface {
	Runtime
	// MeasureUsage reads the current usage of the machine, of all pods together and of each running
	// pod. It reads several files per pod and caches nothing; frequent callers cache the result. A
	// pod that ends during the call is omitted.
	MeasureUsage(context.Context) (*UsageSnapshot, error)
	// MeasureDetails is MeasureUsage that also reads UsageSnapshot.Details, in the same pass. It
	// reads about three times as many files.
	MeasureDetails(context.Context) (*UsageSnapshot, error)
}

// UsageSnapshot is the resource usage of the machine and its pods at one time.
type UsageSnapshot struct {
	Machine Usage // everything that runs on the machine
	Root    Usage // the cgroup of all pods and everything else in it
	Pods    []PodUsage
	Details *UsageDetails // nil if they were not read
}

// PodUsage is the usage of a pod, including its sandbox, and of each of its containers.
type PodUsage struct {
	UID             types.UID
	Namespace, Name string
	Started         time.Time
	Usage
	Network    []InterfaceUsage // empty for a pod on the host network
	Containers []ContainerUsage // running containers only
}

// PodStorage is the disk usage of a pod and its volumes.
type PodStorage struct {
	// At is when the pod's files were measured last. It is zero for a pod without storage limits,
	// because the files of such a pod are not measured.
	At         time.Time
	Used       uint64 // all bytes that count as local ephemeral storage
	Inodes     uint64 // all inodes that count as local ephemeral storage
	Containers map[string]ContainerStorage
	Volumes    []VolumeStorage
}

// ContainerStorage is the number of bytes that the newest instance of a container has written.
type ContainerStorage struct{ Layer, Logs uint64 }

// VolumeStorage is the disk usage of a volume.
type VolumeStorage struct {
	Name, Claim string // Claim is the name of the PersistentVolumeClaim; "" = not a persistent volume
	At          time.Time
	Used        uint64
	// FileSystem is the usage of the volume's own file system; nil = the volume is a directory on
	// the node's disk.
	FileSystem *Disk
}

// Disk is the capacity and the free space of a file system, in bytes and in inodes.
type Disk struct {
	Capacity, Available uint64
	Inodes, InodesFree  uint64
}

// ContainerUsage is the usage of a container since it started.
type ContainerUsage struct {
	Name    string
	Started time.Time
	Usage
}

// Usage is the usage that the kernel accounts to a cgroup, in bytes unless stated otherwise. The
// Has fields report which groups of values are accounted.
type Usage struct {
	At time.Time // time of the measurement

	HasCPU bool
	CPU    uint64 // CPU time in nanoseconds since the cgroup was created

	HasMemory           bool
	Memory, WorkingSet  uint64 // WorkingSet is Memory without inactive file pages
	Limit               uint64 // memory limit; 0 = none
	RSS                 uint64
	Faults, MajorFaults uint64 // page faults
	HasSwap             bool
	Swap                uint64
	HasSwapLimit        bool
	SwapLimit           uint64
	HasProcesses        bool
	Processes           uint64 // includes threads
}

// InterfaceUsage are the traffic counters of a network interface.
type InterfaceUsage struct {
	Name                         string
	Received, Sent               uint64 // bytes
	ReceivedPackets, SentPackets uint64
	ReceiveErrors, SendingErrors uint64
	ReceiveDrops, SendingDrops   uint64 // packets
}

// NodeAverageUsage is the recent usage of a node and its pods. It is shared: receivers must not
// modify it.
type NodeAverageUsage struct {
	At   time.Time         // time of the measurement
	Node *AverageUsage     // nil after the first measurement
	Pods []PodAverageUsage // omits pods with a container that was not measured over a window
}

// UsageReporter is a Reporter that also reports resource usage.
type UsageReporter interface {
	// ReportUsage reports the usage, which replaces the previous report. It never blocks.
	ReportUsage(u *NodeAverageUsage)
}

// PodAverageUsage is the recent usage of the running containers of a pod.
type PodAverageUsage struct {
	UID        types.UID
	Containers []ContainerAverageUsage
}

// ContainerAverageUsage is the recent usage of a container.
type ContainerAverageUsage struct {
	Name string
	AverageUsage
}

// AverageUsage is a CPU usage averaged over a window, and the memory at the end of the window.
type AverageUsage struct {
	CPU    uint64        // in billionths of a CPU, averaged over Window
	Memory uint64        // working set in bytes, at the end of Window
	Window time.Duration // the window ends with the measurement
}

// ServerTrust provides the certificate of a node's HTTPS server and authenticates and authorizes
// its clients.
type ServerTrust interface {
	// ServingCertificate returns the server's certificate: the one that the cluster issued, or a
	// self-signed one until then.
	ServingCertificate() (*tls.Certificate, error)
	// ClientCAs returns the CA certificates for client certificates. It returns nil while they are
	// unknown.
	ClientCAs() *x509.CertPool
	// ReviewAccess asks the control plane for a decision. An error that wraps ErrReviewUnavailable
	// means that no decision could be requested; the client may be valid.
	ReviewAccess(ctx context.Context, q AccessReview) (AccessDecision, error)
}

// AccessReview asks whether a client may use any of the listed subresources of this node.
type AccessReview struct {
	Token        string // the client's bearer token; if empty, a certificate names User and Groups
	User         string
	Groups       []string
	Certificate  []byte // DER form of the client certificate that names User and Groups
	Verb         string // an API verb: get, create ...
	Subresources []string
}

// AccessDecision is the result of an AccessReview. A client that is not authenticated is not
// allowed.
type AccessDecision struct {
	Authenticated bool
	User          string
	Allowed       bool
	Reason        string // may be empty
}

// ErrReviewUnavailable is returned if no control plane could be reached for an AccessReview.
var ErrReviewUnavailable = errors.New("no control plane has judged this")
