package fake

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"

	"keelson.dev/keelson/agent"
)

// Thing is the name of the extended resource of the fake device plugin.
const Thing v1.ResourceName = "example.com/thing"

// Plugins simulates a device plugin with a number of devices of the resource Thing, named 0, 1 and
// so on. It implements agent.Plugins.
type Plugins struct {
	Script
	Clock  Clock
	Number int

	mu       sync.Mutex
	given    map[types.UID]map[string][]string
	asks     map[types.UID]int // number of Allocate calls in progress, by pod
	sick     map[string]bool
	watchers agent.ChangeNotifier
}

var _ agent.Plugins = (*Plugins)(nil)

// Manages reports whether the resource is Thing. It implements agent.Plugins.
func (p *Plugins) Manages(name v1.ResourceName) bool { return name == Thing }

// Allocate allocates the devices that the containers of a pod request. It implements agent.Plugins.
func (p *Plugins) Allocate(ctx context.Context, pod *v1.Pod) error {
	p.addRequests(pod.UID, 1)
	defer p.addRequests(pod.UID, -1)
	if err := p.enterVerb(ctx, p.Clock, "Allocate", pod.Name); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	used := map[string]bool{}
	for uid, by := range p.given {
		for _, ids := range by {
			for _, id := range ids {
				used[id] = uid != pod.UID
			}
		}
	}
	mine := map[string][]string{}
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		q, ok := c.Resources.Limits[Thing]
		if !ok {
			continue
		}
		for i := 0; i < p.Number && int64(len(mine[c.Name])) < q.Value(); i++ {
			if id := fmt.Sprint(i); !used[id] {
				used[id] = true
				mine[c.Name] = append(mine[c.Name], id)
			}
		}
		if int64(len(mine[c.Name])) < q.Value() {
			return fmt.Errorf("too few devices of %s for container %s", Thing, c.Name)
		}
	}
	if p.given == nil {
		p.given = map[types.UID]map[string][]string{}
	}
	p.given[pod.UID] = mine
	p.watchers.Notify()
	return nil
}

func (p *Plugins) addRequests(pod types.UID, n int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asks == nil {
		p.asks = map[types.UID]int{}
	}
	p.asks[pod] += n
}

// Container returns an environment variable THING_ID=yes for each device of the container. It
// implements agent.Plugins.
func (p *Plugins) Container(ctx context.Context, pod *v1.Pod, container string) (out agent.PluginDevices, err error) {
	if err := p.enterVerb(ctx, p.Clock, "Container", pod.Name+"/"+container); err != nil {
		return out, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range p.given[pod.UID][container] {
		out.Envs = append(out.Envs, &cri.KeyValue{Key: "THING_" + id, Value: []byte("yes")})
	}
	return out, nil
}

// Sick sets whether the device with this ID is unhealthy.
func (p *Plugins) Sick(id string, unhealthy bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.sick == nil {
		p.sick = map[string]bool{}
	}
	p.sick[id] = unhealthy
	p.watchers.Notify()
}

// Health returns the health of a pod's devices, as set with Sick. It implements agent.Plugins.
func (p *Plugins) Health(pod types.UID) map[string][]v1.ResourceStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	var out map[string][]v1.ResourceStatus
	for c, ids := range p.given[pod] {
		s := v1.ResourceStatus{Name: Thing}
		for _, id := range ids {
			h := v1.ResourceHealth{ResourceID: v1.ResourceID(id), Health: v1.ResourceHealthStatusHealthy}
			if p.sick[id] {
				h.Health = v1.ResourceHealthStatusUnhealthy
			}
			s.Resources = append(s.Resources, h)
		}
		if out == nil {
			out = map[string][]v1.ResourceStatus{}
		}
		out[c] = append(out[c], s)
	}
	return out
}

// Release releases the devices of a pod. It implements agent.Plugins.
func (p *Plugins) Release(pod types.UID) error {
	if err := p.enterVerb(context.Background(), p.Clock, "Release", string(pod)); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.asks[pod] > 0 {
		return fmt.Errorf("pod %s is being given devices", pod) // the real implementation waits instead
	}
	delete(p.given, pod)
	p.watchers.Notify()
	return nil
}

// Pods returns the UIDs of the pods with devices. It implements agent.Plugins.
func (p *Plugins) Pods() ([]types.UID, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Sorted(maps.Keys(p.given)), nil
}

// Changes returns a channel that is signaled when devices change. It implements agent.Plugins.
func (p *Plugins) Changes(ctx context.Context) <-chan struct{} { return p.watchers.Subscribe(ctx) }
