// Package agent is the vocabulary of the node agent: what a pod worker needs of
// a container runtime, an image store, a network, volumes and the control plane,
// each as an interface with its contract. The packages below implement them and
// do not know each other; agent/node wires them.
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

// Runtime runs sandboxes and containers. The verbs and messages are CRI v1's:
// each is idempotent as the CRI demands (stopping what is stopped, removing what
// is gone, succeed). Not found is a gRPC status NotFound.
type Runtime interface {
	// RunPodSandbox makes the pod's cgroup, its network namespace (pinned by a
	// bind mount that outlives processes), calls Network.Add, and starts pause.
	RunPodSandbox(context.Context, *cri.RunPodSandboxRequest) (*cri.RunPodSandboxResponse, error)
	StopPodSandbox(context.Context, *cri.StopPodSandboxRequest) (*cri.StopPodSandboxResponse, error)
	RemovePodSandbox(context.Context, *cri.RemovePodSandboxRequest) (*cri.RemovePodSandboxResponse, error)
	PodSandboxStatus(context.Context, *cri.PodSandboxStatusRequest) (*cri.PodSandboxStatusResponse, error)
	ListPodSandbox(context.Context, *cri.ListPodSandboxRequest) (*cri.ListPodSandboxResponse, error)

	CreateContainer(context.Context, *cri.CreateContainerRequest) (*cri.CreateContainerResponse, error)
	StartContainer(context.Context, *cri.StartContainerRequest) (*cri.StartContainerResponse, error)
	// StopContainer fails with ErrStillRunning where the container was killed and does not end.
	StopContainer(context.Context, *cri.StopContainerRequest) (*cri.StopContainerResponse, error)
	RemoveContainer(context.Context, *cri.RemoveContainerRequest) (*cri.RemoveContainerResponse, error)
	ListContainers(context.Context, *cri.ListContainersRequest) (*cri.ListContainersResponse, error)
	ContainerStatus(context.Context, *cri.ContainerStatusRequest) (*cri.ContainerStatusResponse, error)
	// UpdateContainerResources and UpdatePodSandboxResources change the CPUs and the memory of what runs, and nothing else
	// of it: of the resources given, shares, quota, period and limit of memory count, where 0 lifts a limit. A limit of
	// memory below what is in use is refused, and changes nothing. What ContainerStatus tells is what was set last.
	UpdateContainerResources(context.Context, *cri.UpdateContainerResourcesRequest) (*cri.UpdateContainerResourcesResponse, error)
	UpdatePodSandboxResources(context.Context, *cri.UpdatePodSandboxResourcesRequest) (*cri.UpdatePodSandboxResourcesResponse, error)
	ExecSync(context.Context, *cri.ExecSyncRequest) (*cri.ExecSyncResponse, error)
	Status(context.Context, *cri.StatusRequest) (*cri.StatusResponse, error)

	// Events delivers a note for every container or sandbox that started or ended,
	// until ctx ends. Losing one is harmless: whoever listens also lists.
	Events(ctx context.Context) <-chan RuntimeEvent
	// Exec runs a command with live streams; Attach joins the container's own.
	// A command that ended with a code other than 0 is *ExitError.
	Exec(ctx context.Context, containerID string, command []string, tty bool, s Streams) error
	Attach(ctx context.Context, containerID string, tty bool, s Streams) error
	// PortForward joins conn to a port on localhost inside the sandbox.
	PortForward(ctx context.Context, sandboxID string, port int32, conn io.ReadWriteCloser) error
	// StageTimes returns what the runtime measured while making a sandbox or container
	// ("netns", "cni", "pause", "rootfs", "create", "start"), and forgets it.
	StageTimes(id string) []StageTime
}

// ErrStillRunning says that the kernel waits for something on behalf of a container that was killed.
var ErrStillRunning = errors.New("container does not end")

// EarlyRuntime is a Runtime in which containers can be created while the network of their sandbox is still being
// attached, which is what takes longest of a sandbox.
type EarlyRuntime interface {
	Runtime
	// RunPodSandboxEarly is RunPodSandbox. It calls prepared once at most, with the sandbox's id, as soon as
	// CreateContainer works in it; StartContainer is refused until it has returned. Such a sandbox is not listed yet.
	// When it fails after that, the containers are gone with the sandbox.
	RunPodSandboxEarly(ctx context.Context, q *cri.RunPodSandboxRequest, prepared func(id string)) (*cri.RunPodSandboxResponse, error)
}

