package node

import (
	"context"
	"errors"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod/lifecycle"
	"keelson.dev/keelson/internal/saturate"
)

// tierUpdater sets the cgroup limits of all pods together, and the CPU weights of the QoS classes,
// when pods change.
type tierUpdater struct {
	runtime agent.TieredRuntime
	objects agent.Objects
	limits  func() v1.ResourceList // returns the limits of all pods together
}

// tierInterval is how often the cgroup limits are set without a change, in case another program
// changed them.
const tierInterval = time.Minute

// updateTiers sets the cgroup limits and weights at each change of pods and at intervals, until ctx
// ends or a limit cannot be set.
func (t *tierUpdater) updateTiers(ctx context.Context) error {
	tick := time.NewTicker(tierInterval)
	defer tick.Stop()
	changes := t.objects.Changes(ctx)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.objects.Synced():
	}
	for {
		if err := t.runtime.SetTiers(ctx, podTiers(t.objects.Pods(), t.limits(), allPIDs())); err != nil {
			return err
		}
		for relevant := false; !relevant; {
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-tick.C:
				relevant = true
			case kinds, ok := <-changes:
				if !ok {
					return errors.New("the stream of changes ended")
				}
				_, relevant = kinds["Pod"]
			}
		}
	}
}

// podTiers returns the cgroup limits and CPU weights for the pods. Pods that have ended do not
// count. It is pure.
func podTiers(pods []*v1.Pod, limits v1.ResourceList, pids int64) agent.Tiers {
	out := agent.Tiers{CPU: saturate.MilliValue(limits.Cpu()), Memory: saturate.Value(limits.Memory()), PIDs: pids}
	for _, p := range pods {
		if !agent.IsTerminalPhase(p.Status.Phase) && lifecycle.QOS(p) == v1.PodQOSBurstable {
			out.Burstable = saturate.Add(out.Burstable, lifecycle.CPURequest(p))
		}
	}
	return out
}
