package volumeattach

import (
	"cmp"
	"fmt"
	"maps"
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

// User is a pod that uses a volume, has a node and has not ended, with the PersistentVolume by which it has it.
type User struct {
	Pod    *corev1.Pod
	Volume *corev1.PersistentVolume
}

// State is one volume, which an attacher knows by one handle: all by which is decided who has it. More than one PersistentVolume
// may show it: each promises what its access modes say, and it is attached to a node once.
type State struct {
	Attacher, Handle string
	Volumes          []*corev1.PersistentVolume // none: gone
	Required         bool                       // volumes of its driver are attached
	Users            []User
	Attachments      []*storagev1.VolumeAttachment
	Hosts            map[string]Host
	// Strangers is for how long a node that the store does not know may have the volume, since a backup was restored.
	Strangers time.Duration
}

// Refusal says why a pod's node does not get the volume.
type Refusal struct {
	Pod     *corev1.Pod
	Message string
}

// Step is what shall be done for a volume.
type Step struct {
	Attach  []User                        // whose nodes get it
	Detach  []*storagev1.VolumeAttachment // those that go
	Listed  []string                      // nodes whose status shall say that they have it
	Remove  []*corev1.Pod                 // pods of fenced nodes, which wait for nobody but their node
	Refused []Refusal
	Settled []*corev1.PersistentVolume // by which no stranger has it any more: they lose the mark of a restore
	Again   time.Duration              // when to look again without a change; 0 = never
}

func (s *Step) again(d time.Duration) {
	if d > 0 && (s.Again == 0 || d < s.Again) {
		s.Again = d
	}
}

// unheardAgain is after which a volume is looked at again that waits for nodes which have not been heard.
const unheardAgain = 3 * time.Second

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
		} else if want && !in.yields(a) || !want && in.held(a, &out) {
			if a.Status.Attached && in.doubt(node, &out) == "" {
				out.Listed = append(out.Listed, node)
			}
		} else {
			out.Detach = append(out.Detach, a)
			leaving[node] = true
		}
	}
	for _, u := range byAge(wanted) {
		node := u.Pod.Spec.NodeName
		if why := in.doubt(node, &out); why != "" {
			if !in.listed(node) {
				out.Refused = append(out.Refused, Refusal{u.Pod, fmt.Sprintf("Multi-Attach error for volume %q: its access modes let one node have it, and %s", u.Volume.Name, why)})
			}
			continue
		}
		if taken[node] {
			continue
		}
		rule, other := in.forbids(u, taken, leaving)
		switch {
		case rule == nil:
			out.Attach = append(out.Attach, u)
			taken[node] = true
		case other != "":
			out.Refused = append(out.Refused, Refusal{u.Pod, in.multi(u, rule, other, wanted[other])})
		}
	}
	in.settle(&out)
	return out
}

// settle ends the time in which strangers may have the volume.
func (in State) settle(out *Step) {
	for _, v := range in.Volumes {
		if !api.Unheard(v) || api.SinglePod(v) { // which keeps it for longer
			continue
		}
		switch {
		case in.Strangers > 0:
			out.again(in.Strangers)
		case in.joining() != "":
			out.again(unheardAgain)
		default:
			out.Settled = append(out.Settled, v)
		}
	}
}

// stranger says why a node does not get the volume that a node may have which the store does not know; "" = there is none. Who says that
// he has it himself is not kept from it.
func (in State) stranger(node string, out *Step) string {
	if h := in.Hosts[node]; h.Node != nil && !api.Unheard(h.Node) {
		if holds, told := api.Holds(h.Node, in.name()); holds && told {
			return ""
		}
	}
	switch other := in.joining(); {
	case !slices.ContainsFunc(in.Volumes, func(v *corev1.PersistentVolume) bool { return api.Unheard(v) }):
	case in.Strangers > 0:
		out.again(in.Strangers)
		return "a backup was restored: a node that joined after it was made may have it mounted, and is waited for a while"
	case other != "" && other != node:
		out.again(unheardAgain)
		return fmt.Sprintf("a backup was restored, and node %s, which has just joined, has not said yet what it has mounted", other)
	}
	return ""
}

// joining is a node that has just been made and has not said which volumes it uses; "" = none.
func (in State) joining() (first string) {
	for node, h := range in.Hosts {
		if h.Node != nil && !h.Fenced && api.Joining(h.Node) && (first == "" || node < first) {
			first = node
		}
	}
	return first
}

