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

// Host is the state of a node that may have the volume of a State, or needs it.
type Host struct {
	Node *corev1.Node // nil if the Node does not exist
	// Fenced reports that nothing on the node uses the volume, and that nothing will use it until
	// the node has connected to the control plane again. Fences is the remaining time until a node
	// that is not connected becomes fenced. It is 0 if the node is connected, is already fenced, or
	// never becomes fenced by itself.
	Fenced bool
	Fences time.Duration
}

// User is a pod that uses the volume of a State, is bound to a node and is not terminal. Volume is
// the PersistentVolume to which the pod's claim is bound.
type User struct {
	Pod    *corev1.Pod
	Volume *corev1.PersistentVolume
}

// State is the input of PlanVolume: the state of one volume, which an attacher and a volume handle
// identify. Several PersistentVolumes may refer to the volume. Each of them has its own access
// modes, but a node has only one attachment of the volume.
type State struct {
	Attacher, Handle string
	// the PersistentVolumes that refer to the volume; empty if all were deleted
	Volumes     []*corev1.PersistentVolume
	Required    bool // the driver requires attachment
	Users       []User
	Attachments []*storagev1.VolumeAttachment
	Hosts       map[string]Host
	// UnrecordedNodeWait is the remaining time during which a node that is not in a restored store
	// may have the volume.
	UnrecordedNodeWait time.Duration
}

// Refusal is a pod with the reason why the volume of a State is not attached to the pod's node.
type Refusal struct {
	Pod     *corev1.Pod
	Message string
}

// Step is the result of PlanVolume: the writes that are due for one volume.
type Step struct {
	Attach  []User                        // pods for which an attachment is created on their node
	Detach  []*storagev1.VolumeAttachment // attachments to delete
	Listed  []string                      // nodes that get the volume added to status.volumesAttached
	Remove  []*corev1.Pod                 // terminating pods of fenced nodes: they are deleted by force
	Refused []Refusal
	// PersistentVolumes that lose annotation api.AnnotationUnconfirmed: no node outside the store
	// can have them
	Settled []*corev1.PersistentVolume
	Again   time.Duration // delay until the next plan if nothing changes; 0 means never
}

func (s *Step) requestRetry(d time.Duration) {
	if d > 0 && (s.Again == 0 || d < s.Again) {
		s.Again = d
	}
}

// reportRetryDelay is the retry delay of a volume that waits for a node to report its volumes after
// a backup was restored.
const reportRetryDelay = 3 * time.Second

// PlanVolume returns the writes that are due for one volume. A volume that allows a single node is
// attached for the oldest pod that needs it. It is attached to another node only after all its
// attachments were deleted.
func PlanVolume(in State) Step {
	var out Step
	wanted := in.wantedNodes(&out)
	taken := map[string]bool{} // nodes with an attachment, including those in leaving
	leaving := map[string]bool{}
	for _, a := range in.Attachments {
		node := a.Spec.NodeName
		taken[node] = true
		if _, want := wanted[node]; a.DeletionTimestamp != nil {
			leaving[node] = true
		} else if want && !in.mustYield(a) || !want && in.isHeldByNode(a, &out) {
			if a.Status.Attached && in.possibleHolder(node, &out) == "" {
				out.Listed = append(out.Listed, node)
			}
		} else {
			out.Detach = append(out.Detach, a)
			leaving[node] = true
		}
	}
	for _, u := range byAge(wanted) {
		node := u.Pod.Spec.NodeName
		if why := in.possibleHolder(node, &out); why != "" {
			if !in.isVolumeListed(node) {
				out.Refused = append(out.Refused, Refusal{u.Pod,
					fmt.Sprintf("Multi-Attach error for volume %q: its access modes let one node have it, and %s",
						u.Volume.Name, why)})
			}
			continue
		}
		if taken[node] {
			continue
		}
		rule, other := in.findExclusiveVolume(u, taken, leaving)
		switch {
		case rule == nil:
			out.Attach = append(out.Attach, u)
			taken[node] = true
		case other != "":
			out.Refused = append(out.Refused, Refusal{u.Pod, in.multiAttachMessage(u, rule, other, wanted[other])})
		}
	}
	in.endUnrecordedWait(&out)
	return out
}

