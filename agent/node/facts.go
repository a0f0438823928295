package node

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/deviceplugin"
	"keelson.dev/keelson/agent/eviction"
	"keelson.dev/keelson/csi"
	"keelson.dev/keelson/internal/saturate"
)

// Annotations of the Node from which the control plane creates the CSINode of this node.
const (
	// CSINodeIDAnnotation maps CSI driver names to the driver's ID of this node, as JSON.
	CSINodeIDAnnotation = "csi.volume.kubernetes.io/nodeid"
	// CSIDriversAnnotation is a JSON list of {"name","nodeID","topologyKeys","allocatable"}.
	CSIDriversAnnotation = "keelson.dev/csi-drivers"
)

// DRADriversAnnotation lists the DRA drivers that are registered on the node, separated by commas.
// The control plane removes the node's ResourceSlices of other drivers.
const DRADriversAnnotation = "keelson.dev/dra-drivers"

// WireGuardKeyAnnotation is an annotation of the Node with the node's public WireGuard key in
// base64.
const WireGuardKeyAnnotation = "keelson.dev/wireguard-key"

// AnnouncesAnnotation is an annotation of the Node. It is "true" if the agent can announce load
// balancer addresses on its network.
const AnnouncesAnnotation = "keelson.dev/announces"

// NodeDegraded is the type of a node condition. It is true if a part of the agent has failed that
// pods do not need to run. The condition's message includes the remedy.
const NodeDegraded v1.NodeConditionType = "keelson.dev/Degraded"

const (
	pidThreshold   = 5 // minimum percentage of available PIDs; Kubernetes' default
	imagesReported = 50
)

// startingMessage is the message of the condition Ready (False) until the container runtime reports
// its first status.
const startingMessage = "the agent is starting"

// PodNetworkAnnotation is an annotation of the Node. It states which network configuration assigned
// the addresses of the node's pods: "keelson" or "foreign". The control plane validates reported
// pod addresses accordingly.
const PodNetworkAnnotation = "keelson.dev/pod-network"

// declaredFeatures are the features of pods that this agent supports and agents of earlier releases
// may not, sorted. The control plane gives a pod that needs one of them only to nodes that declare
// it. The names are those of Kubernetes (component-helpers/nodedeclaredfeatures), except
// EphemeralContainers and PodLevelResources, which every supported kubelet has.
var declaredFeatures = []string{
	"EphemeralContainers",                     // spec.ephemeralContainers
	"InPlacePodLevelResourcesVerticalScaling", // resize of spec.resources
	"InPlacePodVerticalScalingInitContainers", // resize of init containers
	"PodLevelResources",                       // spec.resources
}

func podNetworkOf(own bool) string {
	if own {
		return "keelson"
	}
	return "foreign"
}

// nodeFacts maintains the Node object (labels, addresses and status) that this agent reports.
type nodeFacts struct {
	cfg  *Config
	info v1.NodeSystemInfo

	fence    *fence           // nil: the node does not fence attached volumes
	pressure *pressureMonitor // nil: a fake node without resource pressure
	mu       sync.Mutex
	current  *v1.Node
}

func newNodeFacts(cfg *Config) *nodeFacts {
	f := &nodeFacts{cfg: cfg, info: systemInfo(cfg.Release)}
	if cfg.Parts.Volumes == nil {
		f.fence = &fence{after: cfg.Storage.FenceAfter,
			contact: lastContact{file: fenceFile(cfg.Dirs.Run), boot: f.info.BootID},
			reports: fenceReportFile(cfg.Dirs.Run),
			boot:    f.info.BootID}
	}
	if cfg.Parts.Runtime == nil {
		f.pressure = newPressureMonitor(cfg, f.info.BootID)
	}
	o := f.observeMachine()
	o.notReady = startingMessage
	f.current = f.composeNode(o, nil, time.Now())
	return f
}

// currentNode returns the Node object that the agent currently reports. It is shared and must not
// be modified.
func (f *nodeFacts) currentNode() *v1.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current
}

// recompose inspects the machine again and returns the resulting Node object. It is called before
// the agent has reported a Node.
func (f *nodeFacts) recompose() *v1.Node {
	o := f.observeMachine()
	o.notReady = startingMessage
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current = f.composeNode(o, f.current, time.Now())
	return f.current
}

