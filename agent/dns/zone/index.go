// Package zone implements the cluster's DNS zone: the names and addresses of Services according to
// the Kubernetes DNS specification (github.com/kubernetes/dns, docs/specification.md, 1.1). An
// Index is filled with Services and their EndpointSlices. Answer is a function of the index and a
// question. The package uses neither sockets nor time.
package zone

import (
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	v1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
)

// Key identifies a Service or an EndpointSlice.
type Key struct{ Namespace, Name string }

// Index indexes Services by name and by address. The cost of a change depends only on the changed
// Service. The index refers to the caller's objects and copies none. It is safe for concurrent use.
type Index struct {
	mu         sync.RWMutex
	services   map[Key]*serviceEntry
	namespaces map[string]int // namespace → number of Services
	byAddress  map[netip.Addr][]*serviceEntry
	serial     atomic.Uint32 // number of changes; incremented after each change

	sync       sync.Mutex // held by Sync and Update
	heldSlices map[Key]heldSlice
	// by Service, even if the Service does not exist yet; slices are never modified in place
	slicesByService map[Key][]*discoveryv1.EndpointSlice
}

// heldSlice is the last state of an EndpointSlice that Sync or Update received.
type heldSlice struct {
	object  *discoveryv1.EndpointSlice
	service string
}

// serviceEntry is one Service in the index, with its EndpointSlices. It is immutable except for
// byHost, which is built on demand.
type serviceEntry struct {
	key            Key
	service        *v1.Service
	endpointSlices []*discoveryv1.EndpointSlice
	headless       bool

	once   sync.Once
	byHost map[string][]endpointRef // only for Services with many endpoints
}

// New returns an empty index.
func New() *Index {
	return &Index{services: map[Key]*serviceEntry{}, namespaces: map[string]int{},
		byAddress:  map[netip.Addr][]*serviceEntry{},
		heldSlices: map[Key]heldSlice{}, slicesByService: map[Key][]*discoveryv1.EndpointSlice{}}
}

// SetService sets a Service with the key k and all of its EndpointSlices, parts. If service is nil,
// it removes the Service.
func (x *Index) SetService(k Key, service *v1.Service, parts []*discoveryv1.EndpointSlice) {
	var now *serviceEntry
	if service != nil {
		now = &serviceEntry{key: k, service: service, endpointSlices: parts,
			headless: service.Spec.ClusterIP == v1.ClusterIPNone && service.Spec.Type != v1.ServiceTypeExternalName}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	old := x.services[k]
	if old == nil && now == nil {
		return
	}
	defer x.serial.Add(1)
	if old != nil {
		old.forEachAddress(func(a netip.Addr) { x.removeAddress(a, old) })
	}
	if now == nil {
		delete(x.services, k)
		if x.namespaces[k.Namespace]--; x.namespaces[k.Namespace] == 0 {
			delete(x.namespaces, k.Namespace)
		}
		return
	}
	if old == nil {
		x.namespaces[k.Namespace]++
	}
	x.services[k] = now
	now.forEachAddress(func(a netip.Addr) {
		if !slices.Contains(x.byAddress[a], now) {
			x.byAddress[a] = append(x.byAddress[a], now)
		}
	})
}

func (x *Index) removeAddress(a netip.Addr, e *serviceEntry) {
	left := slices.DeleteFunc(x.byAddress[a], func(o *serviceEntry) bool { return o == e })
	if len(left) == 0 {
		delete(x.byAddress, a)
		return
	}
	x.byAddress[a] = left
}

// Len returns the number of Services in the index.
func (x *Index) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.services)
}

// Sync replaces the content of the index with the given Services and EndpointSlices. It returns the
// number of Services that were updated. An object with an unchanged pointer is skipped, because
// objects must never be modified.
func (x *Index) Sync(services []*v1.Service, parts []*discoveryv1.EndpointSlice) (changed int) {
	x.sync.Lock()
	defer x.sync.Unlock()
	dirty := map[Key]struct{}{}
	present := make(map[Key]struct{}, len(parts))
	for _, p := range parts {
		k := Key{p.Namespace, p.Name}
		present[k] = struct{}{}
		x.updateSlice(k, p, dirty)
	}
	if len(present) < len(x.heldSlices) {
		for k := range x.heldSlices {
			if _, ok := present[k]; !ok {
				x.updateSlice(k, nil, dirty)
			}
		}
	}
	all := make(map[Key]*v1.Service, len(services))
	for _, s := range services {
		all[Key{s.Namespace, s.Name}] = s
	}
	x.mu.RLock()
	for k, s := range all {
		if have := x.services[k]; have == nil || have.service != s {
			dirty[k] = struct{}{}
		}
	}
	for k := range x.services {
		if all[k] == nil {
			dirty[k] = struct{}{}
		}
	}
	x.mu.RUnlock()
	for k := range dirty {
		x.SetService(k, all[k], x.slicesByService[k])
	}
	return len(dirty)
}

// Source provides the current Services and EndpointSlices.
type Source interface {
	Service(namespace, name string) (*v1.Service, bool)
	EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool)
}

// Update reads the Services and EndpointSlices with the given keys from source, and returns the
// number of Services that were updated.
func (x *Index) Update(serviceKeys, sliceKeys []Key, source Source) (changed int) {
	x.sync.Lock()
	defer x.sync.Unlock()
	dirty := make(map[Key]struct{}, len(serviceKeys))
	for _, k := range serviceKeys {
		dirty[k] = struct{}{}
	}
	for _, k := range sliceKeys {
		p, _ := source.EndpointSlice(k.Namespace, k.Name) // nil if it was deleted
		x.updateSlice(k, p, dirty)
	}
	for k := range dirty {
		s, _ := source.Service(k.Namespace, k.Name)
		x.SetService(k, s, x.slicesByService[k])
	}
	return len(dirty)
}

