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

// Annotations of the node by which the control plane writes its CSINode.
const (
	// CSINodeIDAnnotation maps driver names to the driver's name for this node, as JSON.
	CSINodeIDAnnotation = "csi.volume.kubernetes.io/nodeid"
	// CSIDriversAnnotation is a JSON list of {"name","nodeID","topologyKeys","allocatable"}.
	CSIDriversAnnotation = "keelson.dev/csi-drivers"
)

// DRADriversAnnotation names the DRA drivers that can be asked on the node, with commas: ResourceSlices of others are removed.
const DRADriversAnnotation = "keelson.dev/dra-drivers"

// WireGuardKeyAnnotation is the node's public key, as base64, by which others speak to it encrypted.
const WireGuardKeyAnnotation = "keelson.dev/wireguard-key"

// AnnouncesAnnotation says that the agent answers for addresses of load balancers when it is asked to.
const AnnouncesAnnotation = "keelson.dev/announces"

// NodeDegraded is the condition of a node of which a part fails that pods can do without; its message says what to do.
const NodeDegraded v1.NodeConditionType = "keelson.dev/Degraded"

const (
	pidThreshold   = 5 // percent available, below which a node is under pressure: Kubernetes' default
	imagesReported = 50
)

// starting is why a node that has not looked at its runtime yet is not ready.
const starting = "the agent is starting"

// PodNetworkAnnotation of a Node says whose network configuration gave its pods their addresses: "keelson" or "foreign".
// By it the control plane judges the addresses that the node reports.
const PodNetworkAnnotation = "keelson.dev/pod-network"

func podNetworkOf(own bool) string {
	if own {
		return "keelson"
	}
	return "foreign"
}

// facts is what the node says of itself.
type facts struct {
	cfg  *Config
	info v1.NodeSystemInfo

	fence    *fence    // nil: attached volumes are not this node's affair
	pressure *pressure // nil: there is no machine to be short of anything
	mu       sync.Mutex
	current  *v1.Node
}

func newFacts(cfg *Config) *facts {
	f := &facts{cfg: cfg, info: systemInfo(cfg.Release)}
	if cfg.Volumes == nil {
		f.fence = &fence{after: cfg.FenceAfter, file: fenceFile(cfg.RunDir), reports: fenceReportFile(cfg.RunDir),
			boot: f.info.BootID}
	}
	if cfg.Runtime == nil {
		f.pressure = newPressure(cfg, f.info.BootID)
	}
	o := f.machine()
	o.notReady = starting
	f.current = f.compose(o, nil, time.Now())
	return f
}

// node returns the facts as of now. Shared: do not modify.
func (f *facts) node() *v1.Node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.current
}

// again composes the facts of a node that has reported nothing yet, from a new reading of the machine.
func (f *facts) again() *v1.Node {
	o := f.machine()
	o.notReady = starting
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current = f.compose(o, f.current, time.Now())
	return f.current
}

// watched is what facts are made from.
type watched struct {
	runtime agent.Runtime
	images  agent.Images
	network agent.Network
	csi     *csi.Registry
	session Session
	volumes agent.AttachedVolumes // nil: none
	plugins *deviceplugin.Manager // nil: none
	devices claimed               // nil: none
	trouble *troubles
}

// claimed are the DRA drivers of the node.
type claimed interface {
	Drivers() []string
	Changes(ctx context.Context) <-chan struct{}
}

// observed is one look at the machine.
type observed struct {
	notReady    string // why pods cannot run; "" when they can
	memoryShort bool
	diskShort   bool
	pidPercent  int64 // available; -1 = not known
	images      []v1.ContainerImage
	drivers     []*csi.Driver // nil = not known
	networkDown string        // what ails the way of pods' traffic; "" = nothing
	degraded    string        // what else fails
	claimed     string        // names of DRA drivers

	volumes uses

	devices, healthy v1.ResourceList // of device plugins: all, and those that can be given out

	handlers []v1.NodeRuntimeHandler // nil = not known
	features *v1.NodeFeatures
}

