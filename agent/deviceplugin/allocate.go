package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	api "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/saturate"
)

// errUnavailable is returned if fewer devices of a resource are available than a container
// requests.
var errUnavailable = errors.New("requested number of devices unavailable")

// deviceRequest is the request of one container for devices of one resource.
type deviceRequest struct {
	container string
	resource  string
	count     int64
	reusable  bool // the container exits before the next container starts, which may reuse its devices
}

// deviceRequests returns the requests of a pod's containers for devices, in the order in which the
// containers start. The caller holds the lock.
func (m *Manager) deviceRequests(pod *v1.Pod) []deviceRequest {
	m.loadRecords()
	var out []deviceRequest
	add := func(c *v1.Container, passes bool) {
		var names []string
		for name, q := range c.Resources.Limits {
			if m.resources[string(name)] != nil && q.Sign() > 0 {
				names = append(names, string(name))
			}
		}
		slices.Sort(names)
		for _, name := range names {
			q := c.Resources.Limits[v1.ResourceName(name)]
			out = append(out, deviceRequest{container: c.Name, resource: name, count: saturate.Value(&q),
				reusable: passes})
		}
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		add(c, c.RestartPolicy == nil || *c.RestartPolicy != v1.ContainerRestartPolicyAlways)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], false)
	}
	return out
}

