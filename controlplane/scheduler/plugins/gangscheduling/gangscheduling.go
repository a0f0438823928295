// Package gangscheduling places pods of a PodGroup together or not at all: none of them is bound before as many as the
// group's policy says have a node. The scheduler tries the pods of such a group in one turn; what this plugin says at
// Permit decides what becomes of them.
package gangscheduling

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name of the plugin.
const Name = framework.GangScheduling

// Plugin holds the pods of a group until they are enough.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter: pods wait for their group, and for the others of it.
func (p Plugin) PreFilter(_ context.Context, c *framework.Cycle) (map[string]struct{}, *framework.Status) {
	key, ok := framework.GroupOf(c.Pod.Pod)
	if !ok {
		return nil, framework.SkipStatus
	}
	switch g := p.H.Group(key); {
	case !g.Known:
		return nil, framework.RefuseForGood(Name, fmt.Sprintf("pod group %s does not exist", g.Name))
	case g.Mixed:
		return nil, framework.RefuseForGood(Name, fmt.Sprintf("pods of pod group %s name different schedulers", g.Name))
	case g.Able < g.Least:
		// How many are missing changes with each pod that comes, and would be told to all the others each time.
		return nil, framework.RefuseForGood(Name, fmt.Sprintf("pod group %s has fewer than the %d pods that it needs", g.Name, g.Least))
	}
	return nil, nil
}

// Permit implements framework.Permit. It takes no time of its own: the scheduler's turn with the group ends the wait.
func (p Plugin) Permit(_ context.Context, c *framework.Cycle, _ string) (*framework.Status, time.Duration) {
	key, ok := framework.GroupOf(c.Pod.Pod)
	if !ok || p.H.Group(key).Needs() == 0 {
		return nil, 0
	}
	return &framework.Status{Code: framework.Wait, Plugin: Name}, 0
}

// MayHelp implements framework.Requeue. Room does not wake those that only shared the fate of others: who found none is
// woken by the plugin that refused it, and takes the group along. Neither does a pod that comes: it does so too.
func (Plugin) MayHelp(e framework.Event, pod *v1.Pod, obj any) bool {
	mine, _ := framework.GroupOf(pod)
	switch x := obj.(type) {
	case framework.GroupKey:
		return e == framework.GroupChanged && x == mine
	case *v1.Pod:
		its, ok := framework.GroupOf(x)
		return e == framework.PodAdded && ok && its == mine
	}
	return false
}
