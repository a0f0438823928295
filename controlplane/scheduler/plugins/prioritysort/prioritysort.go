// Package prioritysort orders the queue: higher priority first, then first come.
package prioritysort

import "keelson.dev/keelson/controlplane/scheduler/framework"

// Name of the plugin.
const Name = "PrioritySort"

// Plugin is the queue's order.
type Plugin struct{}

// Name implements framework.Plugin.
func (Plugin) Name() string { return Name }

// Less implements framework.QueueSort.
func (Plugin) Less(a, b *framework.QueuedPod) bool {
	if a.Priority != b.Priority {
		return a.Priority > b.Priority
	}
	return a.Added.Before(b.Added)
}
