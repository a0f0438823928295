// Package gangscheduling is the plugin GangScheduling, which places the pods of a PodGroup together
// or not at all. No pod of the group is bound until as many pods as the group's policy requires
// have a node. The scheduler chooses nodes for all pods of the group in one attempt; Permit of this
// plugin delays their bindings until enough have a node.
package gangscheduling

import (
	"context"
	"fmt"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = framework.GangScheduling

// Plugin delays the binding of pods that belong to a PodGroup, until enough pods of the group have
// a node.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreFilter implements framework.PreFilter: it refuses a pod if its PodGroup does not exist, has
// fewer pods than its policy requires, or has pods with different schedulerNames.
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
		// The message does not contain the number of missing pods: with each new pod it would
		// change, and be reported, for all pods of the group.
		return nil, framework.RefuseForGood(Name,
			fmt.Sprintf("pod group %s has fewer than the %d pods that it needs", g.Name, g.Least))
	}
	return nil, nil
}

// Permit implements framework.Permit: it delays the binding of a pod until enough pods of its
// PodGroup have a node. The delay has no timeout of its own, because it ends with the scheduler's
// attempt to place the group.
func (p Plugin) Permit(_ context.Context, c *framework.Cycle, _ string) (*framework.Status, time.Duration) {
	key, ok := framework.GroupOf(c.Pod.Pod)
	if !ok || p.H.Group(key).Needs() == 0 {
		return nil, 0
	}
	return &framework.Status{Code: framework.Wait, Plugin: Name}, 0
}

// MayHelp implements framework.Requeue. It returns true if the pod's PodGroup has changed or a pod
// of the group got a node. Free resources do not help a pod that only this plugin refused. They
// help another pod of the group, which a different plugin refused; the attempt with that pod then
// includes all pods of the group.
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
