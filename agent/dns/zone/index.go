// Package zone is the cluster's own part of DNS: which names and addresses Services have, by Kubernetes' DNS
// specification (github.com/kubernetes/dns, docs/specification.md, 1.1). An Index is filled with Services and their
// EndpointSlices; Answer is a function of the index and a question. Nothing here knows of sockets or time.
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

// Key names a Service.
type Key struct{ Namespace, Name string }

// Index is what is known of Services, by name and by address. One change costs the Service that it is of: Services keep
// pointers to the objects that the node holds anyway. Safe for concurrent use.
type Index struct {
	mu         sync.RWMutex
	services   map[Key]*entry
	namespaces map[string]int // Services in it
	byAddress  map[netip.Addr][]*entry
	serial     atomic.Uint32 // changes so far; moves on after what it counts

	sync  sync.Mutex // held by Sync and Update
	held  map[Key]heldSlice
	parts map[Key][]*discoveryv1.EndpointSlice // by Service, also where there is none yet; never changed in place
}

// heldSlice is an EndpointSlice as it was seen last.
type heldSlice struct {
	object  *discoveryv1.EndpointSlice
	service string
}

// entry is one Service. It is replaced, never changed, but for what is made of it on demand.
type entry struct {
	key      Key
	service  *v1.Service
	parts    []*discoveryv1.EndpointSlice
	headless bool

	once   sync.Once
	byHost map[string][]place // of Services with many endpoints
}

// New returns an empty index.
func New() *Index {
	return &Index{services: map[Key]*entry{}, namespaces: map[string]int{}, byAddress: map[netip.Addr][]*entry{},
		held: map[Key]heldSlice{}, parts: map[Key][]*discoveryv1.EndpointSlice{}}
}

