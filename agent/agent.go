// Package agent is the vocabulary of the node agent. It declares the interfaces between the pod
// workers and the container runtime, the image store, the network, the volumes and the control
// plane. The packages below it implement these interfaces and do not import each other; agent/node
// wires them together.
package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	nodev1 "k8s.io/api/node/v1"
	resourcev1 "k8s.io/api/resource/v1"
	storagev1 "k8s.io/api/storage/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Runtime runs sandboxes and containers. Its first methods are those of CRI v1, with the CRI's
// messages and idempotency: stopping a stopped container and removing a removed one succeed. A
// missing object is a gRPC status NotFound.
type Runtime interface {
	// RunPodSandbox creates the pod's cgroup and its network namespace, calls Network.Add and
	// starts the pause process. A bind mount pins the network namespace, which therefore outlives
	// its processes.
	RunPodSandbox(context.Context, *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error)
	StopPodSandbox(context.Context, *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error)
	RemovePodSandbox(context.Context, *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error)
	PodSandboxStatus(context.Context, *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error)
	ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error)

	CreateContainer(context.Context, *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error)
	StartContainer(context.Context, *cri.StartContainerRequest) (*cri.StartContainerResponse, error)
	// StopContainer fails with ErrStillRunning if the container was killed and does not exit.
	StopContainer(context.Context, *cri.StopContainerRequest) (*cri.StopContainerResponse, error)
	RemoveContainer(context.Context, *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error)
	ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error)
	ContainerStatus(context.Context, *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error)
	// UpdateContainerResources and UpdatePodSandboxResources change the CPU and memory limits of a
	// running container or sandbox. They apply the CPU shares, quota and period and the memory
	// limit, and ignore all other resources. A limit of 0 removes the limit. A memory limit below
	// the current usage is refused and changes nothing. ContainerStatus returns the values that
	// were set last.
	UpdateContainerResources(context.Context,
		*cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error)
	UpdatePodSandboxResources(context.Context,
		*cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error)
	ExecSync(context.Context, *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error)
	Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error)

	// Events delivers an event for every container or sandbox that started or exited, until ctx
	// ends. Events may be lost; receivers must also list.
	Events(ctx context.Context) <-chan RuntimeEvent
	// Exec runs a command with live streams; Attach connects to the container's own streams. A
	// command that exits with a code other than 0 returns *ExitError.
	Exec(ctx context.Context, containerID string, command []string, tty bool, s Streams) error
	Attach(ctx context.Context, containerID string, tty bool, s Streams) error
	// PortForward connects conn to a port on localhost inside the sandbox.
	PortForward(ctx context.Context, sandboxID string, port int32, conn io.ReadWriteCloser) error
	// StageTimes returns and deletes the stages measured during the creation of a sandbox or
	// container: "netns", "cni", "pause", "rootfs", "create", "start".
	StageTimes(id string) []StageTime
}

// ErrStillRunning is returned for a killed container that does not exit, because the kernel is
// waiting on its behalf (for example for a file server).
var ErrStillRunning = errors.New("container does not end")

// EarlyRuntime is a Runtime that can create containers while the network of their sandbox is still
// being attached. The network takes the longest part of a sandbox's creation.
type EarlyRuntime interface {
	Runtime
	// RunPodSandboxEarly is RunPodSandbox with a callback. It calls prepared at most once, with the
	// sandbox's ID, as soon as CreateContainer works in the sandbox. Until RunPodSandboxEarly
	// returns, StartContainer is refused and the sandbox is not listed. If it fails after prepared
	// was called, the sandbox's containers have been removed with the sandbox.
	RunPodSandboxEarly(ctx context.Context, q *cri.RunPodSandboxRequest,
		prepared func(id string)) (*cri.RunPodSandboxResponse, error)
}

// TieredRuntime is a Runtime that places pods in one cgroup per QoS class.
type TieredRuntime interface {
	Runtime
	// SetTiers sets the resource limits of kubepods and the CPU weights of the QoS cgroups. It
	// waits until the runtime has started. A limit that cannot be set is reported in the error; the
	// other limits are set.
	SetTiers(context.Context, Tiers) error
}

// Tiers are the resource limits of all pods together and the CPU weights of the QoS classes.
// BestEffort pods have the smallest possible weight.
type Tiers struct {
	CPU    int64 // for all pods, in thousandths of a CPU; sets the CPU weight of kubepods on the machine
	Memory int64 // for all pods, in bytes; 0 = no limit
	PIDs   int64 // processes and threads of all pods; 0 = no limit

	Burstable int64 // CPU requests of all Burstable pods, in thousandths of a CPU
}

