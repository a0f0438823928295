package framework

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"time"

	v1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/internal/saturate"
)

// Resources contains an amount of each resource: CPU in millicores, memory and ephemeral storage in
// bytes, and extended resources.
type Resources struct {
	MilliCPU, Memory, EphemeralStorage int64
	Scalar                             map[v1.ResourceName]int64 // extended resources and huge pages; nil = none
}

func resourcesOf(l v1.ResourceList) Resources {
	var r Resources
	for name, q := range l {
		switch name {
		case v1.ResourceCPU:
			r.MilliCPU = saturate.MilliValue(&q)
		case v1.ResourceMemory:
			r.Memory = saturate.Value(&q)
		case v1.ResourceEphemeralStorage:
			r.EphemeralStorage = saturate.Value(&q)
		case v1.ResourcePods:
		default:
			if r.Scalar == nil {
				r.Scalar = make(map[v1.ResourceName]int64)
			}
			r.Scalar[name] = saturate.Value(&q)
		}
	}
	return r
}

// Native reports whether the resource is CPU, memory or ephemeral storage, which every node has. It
// returns false for extended resources and huge pages.
func Native(name v1.ResourceName) bool {
	return name == v1.ResourceCPU || name == v1.ResourceMemory || name == v1.ResourceEphemeralStorage
}

// Of returns the amount of the resource with the given name: millicores of CPU, bytes of memory and
// ephemeral storage, units of extended resources.
func (r *Resources) Of(name v1.ResourceName) int64 {
	switch name {
	case v1.ResourceCPU:
		return r.MilliCPU
	case v1.ResourceMemory:
		return r.Memory
	case v1.ResourceEphemeralStorage:
		return r.EphemeralStorage
	}
	return r.Scalar[name]
}

// addScaled adds the amounts of o, multiplied by sign, to r. Sums saturate at the limits of int64.
func (r *Resources) addScaled(o Resources, sign int64) {
	r.MilliCPU = addScaledAmount(r.MilliCPU, sign, o.MilliCPU)
	r.Memory = addScaledAmount(r.Memory, sign, o.Memory)
	r.EphemeralStorage = addScaledAmount(r.EphemeralStorage, sign, o.EphemeralStorage)
	for name, n := range o.Scalar {
		if r.Scalar == nil {
			r.Scalar = make(map[v1.ResourceName]int64)
		}
		r.Scalar[name] = addScaledAmount(r.Scalar[name], sign, n)
	}
}

// addScaledAmount returns a + sign * b, saturated at the limits of int64.
func addScaledAmount(a, sign, b int64) int64 { return saturate.Add(a, saturate.Mul(sign, b)) }

// hasOverflowed reports whether an amount has reached the limit of int64, so that it may no longer
// be the exact sum.
func (r *Resources) hasOverflowed() bool {
	most := max(r.MilliCPU, r.Memory, r.EphemeralStorage)
	for _, n := range r.Scalar {
		most = max(most, n)
	}
	return most == math.MaxInt64
}

// Equal reports whether r and o contain the same amount of every resource.
func (r Resources) Equal(o Resources) bool {
	return r.MilliCPU == o.MilliCPU && r.Memory == o.Memory && r.EphemeralStorage == o.EphemeralStorage &&
		maps.Equal(r.Scalar, o.Scalar)
}

