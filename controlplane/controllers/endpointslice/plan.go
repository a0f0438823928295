// Package endpointslice maintains the EndpointSlices of Services. For a Service with a selector
// they contain the addresses of its pods with the conditions ready, serving and terminating. For a
// Service without a selector they mirror Endpoints that a user manages (mirror.go).
package endpointslice

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// ManagedBy is the value of the managed-by label of EndpointSlices of this controller.
const ManagedBy = "endpointslice-controller.k8s.io"

// MaxEndpoints is the maximum number of endpoints in an EndpointSlice.
const MaxEndpoints = 100

// Plan lists the EndpointSlices of one Service to create, to update and to delete.
type Plan struct {
	Create     []*discoveryv1.EndpointSlice
	Update     []*discoveryv1.EndpointSlice
	Delete     []*discoveryv1.EndpointSlice
	HintEvents []HintEvent // Events about topology hints
}

// group identifies a set of endpoints that may be in one EndpointSlice.
type group struct {
	family discoveryv1.AddressType
	ports  string // canonical form of the ports
}

// source describes the slices of a Service or of Endpoints: their owner, metadata and address
// families.
type source struct {
	namespace, name string // name is the Service and the prefix of the slices' names
	owner           metav1.OwnerReference
	labels          map[string]string
	annotations     map[string]string // annotations of the slices; nil leaves their annotations unchanged
	families        []discoveryv1.AddressType
	empty           bool // if true, an address family without endpoints has one empty slice
}

// addresses holds the endpoints that the slices of a source must contain, by group.
type addresses map[group]*content

type content struct {
	ports     []discoveryv1.EndpointPort
	endpoints []discoveryv1.Endpoint
	known     map[string]bool // endpointIdentity of every endpoint of the group
}

// addEndpoint adds endpoint e, with these ports, unless a already contains it.
func (a addresses) addEndpoint(
	family discoveryv1.AddressType, ports []discoveryv1.EndpointPort, e discoveryv1.Endpoint,
) {
	g := group{family, portsKey(ports)}
	if a[g] == nil {
		a[g] = &content{ports: ports, known: map[string]bool{}}
	}
	if who := endpointIdentity(e); !a[g].known[who] {
		a[g].known[who] = true
		a[g].endpoints = append(a[g].endpoints, e)
	}
}

func (a addresses) hasFamily(f discoveryv1.AddressType) bool {
	for g := range a {
		if g.family == f {
			return true
		}
	}
	return false
}

// Reconcile returns the writes after which the slices of a Service match its pods. existing are the
// current slices. Endpoints stay in their slice, so that a change writes as few slices as possible.
func Reconcile(svc *corev1.Service, pods []*corev1.Pod, existing []*discoveryv1.EndpointSlice, nodes Nodes) Plan {
	src, wanted := ofService(svc), addresses{}
	for _, pod := range pods {
		if !Serves(pod) {
			continue
		}
		ports := podPorts(svc, pod)
		for _, family := range src.families {
			if e, ok := podEndpoint(svc, pod, family, nodes.Zone); ok {
				wanted.addEndpoint(family, ports, e)
			}
		}
	}
	var notes []HintEvent
	for _, family := range src.families {
		if !wantsTopologyHints(svc) {
			continue
		}
		if note := wanted.setZoneHints(family, existing, nodes.CPU); note != (HintEvent{}) {
			notes = append(notes, note)
		}
	}
	var owned, foreign []*discoveryv1.EndpointSlice
	for _, s := range existing {
		switch {
		case slices.ContainsFunc(s.OwnerReferences, src.isOwner):
			owned = append(owned, s)
		case s.DeletionTimestamp == nil:
			foreign = append(foreign, s)
		}
	}
	plan := src.planSlices(wanted, owned)
	// Slices with another owner are not reused, because the garbage collector deletes the slices of
	// a previous Service of the same name.
	plan.Delete = append(plan.Delete, foreign...)
	slices.SortFunc(plan.Delete, byName)
	plan.HintEvents = notes
	return plan
}