// RuntimeEvent reports that the state of a container changed, or that of the sandbox if ContainerID
// is empty.
type RuntimeEvent struct {
	SandboxID   string
	ContainerID string
	PodUID      types.UID
}

// StageTime is one measured step of creating a sandbox or container.
type StageTime struct {
	Name     string
	Start    time.Time
	Duration time.Duration
	Detail   string
}

// TermSize is a terminal's size in characters.
type TermSize struct{ Width, Height uint16 }

// Streams are the standard streams of an exec. A stream that is not used is nil.
type Streams struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Resize <-chan TermSize
}

// Images stores container images on the node. Pulling an image that is already present costs at
// most one request for its manifest.
type Images interface {
	PullImage(context.Context, *cri.PullImageRequest) (*cri.PullImageResponse, error)
	ImageStatus(context.Context, *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error)
	ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error)
	RemoveImage(context.Context, *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error)
	ImageFsInfo(context.Context, *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error)

	// Config returns the image's defaults. It returns ErrImageNotPresent if the image is missing.
	Config(ctx context.Context, image string) (ImageConfig, error)
	// PrepareRootFS prepares a writable root file system on top of the image and returns it. It is
	// idempotent per containerID. RemoveRootFS unmounts and deletes the root file system. It
	// succeeds if the container has no root file system.
	PrepareRootFS(ctx context.Context, containerID, image string) (RootFS, error)
	RemoveRootFS(ctx context.Context, containerID string) error
	// Import loads an OCI layout or docker archive (a tar file) and returns the image names in it.
	Import(ctx context.Context, path string) ([]string, error)
}

// ImageConfig is the part of an image's config that a container inherits.
type ImageConfig struct {
	ID         string // "sha256:..." of the config
	Digest     string // "repo@sha256:..." of the manifest
	Env        []string
	Entrypoint []string
	Cmd        []string
	WorkingDir string
	User       string
	StopSignal string
	Volumes    []string
}

// RootFS is a prepared root file system. Lower lists the read-only layers, topmost first. If
// Mounted is true, Path is ready to use. Otherwise the creator of the container mounts an overlay
// of Lower, Upper and Work at Path.
type RootFS struct {
	Path    string
	Lower   []string
	Upper   string
	Work    string
	Mounted bool
}

// Errors that the methods of Images return.
var (
	ErrImageNotPresent = errors.New("image is not present on the node")
	ErrImagePull       = errors.New("ErrImagePull")          // wrapped with registry, image and cause
	ErrInvalidImage    = errors.New("InvalidImageName")      // the image reference cannot be parsed
	ErrImageUnpack     = errors.New("image does not unpack") // wrapped with layer and cause
)

// NetworkRequest describes the sandbox that is attached to or detached from its network.
type NetworkRequest struct {
	SandboxID string
	NetNS     string // path of the network namespace
	Namespace string
	Name      string
	UID       types.UID
	Ports     []*cri.PortMapping
	Ingress   int64 // bandwidth limit in bits per second; 0 = no limit
	Egress    int64
}

// NetworkStatus describes the attached network of a pod.
type NetworkStatus struct {
	IPs      []string // the first one is the primary address
	MAC      string
	Gateways []string
}

// Network attaches pod sandboxes to the pod network. Every call is idempotent. Del succeeds if Add
// was not called.
type Network interface {
	Add(ctx context.Context, r NetworkRequest) (NetworkStatus, error)
	Check(ctx context.Context, r NetworkRequest) error
	Del(ctx context.Context, r NetworkRequest) error
	// GC releases the networks of all sandboxes that are not in keep. It does not release a sandbox
	// that this process attached, because keep may be older than the attachment.
	GC(ctx context.Context, keep []string) error
	// Ready returns nil if a network configuration is loaded. Otherwise its error states what is
	// missing.
	Ready() error
}

// PolicyGuard delays the start of a pod until its network policies are enforced.
type PolicyGuard interface {
	// Guard records that a pod of this node has these addresses and waits until the kernel enforces
	// the policies that select the pod. It returns immediately if no policy selects the pod or if
	// the rules are already in place. It waits at most ten seconds; its error states why the rules
	// are missing.
	Guard(ctx context.Context, pod *v1.Pod, addresses []string) error
}

// Mount is a prepared volume.
type Mount struct {
	HostPath string
	ReadOnly bool
	// IsFile is true for a hostPath volume with the path of a file or a device.
	IsFile bool
	// Block is true if HostPath is a block device, or a link to a block device, for the containers'
	// volumeDevices.
	Block bool
	// Group is the supplemental group that the volume adds to the pod's processes; nil = none.
	Group *int64
}

