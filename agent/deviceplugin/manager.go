// Package deviceplugin manages device plugins (the kubelet's API v1beta1). It accepts their
// registrations, tracks their devices, which the node advertises as extended resources, and
// allocates devices to containers.
//
// An allocation is stored on disk before the first container of a pod is created, and remains until
// the pod has ended. Therefore a device is not allocated to a second pod after a restart of the
// agent or of a plugin.
package deviceplugin

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/agent"
	"keelson.dev/keelson/internal/keylock"
)

// Limits of the data that plugins may send.
const (
	maxResources = 64      // number of resources
	maxDevices   = 1 << 14 // devices of one plugin
	maxID        = 256     // bytes of a device ID
	maxNodes     = 64      // NUMA nodes of a device; further nodes are ignored
	maxList      = 4 << 20 // bytes of one device list
	maxAnswer    = 1 << 20 // bytes of any other response
	maxSettings  = 1024    // variables, mounts, devices, annotations and CDI devices of one container, each
	maxText      = 4096    // bytes of a path or of a plugin's error message
)

// Config is the configuration of a Manager. The comments of durations state the default, which
// replaces zero.
type Config struct {
	Dir          string // kubelet's device-plugins directory with the registration socket; "" = none
	Registration string // kubelet's plugins_registry directory, which is scanned for plugins; "" = none
	State        string // directory for records
	Objects      agent.Objects
	Log          *slog.Logger

	AllocateLimit time.Duration // timeout of Allocate and PreStartContainer: 30 s
	QueryLimit    time.Duration // timeout of other calls: 10 s
	Grace         time.Duration // how long the devices of a disconnected plugin count toward capacity: 5 min
	ReturnWait    time.Duration // how long a pod waits for a plugin to reconnect: 10 s
}

// Manager manages the device plugins of this node and allocates their devices. It implements
// agent.Plugins.
type Manager struct {
	cfg   Config
	locks keylock.Locks // per pod, for allocations and releases

	mu        sync.Mutex
	loaded    bool
	resources map[string]*devicePool
	pods      map[types.UID]*podRecord
	damaged   map[types.UID]error // unreadable records by pod; the devices of these pods are unknown
	reserved  map[types.UID]map[string]map[string]bool
	pending   map[string]*registeredPlugin // newest registration of each resource, until its first device list
	sockets   map[string]*registeredPlugin // by registration socket
	runCtx    context.Context              // context of Run; nil while Run is not active
	serving   sync.WaitGroup
	notifier  agent.ChangeNotifier
}

var _ agent.Plugins = (*Manager)(nil)

// devicePool holds the devices of one resource and the plugin that provides them.
type devicePool struct {
	plugin  *registeredPlugin // nil while no plugin is connected
	devices map[string]bool
	lostAt  time.Time // when the plugin disconnected
}

// New returns a Manager. It starts nothing.
func New(cfg Config) *Manager {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		to        *time.Duration
		otherwise time.Duration
	}{{&cfg.AllocateLimit, 30 * time.Second}, {&cfg.QueryLimit, 10 * time.Second}, {&cfg.Grace, 5 * time.Minute},
		{&cfg.ReturnWait, 10 * time.Second}} {
		if *d.to == 0 {
			*d.to = d.otherwise
		}
	}
	return &Manager{cfg: cfg, resources: map[string]*devicePool{}, pods: map[types.UID]*podRecord{},
		damaged:  map[types.UID]error{},
		reserved: map[types.UID]map[string]map[string]bool{}, pending: map[string]*registeredPlugin{},
		sockets: map[string]*registeredPlugin{}}
}

// Manages reports whether a plugin has registered the resource with this agent process or the
// previous one. It implements agent.Plugins.
func (m *Manager) Manages(name v1.ResourceName) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	return m.resources[string(name)] != nil
}

// Resources returns the extended resources of the node. The devices of a disconnected plugin are
// not allocatable, but count toward capacity for the time Config.Grace. Afterwards the capacity is
// 0, which shows that the resource exists but its plugin is missing.
func (m *Manager) Resources() (capacity, allocatable v1.ResourceList) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	capacity, allocatable = v1.ResourceList{}, v1.ResourceList{}
	for name, p := range m.resources {
		all, healthy := int64(len(p.devices)), int64(0)
		switch {
		case p.plugin != nil:
			healthy = int64(len(p.healthyDevices()))
		case time.Since(p.lostAt) >= m.cfg.Grace:
			all = 0
		}
		capacity[v1.ResourceName(name)] = *resource.NewQuantity(all, resource.DecimalSI)
		allocatable[v1.ResourceName(name)] = *resource.NewQuantity(healthy, resource.DecimalSI)
	}
	return capacity, allocatable
}

// healthyDevices returns the IDs of the devices that may be allocated, sorted.
func (p *devicePool) healthyDevices() []string {
	if p.plugin == nil {
		return nil
	}
	var out []string
	for id, well := range p.devices {
		if well {
			out = append(out, id)
		}
	}
	slices.Sort(out)
	return out
}

// Health returns the health of a pod's devices by container name, or nil if the pod has no devices.
// It implements agent.Plugins.
func (m *Manager) Health(uid types.UID) map[string][]v1.ResourceStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	r := m.pods[uid]
	if r == nil {
		return nil
	}
	out := map[string][]v1.ResourceStatus{}
	for container, has := range r.Containers {
		for _, name := range slices.Sorted(maps.Keys(has)) {
			s := v1.ResourceStatus{Name: v1.ResourceName(name)}
			for _, id := range has[name].IDs {
				s.Resources = append(s.Resources, v1.ResourceHealth{ResourceID: v1.ResourceID(id),
					Health: m.resources[name].deviceHealth(id)})
			}
			out[container] = append(out[container], s)
		}
	}
	return out
}