// Allocate allocates the devices that the containers of a pod request: all of them or none. A
// repeated call returns without changes. It implements agent.Plugins.
func (m *Manager) Allocate(ctx context.Context, pod *v1.Pod) error {
	defer m.locks.Lock(string(pod.UID))()
	m.mu.Lock()
	needs, r := m.deviceRequests(pod), m.pods[pod.UID].cloneFor(pod)
	m.mu.Unlock()
	defer m.cancelReservations(pod.UID)
	until, fresh := time.Now().Add(m.cfg.ReturnWait), false
	// by resource: devices of init containers that will have exited before the next container
	// starts
	left := map[string][]string{}
	for _, n := range needs {
		has, ok := r.Containers[n.container][n.resource]
		if !ok {
			var err error
			if has, err = m.allocateDevices(ctx, pod, n, left[n.resource], until); err != nil {
				return err
			}
			if r.Containers[n.container] == nil {
				r.Containers[n.container] = map[string]allocation{}
			}
			r.Containers[n.container][n.resource] = has
			fresh = true
		}
		rest := slices.DeleteFunc(slices.Clone(left[n.resource]), func(id string) bool {
			return slices.Contains(has.IDs, id)
		})
		if n.reusable {
			rest = append(rest, has.IDs...)
		}
		left[n.resource] = rest
	}
	if !fresh {
		return nil
	}
	// The record is saved before the pod may use the devices, so that an allocation is never lost.
	if err := saveRecord(m.recordPath(pod.UID), r); err != nil {
		return fmt.Errorf("recording the devices of pod %s/%s: %w", pod.Namespace, pod.Name, err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.pods[pod.UID] = r
	m.notifier.Notify()
	return nil
}

// cloneFor returns a copy of the pod's record that the caller may modify. If r is nil, it returns
// an empty record for the pod.
func (r *podRecord) cloneFor(pod *v1.Pod) *podRecord {
	out := &podRecord{UID: pod.UID, Namespace: pod.Namespace, Name: pod.Name,
		Containers: map[string]map[string]allocation{}}
	if r != nil {
		for c, has := range r.Containers {
			out.Containers[c] = maps.Clone(has)
		}
	}
	return out
}

// allocateDevices reserves the devices that a container requests, calls Allocate of their plugin,
// and returns the allocation. reusable are devices of earlier containers that this container may
// reuse. It waits for missing devices until the deadline.
func (m *Manager) allocateDevices(
	ctx context.Context, pod *v1.Pod, request deviceRequest, reusable []string, deadline time.Time,
) (g allocation, err error) {
	ids, p, err := m.reserveDevices(ctx, pod.UID, request, reusable, deadline)
	if err != nil {
		return g, err
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.AllocateLimit)
	defer cancel()
	res, err := p.client.Allocate(ctx,
		&api.AllocateRequest{ContainerRequests: []*api.ContainerAllocateRequest{{DevicesIds: ids}}})
	if err != nil {
		return g, p.callError("Allocate", err)
	}
	a, err := parseAllocation(res)
	if err != nil {
		return g, p.callError("Allocate", err)
	}
	return allocation{IDs: ids, Answer: a, Prepare: p.options.GetPreStartRequired()}, nil
}

// callError returns the error of a failed call of a plugin, with the plugin's resource and the name
// of the call.
func (p *registeredPlugin) callError(call string, err error) error {
	return fmt.Errorf("device plugin of %s: %s: %s", p.resource, call, truncateText(err.Error()))
}

// reserveDevices reserves the devices that a container requests, and returns their IDs and their
// plugin. It uses reusable devices first. If devices are missing because their plugin has just
// disconnected or a pod is terminating, it waits for them until the deadline.
func (m *Manager) reserveDevices(
	ctx context.Context, pod types.UID, request deviceRequest, reusable []string, deadline time.Time,
) ([]string, *registeredPlugin, error) {
	waiting, stop := context.WithDeadline(ctx, deadline)
	defer stop()
	var news <-chan struct{}
	for {
		ids, p, err := m.tryReserve(ctx, pod, request, reusable)
		if !errors.Is(err, errUnavailable) || !m.isShortageTransient(request.resource) {
			return ids, p, err
		}
		if news == nil {
			news = m.Changes(waiting)
			continue // changes before the subscription are included in the next attempt
		}
		select {
		case <-news:
		case <-waiting.Done():
			return nil, nil, err
		}
	}
}

func (m *Manager) tryReserve(ctx context.Context, pod types.UID, n deviceRequest, left []string) (
	[]string, *registeredPlugin, error,
) {
	free, p, err := m.freeDevices(pod, n, left)
	if err != nil {
		return nil, nil, err
	}
	ids := left[:min(int64(len(left)), n.count)]
	missing := n.count - int64(len(ids))
	var preferred []string
	if missing > 0 && p.options.GetGetPreferredAllocationAvailable() {
		if preferred, err = p.preferredDevices(ctx, m.cfg.QueryLimit, slices.Concat(ids, free), ids, n.count); err !=
			nil {
			return nil, nil, err
		}
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	used := m.usedDevices(n.resource)
	ids = selectDevices(ids, int(n.count), preferred, slices.DeleteFunc(free, func(id string) bool { return used[id] }))
	if int64(len(ids)) < n.count { // another pod has reserved devices in the meantime
		return nil, nil, fmt.Errorf("%w for %s. Requested: %d, Available: %d", errUnavailable, n.resource,
			n.count, len(ids))
	}
	if m.reserved[pod] == nil {
		m.reserved[pod] = map[string]map[string]bool{}
	}
	if m.reserved[pod][n.resource] == nil {
		m.reserved[pod][n.resource] = map[string]bool{}
	}
	for _, id := range ids {
		m.reserved[pod][n.resource][id] = true
	}
	return ids, p, nil
}

// freeDevices returns the unused healthy devices of the requested resource, and their plugin. It
// returns an error if these and the reusable devices together are fewer than requested.
func (m *Manager) freeDevices(pod types.UID, request deviceRequest, reusable []string) (
	[]string, *registeredPlugin, error,
) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for uid, err := range m.damaged {
		return nil, nil, fmt.Errorf("the devices of pod %s are unknown: delete that pod: %w", uid, err)
	}
	r := m.resources[request.resource]
	if r == nil {
		return nil, nil, fmt.Errorf("%s: %w", request.resource, errPluginMissing)
	}
	used := m.usedDevices(request.resource)
	out := slices.DeleteFunc(r.healthyDevices(), func(id string) bool { return used[id] })
	if have := int64(len(out) + len(reusable)); have < request.count {
		return nil, nil, fmt.Errorf("%w for %s. Requested: %d, Available: %d", errUnavailable,
			request.resource, request.count, have)
	}
	if r.plugin == nil { // the devices in reusable would suffice, but without the plugin their settings are unknown
		return nil, nil, fmt.Errorf("%w for %s: %w", errUnavailable, request.resource, errPluginMissing)
	}
	return out, r.plugin, nil
}

// selectDevices returns chosen, extended with free devices to count devices. It first adds the free
// devices that the plugin prefers, and then other free devices. It is pure.
func selectDevices(chosen []string, count int, preferred, free []string) []string {
	out, open := slices.Clone(chosen), map[string]bool{}
	for _, id := range free {
		open[id] = true
	}
	for _, id := range slices.Concat(preferred, free) {
		if len(out) < count && open[id] {
			out = append(out, id)
			delete(open, id)
		}
	}
	slices.Sort(out)
	return out
}

// preferredDevices asks the plugin which of the available devices it prefers for an allocation of
// count devices that includes must. The allocation need not follow the response.
func (p *registeredPlugin) preferredDevices(
	ctx context.Context, limit time.Duration, available, must []string, count int64,
) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	res, err := p.client.GetPreferredAllocation(ctx,
		&api.PreferredAllocationRequest{ContainerRequests: []*api.ContainerPreferredAllocationRequest{
			// count cannot overflow, because that many devices exist
			{AvailableDeviceIDs: available, MustIncludeDeviceIDs: must, AllocationSize: int32(count)}}})
	if err != nil {
		return nil, p.callError("GetPreferredAllocation", err)
	}
	if len(res.GetContainerResponses()) == 0 {
		return nil, nil
	}
	return res.ContainerResponses[0].GetDeviceIDs(), nil
}

// usedDevices returns the IDs of the devices of a resource that are allocated to pods or reserved
// for them. The caller holds the lock.
func (m *Manager) usedDevices(resource string) map[string]bool {
	out := map[string]bool{}
	for _, r := range m.pods {
		for _, has := range r.Containers {
			for _, id := range has[resource].IDs {
				out[id] = true
			}
		}
	}
	for _, by := range m.reserved {
		maps.Copy(out, by[resource])
	}
	return out
}

// cancelReservations removes the reservations of a pod. If the pod's record was saved, the devices
// in it stay allocated.
func (m *Manager) cancelReservations(pod types.UID) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reserved[pod] != nil {
		delete(m.reserved, pod)
		m.notifier.Notify()
	}
}