// factSources are the parts of the agent from which the content of the Node object is read.
type factSources struct {
	runtime  agent.Runtime
	images   agent.Images
	network  agent.Network
	csi      *csi.Registry
	session  Session
	volumes  agent.AttachedVolumes // nil: none
	plugins  *deviceplugin.Manager // nil: none
	devices  draDrivers            // nil: none
	failures *partFailures
}

// draDrivers is the part of the DRA device manager from which the names of registered drivers are
// read.
type draDrivers interface {
	Drivers() []string
	Changes(ctx context.Context) <-chan struct{}
}

// observation contains the results of one inspection of the node, from which its Node object is
// composed.
type observation struct {
	notReady        string // why pods cannot run; "" = they can
	memoryPressure  bool
	diskPressure    bool
	pidPercent      int64 // percentage of available PIDs; -1 = unknown
	images          []v1.ContainerImage
	drivers         []*csi.Driver // nil = unknown
	networkMessage  string        // failure of Service rules or routes; "" = none
	degradedMessage string        // failures of other parts
	draDriverNames  string        // separated by commas

	volumes volumeUses

	devices, healthy v1.ResourceList // of device plugins: all devices, and the healthy ones

	handlers []v1.NodeRuntimeHandler // nil = unknown
	features *v1.NodeFeatures
}

// updateFacts reports the Node object each time it changes, until ctx ends. It inspects the node
// after events: the runtime's start, a new pod CIDR, and changes of its sources. A timer covers
// changes without events, such as a third-party network configuration or the machine's resources.
func (f *nodeFacts) updateFacts(ctx context.Context, w factSources) error {
	const early, seldom = time.Second, 10 * time.Second
	t := time.NewTimer(0)
	defer t.Stop()
	started := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		// A runtime that is still adopting sandboxes responds when it has finished. No sandbox has
		// this ID.
		_, err := w.runtime.ListPodSandbox(ctx, &cri.ListPodSandboxRequest{Filter: &cri.PodSandboxFilter{Id: "none"}})
		if err == nil {
			close(started)
		}
	})
	news := w.session.Changes(ctx)
	var devices, asked <-chan struct{}
	if w.plugins != nil {
		devices = w.plugins.Changes(ctx)
	}
	if w.devices != nil {
		asked = w.devices.Changes(ctx)
	}
	var uses <-chan struct{}
	if w.volumes != nil {
		uses = w.volumes.UsesChanged()
	}
	var rekeyed <-chan struct{}
	if f.cfg.PodNetwork.ownKey != nil {
		rekeyed = f.cfg.PodNetwork.ownKey.Changed()
	}
	var sent *v1.Node
	for ready := false; ; {
		changes := news
		if ready {
			changes = nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-w.csi.Changed():
		case <-devices:
		case <-uses:
		case <-f.pressure.pressureChanged():
		case <-asked:
		case <-rekeyed:
		case <-w.failures.changed:
		case <-started:
			started = nil
		case kinds, ok := <-changes:
			if !ok {
				news = nil
				continue
			}
			if _, about := kinds["Node"]; !about {
				continue
			}
		case <-t.C:
		}
		o := f.observe(ctx, w)
		o.observeVolumes(w)
		f.mu.Lock()
		next := f.composeNode(o, f.current, time.Now())
		f.current = next
		f.mu.Unlock()
		if sent == nil || !reflect.DeepEqual(sent, next) {
			sent = next
			w.session.Facts(next)
		}
		if ready = o.notReady == ""; ready {
			t.Reset(seldom)
		} else {
			t.Reset(early)
		}
	}
}

// observeVolumes records in o which attached volumes and exclusive claims are in use. It must be
// the last part of an inspection, so that the report is recent. A control plane that was restored
// from a backup depends on the report.
func (o *observation) observeVolumes(w factSources) {
	if w.volumes == nil {
		return
	}
	names, held, err := w.volumes.VolumesInUse()
	alone, bad := w.volumes.ExclusiveClaims()
	if err == nil && bad == nil { // otherwise the control plane keeps the previous report
		o.volumes = volumeUses{names, held, alone}
	}
}