// TieredRuntime is a Runtime that holds the classes of pods apart.
type TieredRuntime interface {
	Runtime
	// SetTiers says what all pods together, and the classes among them, are worth. It waits for the runtime's start;
	// what cannot be set is in the error, and the rest is set.
	SetTiers(context.Context, Tiers) error
}

// Tiers are the limits of all pods together, and the weights of their classes: pods that asked for nothing come last,
// and weigh next to nothing, when the others want the CPUs.
type Tiers struct {
	CPU    int64 // thousandths of a CPU for all pods: their weight against the rest of the machine
	Memory int64 // bytes for all pods; 0 = no limit
	PIDs   int64 // processes and threads of all pods; 0 = no limit

	Burstable int64 // thousandths of a CPU that all Burstable pods requested
}

// RuntimeEvent says that the state of a container (or of the sandbox itself, when ContainerID is empty) changed.
type RuntimeEvent struct {
	SandboxID   string
	ContainerID string
	PodUID      types.UID
}

// StageTime is one measured step.
type StageTime struct {
	Name     string
	Start    time.Time
	Duration time.Duration
	Detail   string
}

// TermSize is a terminal's size in characters.
type TermSize struct{ Width, Height uint16 }

// Streams are the standard streams of an exec; nil where not wanted.
type Streams struct {
	Stdin  io.Reader
	Stdout io.Writer
	Stderr io.Writer
	Resize <-chan TermSize
}

