// Package volumezone is the Filter plugin VolumeZone. It restricts a pod to nodes in the zones and
// regions that are labels of its PersistentVolumes.
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

// alternatives maps each zone and region label to its alternative: the deprecated beta label to the
// current one, and the current one to the beta label. Nodes and volumes may have either of the two.
var alternatives = map[string]string{
	v1.LabelTopologyZone:            v1.LabelFailureDomainBetaZone,
	v1.LabelTopologyRegion:          v1.LabelFailureDomainBetaRegion,
	v1.LabelFailureDomainBetaZone:   v1.LabelTopologyZone,
	v1.LabelFailureDomainBetaRegion: v1.LabelTopologyRegion,
}

// Plugin refuses nodes outside the zones and regions of the pod's PersistentVolumes.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// zone is a zone or region label of a PersistentVolume, with its values. Filter accepts a node only
// if its label has one of these values.
type zone struct {
	key    string
	values []string
}

// PreFilter implements framework.PreFilter: it collects the zone and region labels of the pod's
// PersistentVolumes. It ignores claims that do not exist or are unbound, which the plugin
// VolumeBinding handles.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	var zones []zone
	for _, name := range c.Pod.Claims {
		claim, ok := p.H.Volumes.Claim(c.Pod.Pod.Namespace, name)
		if !ok || claim.Spec.VolumeName == "" {
			continue
		}
		pv, ok := p.H.Volumes.PersistentVolume(claim.Spec.VolumeName)
		if !ok {
			continue
		}
		for key := range alternatives {
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

// Filter implements framework.Filter: it refuses a node whose zone and region labels do not match
// those of the pod's PersistentVolumes. A node without any such label is accepted, because the
// cluster then has no zones.
func (Plugin) Filter(_ context.Context, c *framework.Cycle, n *framework.NodeInfo) *framework.Status {
	zones, _ := c.Get(Name).([]zone)
	placed := false
	for key := range alternatives {
		_, ok := n.Node.Labels[key]
		placed = placed || ok
	}
	if !placed {
		return nil
	}
	for _, z := range zones {
		value, ok := n.Node.Labels[z.key]
		if !ok {
			value, ok = n.Node.Labels[alternatives[z.key]]
		}
		if !ok || !slices.Contains(z.values, value) {
			return refused
		}
	}
	return nil
}

// MayHelp implements framework.Requeue. It returns true if a node was added or its labels changed,
// if a PersistentVolume changed, and if a claim in the pod's namespace changed.
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