func (f *nodeFacts) observe(ctx context.Context, w factSources) observation {
	o := f.observeMachine()
	if w.csi != nil {
		o.drivers = w.csi.Drivers()
	}
	if w.devices != nil {
		o.draDriverNames = strings.Join(w.devices.Drivers(), ",")
	}
	if w.plugins != nil {
		o.devices, o.healthy = w.plugins.Resources()
	}
	o.notReady = o.observeRuntime(ctx, w)
	f.setFailures(&o, w.failures)
	if f.cfg.Parts.Runtime != nil {
		return o
	}
	listing, cancel := context.WithTimeout(ctx, time.Second) // a store that is still importing does not respond
	defer cancel()
	if res, err := w.images.ListImages(listing, &cri.ListImagesRequest{}); err == nil {
		o.images = imageList(res.GetImages())
	}
	return o
}

// setFailures sets the messages of the observation about failed parts of the agent. A failure of
// the runtime or of images makes the node NotReady. A failure of the proxy or of routes makes its
// network unavailable. A failure of another part makes the node degraded.
func (f *nodeFacts) setFailures(o *observation, t *partFailures) {
	vital := func(part string) bool { return part == partRuntime || part == partImages }
	traffic := func(part string) bool { return part == partProxy || part == partRoutes }
	if why := t.describeFailures(vital); why != "" {
		o.notReady = why
	}
	o.networkMessage = t.describeFailures(traffic)
	o.degradedMessage = t.describeFailures(func(part string) bool { return !vital(part) && !traffic(part) })
	if f.cfg.PodNetwork.unreachableNodes == nil || f.cfg.PodNetwork.isForeign() {
		return
	}
	if why := f.cfg.PodNetwork.unreachableNodes(); why != "" {
		o.degradedMessage = strings.TrimPrefix(o.degradedMessage+"; pods of some nodes are unreachable: "+
			truncateMessage(why), "; ")
	}
}

// truncateMessage limits the length of a condition's message, which may otherwise list every node
// of a cluster.
func truncateMessage(why string) string {
	const limit = 1024
	if len(why) <= limit {
		return why
	}
	return strings.ToValidUTF8(why[:limit], "") + " ... (the complete message is in the agent's log)"
}

// observeMachine returns an observation with the resource pressure of the machine. On a fake node
// the observation is empty.
func (f *nodeFacts) observeMachine() observation {
	o := observation{pidPercent: -1}
	if f.cfg.Parts.Runtime != nil {
		return o // a fake node has no machine
	}
	o.memoryPressure, o.diskPressure = f.pressure.hasPressure(eviction.Memory),
		f.pressure.hasPressure(eviction.Disk) || f.pressure.hasPressure(eviction.Inodes)
	if left, err := pidsAvailable(); err == nil {
		o.pidPercent = left
	}
	return o
}

// observeRuntime records the container runtime's handlers and features in o. notReady is the reason
// why the node cannot run pods, or "".
func (o *observation) observeRuntime(ctx context.Context, w factSources) (notReady string) {
	res, err := w.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return fmt.Sprintf("container runtime is down: %v", err)
	}
	o.handlers, o.features = runtimeFeatures(res)
	for _, c := range res.GetStatus().GetConditions() {
		if c.Type == cri.RuntimeReady && !c.Status {
			return fmt.Sprintf("container runtime not ready: RuntimeReady=false reason:%s message:%s",
				c.Reason, c.Message)
		}
	}
	if err := w.network.Ready(); err != nil {
		return fmt.Sprintf("container runtime network not ready: NetworkReady=false "+
			"reason:NetworkPluginNotReady message:%v", err)
	}
	return ""
}

// runtimeFeatures converts the container runtime's status to the runtime handlers, sorted by name,
// and the features in a Node's status.
func runtimeFeatures(res *cri.StatusResponse) ([]v1.NodeRuntimeHandler, *v1.NodeFeatures) {
	var handlers []v1.NodeRuntimeHandler
	for _, h := range res.GetRuntimeHandlers() {
		recursive, users := h.GetFeatures().GetRecursiveReadOnlyMounts(), h.GetFeatures().GetUserNamespaces()
		handlers = append(handlers, v1.NodeRuntimeHandler{Name: h.GetName(),
			Features: &v1.NodeRuntimeHandlerFeatures{RecursiveReadOnlyMounts: &recursive, UserNamespaces: &users}})
	}
	slices.SortStableFunc(handlers, func(a, b v1.NodeRuntimeHandler) int { return strings.Compare(a.Name, b.Name) })
	if res.GetFeatures() == nil {
		return handlers, nil
	}
	groups := res.GetFeatures().GetSupplementalGroupsPolicy()
	return handlers, &v1.NodeFeatures{SupplementalGroupsPolicy: &groups}
}