// endUnrecordedWait adds to out.Settled the PersistentVolumes that no longer wait for nodes outside
// the restored store (see State.UnrecordedNodeWait).
func (in State) endUnrecordedWait(out *Step) {
	for _, v := range in.Volumes {
		if !api.IsUnconfirmed(v) || api.IsSinglePod(v) {
			// single-pod volumes keep the annotation for longer, see confirmSingleUse
			continue
		}
		switch {
		case in.UnrecordedNodeWait > 0:
			out.requestRetry(in.UnrecordedNodeWait)
		case in.findJoiningNode() != "":
			out.requestRetry(reportRetryDelay)
		default:
			out.Settled = append(out.Settled, v)
		}
	}
}

// unrecordedHolderReason returns why the volume is not given to the given node after a backup was
// restored. The reason is a node that may have the volume and is not in the restored store, or has
// just joined. It returns "" if no such node is possible. It also returns "" if the given node
// itself reports that it has the volume mounted.
func (in State) unrecordedHolderReason(node string, out *Step) string {
	if h := in.Hosts[node]; h.Node != nil && !api.IsUnconfirmed(h.Node) {
		if holds, told := api.MayHoldVolume(h.Node, in.uniqueVolumeName()); holds && told {
			return ""
		}
	}
	switch other := in.findJoiningNode(); {
	case !slices.ContainsFunc(in.Volumes, func(v *corev1.PersistentVolume) bool { return api.IsUnconfirmed(v) }):
	case in.UnrecordedNodeWait > 0:
		out.requestRetry(in.UnrecordedNodeWait)
		return "a backup was restored: a node that joined after the backup may have the volume mounted, and its " +
			"report is awaited for a limited time"
	case other != "" && other != node:
		out.requestRetry(reportRetryDelay)
		return fmt.Sprintf("a backup was restored, and node %s, which has just joined, has not reported its mounted "+
			"volumes yet", other)
	}
	return ""
}

// findJoiningNode returns the first node, by name, that has just joined and has not reported yet
// which volumes it uses. It returns "" if none exists.
func (in State) findJoiningNode() (first string) {
	for node, h := range in.Hosts {
		if h.Node != nil && !h.Fenced && api.IsJoining(h.Node) && (first == "" || node < first) {
			first = node
		}
	}
	return first
}

// findExclusiveVolume returns what forbids attaching the volume to the node of u in addition to the
// nodes that have it. taken are these nodes, and leaving are those of them that are losing the
// volume. rule is a PersistentVolume with access modes that allow a single node: that of u, or one
// through which a node in taken uses the volume. rule is nil if nothing forbids the attachment.
// other is the node that has the volume, or "" if all such nodes are losing it.
func (in State) findExclusiveVolume(u User, taken, leaving map[string]bool) (
	rule *corev1.PersistentVolume, other string,
) {
	if api.IsSingleNode(u.Volume) && len(taken) > 0 {
		return u.Volume, findHolder(taken, leaving)
	}
	for _, node := range slices.Sorted(maps.Keys(taken)) {
		if i := slices.IndexFunc(in.shownOn(node), api.IsSingleNode); i >= 0 {
			rule = in.shownOn(node)[i]
			if !leaving[node] {
				return rule, node
			}
		}
	}
	return rule, ""
}

// shownOn returns the PersistentVolumes through which a node uses the volume: those of its pods. If
// the node has no such pods, it returns the PersistentVolume of the node's attachment.
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
		if i := slices.IndexFunc(in.Volumes, func(v *corev1.PersistentVolume) bool {
			return v.Name == volumeOf(a)
		}); i >= 0 && a.Spec.NodeName == node {
			by = append(by, in.Volumes[i])
		}
	}
	return by
}

// wantedNodes returns the nodes that must have the volume, each with the oldest of its pods. It
// adds terminating pods of fenced nodes to out.Remove.
func (in State) wantedNodes(out *Step) map[string]User {
	wanted := map[string]User{}
	if !in.Required {
		return wanted
	}
	for _, u := range in.Users {
		p, node := u.Pod, u.Pod.Spec.NodeName
		if p.DeletionTimestamp != nil && in.attachedTo(node) {
			// Only the pod's node could confirm that the pod has stopped, and may be disconnected.
			if h := in.Hosts[node]; h.Fenced {
				out.Remove = append(out.Remove, p)
			} else {
				out.requestRetry(h.Fences)
			}
		}
		if have, ok := wanted[node]; !ok || compareAge(u, have) < 0 {
			wanted[node] = u
		}
	}
	return wanted
}

