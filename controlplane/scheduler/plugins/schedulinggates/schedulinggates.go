// Package schedulinggates is the PreEnqueue plugin SchedulingGates. It keeps pods with scheduling
// gates out of the active queue.
package schedulinggates

import (
	"context"
	"fmt"
	"strings"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/scheduler/framework"
)

// Name is the name of the plugin in a KubeSchedulerConfiguration.
const Name = "SchedulingGates"

// Plugin keeps pods with spec.schedulingGates out of the active queue.
type Plugin struct{}

// Name implements framework.Plugin: it returns the name of the plugin.
func (Plugin) Name() string { return Name }

// PreEnqueue implements framework.PreEnqueue: it refuses a pod that has scheduling gates.
func (Plugin) PreEnqueue(_ context.Context, pod *v1.Pod) *framework.Status {
	if len(pod.Spec.SchedulingGates) == 0 {
		return nil
	}
	names := make([]string, 0, len(pod.Spec.SchedulingGates))
	for _, g := range pod.Spec.SchedulingGates {
		names = append(names, g.Name)
	}
	return framework.RefuseForGood(Name, fmt.Sprintf("waiting for scheduling gates: [%s]", strings.Join(names, " ")))
}

// MayHelp implements framework.Requeue. It always returns false: only an update of the pod itself,
// for which the queue checks the pod again, can remove a gate.
func (Plugin) MayHelp(framework.Event, *v1.Pod, any) bool { return false }