// isOwner reports whether owner reference ref refers to the owner of src.
func (src *source) isOwner(ref metav1.OwnerReference) bool {
	return ref.UID == src.owner.UID && ref.Kind == src.owner.Kind && ref.APIVersion == src.owner.APIVersion
}

// ofService returns the source that describes the slices of a Service with a selector.
func ofService(svc *corev1.Service) source {
	labels := map[string]string{}
	for k, v := range svc.Labels {
		labels[k] = v
	}
	delete(labels, corev1.IsHeadlessService)
	if svc.Spec.ClusterIP == corev1.ClusterIPNone {
		labels[corev1.IsHeadlessService] = ""
	}
	labels[discoveryv1.LabelServiceName] = svc.Name
	labels[discoveryv1.LabelManagedBy] = ManagedBy
	return source{
		namespace: svc.Namespace, name: svc.Name,
		owner:  *metav1.NewControllerRef(svc, corev1.SchemeGroupVersion.WithKind("Service")),
		labels: labels, families: addressTypes(svc), empty: true,
	}
}

// planSlices returns the writes after which the existing slices contain exactly the wanted
// endpoints.
func (src *source) planSlices(wanted addresses, existing []*discoveryv1.EndpointSlice) Plan {
	byGroup := map[group][]*discoveryv1.EndpointSlice{}
	var plan Plan
	for _, s := range existing {
		g := group{s.AddressType, portsKey(s.Ports)}
		_, used := wanted[g]
		if !used && (!src.empty || wanted.hasFamily(g.family) || !slices.Contains(src.families, g.family)) ||
			s.DeletionTimestamp != nil {
			if s.DeletionTimestamp == nil {
				plan.Delete = append(plan.Delete, s)
			}
			continue
		}
		byGroup[g] = append(byGroup[g], s)
	}
	for _, family := range src.families {
		if src.empty && !wanted.hasFamily(family) {
			src.keepOneEmptySlice(family, byGroup, &plan)
		}
	}
	for g, c := range wanted {
		plan.fillGroup(src, g, c, byGroup[g])
	}
	plan.sortByName()
	plan.reuseDeleted()
	return plan
}

// keepOneEmptySlice adds writes to plan so that an address family without endpoints has exactly one
// slice, which is empty. byGroup holds the existing slices.
func (src *source) keepOneEmptySlice(
	family discoveryv1.AddressType, byGroup map[group][]*discoveryv1.EndpointSlice, plan *Plan,
) {
	var existing []*discoveryv1.EndpointSlice
	for g, list := range byGroup {
		if g.family == family {
			existing = append(existing, list...)
		}
	}
	if len(existing) == 0 {
		plan.Create = append(plan.Create, src.newSlice(family, nil, nil))
		return
	}
	slices.SortFunc(existing, byName)
	plan.Delete = append(plan.Delete, existing[1:]...)
	next := existing[0].DeepCopy()
	next.Endpoints = []discoveryv1.Endpoint{}
	next.Ports = []discoveryv1.EndpointPort{}
	if src.labelSlice(next) || len(existing[0].Endpoints) > 0 || len(existing[0].Ports) > 0 {
		plan.Update = append(plan.Update, next)
	}
}

