package node

import (
	"context"
	"errors"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/agent/pod"
	"keelson.dev/keelson/internal/saturate"
)

// tiers keeps the runtime's idea of what pods are worth in step with the pods of the node.
type tiers struct {
	runtime agent.TieredRuntime
	objects agent.Objects
	limits  func() v1.ResourceList // of all pods together
}

// tiersEvery is how often limits are set without cause: somebody may have changed them.
const tiersEvery = time.Minute

// run works until ctx ends or a limit cannot be set.
func (t *tiers) run(ctx context.Context) error {
	tick := time.NewTicker(tiersEvery)
	defer tick.Stop()
	changes := t.objects.Changes(ctx)
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-t.objects.Synced():
	}
	for {
		if err := t.runtime.SetTiers(ctx, tiersOf(t.objects.Pods(), t.limits(), allPIDs())); err != nil {
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
					return errors.New("the view of the cluster ended")
				}
				_, relevant = kinds["Pod"]
			}
		}
	}
}

// tiersOf is what the pods are worth. Pods that have ended count for nothing. Pure.
func tiersOf(pods []*v1.Pod, limits v1.ResourceList, pids int64) agent.Tiers {
	out := agent.Tiers{CPU: saturate.MilliValue(limits.Cpu()), Memory: saturate.Value(limits.Memory()), PIDs: pids}
	for _, p := range pods {
		if p.Status.Phase != v1.PodSucceeded && p.Status.Phase != v1.PodFailed && pod.QOS(p) == v1.PodQOSBurstable {
			out.Burstable = saturate.Add(out.Burstable, pod.CPURequest(p))
		}
	}
	return out
}