// deviceHealth returns the health of a device. It is unknown while the plugin is disconnected or if
// the plugin no longer lists the device.
func (p *devicePool) deviceHealth(id string) v1.ResourceHealthStatus {
	if p == nil || p.plugin == nil {
		return v1.ResourceHealthStatusUnknown
	}
	switch well, known := p.devices[id]; {
	case !known:
		return v1.ResourceHealthStatusUnknown
	case well:
		return v1.ResourceHealthStatusHealthy
	default:
		return v1.ResourceHealthStatusUnhealthy
	}
}

// AllocatedDevices returns the devices that are allocated to a pod, by container name and resource
// name.
func (m *Manager) AllocatedDevices(pod types.UID) map[string]map[string][]agent.PluginDevice {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	r := m.pods[pod]
	if r == nil {
		return nil
	}
	out := map[string]map[string][]agent.PluginDevice{}
	for container, has := range r.Containers {
		out[container] = map[string][]agent.PluginDevice{}
		for name, g := range has {
			for _, id := range g.IDs {
				out[container][name] = append(out[container][name], m.resources[name].pluginDevice(id))
			}
		}
	}
	return out
}

// AllocatableDevices returns all devices that can be allocated to pods, by resource name. It
// includes devices that are allocated already.
func (m *Manager) AllocatableDevices() map[string][]agent.PluginDevice {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	out := map[string][]agent.PluginDevice{}
	for name, p := range m.resources {
		for _, id := range p.healthyDevices() {
			out[name] = append(out[name], p.pluginDevice(id))
		}
	}
	return out
}

// pluginDevice returns the device with this ID, with its NUMA nodes.
func (p *devicePool) pluginDevice(id string) agent.PluginDevice {
	d := agent.PluginDevice{ID: id}
	if p != nil && p.plugin != nil {
		d.Nodes = p.plugin.numa[id]
	}
	return d
}

// Changes returns a channel that is signaled when devices, their health or their allocation have
// changed. It implements agent.Plugins.
func (m *Manager) Changes(ctx context.Context) <-chan struct{} { return m.notifier.Subscribe(ctx) }

// setDevices stores the device list of a plugin. After its first list, a newly registered plugin
// replaces the previous plugin of its resource.
func (m *Manager) setDevices(p *registeredPlugin, devices map[string]bool, numa map[string][]int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loadRecords()
	r := m.resources[p.resource]
	switch {
	case r == nil:
		r = &devicePool{}
		m.resources[p.resource] = r
		if err := m.saveNames(); err != nil {
			m.cfg.Log.Error("a resource name could not be recorded: a restarted agent would not know the resource",
				"resource", p.resource, "err", err)
		}
	case r.plugin != nil && r.plugin != p:
		if m.pending[p.resource] != p {
			return // another plugin has registered in the meantime
		}
		r.plugin.stop()
	}
	if m.pending[p.resource] == p {
		delete(m.pending, p.resource)
	}
	p.numa = numa
	if r.plugin == p && maps.Equal(r.devices, devices) {
		return
	}
	r.plugin, r.devices = p, devices
	m.notifier.Notify()
}

// removePlugin records that a plugin has disconnected because of the error cause.
func (m *Manager) removePlugin(plugin *registeredPlugin, cause error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.runCtx == nil || m.runCtx.Err() != nil {
		return // Run is ending; the next Run starts without plugins
	}
	if m.pending[plugin.resource] == plugin {
		delete(m.pending, plugin.resource)
	}
	r := m.resources[plugin.resource]
	if r == nil || r.plugin != plugin {
		m.cfg.Log.Warn("a registered device plugin does not list its devices", "resource", plugin.resource, "socket",
			plugin.endpoint, "err", cause)
		return
	}
	m.cfg.Log.Warn("a device plugin disconnected: its devices are not allocated", "resource", plugin.resource, "socket",
		plugin.endpoint, "err", cause)
	r.plugin, r.lostAt = nil, time.Now()
	time.AfterFunc(m.cfg.Grace, m.notifyChange)
	m.notifier.Notify()
}

// resetPlugins removes the plugins that registered during an earlier call of Run. The caller holds
// the lock.
func (m *Manager) resetPlugins() {
	clear(m.pending)
	clear(m.sockets)
	for _, r := range m.resources {
		if r.plugin != nil {
			r.plugin, r.lostAt = nil, time.Now()
			time.AfterFunc(m.cfg.Grace, m.notifyChange)
		}
	}
	m.notifier.Notify()
}

// notifyChange signals the channels of Changes.
func (m *Manager) notifyChange() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.notifier.Notify()
}

// admitResource returns an error if a new resource name would exceed maxResources. Before that, it
// tries to remove an unused resource, which has no allocated devices and has had no plugin for at
// least Config.Grace. Of several unused resources it removes the one that lost its plugin first.
// The caller holds the lock.
func (m *Manager) admitResource(name string) error {
	m.loadRecords()
	all := len(m.pending)
	for n := range m.pending {
		if m.resources[n] != nil {
			all--
		}
	}
	if m.resources[name] != nil || m.pending[name] != nil || all+len(m.resources) < maxResources {
		return nil
	}
	oldest := ""
	for n, r := range m.resources {
		if r.plugin == nil && m.pending[n] == nil && time.Since(r.lostAt) >= m.cfg.Grace &&
			len(m.usedDevices(n)) == 0 &&
			(oldest == "" || r.lostAt.Before(m.resources[oldest].lostAt)) {
			oldest = n
		}
	}
	if oldest == "" {
		return fmt.Errorf("the maximum of %d device plugin resources per node is reached", maxResources)
	}
	delete(m.resources, oldest)
	return nil
}