func (r Resources) deepCopy() Resources {
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

// HostPort is a host port that a pod uses on its node. The IP "0.0.0.0" means all addresses of the
// node.
type HostPort struct {
	IP       string
	Protocol v1.Protocol
	Port     int32
}

func (p HostPort) conflictsWith(o HostPort) bool {
	const all = "0.0.0.0"
	return p.Port == o.Port && p.Protocol == o.Protocol && (p.IP == o.IP || p.IP == all || o.IP == all)
}

// PodInfo is a pod with the properties that scheduling needs, such as the sums of its requests.
// They are computed once, by NewPodInfo.
type PodInfo struct {
	Pod      *v1.Pod
	Requests Resources
	// CountedCPU and CountedMemory are the requests that Score plugins use. A container without a
	// request is counted with a default, so that such pods are spread too.
	CountedCPU, CountedMemory int64
	Ports                     []HostPort
	Priority                  int32
	Affinity                  *Affinity // the pod's inter-pod affinity and anti-affinity terms; nil = none
	Claims                    []string  // names of the PersistentVolumeClaims that the pod's volumes use
}

// NewPodInfo returns the PodInfo of a pod. The pod is shared and not modified.
func NewPodInfo(pod *v1.Pod) *PodInfo {
	info := &PodInfo{Pod: pod}
	info.setRequests()
	if pod.Spec.Priority != nil {
		info.Priority = *pod.Spec.Priority
	}
	info.Affinity = AffinityOf(pod)
	info.Claims = ClaimsOf(pod)
	info.hostPorts(pod.Spec.Containers)
	for i := range pod.Spec.InitContainers {
		if r := pod.Spec.InitContainers[i].RestartPolicy; r != nil && *r == v1.ContainerRestartPolicyAlways {
			info.hostPorts(pod.Spec.InitContainers[i : i+1])
		}
	}
	return info
}

// ClaimsOf returns the names of the PersistentVolumeClaims that a pod's volumes use. The claim of
// an ephemeral volume is named after the pod and the volume.
func ClaimsOf(pod *v1.Pod) []string {
	var out []string
	for i := range pod.Spec.Volumes {
		v := &pod.Spec.Volumes[i]
		switch {
		case v.PersistentVolumeClaim != nil:
			out = append(out, v.PersistentVolumeClaim.ClaimName)
		case v.Ephemeral != nil:
			out = append(out, pod.Name+"-"+v.Name)
		}
	}
	return out
}

// OwnsClaim reports whether the pod has an ephemeral volume whose PersistentVolumeClaim has the
// name claim.
func OwnsClaim(pod *v1.Pod, claim string) bool {
	return slices.ContainsFunc(pod.Spec.Volumes, func(v v1.Volume) bool {
		return v.Ephemeral != nil && pod.Name+"-"+v.Name == claim
	})
}

// PendingClaimReason returns the message with which a pod is refused while the
// PersistentVolumeClaim of its ephemeral volume has not been created. claim is the name of that
// PersistentVolumeClaim.
func PendingClaimReason(claim string) string {
	return fmt.Sprintf("waiting for ephemeral volume controller to create the persistentvolumeclaim %q", claim)
}

func (pod *PodInfo) hostPorts(list []v1.Container) {
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
			pod.Ports = append(pod.Ports, h)
		}
	}
}

// NodeInfo is a node with the pods that are bound or assumed on it, and the sums of their requests.
// In a snapshot it is immutable.
type NodeInfo struct {
	Node        *v1.Node // nil if the node object does not exist, but pods are bound to the node
	Taints      []v1.Taint
	Cordoned    bool
	Pods        []*PodInfo
	Requested   Resources
	CountedCPU  int64
	CountedMem  int64
	Allocatable Resources
	MaxPods     int
	Ports       []HostPort
	// Images are the container images on the node, by name, with their sizes in bytes.
	Images map[string]int64

	// Generation increases with every change of the NodeInfo. A snapshot copies only the nodes
	// whose generation has changed.
	Generation int64

	slot int32 // index of the node in the slices of the snapshot's Index; 0 = the node is not in an Index
}