// possibleHolder returns the reason why the volume must not be attached to the given node: another
// node has the volume, or may have it, without an attachment. It returns "" if no such node exists.
// Attachments may be missing after a backup was restored. A single-node volume is then not given to
// a node until every other node has reported its mounts and no other node has the volume mounted.
// An agent unmounts a volume that no pod needs. A node with a pod for the volume keeps it and gets
// the attachment.
func (in State) possibleHolder(node string, out *Step) string {
	if !slices.ContainsFunc(in.Volumes, api.IsSingleNode) {
		return ""
	}
	first, why := "", ""
	for other, h := range in.Hosts {
		if other == node || h.Fenced || h.Node == nil || first != "" && first < other {
			continue
		}
		switch {
		case api.IsUnconfirmed(h.Node):
			first, why = other,
				fmt.Sprintf("node %s has not reported since a backup was restored: it may have the volume mounted (if "+
					"its machine no longer exists: kubectl delete node %[1]s)", other)
		case in.hasUnrecordedVolume(other):
			first, why = other,
				fmt.Sprintf("node %s has it mounted for a deleted pod: it is detached after the unmount", other)
			if p := in.userOn(other); p != nil {
				why = fmt.Sprintf("node %s has it mounted, or may have it mounted, for pod %s/%s: it is detached when "+
					"that pod has ended", other, p.Namespace, p.Name)
			}
		}
	}
	if first == "" {
		return in.unrecordedHolderReason(node, out)
	}
	if h := in.Hosts[first]; h.Fences > 0 {
		out.requestRetry(h.Fences)
	} else if api.IsUnconfirmed(h.Node) {
		out.requestRetry(reportRetryDelay) // the report of that node need not queue this volume
	}
	return why
}

// hasUnrecordedVolume reports whether a node reports that it has the volume, although it has no
// attachment. An agent of an older release does not distinguish mounted volumes from volumes for
// which it waits. If such a node has a pod for the volume, the node is assumed to wait.
func (in State) hasUnrecordedVolume(node string) bool {
	h := in.Hosts[node]
	if h.Node == nil || h.Fenced || in.attachedTo(node) {
		return false
	}
	holds, told := api.MayHoldVolume(h.Node, in.uniqueVolumeName())
	return holds && (told || in.userOn(node) == nil)
}

// mustYield reports whether attachment a must be deleted because another node has the volume
// mounted and has a pod for it. This happens if a backup is restored that was made when the volume
// was attached to the node of a. That node loses nothing: its status.volumesAttached lacks the
// volume, and it is fenced or reports that it does not have the volume mounted.
func (in State) mustYield(a *storagev1.VolumeAttachment) bool {
	node := a.Spec.NodeName
	h := in.Hosts[node]
	if in.isVolumeListed(node) || !slices.ContainsFunc(in.Volumes, api.IsSingleNode) {
		return false
	}
	if !h.Fenced {
		if h.Node == nil || api.IsUnconfirmed(h.Node) {
			return false
		}
		if holds, _ := api.MayHoldVolume(h.Node, in.uniqueVolumeName()); holds {
			return false
		}
	}
	return slices.ContainsFunc(in.Users, func(u User) bool {
		return u.Pod.Spec.NodeName != node && in.hasUnrecordedVolume(u.Pod.Spec.NodeName) &&
			!api.IsUnconfirmed(in.Hosts[u.Pod.Spec.NodeName].Node)
	})
}

// userOn returns the oldest pod of a node that uses the volume, or nil.
func (in State) userOn(node string) *corev1.Pod {
	on := slices.DeleteFunc(slices.Clone(in.Users), func(u User) bool { return u.Pod.Spec.NodeName != node })
	if len(on) == 0 {
		return nil
	}
	return slices.MinFunc(on, compareAge).Pod
}

// isVolumeListed reports whether a node's status.volumesAttached contains the volume.
func (in State) isVolumeListed(node string) bool {
	h := in.Hosts[node]
	return h.Node != nil && slices.ContainsFunc(h.Node.Status.VolumesAttached, func(a corev1.AttachedVolume) bool {
		return a.Name == in.uniqueVolumeName()
	})
}

func (in State) attachedTo(node string) bool {
	return slices.ContainsFunc(in.Attachments, func(a *storagev1.VolumeAttachment) bool {
		return a.Spec.NodeName == node
	})
}