// fillGroup adds to p the writes for the slices of group g, so that they contain the endpoints in
// c. Existing endpoints stay in their slice or are updated there. New endpoints go to existing
// slices with free capacity, then to new slices.
func (p *Plan) fillGroup(src *source, g group, c *content, existing []*discoveryv1.EndpointSlice) {
	wanted := c.endpoints
	slices.SortFunc(wanted, func(a, b discoveryv1.Endpoint) int {
		return cmp.Compare(endpointIdentity(a), endpointIdentity(b))
	})
	slices.SortFunc(existing, byName)
	missing := map[string]discoveryv1.Endpoint{}
	for _, e := range wanted {
		missing[endpointIdentity(e)] = e
	}
	type draft struct {
		slice   *discoveryv1.EndpointSlice
		changed bool
	}
	drafts := make([]draft, 0, len(existing))
	for _, s := range existing {
		d := draft{slice: s.DeepCopy()}
		d.slice.Endpoints = d.slice.Endpoints[:0]
		for _, old := range s.Endpoints {
			e, ok := missing[endpointIdentity(old)]
			if !ok {
				d.changed = true
				continue
			}
			delete(missing, endpointIdentity(old))
			d.changed = d.changed || !equality.Semantic.DeepEqual(e, old)
			d.slice.Endpoints = append(d.slice.Endpoints, e)
		}
		d.changed = src.labelSlice(d.slice) || d.changed
		drafts = append(drafts, d)
	}
	rest := make([]discoveryv1.Endpoint, 0, len(missing))
	for _, e := range wanted {
		if _, ok := missing[endpointIdentity(e)]; ok {
			rest = append(rest, e)
		}
	}
	for i := range drafts {
		// Fill slices that are written anyway first, then other slices with free capacity.
		if n := min(len(rest), MaxEndpoints-len(drafts[i].slice.Endpoints)); n > 0 &&
			(drafts[i].changed || len(rest) > 0) {
			drafts[i].slice.Endpoints = append(drafts[i].slice.Endpoints, rest[:n]...)
			drafts[i].changed = true
			rest = rest[n:]
		}
	}
	for _, d := range drafts {
		switch {
		case len(d.slice.Endpoints) == 0:
			p.Delete = append(p.Delete, d.slice)
		case d.changed:
			p.Update = append(p.Update, d.slice)
		}
	}
	for len(rest) > 0 {
		n := min(len(rest), MaxEndpoints)
		p.Create = append(p.Create, src.newSlice(g.family, c.ports, slices.Clone(rest[:n])))
		rest = rest[n:]
	}
}

// reuseDeleted replaces a deletion and a creation of the same address family in p by one update.
// This saves a write, and the endpoints are in a slice at all times.
func (p *Plan) reuseDeleted() {
	var create []*discoveryv1.EndpointSlice
	for _, c := range p.Create {
		i := slices.IndexFunc(p.Delete, func(d *discoveryv1.EndpointSlice) bool {
			return d.AddressType == c.AddressType
		})
		if i < 0 {
			create = append(create, c)
			continue
		}
		next := p.Delete[i].DeepCopy()
		next.Endpoints, next.Ports, next.Labels, next.OwnerReferences = c.Endpoints, c.Ports, c.Labels,
			c.OwnerReferences
		if c.Annotations != nil {
			next.Annotations = c.Annotations
		}
		p.Update = append(p.Update, next)
		p.Delete = slices.Delete(p.Delete, i, i+1)
	}
	p.Create = create
}

// sortByName sorts the writes of p by the names of the slices, so that the plan does not depend on
// the order of maps.
func (p *Plan) sortByName() {
	slices.SortFunc(p.Update, byName)
	slices.SortFunc(p.Delete, byName)
	slices.SortStableFunc(p.Create, func(a, b *discoveryv1.EndpointSlice) int {
		return cmp.Or(cmp.Compare(a.AddressType, b.AddressType), cmp.Compare(portsKey(a.Ports), portsKey(b.Ports)))
	})
}

func byName(a, b *discoveryv1.EndpointSlice) int { return cmp.Compare(a.Name, b.Name) }

// endpointIdentity returns a string that identifies an endpoint across updates: the UID of its pod
// and its addresses.
func endpointIdentity(e discoveryv1.Endpoint) string {
	uid := ""
	if e.TargetRef != nil {
		uid = string(e.TargetRef.UID)
	}
	return uid + "/" + strings.Join(e.Addresses, ",")
}

// Serves reports whether pod p belongs in the slices of its Service: p has an address and is not
// terminal. A terminating pod stays in the slices until it is deleted.
func Serves(p *corev1.Pod) bool {
	return !api.IsPodTerminal(p) && (p.Status.PodIP != "" || len(p.Status.PodIPs) > 0)
}

// addressTypes returns the IP families of a Service as address types of slices.
func addressTypes(svc *corev1.Service) []discoveryv1.AddressType {
	var out []discoveryv1.AddressType
	for _, f := range svc.Spec.IPFamilies {
		out = append(out, discoveryv1.AddressType(f))
	}
	if len(out) == 0 {
		ip := svc.Spec.ClusterIP
		if a, err := netip.ParseAddr(ip); err == nil && a.Is6() {
			return []discoveryv1.AddressType{discoveryv1.AddressTypeIPv6}
		}
		return []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4}
	}
	return out
}