// Put sets one Service with all of its EndpointSlices, or takes it away when service is nil.
func (x *Index) Put(k Key, service *v1.Service, parts []*discoveryv1.EndpointSlice) {
	var now *entry
	if service != nil {
		now = &entry{key: k, service: service, parts: parts, headless: service.Spec.ClusterIP == v1.ClusterIPNone && service.Spec.Type != v1.ServiceTypeExternalName}
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	old := x.services[k]
	if old == nil && now == nil {
		return
	}
	defer x.serial.Add(1)
	if old != nil {
		old.addresses(func(a netip.Addr) { x.unlink(a, old) })
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
	now.addresses(func(a netip.Addr) {
		if !slices.Contains(x.byAddress[a], now) {
			x.byAddress[a] = append(x.byAddress[a], now)
		}
	})
}

func (x *Index) unlink(a netip.Addr, e *entry) {
	left := slices.DeleteFunc(x.byAddress[a], func(o *entry) bool { return o == e })
	if len(left) == 0 {
		delete(x.byAddress, a)
		return
	}
	x.byAddress[a] = left
}

// Len is how many Services there are.
func (x *Index) Len() int {
	x.mu.RLock()
	defer x.mu.RUnlock()
	return len(x.services)
}

// Sync brings the index to the Services and EndpointSlices given, and says how many Services it had to look into:
// objects are immutable, and what is the same object as before is left alone.
func (x *Index) Sync(services []*v1.Service, parts []*discoveryv1.EndpointSlice) (changed int) {
	x.sync.Lock()
	defer x.sync.Unlock()
	dirty := map[Key]struct{}{}
	present := make(map[Key]struct{}, len(parts))
	for _, p := range parts {
		k := Key{p.Namespace, p.Name}
		present[k] = struct{}{}
		x.part(k, p, dirty)
	}
	if len(present) < len(x.held) {
		for k := range x.held {
			if _, ok := present[k]; !ok {
				x.part(k, nil, dirty)
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
		x.Put(k, all[k], x.parts[k])
	}
	return len(dirty)
}

// Source is where objects are read from.
type Source interface {
	Service(namespace, name string) (*v1.Service, bool)
	EndpointSlice(namespace, name string) (*discoveryv1.EndpointSlice, bool)
}

// Update looks at the Services and EndpointSlices of the names given, and says how many Services it had to look into.
func (x *Index) Update(services, parts []Key, from Source) (changed int) {
	x.sync.Lock()
	defer x.sync.Unlock()
	dirty := make(map[Key]struct{}, len(services))
	for _, k := range services {
		dirty[k] = struct{}{}
	}
	for _, k := range parts {
		p, _ := from.EndpointSlice(k.Namespace, k.Name) // nil when it is gone
		x.part(k, p, dirty)
	}
	for k := range dirty {
		s, _ := from.Service(k.Namespace, k.Name)
		x.Put(k, s, x.parts[k])
	}
	return len(dirty)
}

// part notes what an EndpointSlice is now, nil when it is gone, and the Services that it concerns.
func (x *Index) part(k Key, p *discoveryv1.EndpointSlice, dirty map[Key]struct{}) {
	have, ok := x.held[k]
	if ok && have.object == p {
		return
	}
	if ok {
		of := Key{k.Namespace, have.service}
		left := make([]*discoveryv1.EndpointSlice, 0, len(x.parts[of]))
		for _, other := range x.parts[of] {
			if other != have.object {
				left = append(left, other)
			}
		}
		if x.parts[of] = left; len(left) == 0 {
			delete(x.parts, of)
		}
		delete(x.held, k)
		dirty[of] = struct{}{}
	}
	if p == nil {
		return
	}
	of := Key{k.Namespace, p.Labels[discoveryv1.LabelServiceName]}
	next := append(slices.Clone(x.parts[of]), p)
	slices.SortFunc(next, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
	x.parts[of] = slices.Clip(next)
	x.held[k] = heldSlice{p, of.Name}
	dirty[of] = struct{}{}
}

// addresses calls do with every address that leads back to the Service: its own, or those of the ready endpoints of a
// headless one.
func (e *entry) addresses(do func(netip.Addr)) {
	if !e.headless {
		e.own(do)
		return
	}
	for _, ep := range e.ready {
		for _, a := range ep.Addresses {
			if ip, err := netip.ParseAddr(a); err == nil {
				do(ip)
			}
		}
	}
}

// own are the Service's own addresses.
func (e *entry) own(do func(netip.Addr)) {
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

// ready yields the ready endpoints. Whether a pod counts that is not ready (publishNotReadyAddresses) has been
// judged by who wrote the EndpointSlice.
func (e *entry) ready(do func(*discoveryv1.EndpointSlice, *discoveryv1.Endpoint) bool) {
	for _, p := range e.parts {
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

// many is from how many endpoints on a Service's endpoints are found by a map, which takes memory, and not one by one.
const many = 64

// place is an endpoint with the EndpointSlice that it stands in.
type place struct {
	part     *discoveryv1.EndpointSlice
	endpoint *discoveryv1.Endpoint
}

// host calls do with the ready endpoints of that name.
func (e *entry) host(name string, podNames bool, do func(*discoveryv1.EndpointSlice, *discoveryv1.Endpoint)) {
	total := 0
	for _, p := range e.parts {
		total += len(p.Endpoints)
	}
	if total < many || podNames {
		for p, ep := range e.ready {
			if named(ep, name, podNames) {
				do(p, ep)
			}
		}
		return
	}
	e.once.Do(func() {
		e.byHost = make(map[string][]place, total)
		for p, ep := range e.ready {
			n := hostOf(ep, false)
			e.byHost[n] = append(e.byHost[n], place{p, ep})
		}
	})
	for _, at := range e.byHost[name] {
		do(at.part, at.endpoint)
	}
}

// named says whether an endpoint has the name, without making one.
func named(ep *discoveryv1.Endpoint, name string, podNames bool) bool {
	if podNames || ep.Hostname != nil && *ep.Hostname != "" {
		return hostOf(ep, podNames) == name
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

// hostOf is the name of an endpoint below its Service: its hostname, that of its pod where the Corefile wants so, or
// else its address with dashes.
func hostOf(ep *discoveryv1.Endpoint, podNames bool) string {
	if ep.Hostname != nil && *ep.Hostname != "" {
		return strings.ToLower(*ep.Hostname)
	}
	if podNames && ep.TargetRef != nil && ep.TargetRef.Kind == "Pod" && ep.TargetRef.Name != "" && !strings.Contains(ep.TargetRef.Name, ".") {
		return ep.TargetRef.Name
	}
	if len(ep.Addresses) == 0 {
		return ""
	}
	return strings.NewReplacer(".", "-", ":", "-").Replace(ep.Addresses[0])
}
