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

// Devices implements agent.Devices: each entry of a pod has a device for request a and one for request b.
type Devices struct {
	Script
	Clock Clock

	mu       sync.Mutex
	prepared map[types.UID]bool
}

var _ agent.Devices = (*Devices)(nil)

// Prepare implements agent.Devices.
func (d *Devices) Prepare(ctx context.Context, pod *v1.Pod) (agent.ClaimedDevices, error) {
	if len(pod.Spec.ResourceClaims) == 0 {
		return nil, nil
	}
	if err := d.enter(ctx, d.Clock, "Prepare", pod.Name); err != nil {
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
			out[c.Name] = append(out[c.Name], agent.ClaimedDevice{Requests: []string{request}, CDI: []string{"fake.example.com/dev=" + c.Name + "-" + request}})
		}
	}
	return out, nil
}

// Release implements agent.Devices.
func (d *Devices) Release(ctx context.Context, pod *v1.Pod) error {
	if err := d.enter(ctx, d.Clock, "Release", string(pod.UID)); err != nil {
		return err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	delete(d.prepared, pod.UID)
	return nil
}

// Pods implements agent.Devices.
func (d *Devices) Pods() ([]types.UID, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Sorted(maps.Keys(d.prepared)), nil
}