// Volumes prepares the volumes of a pod on the node. All calls are idempotent.
type Volumes interface {
	// MountAll prepares every volume of the pod and returns the mounts by volume name. A missing
	// object that is not optional is an error that names the object. The caller retries by calling
	// MountAll again.
	MountAll(ctx context.Context, pod *v1.Pod) (map[string]Mount, error)
	// Refresh rewrites projected content (ConfigMap, Secret, token) that has changed. Each rewrite
	// is atomic.
	Refresh(ctx context.Context, pod *v1.Pod) error
	// AbortIO aborts the kernel's pending I/O for a pod with killed processes that do not exit, for
	// example because a file server does not respond. Data that has not been written is lost. It
	// succeeds if nothing is pending.
	AbortIO(ctx context.Context, pod types.UID) error
	// UnmountAll unmounts and removes all volumes of the pod. It succeeds if the pod has none.
	UnmountAll(ctx context.Context, pod types.UID) error
	// Pods lists the pods that still have mounted or stored volumes, for the cleanup after a crash.
	Pods() ([]types.UID, error)
}

// ErrDamagedRecord is returned if the stored record of prepared devices cannot be read. The error
// that wraps it names the file and the remedy.
var ErrDamagedRecord = errors.New("damaged record")

// Devices asks drivers to prepare the devices that pods claim. All calls are idempotent.
type Devices interface {
	// Prepare prepares all devices that the pod claims. An unusable claim or a missing driver is an
	// error that names it. The caller retries by calling Prepare again.
	Prepare(ctx context.Context, pod *v1.Pod) (ClaimedDevices, error)
	// Release releases the pod's devices. The devices of a claim are released when no other pod of
	// the node uses the claim. It succeeds if the pod has none. For a pod that an earlier agent
	// process started, only the UID is required. It returns ErrDamagedRecord if the pod's devices
	// are unknown.
	Release(ctx context.Context, pod *v1.Pod) error
	// Pods lists the pods that may have prepared devices, for the cleanup after a crash.
	Pods() ([]types.UID, error)
	// Health returns the health of the prepared devices of a pod by container name. It returns nil
	// if the pod has none.
	Health(pod *v1.Pod) map[string][]v1.ResourceStatus
	// Changes returns a channel that is signaled until ctx ends when a driver registers or
	// unregisters, or when the reported health changes.
	Changes(ctx context.Context) <-chan struct{}
}

// ClaimedDevice is one device that a driver prepared for a pod.
type ClaimedDevice struct {
	// requests of the claim that the device was allocated for: "request" or "request/alternative";
	// none = all
	Requests []string
	CDI      []string // CDI device names for the runtime: "vendor/class=name"
	// Driver, Pool and Device identify the device in the cluster. They are empty if an agent
	// prepared the device that did not record them.
	Driver, Pool, Device string `json:",omitempty"`
	ShareID              string `json:",omitempty"` // set for a device that several claims share
}

// ContainerClaim lists the devices of one claim that a container uses.
type ContainerClaim struct {
	Namespace, Name string
	Devices         []ClaimedDevice
}

// MatchesRequest reports whether the device was allocated for a request of its claim, or for a
// subrequest of it. request is the request's name; "" matches all devices of the claim.
func (d *ClaimedDevice) MatchesRequest(request string) bool {
	return request == "" || len(d.Requests) == 0 || slices.ContainsFunc(d.Requests, func(name string) bool {
		main, _, _ := strings.Cut(name, "/")
		return main == request
	})
}

// ClaimedDevices are the devices of a pod, by the name of the entry in spec.resourceClaims.
type ClaimedDevices map[string][]ClaimedDevice

