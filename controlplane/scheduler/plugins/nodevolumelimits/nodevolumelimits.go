// Package nodevolumelimits keeps the number of a driver's volumes on a node within the driver's
// limit.
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

// Plugin refuses nodes to which a CSI driver could not attach another volume.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// one identifies a volume by its CSI driver and volume handle. For a claim without a volume, the
// claim takes the place of the handle.
type one struct{ driver, id string }

// csiVolumes returns the CSI volumes of the PersistentVolumeClaims that a pod uses.
func (p Plugin) csiVolumes(pod *framework.PodInfo) []one {
	var out []one
	for _, name := range pod.Claims {
		claim, ok := p.H.Claim(pod.Pod.Namespace, name)
		if !ok {
			continue
		}
		if claim.Spec.VolumeName == "" {
			class, ok := p.H.StorageClass(volume.GetPersistentVolumeClaimClass(claim))
			if ok && class.Provisioner != "" {
				out = append(out, one{class.Provisioner, "claim " + claim.Namespace + "/" + claim.Name})
			}
			continue
		}
		if pv, ok := p.H.PersistentVolume(claim.Spec.VolumeName); ok && pv.Spec.CSI != nil {
			out = append(out, one{pv.Spec.CSI.Driver, pv.Spec.CSI.VolumeHandle})
		}
	}
	return out
}

// PreFilter implements framework.PreFilter. It skips the filter if the pod uses no CSI volumes.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	wanted := p.csiVolumes(c.Pod)
	if len(wanted) == 0 || p.H.VolumeLimits == nil {
		return nil, framework.SkipStatus
	}
	c.Put(Name, wanted)
	return nil, nil
}

// Filter implements framework.Filter: it refuses a node on which the pod would exceed a driver's
// limit of attached volumes. A volume that several pods use counts once.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	wanted, _ := c.Get(Name).([]one)
	limits := p.H.VolumeLimits(n.Node.Name)
	if len(limits) == 0 {
		return nil
	}
	there := make(map[one]bool)
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

// MayHelp implements framework.Requeue: a node, its drivers or a volume changed, a pod with claims
// was removed, or a claim in the pod's namespace changed.
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
