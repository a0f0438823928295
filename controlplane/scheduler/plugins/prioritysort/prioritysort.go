// Package prioritysort is the QueueSort plugin PrioritySort. It orders the active queue by
// descending priority, and pods of equal priority by the time at which they were added.
package prioritysort

import "keelson.dev/keelson/controlplane/scheduler/framework"

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "PrioritySort"

// Plugin orders the scheduling queue by priority, then by the time at which a pod was added.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Less implements framework.QueueSort: the pod with the higher priority comes first. Among equal
// priorities, the pod that was added to the queue earlier comes first.
func (Plugin) Less(a, b *framework.QueuedPod) bool {
	if a.Priority != b.Priority {
		return a.Priority > b.Priority
	}
	return a.Added.Before(b.Added)
}