// Objects is the agent's view of the cluster. It holds exactly the objects that the session
// delivered. While no control plane can be reached, it holds the objects of the checkpoint.
// Returned objects are shared: callers must not modify them.
type Objects interface {
	Pod(uid types.UID) (*v1.Pod, bool)
	Pods() []*v1.Pod
	ConfigMap(namespace, name string) (*v1.ConfigMap, bool)
	Secret(namespace, name string) (*v1.Secret, bool)
	Claim(namespace, name string) (*v1.PersistentVolumeClaim, bool)
	PersistentVolume(name string) (*v1.PersistentVolume, bool)
	CSIDriver(name string) (*storagev1.CSIDriver, bool)
	// VolumeAttachment returns the object that attaches the driver's volume with this handle to
	// this node. Any PersistentVolume may be its source.
	VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool)
	RuntimeClass(name string) (*nodev1.RuntimeClass, bool)
	ResourceClaim(namespace, name string) (*resourcev1.ResourceClaim, bool)
	Services() []*v1.Service
	Service(namespace, name string) (*v1.Service, bool)
	EndpointSlices() []*discoveryv1.EndpointSlice
	EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool)
	// NetworkPolicies returns the policies that select a pod of this node, in no order. The
	// annotation AddressGroups of each policy names the address groups of its peers. Callers must
	// not modify the policies.
	NetworkPolicies() []*networkingv1.NetworkPolicy
	// AddressGroup returns the pods that match a policy peer. Each subset holds addresses and the
	// named ports of the containers at these addresses. A group is available before any policy that
	// names it.
	AddressGroup(name string) (*v1.Endpoints, bool)
	// Node returns this node's own object. It returns false until the control plane has created the
	// object.
	Node() (*v1.Node, bool)
	// Peers returns the other nodes, in no order. Callers must not modify them.
	Peers() []*Peer
	// Token returns a bound service account token. Tokens are cached until 80% of their lifetime
	// has passed.
	Token(ctx context.Context, pod *v1.Pod, audience string,
		expirationSeconds int64) (token string, expires time.Time, err error)
	// Revision returns the revision up to which the view is complete.
	Revision() uint64
	// Synced is closed once a full assignment (or a checkpoint) has been loaded.
	Synced() <-chan struct{}
	// Confirmed is closed once a control plane has confirmed the view since this process started.
	// Until then, callers must not remove pods that the view lacks: a checkpoint may lack the pods
	// that were started last.
	Confirmed() <-chan struct{}
	// Changes delivers the kinds that changed ("Pod", "Service", "EndpointSlice", "ConfigMap" ...),
	// coalesced, until ctx ends. "Node" is this node's own object, "Peer" stands for the other
	// nodes. The first value is delivered immediately and names every kind.
	Changes(ctx context.Context) <-chan map[string]struct{}
	// Follow delivers the changed objects of the given kinds, coalesced, from the first complete
	// view until ctx ends. It also delivers a value when only the view's revision has changed. In
	// the first value, All is true.
	Follow(ctx context.Context, kinds ...string) <-chan ObjectChanges
	// Cluster returns the cluster settings of the session's Welcome message.
	Cluster() Cluster
}

// AddressGroups is an annotation of the NetworkPolicies that nodes receive. It names one address
// group per peer with selectors, separated by commas. Peers of ingress rules precede those of
// egress rules, each in their order in the policy.
const AddressGroups = "keelson.dev/address-groups"

// NamedPortGroups is an annotation of the NetworkPolicies that nodes receive. It lists
// PROTOCOL/NAME=GROUP, separated by commas, for each named port of an egress rule that allows
// destinations without selectors. The group contains the pods with that named port. Earlier
// releases of the control plane do not set it.
const NamedPortGroups = "keelson.dev/named-port-groups"

// ObjectKey identifies one object of the view.
type ObjectKey struct{ Kind, Namespace, Name string }

// ObjectChanges are the changes that a follower has not received yet. A read of the view after
// receiving them returns the state at Revision or later.
type ObjectChanges struct {
	Revision uint64
	All      bool // any object may have changed: this is the first value, or more than MaxChangedKeys objects changed
	Keys     map[ObjectKey]struct{}
}

// MaxChangedKeys is the maximum length of ObjectChanges.Keys. If more objects changed, All is set
// instead.
const MaxChangedKeys = 4096

// Merge adds newer changes of the same view to c.
func (c *ObjectChanges) Merge(newer ObjectChanges) {
	c.Revision, c.All = newer.Revision, c.All || newer.All
	if c.All {
		c.Keys = nil
		return
	}
	for k := range newer.Keys {
		c.AddKey(k)
	}
}

// AddKey adds a changed object to the changes. If they exceed MaxChangedKeys, it sets All instead.
func (c *ObjectChanges) AddKey(k ObjectKey) {
	if c.All {
		return
	}
	if c.Keys == nil {
		c.Keys = make(map[ObjectKey]struct{})
	}
	if c.Keys[k] = struct{}{}; len(c.Keys) > MaxChangedKeys {
		c.All, c.Keys = true, nil
	}
}

// Peer is another node of the cluster.
type Peer struct {
	Name      string
	UID       types.UID
	PodCIDRs  []netip.Prefix // at least one
	Addresses []netip.Addr   // internal addresses, at least one
	// WireGuardKey is the public key for encrypted traffic to the node; all zeros if the node has
	// not published a key.
	WireGuardKey [32]byte
}

