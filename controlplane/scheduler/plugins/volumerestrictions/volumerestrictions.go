// Package volumerestrictions is the Filter plugin VolumeRestrictions. It restricts a
// PersistentVolumeClaim with the access mode ReadWriteOncePod to one pod in the cluster, and an
// inline iSCSI disk to one pod per node, unless all pods mount the disk read-only.
package volumerestrictions

import (
	"context"
	"fmt"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "VolumeRestrictions"

var (
	taken = framework.Refuse(Name,
		"node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode")
	inUse = framework.Refuse(Name, "node(s) had no available disk")
)

// exclusiveVolumes is the result of PreFilter: the pod's ReadWriteOncePod claims and inline iSCSI
// disks.
type exclusiveVolumes struct {
	sole  []string // names of the claims with access mode ReadWriteOncePod
	disks []*v1.ISCSIVolumeSource
}

// disksOf returns the inline iSCSI disks of a pod.
func disksOf(pod *v1.Pod) []*v1.ISCSIVolumeSource {
	var out []*v1.ISCSIVolumeSource
	for i := range pod.Spec.Volumes {
		if d := pod.Spec.Volumes[i].ISCSI; d != nil {
			out = append(out, d)
		}
	}
	return out
}

// iscsiConflict reports whether two pods with these inline iSCSI disks, mine and others, may not
// run on the same node. Disks are the same if they have the same LUN and IQN; the portal, and upper
// and lower case in the IQN, are ignored. Two pods may share a disk if both mount it read-only.
func iscsiConflict(mine, others []*v1.ISCSIVolumeSource) bool {
	return slices.ContainsFunc(mine, func(a *v1.ISCSIVolumeSource) bool {
		return slices.ContainsFunc(others, func(b *v1.ISCSIVolumeSource) bool {
			return strings.EqualFold(a.IQN, b.IQN) && a.Lun == b.Lun && !(a.ReadOnly && b.ReadOnly)
		})
	})
}

// Plugin refuses nodes on which the pod would share a ReadWriteOncePod claim or an inline iSCSI
// disk with another pod.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter. It refuses a pod that uses a PersistentVolumeClaim
// which does not exist. It returns Skip, which disables Filter, if the pod has neither
// ReadWriteOncePod claims nor inline iSCSI disks.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	var sole []string
	for _, name := range c.Pod.Claims {
		claim, ok := p.H.Volumes.Claim(c.Pod.Pod.Namespace, name)
		switch {
		case !ok && framework.OwnsClaim(c.Pod.Pod, name):
			return nil, framework.RefuseForGood(Name, framework.PendingClaimReason(name))
		case !ok:
			return nil, framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q not found", name))
		case slices.Contains(claim.Spec.AccessModes, v1.ReadWriteOncePod):
			sole = append(sole, name)
		}
	}
	disks := disksOf(c.Pod.Pod)
	if len(sole) == 0 && len(disks) == 0 {
		return nil, framework.SkipStatus
	}
	c.Put(Name, exclusiveVolumes{sole, disks})
	return nil, nil
}

// Filter implements framework.Filter. It refuses every node if another pod uses a ReadWriteOncePod
// claim of the pod; preemption helps only on the node that has all of these other pods. It refuses
// a node with a pod that uses one of the pod's iSCSI disks.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	w, _ := c.Get(Name).(exclusiveVolumes)
	if len(w.disks) > 0 {
		for _, pod := range n.Pods {
			if iscsiConflict(w.disks, disksOf(pod.Pod)) {
				return inUse
			}
		}
	}
	for _, name := range w.sole {
		uses := func(pod *framework.PodInfo) bool {
			return pod.Pod.Namespace == c.Pod.Pod.Namespace && slices.Contains(pod.Claims, name)
		}
		if c.Snapshot.Index.ClaimUsers(c.Pod.Pod.Namespace, name)+c.More(uses) > 0 {
			return taken
		}
	}
	return nil
}

// MayHelp implements framework.Requeue. It returns true if one of the pod's claims changed, and if
// a pod was removed that uses one of the pod's claims or inline iSCSI disks. Other events do not
// help.
func (p Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.PodRemoved:
		gone, ok := obj.(*v1.Pod)
		if !ok {
			return true
		}
		mine := framework.ClaimsOf(pod)
		return iscsiConflict(disksOf(pod), disksOf(gone)) || gone.Namespace == pod.Namespace &&
			slices.ContainsFunc(framework.ClaimsOf(gone), func(name string) bool { return slices.Contains(mine, name) })
	case framework.ClaimChanged:
		c, ok := obj.(*v1.PersistentVolumeClaim)
		return !ok || c.Namespace == pod.Namespace && slices.Contains(framework.ClaimsOf(pod), c.Name)
	}
	return false
}