// Images holds images on the node. PullImage of what is there already costs a
// manifest request at most.
type Images interface {
	PullImage(context.Context, *cri.PullImageRequest) (*cri.PullImageResponse, error)
	ImageStatus(context.Context, *cri.ImageStatusRequest) (*cri.ImageStatusResponse, error)
	ListImages(context.Context, *cri.ListImagesRequest) (*cri.ListImagesResponse, error)
	RemoveImage(context.Context, *cri.RemoveImageRequest) (*cri.RemoveImageResponse, error)
	ImageFsInfo(context.Context, *cri.ImageFsInfoRequest) (*cri.ImageFsInfoResponse, error)

	// Config returns the image's defaults, or ErrImageNotPresent.
	Config(ctx context.Context, image string) (ImageConfig, error)
	// PrepareRootFS prepares a writable root file system for a container on top of the image and
	// returns the mount; idempotent per containerID. RemoveRootFS unmounts and deletes it; safe without it.
	PrepareRootFS(ctx context.Context, containerID, image string) (RootFS, error)
	RemoveRootFS(ctx context.Context, containerID string) error
	// Import loads an OCI layout or docker archive (a tar file) and returns the names it holds.
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

// RootFS is a prepared root file system. Lower are read-only layers, topmost first. When Mounted,
// Path is ready to use; otherwise the container's creator mounts overlay at Path with the given parts.
type RootFS struct {
	Path    string
	Lower   []string
	Upper   string
	Work    string
	Mounted bool
}

// The errors of Images.
var (
	ErrImageNotPresent = errors.New("image is not present on the node")
	ErrImagePull       = errors.New("ErrImagePull")          // wrapped with registry, image and cause
	ErrInvalidImage    = errors.New("InvalidImageName")      // the reference does not parse
	ErrImageUnpack     = errors.New("image does not unpack") // wrapped with layer and cause
)

// NetworkRequest describes the sandbox to be attached.
type NetworkRequest struct {
	SandboxID string
	NetNS     string // path
	Namespace string
	Name      string
	UID       types.UID
	Ports     []*cri.PortMapping
	Ingress   int64 // bandwidth, bits/s; 0 = no limit
	Egress    int64
}

// NetworkStatus is what the pod got.
type NetworkStatus struct {
	IPs      []string // first is the primary one
	MAC      string
	Gateways []string
}

// Network attaches sandboxes. Every call is idempotent; Del is safe without Add.
type Network interface {
	Add(ctx context.Context, r NetworkRequest) (NetworkStatus, error)
	Check(ctx context.Context, r NetworkRequest) error
	Del(ctx context.Context, r NetworkRequest) error
	// GC releases what belongs to no sandbox of the list, and was not attached by this process: the list may be older.
	GC(ctx context.Context, keep []string) error
	// Ready is nil when a network configuration is loaded, else says what is missing.
	Ready() error
}

// PolicyGuard holds back what would run before its network policies are in force.
type PolicyGuard interface {
	// Guard is told that a pod of this node has these addresses, and returns once what policies say of them is in the
	// kernel: at once for a pod that no policy selects, and for one whose rules are there. It waits ten seconds at most;
	// its error says why they are not.
	Guard(ctx context.Context, pod *v1.Pod, addresses []string) error
}

// Mount is a prepared volume.
type Mount struct {
	HostPath string
	ReadOnly bool
	// IsFile is true for a hostPath that names a file or device.
	IsFile bool
	// Block: HostPath is, or leads to, a block device, for containers' volumeDevices.
	Block bool
	// Group is the supplemental group that the volume gives to the processes of the pod; nil = none.
	Group *int64
}

// Volumes prepares the volumes of a pod on the node. All calls are idempotent.
type Volumes interface {
	// MountAll prepares every volume of the pod and returns them by name. Objects that are
	// missing, optional ones aside, are an error that names them; calling again later is the retry.
	MountAll(ctx context.Context, pod *v1.Pod) (map[string]Mount, error)
	// Refresh rewrites projected content (ConfigMap, Secret, token) that has changed, atomically.
	Refresh(ctx context.Context, pod *v1.Pod) error
	// GiveUp has the kernel give up what it waits for on behalf of a pod whose processes were killed and do not end: a file
	// server that does not answer. What was not written by then is lost. Safe when there is nothing.
	GiveUp(ctx context.Context, pod types.UID) error
	// UnmountAll takes everything of the pod away; safe when there is nothing.
	UnmountAll(ctx context.Context, pod types.UID) error
	// Pods lists the pods of which something is still mounted or stored, for clean-up after a crash.
	Pods() ([]types.UID, error)
}

// ErrDamagedRecord says that what lies on disk about devices cannot be read; it is wrapped with the file and what to do.
var ErrDamagedRecord = errors.New("damaged record")

// Devices has drivers prepare the devices that pods claim. All calls are idempotent.
type Devices interface {
	// Prepare makes ready all that the pod claims. A claim that cannot be used, or a driver that is not there, is an
	// error that names it; calling again later is the retry.
	Prepare(ctx context.Context, pod *v1.Pod) (ClaimedDevices, error)
	// Release gives the pod's devices back, those of a claim when no other pod of the node uses it; safe when there is nothing.
	// Of a pod of an earlier life no more need be given than its uid. ErrDamagedRecord when what it has is not known.
	Release(ctx context.Context, pod *v1.Pod) error
	// Pods lists the pods for which devices may be prepared, for clean-up after a crash.
	Pods() ([]types.UID, error)
	// Health tells of the prepared devices of a pod's containers, by the containers' names; nil when the pod has none.
	Health(pod *v1.Pod) map[string][]v1.ResourceStatus
	// Changes has a value when drivers came or went, or what they tell has changed, until ctx ends.
	Changes(ctx context.Context) <-chan struct{}
}

// ClaimedDevice is one prepared device of a pod.
type ClaimedDevice struct {
	Requests []string // of the claim that it was allocated for: "request" or "request/alternative"; none = all
	CDI      []string // what the runtime knows it by: "vendor/class=name"
	// Its names in the cluster; empty when it was prepared by an agent that did not note them.
	Driver, Pool, Device string `json:",omitempty"`
	ShareID              string `json:",omitempty"` // of a device that several claims share
}

// ContainerClaim is what a container has of a claim.
type ContainerClaim struct {
	Namespace, Name string
	Devices         []ClaimedDevice
}

// For says whether the device belongs to a request of its claim; "" is the whole claim.
func (d *ClaimedDevice) For(request string) bool {
	return request == "" || len(d.Requests) == 0 || slices.ContainsFunc(d.Requests, func(name string) bool {
		main, _, _ := strings.Cut(name, "/")
		return main == request
	})
}

// ClaimedDevices are a pod's, by the name of the entry of spec.resourceClaims.
type ClaimedDevices map[string][]ClaimedDevice

// Objects is the agent's view of the cluster: exactly what its session delivered (or its checkpoint
// holds while no control plane can be reached). Returned objects are shared: do not modify.
type Objects interface {
	Pod(uid types.UID) (*v1.Pod, bool)
	Pods() []*v1.Pod
	ConfigMap(namespace, name string) (*v1.ConfigMap, bool)
	Secret(namespace, name string) (*v1.Secret, bool)
	Claim(namespace, name string) (*v1.PersistentVolumeClaim, bool)
	PersistentVolume(name string) (*v1.PersistentVolume, bool)
	CSIDriver(name string) (*storagev1.CSIDriver, bool)
	// VolumeAttachment is what attaches a driver's volume of this handle to this node, by whichever PersistentVolume.
	VolumeAttachment(driver, handle string) (*storagev1.VolumeAttachment, bool)
	RuntimeClass(name string) (*nodev1.RuntimeClass, bool)
	ResourceClaim(namespace, name string) (*resourcev1.ResourceClaim, bool)
	Services() []*v1.Service
	Service(namespace, name string) (*v1.Service, bool)
	EndpointSlices() []*discoveryv1.EndpointSlice
	EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool)
	// NetworkPolicies are those that select a pod of this node, in no order. The annotation AddressGroups of each names the
	// groups of its peers. Shared: do not modify.
	NetworkPolicies() []*networkingv1.NetworkPolicy
	// AddressGroup are the pods that a peer of a policy stands for: addresses, and with each subset of them the ports that
	// their containers name. A group that a policy names is there before the policy is.
	AddressGroup(name string) (*v1.Endpoints, bool)
	// Node is the node's own object, once the control plane has it.
	Node() (*v1.Node, bool)
	// Peers are the other nodes, in no order. They are shared: do not modify.
	Peers() []*Peer
	// Token returns a bound service account token, cached until 80% of its life.
	Token(ctx context.Context, pod *v1.Pod, audience string, expirationSeconds int64) (token string, expires time.Time, err error)
	// Revision up to which the view is complete.
	Revision() uint64
	// Synced is closed once a full assignment (or a checkpoint) has been loaded.
	Synced() <-chan struct{}
	// Confirmed is closed once a control plane has confirmed the view since this process started. A checkpoint
	// may be a moment older than the last pods that were started: what it lacks is not to be removed before.
	Confirmed() <-chan struct{}
	// Changes delivers the kinds that changed ("Pod", "Service", "EndpointSlice", "ConfigMap" ...;
	// "Node" is the own one, "Peer" the others), coalesced,
	// until ctx ends. The first value arrives at once and names every kind.
	Changes(ctx context.Context) <-chan map[string]struct{}
	// Follow delivers which objects of the kinds changed, coalesced, from the first complete view until ctx ends. A view
	// that is complete up to another revision is told also where none of them changed. The first value is All.
	Follow(ctx context.Context, kinds ...string) <-chan Changed
	// Cluster facts from Welcome.
	Cluster() Cluster
}

