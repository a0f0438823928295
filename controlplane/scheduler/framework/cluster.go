package framework

import (
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"
	podresources "k8s.io/component-helpers/resource"
)

// Resources are amounts: cores in thousandths, bytes, and whatever else nodes advertise.
type Resources struct {
	MilliCPU, Memory, EphemeralStorage int64
	Scalar                             map[v1.ResourceName]int64 // extended resources and huge pages; nil = none
}

func resourcesOf(l v1.ResourceList) Resources {
	var r Resources
	for name, q := range l {
		switch name {
		case v1.ResourceCPU:
			r.MilliCPU = q.MilliValue()
		case v1.ResourceMemory:
			r.Memory = q.Value()
		case v1.ResourceEphemeralStorage:
			r.EphemeralStorage = q.Value()
		case v1.ResourcePods:
		default:
			if r.Scalar == nil {
				r.Scalar = make(map[v1.ResourceName]int64)
			}
			r.Scalar[name] = q.Value()
		}
	}
	return r
}

// add adds o times sign.
func (r *Resources) add(o Resources, sign int64) {
	r.MilliCPU += sign * o.MilliCPU
	r.Memory += sign * o.Memory
	r.EphemeralStorage += sign * o.EphemeralStorage
	for name, n := range o.Scalar {
		if r.Scalar == nil {
			r.Scalar = make(map[v1.ResourceName]int64)
		}
		r.Scalar[name] += sign * n
	}
}

func (r Resources) clone() Resources {
	if r.Scalar == nil {
		return r
	}
	scalar := make(map[v1.ResourceName]int64, len(r.Scalar))
	for k, v := range r.Scalar {
		scalar[k] = v
	}
	r.Scalar = scalar
	return r
}

// HostPort is a port taken on a node. IP "0.0.0.0" means all addresses.
type HostPort struct {
	IP       string
	Protocol v1.Protocol
	Port     int32
}

func (p HostPort) conflicts(o HostPort) bool {
	const all = "0.0.0.0"
	return p.Port == o.Port && p.Protocol == o.Protocol && (p.IP == o.IP || p.IP == all || o.IP == all)
}

// PodInfo is a pod with what scheduling needs to know of it, worked out once.
type PodInfo struct {
	Pod      *v1.Pod
	Requests Resources
	// Counted are the requests with a guess where a container asks for nothing, so that scores spread such pods too.
	CountedCPU, CountedMemory int64
	Ports                     []HostPort
	Priority                  int32
}

// What a container that asks for nothing is counted with, for scores only.
var (
	guess = v1.ResourceList{
		v1.ResourceCPU:    *resource.NewMilliQuantity(100, resource.DecimalSI),
		v1.ResourceMemory: *resource.NewQuantity(200<<20, resource.BinarySI),
	}
)

// NewPodInfo works out a pod. The pod is shared and not modified.
func NewPodInfo(p *v1.Pod) *PodInfo {
	info := &PodInfo{Pod: p, Requests: resourcesOf(podresources.PodRequests(p, podresources.PodResourcesOptions{}))}
	info.CountedCPU, info.CountedMemory = info.Requests.MilliCPU, info.Requests.Memory
	if asksForNothing(p) {
		counted := podresources.PodRequests(p, podresources.PodResourcesOptions{NonMissingContainerRequests: guess})
		info.CountedCPU, info.CountedMemory = counted.Cpu().MilliValue(), counted.Memory().Value()
	}
	if p.Spec.Priority != nil {
		info.Priority = *p.Spec.Priority
	}
	info.hostPorts(p.Spec.Containers)
	for i := range p.Spec.InitContainers {
		if r := p.Spec.InitContainers[i].RestartPolicy; r != nil && *r == v1.ContainerRestartPolicyAlways {
			info.hostPorts(p.Spec.InitContainers[i : i+1])
		}
	}
	return info
}

// asksForNothing says whether some container leaves its CPU or memory open.
func asksForNothing(p *v1.Pod) bool {
	for i := range p.Spec.Containers {
		r := p.Spec.Containers[i].Resources.Requests
		if _, ok := r[v1.ResourceCPU]; !ok {
			return true
		}
		if _, ok := r[v1.ResourceMemory]; !ok {
			return true
		}
	}
	return false
}

