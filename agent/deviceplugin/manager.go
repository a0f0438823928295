// Package deviceplugin gives out the devices of device plugins (kubelet's v1beta1 API): it lets plugins register, keeps
// their lists of devices, which the node tells of as extended resources, and asks them for what a container needs to
// see its devices.
//
// Who has which devices is on disk before the first container of a pod is made, and is kept until the pod has ended:
// neither an agent nor a plugin that begins again gives a device to a second pod.
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

// Bounds of what plugins may say.
const (
	maxResources = 64      // names
	maxDevices   = 1 << 14 // of one plugin
	maxID        = 256     // bytes of a device's name
	maxNodes     = 64      // NUMA nodes of a device; more are not told of
	maxList      = 4 << 20 // bytes of one list
	maxAnswer    = 1 << 20 // bytes of any other answer
	maxThings    = 1024    // variables, mounts, devices, annotations and CDI devices of one container, each
	maxText      = 4096    // bytes of a path, or of a plugin's own words
)

// Config says where things are. What is zero has the value that the comment names.
type Config struct {
	Dir          string // kubelet's device-plugins folder, in which plugins find the agent; "" = none do
	Registration string // kubelet's plugins_registry folder; "" = no plugins are looked for
	State        string // folder for records
	Objects      agent.Objects
	Log          *slog.Logger

	AllocateLimit time.Duration // of an Allocate or PreStartContainer: 30 s
	AskLimit      time.Duration // of any other question: 10 s
	Grace         time.Duration // for which the devices of a plugin that went are counted: 5 min
	Patience      time.Duration // for which a pod waits for a plugin that is about to come back: 10 s
}

// Manager implements agent.Plugins.
type Manager struct {
	cfg   Config
	locks keylock.Locks // by pod: of allocations and releases

	mu        sync.Mutex
	loaded    bool
	resources map[string]*pool
	pods      map[types.UID]*record
	damaged   map[types.UID]error // records that cannot be read: which devices they speak of is not known
	reserved  map[types.UID]map[string]map[string]bool
	pending   map[string]*plugin // by resource: the newest that registered, until its first list
	sockets   map[string]*plugin // by registration socket
	run       context.Context    // of Run; nil while it does not run
	serving   sync.WaitGroup
	watchers  agent.Watchers
}

var _ agent.Plugins = (*Manager)(nil)

// pool is the devices of one resource.
type pool struct {
	plugin  *plugin // nil while there is none
	devices map[string]bool
	gone    time.Time // since when there is no plugin
}

// New starts nothing.
func New(cfg Config) *Manager {
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.DiscardHandler)
	}
	for _, d := range []struct {
		to        *time.Duration
		otherwise time.Duration
	}{{&cfg.AllocateLimit, 30 * time.Second}, {&cfg.AskLimit, 10 * time.Second}, {&cfg.Grace, 5 * time.Minute}, {&cfg.Patience, 10 * time.Second}} {
		if *d.to == 0 {
			*d.to = d.otherwise
		}
	}
	return &Manager{cfg: cfg, resources: map[string]*pool{}, pods: map[types.UID]*record{}, damaged: map[types.UID]error{},
		reserved: map[types.UID]map[string]map[string]bool{}, pending: map[string]*plugin{}, sockets: map[string]*plugin{}}
}

// Manages implements agent.Plugins.
func (m *Manager) Manages(name v1.ResourceName) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	return m.resources[string(name)] != nil
}

// Resources are what the node tells of its devices. A plugin that went has none that could be given out; its devices are
// counted for a while, and then there are none: 0 says that there is such a resource, whose plugin is not there.
func (m *Manager) Resources() (capacity, allocatable v1.ResourceList) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	capacity, allocatable = v1.ResourceList{}, v1.ResourceList{}
	for name, p := range m.resources {
		all, healthy := int64(len(p.devices)), int64(0)
		switch {
		case p.plugin != nil:
			healthy = int64(len(p.healthy()))
		case time.Since(p.gone) >= m.cfg.Grace:
			all = 0
		}
		capacity[v1.ResourceName(name)] = *resource.NewQuantity(all, resource.DecimalSI)
		allocatable[v1.ResourceName(name)] = *resource.NewQuantity(healthy, resource.DecimalSI)
	}
	return capacity, allocatable
}