// AddressGroups is the annotation of a NetworkPolicy, as nodes are sent it, that names a group for each of its peers that
// has selectors: those of the ingress rules in their order, then those of egress, with commas between.
const AddressGroups = "keelson.dev/address-groups"

// NamedPortGroups is the annotation of a NetworkPolicy, as nodes are sent it, that names a group for each named port of an
// egress rule that allows destinations without selectors, as PROTOCOL/NAME=GROUP with commas between. The group has the pods
// that name the port. A control plane of an earlier release does not set it.
const NamedPortGroups = "keelson.dev/named-port-groups"

// ObjectKey names one object of the view.
type ObjectKey struct{ Kind, Namespace, Name string }

// Changed is what a follower has not seen yet. What it reads from the view afterwards shows Revision at least.
type Changed struct {
	Revision uint64
	All      bool // any object may have changed: this is the first value, or there were too many to name
	Keys     map[ObjectKey]struct{}
}

// MaxChanged is how many objects a Changed names before it says All instead.
const MaxChanged = 4096

// And adds what happened later.
func (c *Changed) And(later Changed) {
	c.Revision, c.All = later.Revision, c.All || later.All
	if c.All {
		c.Keys = nil
		return
	}
	for k := range later.Keys {
		c.Name(k)
	}
}

