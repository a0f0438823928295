package fake

import (
	"context"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
)

// Devices simulates prepared DRA devices: each claim of a pod has one device for request "a" and
// one for request "b". It implements agent.Devices.
type Devices struct {
	Script
	Clock Clock

	mu       sync.Mutex
	prepared map[types.UID]bool
	sick     bool
	watchers agent.ChangeNotifier
}

var _ agent.Devices = (*Devices)(nil)

// Prepare returns the simulated devices of all claims of a pod. It implements agent.Devices.
func (d *Devices) Prepare(ctx context.Context, pod *v1.Pod) (agent.ClaimedDevices, error) {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil, nil
	}
	if err := d.enterVerb(ctx, d.Clock, "Prepare", pod.Name); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.prepared == nil {
		d.prepared = map[types.UID]bool{}
	}
	d.prepared[pod.UID] = true
	out := agent.ClaimedDevices{}
	for _, c := range pod.Spec.ResourceClaims {
		for _, request := range []string{"a", "b"} {
			out[c.Name] = append(out[c.Name], agent.ClaimedDevice{Requests: []string{request},
				CDI: []string{"fake.example.com/dev=" + c.Name + "-" + request}})
		}
	}
	return out, nil
}

// Release releases the simulated devices of a pod. It implements agent.Devices.
func (d *Devices) Release(ctx context.Context, pod *v1.Pod) error {
	if err := d.enterVerb(ctx, d.Clock, "Release", string(pod.UID)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.prepared, pod.UID)
	return nil
}

// Pods returns the UIDs of the pods with prepared devices. It implements agent.Devices.
func (d *Devices) Pods() ([]types.UID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.prepared)), nil
}

// Health returns the health of a pod's devices, as set with Sicken. It implements agent.Devices.
func (d *Devices) Health(pod *v1.Pod) map[string][]v1.ResourceStatus {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.prepared[pod.UID] {
		return nil
	}
	h := v1.ResourceHealth{Health: v1.ResourceHealthStatusHealthy}
	if d.sick {
		h.Health = v1.ResourceHealthStatusUnhealthy
	}
	out := map[string][]v1.ResourceStatus{}
	for _, c := range pod.Spec.Containers {
		for _, use := range c.Resources.Claims {
			h.ResourceID = v1.ResourceID("fake.example.com/pool/" + use.Name)
			out[c.Name] = append(out[c.Name], v1.ResourceStatus{Name: v1.ResourceName("claim:" + use.Name),
				Resources: []v1.ResourceHealth{h}})
		}
	}
	return out
}

// Sicken makes all devices unhealthy if sick is true, otherwise healthy.
func (d *Devices) Sicken(sick bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.sick = sick
	d.watchers.Notify()
}

// Changes returns a channel that is signaled when Sicken is called. It implements agent.Devices.
func (d *Devices) Changes(ctx context.Context) <-chan struct{} { return d.watchers.Subscribe(ctx) }