// podEndpoint returns the endpoint of pod p for an address family. zones maps nodes to zones. It
// returns false if p has no address of the family.
func podEndpoint(svc *corev1.Service, p *corev1.Pod, family discoveryv1.AddressType, zones map[string]string) (
	discoveryv1.Endpoint, bool,
) {
	address, ok := engine.PodAddress(p, family == discoveryv1.AddressTypeIPv6)
	if !ok {
		return discoveryv1.Endpoint{}, false
	}
	serving := api.IsPodReady(p)
	terminating := p.DeletionTimestamp != nil
	ready := svc.Spec.PublishNotReadyAddresses || serving && !terminating
	e := discoveryv1.Endpoint{
		Addresses:  []string{address},
		Conditions: discoveryv1.EndpointConditions{Ready: &ready, Serving: &serving, Terminating: &terminating},
		TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: p.Namespace, Name: p.Name, UID: p.UID},
	}
	if p.Spec.NodeName != "" {
		e.NodeName = &p.Spec.NodeName
		if zone := zones[p.Spec.NodeName]; zone != "" {
			e.Zone = &zone
		}
	}
	if p.Spec.Hostname != "" && p.Spec.Subdomain == svc.Name && svc.Namespace == p.Namespace {
		e.Hostname = &p.Spec.Hostname
	}
	e.Hints = trafficDistributionHints(svc, &e)
	return e, true
}

// podPorts returns the Service's ports with the port numbers of a pod. It omits a named port that
// the pod does not have.
func podPorts(svc *corev1.Service, p *corev1.Pod) []discoveryv1.EndpointPort {
	out := []discoveryv1.EndpointPort{}
	for i := range svc.Spec.Ports {
		sp := &svc.Spec.Ports[i]
		n, ok := engine.TargetPort(p, sp)
		if !ok {
			continue
		}
		name, protocol := sp.Name, cmp.Or(sp.Protocol, corev1.ProtocolTCP)
		out = append(out, discoveryv1.EndpointPort{Name: &name, Port: &n, Protocol: &protocol,
			AppProtocol: sp.AppProtocol})
	}
	return out
}

// portsKey returns a string that is equal for equal sets of ports.
func portsKey(ports []discoveryv1.EndpointPort) string {
	parts := make([]string, 0, len(ports))
	for _, p := range ports {
		parts = append(parts, fmt.Sprint(ptr.Deref(p.Name, ""), "/", ptr.Deref(p.Protocol, ""), "/",
			ptr.Deref(p.Port, 0), "/", ptr.Deref(p.AppProtocol, "")))
	}
	slices.Sort(parts)
	return strings.Join(parts, " ")
}

// newSlice returns a new EndpointSlice of src with these ports and endpoints.
func (src *source) newSlice(
	family discoveryv1.AddressType, ports []discoveryv1.EndpointPort, endpoints []discoveryv1.Endpoint,
) *discoveryv1.EndpointSlice {
	if ports == nil {
		ports = []discoveryv1.EndpointPort{}
	}
	if endpoints == nil {
		endpoints = []discoveryv1.Endpoint{}
	}
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{Namespace: src.namespace, GenerateName: src.name + "-",
			OwnerReferences: []metav1.OwnerReference{src.owner}},
		AddressType: family,
		Ports:       ports,
		Endpoints:   endpoints,
	}
	src.labelSlice(s)
	return s
}

// labelSlice sets the labels and annotations of the source on a slice. It reports whether any
// changed.
func (src *source) labelSlice(s *discoveryv1.EndpointSlice) bool {
	changed := false
	if !equality.Semantic.DeepEqual(src.labels, s.Labels) {
		s.Labels, changed = maps.Clone(src.labels), true
	}
	if src.annotations != nil && !equality.Semantic.DeepEqual(src.annotations, s.Annotations) {
		s.Annotations, changed = maps.Clone(src.annotations), true
	}
	return changed
}