func imageList(all []*cri.Image) []v1.ContainerImage {
	slices.SortFunc(all, func(a, b *cri.Image) int { return strings.Compare(a.Id, b.Id) })
	slices.SortStableFunc(all, func(a, b *cri.Image) int { return int(min(max(int64(b.Size)-int64(a.Size), -1), 1)) })
	var out []v1.ContainerImage
	for _, i := range all[:min(len(all), imagesReported)] {
		names := slices.Concat(i.RepoDigests, i.RepoTags)
		if len(names) > 0 {
			out = append(out, v1.ContainerImage{Names: names[:min(len(names), 5)], SizeBytes: int64(i.Size)})
		}
	}
	return out
}

// composeNode returns the complete Node object for an observation. If a condition has the same
// status as in old, the previous Node, it keeps its transition time.
func (f *nodeFacts) composeNode(o observation, old *v1.Node, now time.Time) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.cfg.NodeName, Labels: map[string]string{},
		Annotations: map[string]string{}}}
	maps.Copy(n.Labels, f.cfg.Node.Labels)
	n.Labels[v1.LabelHostname], n.Labels[v1.LabelOSStable], n.Labels[v1.LabelArchStable] = f.cfg.NodeName,
		runtime.GOOS, runtime.GOARCH
	// Deprecated labels that every kubelet sets: manifests still select nodes by them.
	n.Labels["beta.kubernetes.io/os"], n.Labels["beta.kubernetes.io/arch"] = runtime.GOOS, runtime.GOARCH
	n.Spec.Taints = f.cfg.Node.Taints
	n.Status.NodeInfo = f.info
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = f.cfg.Listen.KubeletPort
	n.Status.Capacity, n.Status.Allocatable = f.nodeResources()
	maps.Copy(n.Status.Capacity, o.devices)
	maps.Copy(n.Status.Allocatable, o.healthy)
	for _, ip := range f.cfg.NodeIPs {
		n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: ip})
	}
	n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeHostName, Address: f.cfg.NodeName})
	n.Status.Images = o.images
	n.Status.RuntimeHandlers, n.Status.Features = o.handlers, o.features
	n.Status.DeclaredFeatures = slices.Clone(declaredFeatures)
	setCSIDrivers(n, o.drivers)
	if f.cfg.Parts.Devices == nil {
		n.Annotations[DRADriversAnnotation] = o.draDriverNames
	}
	if f.cfg.PodNetwork.ownKey != nil {
		n.Annotations[WireGuardKeyAnnotation] = f.cfg.PodNetwork.ownKey.Key().PublicKey().String()
	}
	if f.fence != nil {
		f.fence.annotate(n, o.volumes)
	}
	if f.cfg.PodNetwork.hasOwnAddresses != nil {
		n.Annotations[PodNetworkAnnotation] = podNetworkOf(f.cfg.PodNetwork.hasOwnAddresses())
	}
	if f.cfg.Services.announcesL2 {
		n.Annotations[AnnouncesAnnotation] = "true"
	}
	set := func(t v1.NodeConditionType, bad bool, good, badReason, goodMessage, badMessage string) {
		c := v1.NodeCondition{Type: t, Status: v1.ConditionFalse, Reason: good, Message: goodMessage}
		if bad {
			c.Status, c.Reason, c.Message = v1.ConditionTrue, badReason, badMessage
		}
		n.Status.Conditions = append(n.Status.Conditions, c)
	}
	set(v1.NodeMemoryPressure, o.memoryPressure, "KubeletHasSufficientMemory", "KubeletHasInsufficientMemory",
		"kubelet has sufficient memory available", "kubelet has insufficient memory available")
	set(v1.NodeDiskPressure, o.diskPressure, "KubeletHasNoDiskPressure", "KubeletHasDiskPressure",
		"kubelet has no disk pressure", "kubelet has disk pressure")
	set(v1.NodePIDPressure, o.pidPercent >= 0 && o.pidPercent < pidThreshold, "KubeletHasSufficientPID",
		"KubeletHasInsufficientPID", "kubelet has sufficient PID available", "kubelet has insufficient PID available")
	// a foreign network product sets this condition itself
	if f.cfg.PodNetwork.isForeign == nil || !f.cfg.PodNetwork.isForeign() || o.networkMessage != "" {
		set(v1.NodeNetworkUnavailable, o.networkMessage != "", "NetworkReady", "NetworkPartFailed",
			"routes and Service rules are in place", o.networkMessage)
	}
	set(NodeDegraded, o.degradedMessage != "", "PartsRun", "PartFailed", "all parts of the agent run",
		o.degradedMessage)
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady",
		Message: "kubelet is posting ready status"}
	if o.notReady != "" {
		ready.Status, ready.Reason, ready.Message = v1.ConditionFalse, "KubeletNotReady", o.notReady
	}
	n.Status.Conditions = append(n.Status.Conditions, ready)
	for i := range n.Status.Conditions {
		c := &n.Status.Conditions[i]
		c.LastTransitionTime = metav1.NewTime(now)
		if old == nil {
			continue
		}
		for _, was := range old.Status.Conditions {
			if was.Type == c.Type && was.Status == c.Status {
				c.LastTransitionTime = was.LastTransitionTime
			}
		}
	}
	return n
}