// isShortageTransient reports whether missing devices of a resource may soon be available. That is
// the case if their plugin has just disconnected, as during a restart of the plugin or agent. It is
// also the case if a pod that has such devices is terminating.
func (m *Manager) isShortageTransient(resource string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if r := m.resources[resource]; r != nil && r.plugin == nil && time.Since(r.lostAt) < m.cfg.ReturnWait {
		return true
	}
	for uid, r := range m.pods {
		for _, has := range r.Containers {
			if len(has[resource].IDs) == 0 || m.cfg.Objects == nil {
				continue
			}
			if p, ok := m.cfg.Objects.Pod(uid); !ok || p.DeletionTimestamp != nil {
				return true
			}
		}
	}
	return false
}

// Container returns the settings that device plugins add to a container of the pod. It calls
// PreStartContainer of the plugins that require it. If the pod started before a plugin registered
// its resource, it first calls Allocate. It implements agent.Plugins.
func (m *Manager) Container(ctx context.Context, pod *v1.Pod, container string) (out agent.PluginDevices, err error) {
	m.mu.Lock()
	var missing bool
	for _, n := range m.deviceRequests(pod) {
		_, has := m.pods[pod.UID].containerDevices(container)[n.resource]
		missing = missing || n.container == container && !has
	}
	m.mu.Unlock()
	if missing { // the pod started before its resource had a plugin
		if err := m.Allocate(ctx, pod); err != nil {
			return out, err
		}
	}
	m.mu.Lock()
	has := m.pods[pod.UID].containerDevices(container)
	m.mu.Unlock()
	seen := map[string]bool{}
	for _, name := range slices.Sorted(maps.Keys(has)) {
		g := has[name]
		if g.Prepare {
			if err := m.preStart(ctx, name, g.IDs); err != nil {
				return agent.PluginDevices{}, err
			}
		}
		g.Answer.addTo(&out, seen)
	}
	return out, nil
}

func (r *podRecord) containerDevices(container string) map[string]allocation {
	if r == nil {
		return nil
	}
	return r.Containers[container]
}

// preStart calls PreStartContainer of a resource's plugin for the devices of a container.
func (m *Manager) preStart(ctx context.Context, resource string, deviceIDs []string) error {
	m.mu.Lock()
	var p *registeredPlugin
	if r := m.resources[resource]; r != nil {
		p = r.plugin
	}
	m.mu.Unlock()
	if p == nil {
		return fmt.Errorf("preparing devices of %s before the container starts: %w", resource, errPluginMissing)
	}
	ctx, cancel := context.WithTimeout(ctx, m.cfg.AllocateLimit)
	defer cancel()
	if _, err := p.client.PreStartContainer(ctx, &api.PreStartContainerRequest{DevicesIds: deviceIDs}); err != nil {
		return p.callError("PreStartContainer", err)
	}
	return nil
}