// SetNode sets the node object and the fields of the NodeInfo that are derived from it, such as the
// allocatable resources and the images.
func (n *NodeInfo) SetNode(node *v1.Node) {
	n.Node, n.Taints, n.Cordoned = node, node.Spec.Taints, node.Spec.Unschedulable
	n.Allocatable = resourcesOf(node.Status.Allocatable)
	n.MaxPods = int(saturate.Value(node.Status.Allocatable.Pods()))
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

// AddPod adds a pod to the list of the node's pods, to the sums of their requests and to the used
// ports.
func (n *NodeInfo) AddPod(pod *PodInfo) {
	n.Pods = append(n.Pods, pod)
	n.addAmounts(pod, 1)
	n.Ports = append(n.Ports, pod.Ports...)
}

// RemovePod removes a pod from the list of the node's pods, from the sums of their requests and
// from the used ports. It reports whether the pod was on the node.
func (n *NodeInfo) RemovePod(uid types.UID) bool {
	i := slices.IndexFunc(n.Pods, func(pod *PodInfo) bool { return pod.Pod.UID == uid })
	if i < 0 {
		return false
	}
	pod := n.Pods[i]
	n.Pods[i] = n.Pods[len(n.Pods)-1]
	n.Pods[len(n.Pods)-1] = nil
	n.Pods = n.Pods[:len(n.Pods)-1]
	n.addAmounts(pod, -1)
	for _, port := range pod.Ports {
		if j := slices.Index(n.Ports, port); j >= 0 {
			n.Ports = slices.Delete(n.Ports, j, j+1)
		}
	}
	return true
}

// addAmounts adds the pod's requests to the node's sums if sign is 1, and subtracts them if sign is
// -1. For
// -1, the pod must no longer be in n.Pods: a sum that has overflowed is computed again from n.Pods.
func (n *NodeInfo) addAmounts(pod *PodInfo, sign int64) {
	if sign < 0 && (n.Requested.hasOverflowed() || max(n.CountedCPU, n.CountedMem) == math.MaxInt64) {
		n.Requested, n.CountedCPU, n.CountedMem = Resources{}, 0, 0
		for _, pod := range n.Pods {
			n.addAmounts(pod, 1)
		}
		return
	}
	n.Requested.addScaled(pod.Requests, sign)
	n.CountedCPU = addScaledAmount(n.CountedCPU, sign, pod.CountedCPU)
	n.CountedMem = addScaledAmount(n.CountedMem, sign, pod.CountedMemory)
}

// PortConflict reports whether one of the given host ports is in use on the node.
func (n *NodeInfo) PortConflict(ports []HostPort) bool {
	for _, w := range ports {
		for _, have := range n.Ports {
			if w.conflictsWith(have) {
				return true
			}
		}
	}
	return false
}

// Clone returns a copy of the NodeInfo that can be modified. The node object, the pods and the
// images are immutable and shared with the original.
func (n *NodeInfo) Clone() *NodeInfo {
	c := *n
	c.Pods = slices.Clone(n.Pods)
	c.Ports = slices.Clone(n.Ports)
	c.Requested = n.Requested.deepCopy()
	return &c
}

// Snapshot is the state of nodes, pods and other objects on which one scheduling attempt is based.
type Snapshot struct {
	Nodes  []*NodeInfo // nodes with a node object, sorted by name
	ByName map[string]*NodeInfo
	Index  *Index // pod counts of these nodes, for inter-pod affinity and topology spread
	// Nominated holds, by node name, the pods without a node for which preemption has reserved
	// resources on that node (status.nominatedNodeName).
	Nominated map[string][]*PodInfo
	Volumes
	Workloads
}

// NominationOf returns the name of the pod's nominated node, on which preemption has reserved
// resources for the pod. It returns "" if the pod has none.
func (s *Snapshot) NominationOf(uid types.UID) string {
	for node, pods := range s.Nominated {
		if slices.ContainsFunc(pods, func(pod *PodInfo) bool { return pod.Pod.UID == uid }) {
			return node
		}
	}
	return ""
}

// Workloads contains functions that look up the Services and controllers of pods, for default
// topology spread. A nil function counts as one that finds nothing.
type Workloads struct {
	// Services returns the selectors of the Services that select the pod.
	Services func(pod *v1.Pod) []map[string]string
	// Owner returns the pod selector of the ReplicationController, ReplicaSet or StatefulSet to
	// which ref refers; nil if it does not exist.
	Owner func(namespace string, ref *metav1.OwnerReference) labels.Selector
}

// Volumes contains functions that look up storage objects. A nil function counts as one that finds
// nothing.
type Volumes struct {
	Claim             func(namespace, name string) (*v1.PersistentVolumeClaim, bool)
	PersistentVolume  func(name string) (*v1.PersistentVolume, bool)
	PersistentVolumes func() []*v1.PersistentVolume
	StorageClass      StorageClassLookup
	// PublishesCapacity reports whether the CSI driver publishes CSIStorageCapacity objects.
	// StorageCapacities returns the CSIStorageCapacity objects of the StorageClass with the given
	// name.
	PublishesCapacity func(driver string) bool
	StorageCapacities func(class string) []*storagev1.CSIStorageCapacity
	// ObserveOperation records for the metrics how long an operation of the plugin VolumeBinding
	// took: "assume" or "bind". It may be nil.
	ObserveOperation func(operation string, d time.Duration)
}

// NewSnapshot returns a snapshot of the given nodes, which must have node objects.
func NewSnapshot(nodes ...*NodeInfo) *Snapshot {
	s := &Snapshot{ByName: make(map[string]*NodeInfo, len(nodes)), Nodes: slices.Clone(nodes), Index: NewIndex()}
	slices.SortFunc(s.Nodes, func(a, b *NodeInfo) int { return strings.Compare(a.Node.Name, b.Node.Name) })
	for _, n := range nodes {
		s.ByName[n.Node.Name] = n
		s.Index.Replace(nil, n)
	}
	return s
}