func (info *PodInfo) hostPorts(list []v1.Container) {
	for i := range list {
		for _, p := range list[i].Ports {
			if p.HostPort <= 0 {
				continue
			}
			h := HostPort{IP: p.HostIP, Protocol: p.Protocol, Port: p.HostPort}
			if h.IP == "" {
				h.IP = "0.0.0.0"
			}
			if h.Protocol == "" {
				h.Protocol = v1.ProtocolTCP
			}
			info.Ports = append(info.Ports, h)
		}
	}
}

// NodeInfo is a node with the pods on it, bound or assumed, and their sums. In a snapshot it is immutable.
type NodeInfo struct {
	Node        *v1.Node // nil while only pods are known of it
	Pods        []*PodInfo
	Requested   Resources
	CountedCPU  int64
	CountedMem  int64
	Allocatable Resources
	MaxPods     int
	Ports       []HostPort
	// Images present on the node by name, with their size.
	Images map[string]int64

	// Generation grows with every change; snapshots compare it.
	Generation int64
}

// SetNode takes the node object.
func (n *NodeInfo) SetNode(node *v1.Node) {
	n.Node = node
	n.Allocatable = resourcesOf(node.Status.Allocatable)
	n.MaxPods = int(node.Status.Allocatable.Pods().Value())
	n.Images = nil
	if len(node.Status.Images) > 0 {
		n.Images = make(map[string]int64, len(node.Status.Images))
		for i := range node.Status.Images {
			for _, name := range node.Status.Images[i].Names {
				n.Images[name] = node.Status.Images[i].SizeBytes
			}
		}
	}
}

// AddPod counts a pod on the node.
func (n *NodeInfo) AddPod(p *PodInfo) {
	n.Pods = append(n.Pods, p)
	n.count(p, 1)
	n.Ports = append(n.Ports, p.Ports...)
}

// RemovePod takes a pod away and reports whether it was there.
func (n *NodeInfo) RemovePod(uid types.UID) bool {
	i := slices.IndexFunc(n.Pods, func(p *PodInfo) bool { return p.Pod.UID == uid })
	if i < 0 {
		return false
	}
	p := n.Pods[i]
	n.Pods[i] = n.Pods[len(n.Pods)-1]
	n.Pods[len(n.Pods)-1] = nil
	n.Pods = n.Pods[:len(n.Pods)-1]
	n.count(p, -1)
	for _, port := range p.Ports {
		if j := slices.Index(n.Ports, port); j >= 0 {
			n.Ports = slices.Delete(n.Ports, j, j+1)
		}
	}
	return true
}

func (n *NodeInfo) count(p *PodInfo, sign int64) {
	n.Requested.add(p.Requests, sign)
	n.CountedCPU += sign * p.CountedCPU
	n.CountedMem += sign * p.CountedMemory
}

// PortConflict says whether one of the ports is taken.
func (n *NodeInfo) PortConflict(want []HostPort) bool {
	for _, w := range want {
		for _, have := range n.Ports {
			if w.conflicts(have) {
				return true
			}
		}
	}
	return false
}

// Clone copies everything that changes. Node, pods and images are immutable and shared.
func (n *NodeInfo) Clone() *NodeInfo {
	c := *n
	c.Pods = slices.Clone(n.Pods)
	c.Ports = slices.Clone(n.Ports)
	c.Requested = n.Requested.clone()
	return &c
}

// Snapshot is the cluster as one scheduling attempt sees it.
type Snapshot struct {
	Nodes  []*NodeInfo // with a node object, in order of name
	ByName map[string]*NodeInfo
	Volumes
}

// Volumes looks up storage objects. A nil field knows none.
type Volumes struct {
	Claim             func(namespace, name string) (*v1.PersistentVolumeClaim, bool)
	PersistentVolume  func(name string) (*v1.PersistentVolume, bool)
	PersistentVolumes func() []*v1.PersistentVolume
	StorageClass      StorageClassLookup
}

// NewSnapshot is a snapshot of these nodes, for tests and tools.
func NewSnapshot(nodes ...*NodeInfo) *Snapshot {
	s := &Snapshot{ByName: make(map[string]*NodeInfo, len(nodes)), Nodes: slices.Clone(nodes)}
	slices.SortFunc(s.Nodes, func(a, b *NodeInfo) int { return strings.Compare(a.Node.Name, b.Node.Name) })
	for _, n := range nodes {
		s.ByName[n.Node.Name] = n
	}
	return s
}
