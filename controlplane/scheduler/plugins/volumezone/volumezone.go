// Package volumezone restricts a pod to the zones and regions of its volumes' labels.
package volumezone

import (
	"context"
	"slices"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "VolumeZone"

var refused = framework.RefuseForGood(Name, "node(s) had no available volume zone")

// keys are the zone and region labels, each with its older or newer alternative. Nodes and volumes
// may have either of the two.
var keys = map[string]string{
	v1.LabelTopologyZone:            v1.LabelFailureDomainBetaZone,
	v1.LabelTopologyRegion:          v1.LabelFailureDomainBetaRegion,
	v1.LabelFailureDomainBetaZone:   v1.LabelTopologyZone,
	v1.LabelFailureDomainBetaRegion: v1.LabelTopologyRegion,
}

// Plugin refuses nodes outside the zones and regions of the pod's volumes.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// zone is a zone or region label of a volume. The node's label must have one of the values.
type zone struct {
	key    string
	values []string
}

// PreFilter implements framework.PreFilter: it collects the zone labels of the pod's bound volumes.
// Missing and unbound claims are left to the plugin VolumeBinding.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	var zones []zone
	for _, name := range c.Pod.Claims {
		claim, ok := p.H.Claim(c.Pod.Pod.Namespace, name)
		if !ok || claim.Spec.VolumeName == "" {
			continue
		}
		pv, ok := p.H.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			continue
		}
		for key := range keys {
			if value, ok := pv.Labels[key]; ok {
				zones = append(zones, zone{key, strings.Split(value, "__")}) // a volume may be in several zones
			}
		}
	}
	if len(zones) == 0 {
		return nil, framework.SkipStatus
	}
	c.Put(Name, zones)
	return nil, nil
}

// Filter implements framework.Filter: it refuses a node with labels that do not match those of the
// volumes. A node without any zone or region label fits, because such a cluster has no zones.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	zones, _ := c.Get(Name).([]zone)
	placed := false
	for key := range keys {
		_, ok := n.Node.Labels[key]
		placed = placed || ok
	}
	if !placed {
		return nil
	}
	for _, z := range zones {
		value, ok := n.Node.Labels[z.key]
		if !ok {
			value, ok = n.Node.Labels[keys[z.key]]
		}
		if !ok || !slices.Contains(z.values, value) {
			return refused
		}
	}
	return nil
}

// MayHelp implements framework.Requeue: a node was added or its labels changed, a volume changed,
// or a claim in the pod's namespace changed.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.NodeAdded, framework.NodeLabels, framework.VolumeChanged:
		return true
	case framework.ClaimChanged:
		c, ok := obj.(*v1.PersistentVolumeClaim)
		return !ok || c.Namespace == pod.Namespace
	}
	return false
}