// Name adds an object.
func (c *Changed) Name(k ObjectKey) {
	if c.All {
		return
	}
	if c.Keys == nil {
		c.Keys = make(map[ObjectKey]struct{})
	}
	if c.Keys[k] = struct{}{}; len(c.Keys) > MaxChanged {
		c.All, c.Keys = true, nil
	}
}

// Peer is what a node knows of another one.
type Peer struct {
	Name      string
	UID       types.UID
	PodCIDRs  []netip.Prefix // at least one
	Addresses []netip.Addr   // internal ones, at least one
	// WireGuardKey is the public key by which the node is spoken to encrypted; zeros: it has told none.
	WireGuardKey [32]byte
}

// Cluster is what every node must know: PodCIDR is of this node's pods, ClusterCIDR of all pods. The plural forms hold a
// prefix of each family, the first family's first; where they are empty there is one family, and the singular form says it.
type Cluster struct {
	Name, PodCIDR, ClusterCIDR, ServiceCIDR, Domain string

	PodCIDRs, ClusterCIDRs, ServiceCIDRs []string
}

// PodPrefixes are the addresses of this node's pods, none while it has none.
func (c Cluster) PodPrefixes() []netip.Prefix { return prefixes(c.PodCIDRs, c.PodCIDR) }

// ClusterPrefixes are the addresses of all pods.
func (c Cluster) ClusterPrefixes() []netip.Prefix { return prefixes(c.ClusterCIDRs, c.ClusterCIDR) }

// ServicePrefixes are the addresses of Services.
func (c Cluster) ServicePrefixes() []netip.Prefix { return prefixes(c.ServiceCIDRs, c.ServiceCIDR) }

func prefixes(all []string, first string) []netip.Prefix {
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

// Reporter takes what the node has to say. Nothing blocks: the newest status per pod wins and is
// delivered when a session is there.
type Reporter interface {
	// PodStatus reports a whole status; pod carries metadata (namespace, name, uid) and status.
	PodStatus(pod *v1.Pod)
	// PodGone says that nothing of a terminating pod is left.
	PodGone(namespace, name string, uid types.UID)
	Event(e *v1.Event)
	Stages(traceParent, object string, stages []StageTime)
	// ProxyApplied says that Service rules on this node show the revision.
	ProxyApplied(revision uint64)
	// StopGate is closed when the pod may be sent SIGTERM: no live proxy routes to it.
	// Callers bound their wait (1 s).
	StopGate(pod types.UID) <-chan struct{}
	// Facts replaces what the node says of itself.
	Facts(node *v1.Node)
}

// NodeServer answers what comes through tunnels. agent/stream implements it; the session calls it.
type NodeServer interface {
	Exec(ctx context.Context, pod types.UID, container string, command []string, attach, tty bool, s Streams) error
	Logs(ctx context.Context, r LogRequest, w io.Writer) error
	PortForward(ctx context.Context, pod types.UID, port int32, conn io.ReadWriteCloser) error
	// Dial connects to a port of an address of one of this node's pods, or of the node itself when pod is empty. It
	// refuses every other address, and the node's loopback.
	Dial(ctx context.Context, pod types.UID, address string, port int32) (net.Conn, error)
}

// DriverCalls passes calls of the control plane on to CSI drivers of this node.
type DriverCalls interface {
	// Call makes one call, encoded as it is. The error is a gRPC status, or says that there is no such driver.
	Call(ctx context.Context, driver, method string, request []byte, timeout time.Duration) ([]byte, error)
}

// LogRequest selects a container's log.
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

// ExitError is a command that ran and failed.
type ExitError struct{ Code int }

func (e *ExitError) Error() string { return "command terminated with a non-zero exit code" }

// Paths are the folders of a node. Run is emptied by a reboot, State is not.
type Paths struct {
	State    string // /var/lib/keelson
	Run      string // /run/keelson
	Logs     string // /var/log/pods
	LogLinks string // /var/log/containers: links to the logs, as log shippers read them; "" = none
	CNIConf  string // /etc/cni/net.d
	CNIBin   string // /opt/cni/bin
	Archives string // /var/lib/keelson/images.d: archives loaded at start (air gap)
	Kubelet  string // /var/lib/kubelet: the layout that CSI drivers know; "" = below State
}