// run keeps the facts current. What a node that is not ready mostly waits for tells of itself: the runtime's start and
// the pod CIDR. The timer is for what does not: a foreign network configuration, the machine's resources.
func (f *facts) run(ctx context.Context, w watched) error {
	const early, seldom = time.Second, 10 * time.Second
	t := time.NewTimer(0)
	defer t.Stop()
	started := make(chan struct{})
	var wg sync.WaitGroup
	defer wg.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	wg.Go(func() {
		// A runtime that still adopts what it finds answers when it is through; nothing has that id.
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
	if f.cfg.ownKey != nil {
		rekeyed = f.cfg.ownKey.Changed()
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
		case <-f.pressure.news():
		case <-asked:
		case <-rekeyed:
		case <-w.trouble.changed:
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
		o := f.look(ctx, w)
		o.askVolumes(w)
		f.mu.Lock()
		next := f.compose(o, f.current, time.Now())
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

// askVolumes comes last, so that what is told of volumes is as new as can be: a control plane that was restored goes by it.
func (o *observed) askVolumes(w watched) {
	if w.volumes == nil {
		return
	}
	names, held, err := w.volumes.VolumesInUse()
	alone, bad := w.volumes.ExclusiveClaims()
	if err == nil && bad == nil { // else the control plane goes by what it knows
		o.volumes = uses{names, held, alone}
	}
}

func (f *facts) look(ctx context.Context, w watched) observed {
	o := f.machine()
	if w.csi != nil {
		o.drivers = w.csi.Drivers()
	}
	if w.devices != nil {
		o.claimed = strings.Join(w.devices.Drivers(), ",")
	}
	if w.plugins != nil {
		o.devices, o.healthy = w.plugins.Resources()
	}
	o.notReady = o.askRuntime(ctx, w)
	f.ailing(&o, w.trouble)
	if f.cfg.Runtime != nil {
		return o
	}
	listing, cancel := context.WithTimeout(ctx, time.Second) // a store that still imports does not answer
	defer cancel()
	if res, err := w.images.ListImages(listing, &cri.ListImagesRequest{}); err == nil {
		o.images = imageList(res.GetImages())
	}
	return o
}

// ailing words the failures of parts by what they mean for pods.
func (f *facts) ailing(o *observed, t *troubles) {
	vital := func(part string) bool { return part == partRuntime || part == partImages }
	traffic := func(part string) bool { return part == partProxy || part == partRoutes }
	if why := t.of(vital); why != "" {
		o.notReady = why
	}
	o.networkDown = t.of(traffic)
	o.degraded = t.of(func(part string) bool { return !vital(part) && !traffic(part) })
	if f.cfg.unreached == nil || f.cfg.foreignNetwork() {
		return
	}
	if why := f.cfg.unreached(); why != "" {
		o.degraded = strings.TrimPrefix(o.degraded+"; pods of some nodes are not reached: "+shortened(why), "; ")
	}
}

// shortened is what a condition says of something that may concern every node of a cluster.
func shortened(why string) string {
	const limit = 1024
	if len(why) <= limit {
		return why
	}
	return strings.ToValidUTF8(why[:limit], "") + " ... (the agent's log says all)"
}

// machine looks at what is left of the machine.
func (f *facts) machine() observed {
	o := observed{pidPercent: -1}
	if f.cfg.Runtime != nil {
		return o // a fake node has no machine of its own to look at
	}
	o.memoryShort, o.diskShort = f.pressure.holds(eviction.Memory), f.pressure.holds(eviction.Disk) || f.pressure.holds(eviction.Inodes)
	if left, err := pidsAvailable(); err == nil {
		o.pidPercent = left
	}
	return o
}

// askRuntime asks what the runtime can do, and says why the node cannot run pods.
func (o *observed) askRuntime(ctx context.Context, w watched) (notReady string) {
	res, err := w.runtime.Status(ctx, &cri.StatusRequest{})
	if err != nil {
		return fmt.Sprintf("container runtime is down: %v", err)
	}
	o.handlers, o.features = runtimeFeatures(res)
	for _, c := range res.GetStatus().GetConditions() {
		if c.Type == cri.RuntimeReady && !c.Status {
			return fmt.Sprintf("container runtime not ready: RuntimeReady=false reason:%s message:%s", c.Reason, c.Message)
		}
	}
	if err := w.network.Ready(); err != nil {
		return fmt.Sprintf("container runtime network not ready: NetworkReady=false reason:NetworkPluginNotReady message:%v", err)
	}
	return ""
}

// runtimeFeatures is what a runtime can do, as nodes tell it; handlers by name.
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

// compose builds the whole node object. Transition times are kept from old while a condition does not change.
func (f *facts) compose(o observed, old *v1.Node, now time.Time) *v1.Node {
	n := &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: f.cfg.NodeName, Labels: map[string]string{}, Annotations: map[string]string{}}}
	maps.Copy(n.Labels, f.cfg.Labels)
	n.Labels[v1.LabelHostname], n.Labels[v1.LabelOSStable], n.Labels[v1.LabelArchStable] = f.cfg.NodeName, runtime.GOOS, runtime.GOARCH
	// Deprecated, and set by every kubelet: manifests still select nodes by these labels.
	n.Labels["beta.kubernetes.io/os"], n.Labels["beta.kubernetes.io/arch"] = runtime.GOOS, runtime.GOARCH
	n.Spec.Taints = f.cfg.Taints
	n.Status.NodeInfo = f.info
	n.Status.DaemonEndpoints.KubeletEndpoint.Port = f.cfg.KubeletPort
	n.Status.Capacity, n.Status.Allocatable = f.resources()
	maps.Copy(n.Status.Capacity, o.devices)
	maps.Copy(n.Status.Allocatable, o.healthy)
	for _, ip := range f.cfg.NodeIPs {
		n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeInternalIP, Address: ip})
	}
	n.Status.Addresses = append(n.Status.Addresses, v1.NodeAddress{Type: v1.NodeHostName, Address: f.cfg.NodeName})
	n.Status.Images = o.images
	n.Status.RuntimeHandlers, n.Status.Features = o.handlers, o.features
	drivers(n, o.drivers)
	if f.cfg.Devices == nil {
		n.Annotations[DRADriversAnnotation] = o.claimed
	}
	if f.cfg.ownKey != nil {
		n.Annotations[WireGuardKeyAnnotation] = f.cfg.ownKey.Key().PublicKey().String()
	}
	if f.fence != nil {
		f.fence.tells(n, o.volumes)
	}
	if f.cfg.ownPods != nil {
		n.Annotations[PodNetworkAnnotation] = podNetworkOf(f.cfg.ownPods())
	}
	if f.cfg.announces {
		n.Annotations[AnnouncesAnnotation] = "true"
	}
	set := func(t v1.NodeConditionType, bad bool, good, badReason, goodMessage, badMessage string) {
		c := v1.NodeCondition{Type: t, Status: v1.ConditionFalse, Reason: good, Message: goodMessage}
		if bad {
			c.Status, c.Reason, c.Message = v1.ConditionTrue, badReason, badMessage
		}
		n.Status.Conditions = append(n.Status.Conditions, c)
	}
	set(v1.NodeMemoryPressure, o.memoryShort, "KubeletHasSufficientMemory", "KubeletHasInsufficientMemory", "kubelet has sufficient memory available", "kubelet has insufficient memory available")
	set(v1.NodeDiskPressure, o.diskShort, "KubeletHasNoDiskPressure", "KubeletHasDiskPressure", "kubelet has no disk pressure", "kubelet has disk pressure")
	set(v1.NodePIDPressure, o.pidPercent >= 0 && o.pidPercent < pidThreshold, "KubeletHasSufficientPID", "KubeletHasInsufficientPID", "kubelet has sufficient PID available", "kubelet has insufficient PID available")
	// a network product tells of its own
	if f.cfg.foreignNetwork == nil || !f.cfg.foreignNetwork() || o.networkDown != "" {
		set(v1.NodeNetworkUnavailable, o.networkDown != "", "NetworkReady", "NetworkPartFailed",
			"routes and Service rules are in place", o.networkDown)
	}
	set(NodeDegraded, o.degraded != "", "PartsRun", "PartFailed", "all parts of the agent run", o.degraded)
	ready := v1.NodeCondition{Type: v1.NodeReady, Status: v1.ConditionTrue, Reason: "KubeletReady", Message: "kubelet is posting ready status"}
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

// drivers tells of CSI drivers: ids and topology. Before the first look for drivers it says nothing: "none"
// would take away what the control plane knows from an earlier life of the agent.
func drivers(n *v1.Node, all []*csi.Driver) {
	if all == nil {
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
	for _, d := range all {
		ids[d.Name] = d.NodeID
		maps.Copy(n.Labels, d.Topology)
		list = append(list, driver{d.Name, d.NodeID, slices.Sorted(maps.Keys(d.Topology)), d.MaxVolumes})
	}
	// Maps and lists of strings always encode.
	a, errA := json.Marshal(ids)
	b, errB := json.Marshal(list)
	if errA == nil && errB == nil {
		n.Annotations[CSINodeIDAnnotation], n.Annotations[CSIDriversAnnotation] = string(a), string(b)
	}
}

// resources are capacity and allocatable: the machine's, or what is configured, which is then all for pods, but for what has to
// be left of its memory.
func (f *facts) resources() (capacity, allocatable v1.ResourceList) {
	capacity = v1.ResourceList{
		v1.ResourceCPU:  *resource.NewQuantity(int64(runtime.NumCPU()), resource.DecimalSI),
		v1.ResourcePods: *resource.NewQuantity(f.cfg.MaxPods, resource.DecimalSI),
	}
	if total, _, err := memory(); err == nil {
		capacity[v1.ResourceMemory] = *resource.NewQuantity(total, resource.BinarySI)
	}
	if total, _, err := disk(f.cfg.StateDir); err == nil {
		capacity[v1.ResourceEphemeralStorage] = *resource.NewQuantity(total, resource.BinarySI)
	}
	allocatable = capacity.DeepCopy()
	if d, ok := allocatable[v1.ResourceEphemeralStorage]; ok {
		allocatable[v1.ResourceEphemeralStorage] = *resource.NewQuantity(max(0, d.Value()-f.cfg.DiskFloor.BytesOf(d.Value())), resource.BinarySI)
	}
	for name, q := range f.cfg.Capacity {
		capacity[name], allocatable[name] = q, q
	}
	if m, ok := allocatable[v1.ResourceMemory]; ok {
		allocatable[v1.ResourceMemory] = *resource.NewQuantity(max(0, saturate.Value(&m)-f.cfg.memoryFloor().BytesOf(saturate.Value(&m))), resource.BinarySI)
	}
	return capacity, allocatable
}

// limits is what all pods together are held to. With a configured capacity the kernel leaves them all of that memory: what
// they have of it is what the node goes by, and it could not see that they have too much.
func (f *facts) limits() v1.ResourceList {
	out := f.node().Status.Allocatable.DeepCopy()
	if q, own := f.cfg.Capacity[v1.ResourceMemory]; own {
		out[v1.ResourceMemory] = q
	}
	return out
}