// updateSlice records p as the current state of the EndpointSlice with the key k; nil means
// deleted. It adds the affected Services to dirty.
func (x *Index) updateSlice(k Key, p *discoveryv1.EndpointSlice, dirty map[Key]struct{}) {
	have, ok := x.heldSlices[k]
	if ok && have.object == p {
		return
	}
	if ok {
		of := Key{k.Namespace, have.service}
		left := make([]*discoveryv1.EndpointSlice, 0, len(x.slicesByService[of]))
		for _, other := range x.slicesByService[of] {
			if other != have.object {
				left = append(left, other)
			}
		}
		if x.slicesByService[of] = left; len(left) == 0 {
			delete(x.slicesByService, of)
		}
		delete(x.heldSlices, k)
		dirty[of] = struct{}{}
	}
	if p == nil {
		return
	}
	of := Key{k.Namespace, p.Labels[discoveryv1.LabelServiceName]}
	next := append(slices.Clone(x.slicesByService[of]), p)
	slices.SortFunc(next, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	x.slicesByService[of] = slices.Clip(next)
	x.heldSlices[k] = heldSlice{p, of.Name}
	dirty[of] = struct{}{}
}

// forEachAddress calls do for every address that has a PTR record for the Service: its cluster IPs,
// or the ready endpoints of a headless Service.
func (e *serviceEntry) forEachAddress(do func(netip.Addr)) {
	if !e.headless {
		e.forEachClusterIP(do)
		return
	}
	for _, ep := range e.readyEndpoints {
		for _, a := range ep.Addresses {
			if ip, err := netip.ParseAddr(a); err == nil {
				do(ip)
			}
		}
	}
}

// forEachClusterIP calls do for each cluster IP of the Service.
func (e *serviceEntry) forEachClusterIP(do func(netip.Addr)) {
	s := &e.service.Spec
	if s.Type == v1.ServiceTypeExternalName {
		return
	}
	if len(s.ClusterIPs) == 0 {
		if ip, err := netip.ParseAddr(s.ClusterIP); err == nil {
			do(ip)
		}
		return
	}
	for _, a := range s.ClusterIPs {
		if ip, err := netip.ParseAddr(a); err == nil {
			do(ip)
		}
	}
}

// readyEndpoints is an iterator over the ready endpoints of the Service. It calls do until do
// returns false. The EndpointSlice controller has already applied publishNotReadyAddresses.
func (e *serviceEntry) readyEndpoints(do func(*discoveryv1.EndpointSlice, *discoveryv1.Endpoint) bool) {
	for _, p := range e.endpointSlices {
		if p.AddressType == discoveryv1.AddressTypeFQDN {
			continue
		}
		for i := range p.Endpoints {
			if r := p.Endpoints[i].Conditions.Ready; r != nil && !*r {
				continue
			}
			if !do(p, &p.Endpoints[i]) {
				return
			}
		}
	}
}

// hostMapThreshold is the number of endpoints from which the host names of a Service are looked up
// in a map instead of linearly. The map costs memory.
const hostMapThreshold = 64

// endpointRef is an endpoint and the EndpointSlice that contains it.
type endpointRef struct {
	slice    *discoveryv1.EndpointSlice
	endpoint *discoveryv1.Endpoint
}

// forEachHost calls do for the ready endpoints with the given host name.
func (e *serviceEntry) forEachHost(
	name string, podNames bool, do func(*discoveryv1.EndpointSlice, *discoveryv1.Endpoint),
) {
	total := 0
	for _, p := range e.endpointSlices {
		total += len(p.Endpoints)
	}
	if total < hostMapThreshold || podNames {
		for p, ep := range e.readyEndpoints {
			if hasHostName(ep, name, podNames) {
				do(p, ep)
			}
		}
		return
	}
	e.once.Do(func() {
		e.byHost = make(map[string][]endpointRef, total)
		for p, ep := range e.readyEndpoints {
			n := endpointHostName(ep, false)
			e.byHost[n] = append(e.byHost[n], endpointRef{p, ep})
		}
	})
	for _, at := range e.byHost[name] {
		do(at.slice, at.endpoint)
	}
}

// hasHostName reports whether name is the endpointHostName of an endpoint. It allocates no memory.
func hasHostName(ep *discoveryv1.Endpoint, name string, podNames bool) bool {
	if podNames || ep.Hostname != nil && *ep.Hostname != "" {
		return endpointHostName(ep, podNames) == name
	}
	if len(ep.Addresses) == 0 || len(ep.Addresses[0]) != len(name) {
		return false
	}
	for i, c := range []byte(ep.Addresses[0]) {
		if c == '.' || c == ':' {
			c = '-'
		}
		if c != name[i] {
			return false
		}
	}
	return true
}

// endpointHostName returns the name of an endpoint below its Service. This is its hostname, or the
// name of its pod if podNames is set, or its address with dashes.
func endpointHostName(ep *discoveryv1.Endpoint, podNames bool) string {
	if ep.Hostname != nil && *ep.Hostname != "" {
		return strings.ToLower(*ep.Hostname)
	}
	if podNames && ep.TargetRef != nil && ep.TargetRef.Kind == "Pod" && ep.TargetRef.Name != "" &&
		!strings.Contains(ep.TargetRef.Name, ".") {
		return ep.TargetRef.Name
	}
	if len(ep.Addresses) == 0 {
		return ""
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(ep.Addresses[0])
}
