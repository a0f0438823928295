// Package nodevolumelimits is the Filter plugin NodeVolumeLimits. It keeps the number of a CSI
// driver's volumes on a node within the limit that the driver reports in the CSINode object.
package nodevolumelimits

import (
	"context"

	v1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/storage/volume"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "NodeVolumeLimits"

var refused = framework.Refuse(Name, "node(s) exceed max volume count")

// Plugin refuses nodes on which the pod's volumes would exceed the limit of a CSI driver for
// attached volumes.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// volumeID identifies a volume by its CSI driver and its volume handle. For a PersistentVolumeClaim
// that has no volume yet, id is a text that identifies the claim.
type volumeID struct{ driver, id string }

// csiVolumes returns the CSI volumes of the PersistentVolumeClaims that the pod uses.
func (p Plugin) csiVolumes(pod *framework.PodInfo) []volumeID {
	var out []volumeID
	for _, name := range pod.Claims {
		claim, ok := p.H.Volumes.Claim(pod.Pod.Namespace, name)
		if !ok {
			continue
		}
		if claim.Spec.VolumeName == "" {
			class, ok := p.H.Volumes.StorageClass(volume.GetPersistentVolumeClaimClass(claim))
			if ok && class.Provisioner != "" {
				out = append(out, volumeID{class.Provisioner, "claim " + claim.Namespace + "/" + claim.Name})
			}
			continue
		}
		if pv, ok := p.H.Volumes.PersistentVolume(claim.Spec.VolumeName); ok && pv.Spec.CSI != nil {
			out = append(out, volumeID{pv.Spec.CSI.Driver, pv.Spec.CSI.VolumeHandle})
		}
	}
	return out
}

// PreFilter implements framework.PreFilter. It returns Skip, which disables Filter, if the pod uses
// no CSI volumes.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	wanted := p.csiVolumes(c.Pod)
	if len(wanted) == 0 || p.H.VolumeLimits == nil {
		return nil, framework.SkipStatus
	}
	c.Put(Name, wanted)
	return nil, nil
}

// Filter implements framework.Filter: it refuses a node on which the volumes of the pod, and those
// already in use there, would exceed a CSI driver's limit of attached volumes. A volume that
// several pods use counts once.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	wanted, _ := c.Get(Name).([]volumeID)
	limits := p.H.VolumeLimits(n.Node.Name)
	if len(limits) == 0 {
		return nil
	}
	there := make(map[volumeID]bool)
	for _, pod := range n.Pods {
		for _, v := range p.csiVolumes(pod) {
			there[v] = true
		}
	}
	count := make(map[string]int32)
	for v := range there {
		count[v.driver]++
	}
	for _, v := range wanted {
		if there[v] {
			continue
		}
		there[v] = true
		count[v.driver]++
		if limit, ok := limits[v.driver]; ok && count[v.driver] > limit {
			return refused
		}
	}
	return nil
}

// MayHelp implements framework.Requeue. It returns true for a new node, for changed CSI drivers of
// a node, for a changed PersistentVolume, for the removal of a pod with PersistentVolumeClaims, and
// for a changed claim in the pod's namespace. Other events do not help.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.NodeAdded, framework.DriversChanged, framework.VolumeChanged:
		return true
	case framework.PodRemoved:
		p, ok := obj.(*v1.Pod)
		return !ok || len(framework.ClaimsOf(p)) > 0
	case framework.ClaimChanged:
		c, ok := obj.(*v1.PersistentVolumeClaim)
		return !ok || c.Namespace == pod.Namespace
	}
	return false
}
