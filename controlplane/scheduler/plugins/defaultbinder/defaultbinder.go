// Package defaultbinder is the Bind plugin DefaultBinder, which binds pods through the API.
package defaultbinder

import (
	"context"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "DefaultBinder"

// Plugin binds a pod by creating its Binding in the API.
type Plugin struct{ H *framework.Handle }

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// Bind implements framework.Bind: it binds the pod to the node through Handle.Bind.
func (p Plugin) Bind(ctx context.Context, c *framework.Cycle, node string) *framework.Status {
	if err := p.H.Bind(ctx, c.Pod.Pod, node); err != nil {
		return framework.Fail(Name, err)
	}
	return nil
}