// setCSIDrivers sets the annotations and topology labels of the Node for its CSI drivers. Before
// the first scan, drivers is nil, and it sets nothing. An empty list would delete the drivers that
// the control plane has stored for the agent's previous run.
func setCSIDrivers(n *v1.Node, drivers []*csi.Driver) {
	if drivers == nil {
		return
	}
	type driver struct {
		Name         string   `json:"name"`
		NodeID       string   `json:"nodeID"`
		TopologyKeys []string `json:"topologyKeys,omitempty"`
		Allocatable  int64    `json:"allocatable,omitempty"`
	}
	ids := map[string]string{}
	list := []driver{}
	for _, d := range drivers {
		ids[d.Name] = d.NodeID
		maps.Copy(n.Labels, d.Topology)
		list = append(list, driver{d.Name, d.NodeID, slices.Sorted(maps.Keys(d.Topology)), d.MaxVolumes})
	}
	// Encoding maps and lists of strings cannot fail.
	a, errA := json.Marshal(ids)
	b, errB := json.Marshal(list)
	if errA == nil && errB == nil {
		n.Annotations[CSINodeIDAnnotation], n.Annotations[CSIDriversAnnotation] = string(a), string(b)
	}
}

// nodeResources returns the capacity and allocatable resources of the Node. A configured resource
// is allocatable as a whole; other resources are measured on the machine. The memory reserve is
// subtracted from both.
func (f *nodeFacts) nodeResources() (capacity, allocatable v1.ResourceList) {
	capacity = v1.ResourceList{
		v1.ResourceCPU:  *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		v1.ResourcePods: *resource.NewQuantity(f.cfg.Node.MaxPods, resource.DecimalSI),
	}
	if total, _, err := machineMemory(); err == nil {
		capacity[v1.ResourceMemory] = *resource.NewQuantity(total, resource.BinarySI)
	}
	if total, _, err := diskSpace(f.cfg.Dirs.State); err == nil {
		capacity[v1.ResourceEphemeralStorage] = *resource.NewQuantity(total, resource.BinarySI)
	}
	allocatable = capacity.DeepCopy()
	if d, ok := allocatable[v1.ResourceEphemeralStorage]; ok {
		allocatable[v1.ResourceEphemeralStorage] =
			*resource.NewQuantity(max(0, d.Value()-f.cfg.Node.DiskFloor.BytesOf(d.Value())), resource.BinarySI)
	}
	for name, q := range f.cfg.Node.Capacity {
		capacity[name], allocatable[name] = q, q
	}
	if m, ok := allocatable[v1.ResourceMemory]; ok {
		allocatable[v1.ResourceMemory] = *resource.NewQuantity(max(0,
			saturate.Value(&m)-f.cfg.memoryFloor().BytesOf(saturate.Value(&m))), resource.BinarySI)
	}
	return capacity, allocatable
}

// podLimits returns the cgroup limits of all pods together. A configured memory capacity is not
// reduced by the memory reserve. In that case the agent evicts because of the usage of the pods'
// cgroup, which must be able to exceed the eviction threshold.
func (f *nodeFacts) podLimits() v1.ResourceList {
	out := f.currentNode().Status.Allocatable.DeepCopy()
	if q, own := f.cfg.Node.Capacity[v1.ResourceMemory]; own {
		out[v1.ResourceMemory] = q
	}
	return out
}
