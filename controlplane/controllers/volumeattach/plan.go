package volumeattach

import (
	"cmp"
	"fmt"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	storagev1 "k8s.io/api/storage/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Host is what is known of a node that has a volume or shall have it.
type Host struct {
	Node *corev1.Node // nil: it is no part of the cluster any more
	// Fenced says that nothing on the node uses the volume, or ever will before it has heard the control plane, whatever its
	// object says; otherwise Fences is when that may be so, 0 where it will not be by itself.
	Fenced bool
	Fences time.Duration
}

// State is one volume: all by which is decided who has it.
type State struct {
	Volume      *corev1.PersistentVolume // nil: gone
	Required    bool                     // volumes of its driver are attached
	Pods        []*corev1.Pod            // that use it, have a node and have not ended
	Attachments []*storagev1.VolumeAttachment
	Hosts       map[string]Host
}

// Refusal says why a pod's node does not get the volume.
type Refusal struct {
	Pod     *corev1.Pod
	Message string
}

// Step is what shall be done for a volume.
type Step struct {
	Attach  []string                      // nodes that get it
	Detach  []*storagev1.VolumeAttachment // those that go
	Listed  []string                      // nodes whose status shall say that they have it
	Remove  []*corev1.Pod                 // pods of fenced nodes, which wait for nobody but their node
	Refused []Refusal
	Again   time.Duration // when to look again without a change; 0 = never
}

func (s *Step) again(d time.Duration) {
	if d > 0 && (s.Again == 0 || d < s.Again) {
		s.Again = d
	}
}

// Plan decides about one volume. A volume for one node goes to the oldest pod that wants it, and to another node's only
// when no attachment is left.
func Plan(in State) Step {
	var out Step
	wanted := in.wanted(&out)
	taken := map[string]bool{} // nodes that have it, or are about to lose it
	leaving := map[string]bool{}
	for _, a := range in.Attachments {
		node := a.Spec.NodeName
		taken[node] = true
		if _, want := wanted[node]; a.DeletionTimestamp != nil {
			leaving[node] = true
		} else if want || in.held(a, &out) {
			if a.Status.Attached {
				out.Listed = append(out.Listed, node)
			}
		} else {
			out.Detach = append(out.Detach, a)
			leaving[node] = true
		}
	}
	alone := in.Volume != nil && single(in.Volume)
	for _, p := range byAge(wanted) {
		node := p.Spec.NodeName
		switch {
		case taken[node]:
		case alone && len(taken) > 0:
			if other := holder(taken, leaving); other != "" {
				out.Refused = append(out.Refused, Refusal{p, in.multi(other, wanted[other])})
			}
		default:
			out.Attach = append(out.Attach, node)
			taken[node] = true
		}
	}
	return out
}

// wanted are the nodes that shall have the volume, each with the oldest of its pods.
func (in State) wanted(out *Step) map[string]*corev1.Pod {
	wanted := map[string]*corev1.Pod{}
	if in.Volume == nil || !in.Required {
		return wanted
	}
	for _, p := range in.Pods {
		node := p.Spec.NodeName
		if p.DeletionTimestamp != nil && in.attachedTo(node) {
			// Its node would have to say that it has ended, and cannot.
			if h := in.Hosts[node]; h.Fenced {
				out.Remove = append(out.Remove, p)
			} else {
				out.again(h.Fences)
			}
		}
		if have := wanted[node]; have == nil || older(p, have) < 0 {
			wanted[node] = p
		}
	}
	return wanted
}

func (in State) attachedTo(node string) bool {
	return slices.ContainsFunc(in.Attachments, func(a *storagev1.VolumeAttachment) bool { return a.Spec.NodeName == node })
}

// held says that a volume that no pod needs is to stay where it is, since the node has not unmounted it.
func (in State) held(a *storagev1.VolumeAttachment, out *Step) bool {
	h := in.Hosts[a.Spec.NodeName]
	if h.Fenced {
		return false
	}
	if h.Node != nil && !inUse(h.Node, a, in.Volume) {
		return false
	}
	out.again(h.Fences)
	return true
}

// inUse says whether a node tells that it uses an attached volume.
func inUse(n *corev1.Node, a *storagev1.VolumeAttachment, v *corev1.PersistentVolume) bool {
	return slices.Contains(n.Status.VolumesInUse, volumeName(a, v))
}

// handleAnnotation keeps the handle of an attached volume, which its PersistentVolume may not outlive.
const handleAnnotation = "keelson.dev/volume-handle"

func volumeName(a *storagev1.VolumeAttachment, v *corev1.PersistentVolume) corev1.UniqueVolumeName {
	if attacher, handle, ok := api.Attachable(v); ok {
		return api.AttachedName(attacher, handle)
	}
	return api.AttachedName(a.Spec.Attacher, a.Annotations[handleAnnotation])
}

// holder is a node that has the volume and keeps it; "" when those that have it are losing it.
func holder(taken, leaving map[string]bool) string {
	best := ""
	for n := range taken {
		if !leaving[n] && (best == "" || n < best) {
			best = n
		}
	}
	return best
}

// multi says to a pod who has the volume.
func (in State) multi(node string, pod *corev1.Pod) string {
	h := in.Hosts[node]
	why := fmt.Sprintf("node %s has not unmounted it yet", node)
	switch {
	case pod != nil && h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s has it for pod %s/%s, and loses it in %s at the latest", node, pod.Namespace, pod.Name, h.Fences.Round(time.Second))
	case pod != nil:
		why = fmt.Sprintf("node %s has it for pod %s/%s: it moves when that pod is gone", node, pod.Namespace, pod.Name)
	case h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s has it, and loses it in %s at the latest", node, h.Fences.Round(time.Second))
	}
	return fmt.Sprintf("Multi-Attach error for volume %q: its access modes let one node have it, and %s", in.Volume.Name, why)
}

// single says whether no more than one node may have a volume.
func single(v *corev1.PersistentVolume) bool {
	return !slices.ContainsFunc(v.Spec.AccessModes, func(m corev1.PersistentVolumeAccessMode) bool {
		return m == corev1.ReadOnlyMany || m == corev1.ReadWriteMany
	})
}

func older(a, b *corev1.Pod) int {
	return cmp.Or(a.CreationTimestamp.Compare(b.CreationTimestamp.Time), cmp.Compare(a.Namespace+"/"+a.Name, b.Namespace+"/"+b.Name))
}

func byAge(pods map[string]*corev1.Pod) []*corev1.Pod {
	out := make([]*corev1.Pod, 0, len(pods))
	for _, p := range pods {
		out = append(out, p)
	}
	slices.SortFunc(out, older)
	return out
}
