// Package volumerestrictions keeps a claim with access mode ReadWriteOncePod to one pod in the whole cluster.
package volumerestrictions

import (
	"context"
	"fmt"
	"slices"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = "VolumeRestrictions"

var taken = framework.Refuse(Name, "node has pod using PersistentVolumeClaim with the same name and ReadWriteOncePod access mode")

// Plugin filters by claims of one pod.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	var sole []string
	for _, name := range c.Pod.Claims {
		claim, ok := p.H.Claim(c.Pod.Pod.Namespace, name)
		switch {
		case !ok && framework.OwnsClaim(c.Pod.Pod, name):
			return nil, framework.RefuseForGood(Name, framework.AwaitsClaim(name))
		case !ok:
			return nil, framework.RefuseForGood(Name, fmt.Sprintf("persistentvolumeclaim %q not found", name))
		case slices.Contains(claim.Spec.AccessModes, v1.ReadWriteOncePod):
			sole = append(sole, name)
		}
	}
	if len(sole) == 0 {
		return nil, framework.SkipStatus
	}
	c.Put(Name, sole)
	return nil, nil
}

// Filter implements framework.Filter. A pod of another node is in the way as well: to end pods of this node helps only
// where they alone use the claim.
func (p Plugin) Filter(_ context.Context, c *framework.Cycle, _ *framework.NodeInfo) *framework.Status {
	sole, _ := c.Get(Name).([]string)
	for _, name := range sole {
		uses := func(q *framework.PodInfo) bool {
			return q.Pod.Namespace == c.Pod.Pod.Namespace && slices.Contains(q.Claims, name)
		}
		if c.Snapshot.Index.ClaimUsers(c.Pod.Pod.Namespace, name)+c.More(uses) > 0 {
			return taken
		}
	}
	return nil
}

// MayHelp implements framework.Requeue: a user of one of the pod's claims has gone, or a claim has come.
func (p Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	switch e {
	case framework.PodRemoved:
		gone, ok := obj.(*v1.Pod)
		if !ok {
			return true
		}
		mine := framework.ClaimsOf(pod)
		return gone.Namespace == pod.Namespace &&
			slices.ContainsFunc(framework.ClaimsOf(gone), func(name string) bool { return slices.Contains(mine, name) })
	case framework.ClaimChanged:
		c, ok := obj.(*v1.PersistentVolumeClaim)
		return !ok || c.Namespace == pod.Namespace && slices.Contains(framework.ClaimsOf(pod), c.Name)
	}
	return false
}