// Cluster are the network settings of the cluster for this node. PodCIDR is the range of this
// node's pods, ClusterCIDR that of all pods. The plural fields hold one prefix per IP family, the
// primary family first. If a plural field is empty, the singular field holds the only prefix.
type Cluster struct {
	Name, PodCIDR, ClusterCIDR, ServiceCIDR, Domain string

	PodCIDRs, ClusterCIDRs, ServiceCIDRs []string
}

// PodPrefixes returns the address ranges of this node's pods, one per IP family. The result is
// empty until the node has pod ranges.
func (c Cluster) PodPrefixes() []netip.Prefix { return parsePrefixes(c.PodCIDRs, c.PodCIDR) }

// ClusterPrefixes returns the address ranges of all pods of the cluster, one per IP family.
func (c Cluster) ClusterPrefixes() []netip.Prefix {
	return parsePrefixes(c.ClusterCIDRs, c.ClusterCIDR)
}

// ServicePrefixes returns the address ranges of cluster IPs, one per IP family.
func (c Cluster) ServicePrefixes() []netip.Prefix {
	return parsePrefixes(c.ServiceCIDRs, c.ServiceCIDR)
}

func parsePrefixes(all []string, first string) []netip.Prefix {
	if len(all) == 0 {
		all = []string{first}
	}
	var out []netip.Prefix
	for _, s := range all {
		if p, err := netip.ParsePrefix(s); err == nil {
			out = append(out, p.Masked())
		}
	}
	return out
}

// Reporter reports the node's state to the control plane. No method blocks. The newest status of
// each pod replaces older ones and is delivered as soon as a session exists.
type Reporter interface {
	// PodStatus reports a complete status. pod holds only metadata (namespace, name, UID) and the
	// status.
	PodStatus(pod *v1.Pod)
	// PodGone reports that the node has removed everything of a terminating pod.
	PodGone(namespace, name string, uid types.UID)
	Event(e *v1.Event)
	Stages(traceParent, object string, stages []StageTime)
	// ProxyApplied reports that the Service rules of this node reflect the revision.
	ProxyApplied(revision uint64)
	// StopGate returns a channel that is closed when the pod may receive SIGTERM, because no live
	// node routes to it any longer. Callers wait at most one second.
	StopGate(pod types.UID) <-chan struct{}
	// Facts replaces the labels, addresses and status that the agent reports about the node.
	Facts(node *v1.Node)
}

// NodeServer serves the exec, log, port-forward and dial requests that the control plane sends to
// the node over the session. agent/stream implements it; the session calls it.
type NodeServer interface {
	Exec(ctx context.Context, pod types.UID, container string, command []string, attach, tty bool, s Streams) error
	Logs(ctx context.Context, r LogRequest, w io.Writer) error
	PortForward(ctx context.Context, pod types.UID, port int32, conn io.ReadWriteCloser) error
	// Dial connects to a port at an address of one of this node's pods, or of the node itself if
	// pod is empty. It refuses every other address and the node's loopback addresses.
	Dial(ctx context.Context, pod types.UID, address string, port int32) (net.Conn, error)
}

// DriverCalls forwards calls of the control plane to the CSI drivers of this node.
type DriverCalls interface {
	// Call calls a method of a driver with the encoded request, and returns the encoded response.
	// Its error is a gRPC status, or states that the driver does not exist.
	Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) ([]byte, error)
}

// LogRequest selects a container's log and a part of it.
type LogRequest struct {
	PodUID     types.UID
	Namespace  string
	Pod        string
	Container  string
	Follow     bool
	Previous   bool
	Timestamps bool
	Since      time.Time // zero = from the start
	TailLines  int64     // -1 = all
	LimitBytes int64     // 0 = no limit
}

// ExitError is returned for a command that exited with a code other than 0.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return "command terminated with a non-zero exit code" }

// Paths are the directories that an agent uses on its node. A reboot deletes Run and keeps State.
type Paths struct {
	State    string // /var/lib/keelson
	Run      string // /run/keelson
	Logs     string // /var/log/pods
	LogLinks string // /var/log/containers: links to the logs for log shippers; "" = no links
	CNIConf  string // /etc/cni/net.d
	CNIBin   string // /opt/cni/bin
	Archives string // /var/lib/keelson/images.d: image archives loaded at start (air gap)
	Kubelet  string // /var/lib/kubelet: the directory layout that CSI drivers expect; "" = below State
}