// isHeldByNode reports whether attachment a must be kept although no pod needs the volume, because
// its node may not have unmounted the volume.
func (in State) isHeldByNode(a *storagev1.VolumeAttachment, out *Step) bool {
	h := in.Hosts[a.Spec.NodeName]
	if h.Fenced {
		return false
	}
	if h.Node != nil && api.IsUnconfirmed(h.Node) {
		out.requestRetry(cmp.Or(h.Fences, reportRetryDelay)) // its status.volumesInUse is as old as the restored backup
		return true
	}
	if h.Node != nil && !slices.Contains(h.Node.Status.VolumesInUse, in.uniqueVolumeName()) {
		return false
	}
	out.requestRetry(h.Fences)
	return true
}

// uniqueVolumeName returns the name of the volume in status.volumesAttached of a Node.
func (in State) uniqueVolumeName() corev1.UniqueVolumeName {
	return api.AttachedVolumeName(in.Attacher, in.Handle)
}

// findHolder returns the first node, by name, that is in taken and not in leaving. It returns "" if
// none exists.
func findHolder(taken, leaving map[string]bool) string {
	best := ""
	for n := range taken {
		if !leaving[n] && (best == "" || n < best) {
			best = n
		}
	}
	return best
}

// multiAttachMessage returns the message of the event for a pod u that does not get the volume.
// node is the node that has the volume, and holder is the oldest pod there that uses it, if any.
// rule is the PersistentVolume with access modes that allow only a single node.
func (in State) multiAttachMessage(u User, rule *corev1.PersistentVolume, node string, holder User) string {
	h, known := in.Hosts[node]
	gone := known && h.Node == nil
	why := fmt.Sprintf("node %s has not unmounted it yet", node)
	switch pod := holder.Pod; {
	case gone && h.Fences > 0:
		why = fmt.Sprintf("node %s, whose Node was deleted, may have it mounted until it is fenced, in "+
			"%s at the latest",
			node, h.Fences.Round(time.Second))
	case gone && !h.Fenced:
		why = fmt.Sprintf("node %s, whose Node was deleted, may have it mounted without a time limit, because its "+
			"agent has --fence-after=0 "+
			"(if its machine no longer exists: kubectl delete volumeattachment %s)",
			node, api.AttachmentName(in.Handle, in.Attacher, node))
	case pod != nil && h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s holds it for pod %s/%s until it is fenced, in %s at the latest", node,
			pod.Namespace, pod.Name, h.Fences.Round(time.Second))
	case pod != nil:
		why = fmt.Sprintf("node %s holds it for pod %s/%s: it is released when that pod has ended", node,
			pod.Namespace, pod.Name)
	case h.Node != nil && h.Fences > 0:
		why = fmt.Sprintf("lost node %s holds it until it is fenced, in %s at the latest", node,
			h.Fences.Round(time.Second))
	}
	whose := "its access modes let"
	if rule.Name != u.Volume.Name {
		whose = fmt.Sprintf("the access modes of volume %q let", rule.Name)
	}
	return fmt.Sprintf("Multi-Attach error for volume %q: %s%s one node have it, and %s", u.Volume.Name,
		in.sharedVolumePrefix(u, node), whose, why)
}

// sharedVolumePrefix returns a phrase for multiAttachMessage if the node uses the volume through
// another PersistentVolume than that of u. The phrase names that PersistentVolume and what both
// have in common. Otherwise it returns "".
func (in State) sharedVolumePrefix(u User, node string) string {
	by := in.shownOn(node)
	if len(by) == 0 || slices.Contains(by, u.Volume) {
		return ""
	}
	what := fmt.Sprintf("volume %s of CSI driver %s", in.Handle, in.Attacher)
	if in.Attacher == api.ISCSIAttacher {
		what = "iSCSI disk " + in.Handle
	}
	return fmt.Sprintf("it has the same storage as volume %q (%s), ", by[0].Name, what)
}

func compareAge(a, b User) int {
	return cmp.Or(a.Pod.CreationTimestamp.Compare(b.Pod.CreationTimestamp.Time),
		cmp.Compare(a.Pod.Namespace+"/"+a.Pod.Name, b.Pod.Namespace+"/"+b.Pod.Name),
		cmp.Compare(a.Volume.Name, b.Volume.Name))
}

func byAge(users map[string]User) []User {
	return slices.SortedFunc(maps.Values(users), compareAge)
}