// healthy are the devices that may be given out, in order.
func (p *pool) healthy() []string {
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

// Health implements agent.Plugins.
func (m *Manager) Health(uid types.UID) map[string][]v1.ResourceStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	r := m.pods[uid]
	if r == nil {
		return nil
	}
	out := map[string][]v1.ResourceStatus{}
	for container, has := range r.Containers {
		for _, name := range slices.Sorted(maps.Keys(has)) {
			s := v1.ResourceStatus{Name: v1.ResourceName(name)}
			for _, id := range has[name].IDs {
				s.Resources = append(s.Resources, v1.ResourceHealth{ResourceID: v1.ResourceID(id), Health: m.resources[name].health(id)})
			}
			out[container] = append(out[container], s)
		}
	}
	return out
}

// health of a device is not known while its plugin is not there, nor that of one of which the plugin has stopped to speak.
func (p *pool) health(id string) v1.ResourceHealthStatus {
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

// Given are the devices of a pod's containers, by container and resource.
func (m *Manager) Given(pod types.UID) map[string]map[string][]agent.PluginDevice {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	r := m.pods[pod]
	if r == nil {
		return nil
	}
	out := map[string]map[string][]agent.PluginDevice{}
	for container, has := range r.Containers {
		out[container] = map[string][]agent.PluginDevice{}
		for name, g := range has {
			for _, id := range g.IDs {
				out[container][name] = append(out[container][name], m.resources[name].told(id))
			}
		}
	}
	return out
}

// Allocatable are the devices that may be given out, those that pods have included, by resource.
func (m *Manager) Allocatable() map[string][]agent.PluginDevice {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	out := map[string][]agent.PluginDevice{}
	for name, p := range m.resources {
		for _, id := range p.healthy() {
			out[name] = append(out[name], p.told(id))
		}
	}
	return out
}

// told is a device with what its plugin said of it.
func (p *pool) told(id string) agent.PluginDevice {
	d := agent.PluginDevice{ID: id}
	if p != nil && p.plugin != nil {
		d.Nodes = p.plugin.numa[id]
	}
	return d
}

// Changes implements agent.Plugins.
func (m *Manager) Changes(ctx context.Context) <-chan struct{} { return m.watchers.Changes(ctx) }

// listed takes over what a plugin tells. The first list of a plugin puts it in the place of the one before.
func (m *Manager) listed(p *plugin, devices map[string]bool, numa map[string][]int64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.load()
	r := m.resources[p.resource]
	switch {
	case r == nil:
		r = &pool{}
		m.resources[p.resource] = r
		if err := m.saveNames(); err != nil {
			m.cfg.Log.Error("an agent that begins anew would not know of a plugin", "resource", p.resource, "err", err)
		}
	case r.plugin != nil && r.plugin != p:
		if m.pending[p.resource] != p {
			return // another has registered since
		}
		r.plugin.end()
	}
	if m.pending[p.resource] == p {
		delete(m.pending, p.resource)
	}
	p.numa = numa
	if r.plugin == p && maps.Equal(r.devices, devices) {
		return
	}
	r.plugin, r.devices = p, devices
	m.watchers.Tell()
}

// lost notes that a plugin is no more.
func (m *Manager) lost(p *plugin, why error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.run == nil || m.run.Err() != nil {
		return // it is we who end; the next Run begins with no plugins
	}
	if m.pending[p.resource] == p {
		delete(m.pending, p.resource)
	}
	r := m.resources[p.resource]
	if r == nil || r.plugin != p {
		m.cfg.Log.Warn("a device plugin that registered does not list its devices", "resource", p.resource, "socket", p.endpoint, "err", why)
		return
	}
	m.cfg.Log.Warn("a device plugin is gone: its devices are not given out", "resource", p.resource, "socket", p.endpoint, "err", why)
	r.plugin, r.gone = nil, time.Now()
	time.AfterFunc(m.cfg.Grace, m.again)
	m.watchers.Tell()
}

// anew forgets the plugins of an earlier Run. The lock is held.
func (m *Manager) anew() {
	clear(m.pending)
	clear(m.sockets)
	for _, r := range m.resources {
		if r.plugin != nil {
			r.plugin, r.gone = nil, time.Now()
			time.AfterFunc(m.cfg.Grace, m.again)
		}
	}
	m.watchers.Tell()
}

// again has the node told of anew.
func (m *Manager) again() {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.watchers.Tell()
}

// known says whether one more resource may be told of; the one that has been without a plugin for longest, and that no
// pod has devices of, makes room for it. The lock is held.
func (m *Manager) known(name string) error {
	m.load()
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
		if r.plugin == nil && m.pending[n] == nil && time.Since(r.gone) >= m.cfg.Grace && len(m.used(n)) == 0 &&
			(oldest == "" || r.gone.Before(m.resources[oldest].gone)) {
			oldest = n
		}
	}
	if oldest == "" {
		return fmt.Errorf("a node has %d resources of device plugins at most", maxResources)
	}
	delete(m.resources, oldest)
	return nil
}