// forbids says which PersistentVolume lets one node have the volume when a pod of another wants it, and which node has it; "" when
// that is losing it. The one that shows it to the pod counts, and so do those by which other nodes have it.
func (in State) forbids(u User, taken, leaving map[string]bool) (rule *corev1.PersistentVolume, other string) {
	if api.SingleNode(u.Volume) && len(taken) > 0 {
		return u.Volume, holder(taken, leaving)
	}
	for _, node := range slices.Sorted(maps.Keys(taken)) {
		if i := slices.IndexFunc(in.shownOn(node), api.SingleNode); i >= 0 {
			rule = in.shownOn(node)[i]
			if !leaving[node] {
				return rule, node
			}
		}
	}
	return rule, ""
}

// shownOn are the PersistentVolumes by which a node has the volume: those of its pods, and where none is left that of the attachment.
func (in State) shownOn(node string) (by []*corev1.PersistentVolume) {
	for _, u := range in.Users {
		if u.Pod.Spec.NodeName == node {
			by = append(by, u.Volume)
		}
	}
	if len(by) > 0 {
		return by
	}
	for _, a := range in.Attachments {
		if i := slices.IndexFunc(in.Volumes, func(v *corev1.PersistentVolume) bool { return v.Name == volumeOf(a) }); i >= 0 && a.Spec.NodeName == node {
			by = append(by, in.Volumes[i])
		}
	}
	return by
}

// wanted are the nodes that shall have the volume, each with the oldest of its pods.
func (in State) wanted(out *Step) map[string]User {
	wanted := map[string]User{}
	if !in.Required {
		return wanted
	}
	for _, u := range in.Users {
		p, node := u.Pod, u.Pod.Spec.NodeName
		if p.DeletionTimestamp != nil && in.attachedTo(node) {
			// Its node would have to say that it has ended, and cannot.
			if h := in.Hosts[node]; h.Fenced {
				out.Remove = append(out.Remove, p)
			} else {
				out.again(h.Fences)
			}
		}
		if have, ok := wanted[node]; !ok || older(u, have) < 0 {
			wanted[node] = u
		}
	}
	return wanted
}

// doubt says which other node has the volume, or may have it, although no attachment says so; "" = none. It is so where the store
// knows less than it did, since a backup was restored: until a node has said what it has mounted, and while it has that, nobody else
// gets what one node may have. It ends by itself what has no pod; with one it keeps the volume, and is the one that gets it.
func (in State) doubt(node string, out *Step) string {
	if !slices.ContainsFunc(in.Volumes, api.SingleNode) {
		return ""
	}
	first, why := "", ""
	for other, h := range in.Hosts {
		if other == node || h.Fenced || h.Node == nil || first != "" && first < other {
			continue
		}
		switch {
		case api.Unheard(h.Node):
			first, why = other, fmt.Sprintf("node %s has not been heard since a backup was restored: it may have it mounted (if its machine is gone for good: kubectl delete node %[1]s)", other)
		case in.strays(other):
			first, why = other, fmt.Sprintf("node %s has it mounted for a pod that is not there any more: it moves when that is unmounted", other)
			if p := in.userOn(other); p != nil {
				why = fmt.Sprintf("node %s has it mounted, or may, and keeps it for pod %s/%s: it moves when that pod is gone", other, p.Namespace, p.Name)
			}
		}
	}
	if first == "" {
		return in.stranger(node, out)
	}
	if h := in.Hosts[first]; h.Fences > 0 {
		out.again(h.Fences)
	} else if api.Unheard(h.Node) {
		out.again(unheardAgain) // one that is heard does not say for which volumes it has been waited
	}
	return why
}

// strays says that a node has the volume by its own word, and no attachment to it is known. Where an agent of a release that does not
// tell what it has from what it waits for has a pod of the volume, it is taken to wait.
func (in State) strays(node string) bool {
	h := in.Hosts[node]
	if h.Node == nil || h.Fenced || in.attachedTo(node) {
		return false
	}
	holds, told := api.Holds(h.Node, in.name())
	return holds && (told || in.userOn(node) == nil)
}

// yields says that an attachment of a node that waits goes, since another one has the volume and a pod for it: as after a backup was
// restored that knows of the first node's turn, and not of the other's that came next. Nothing is taken from a node by it: it
// has not been told that it has the volume, and says that it does not.
func (in State) yields(a *storagev1.VolumeAttachment) bool {
	node := a.Spec.NodeName
	h := in.Hosts[node]
	if in.listed(node) || !slices.ContainsFunc(in.Volumes, api.SingleNode) {
		return false
	}
	if !h.Fenced {
		if h.Node == nil || api.Unheard(h.Node) {
			return false
		}
		if holds, _ := api.Holds(h.Node, in.name()); holds {
			return false
		}
	}
	return slices.ContainsFunc(in.Users, func(u User) bool {
		return u.Pod.Spec.NodeName != node && in.strays(u.Pod.Spec.NodeName) && !api.Unheard(in.Hosts[u.Pod.Spec.NodeName].Node)
	})
}

// userOn is the oldest pod of a node that uses the volume; nil = none.
func (in State) userOn(node string) *corev1.Pod {
	on := slices.DeleteFunc(slices.Clone(in.Users), func(u User) bool { return u.Pod.Spec.NodeName != node })
	if len(on) == 0 {
		return nil
	}
	return slices.MinFunc(on, older).Pod
}

// listed says whether a node has been told that it has the volume.
func (in State) listed(node string) bool {
	h := in.Hosts[node]
	return h.Node != nil && slices.ContainsFunc(h.Node.Status.VolumesAttached, func(a corev1.AttachedVolume) bool { return a.Name == in.name() })
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
	if h.Node != nil && api.Unheard(h.Node) {
		out.again(cmp.Or(h.Fences, unheardAgain)) // what it uses is of the time of the backup
		return true
	}
	if h.Node != nil && !slices.Contains(h.Node.Status.VolumesInUse, in.name()) {
		return false
	}
	out.again(h.Fences)
	return true
}

// name is how the status of a Node names the volume.
func (in State) name() corev1.UniqueVolumeName { return api.AttachedName(in.Attacher, in.Handle) }

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

// multi says to a pod who has the volume, and by what it is no other's: rule lets one node have it.
func (in State) multi(u User, rule *corev1.PersistentVolume, node string, has User) string {
	h, known := in.Hosts[node]
	gone := known && h.Node == nil
	why := fmt.Sprintf("node %s has not unmounted it yet", node)
	switch pod := has.Pod; {
	case gone && h.Fences > 0:
		why = fmt.Sprintf("node %s, whose Node was deleted, may have it mounted, and loses it in %s at the latest",
			node, h.Fences.Round(time.Second))
	case gone && !h.Fenced:
		why = fmt.Sprintf("node %s, whose Node was deleted, may have it mounted for ever, since its agent has --fence-after=0 "+
			"(if its machine is gone for good: kubectl delete volumeattachment %s)",
			node, api.AttachmentName(in.Handle, in.Attacher, node))
	case pod != nil && h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s has it for pod %s/%s, and loses it in %s at the latest", node, pod.Namespace, pod.Name, h.Fences.Round(time.Second))
	case pod != nil:
		why = fmt.Sprintf("node %s has it for pod %s/%s: it moves when that pod is gone", node, pod.Namespace, pod.Name)
	case h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s has it, and loses it in %s at the latest", node, h.Fences.Round(time.Second))
	}
	whose := "its access modes let"
	if rule.Name != u.Volume.Name {
		whose = fmt.Sprintf("the access modes of volume %q let", rule.Name)
	}
	return fmt.Sprintf("Multi-Attach error for volume %q: %s%s one node have it, and %s", u.Volume.Name, in.alike(u, node), whose, why)
}

// alike names the PersistentVolume by which a node has the volume, where it is not the pod's own.
func (in State) alike(u User, node string) string {
	by := in.shownOn(node)
	if len(by) == 0 || slices.Contains(by, u.Volume) {
		return ""
	}
	what := fmt.Sprintf("volume %s of CSI driver %s", in.Handle, in.Attacher)
	if in.Attacher == api.ISCSIAttacher {
		what = "iSCSI disk " + in.Handle
	}
	return fmt.Sprintf("it shows the same as volume %q (%s), ", by[0].Name, what)
}

func older(a, b User) int {
	return cmp.Or(a.Pod.CreationTimestamp.Compare(b.Pod.CreationTimestamp.Time), cmp.Compare(a.Pod.Namespace+"/"+a.Pod.Name, b.Pod.Namespace+"/"+b.Pod.Name),
		cmp.Compare(a.Volume.Name, b.Volume.Name))
}

func byAge(users map[string]User) []User {
	return slices.SortedFunc(maps.Values(users), older)
}
