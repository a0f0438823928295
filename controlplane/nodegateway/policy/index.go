// Package policy indexes the NetworkPolicies that select each pod and the addresses of the pods
// that each policy's peers select. The index is updated incrementally as pods, namespaces and
// policies change.
package policy

import (
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Source gives an index access to the existing pods and namespaces, for the members of a new group.
// It must contain every object that was already passed to a method of Index.
type Source interface {
	Pods(namespace string) []*v1.Pod
	Pod(namespace, name string) (*v1.Pod, bool)
	Namespace(name string) (*v1.Namespace, bool)
	Namespaces() []*v1.Namespace
	// Peer returns the pod with only its valid addresses, or nil if it has none.
	Peer(p *v1.Pod) *v1.Pod
}

// Annotation is the annotation of a policy sent to nodes that lists the address group of each peer
// with selectors. The ingress rules' peers come first, then those of egress, separated by commas.
const Annotation = "keelson.dev/address-groups"

// PortAnnotation is the annotation of a policy sent to nodes that lists groups of named ports, as
// PROTOCOL/NAME=GROUP separated by commas. It covers egress rules that allow destinations without
// selectors. Agents of earlier releases ignore it and allow nothing by such a port.
const PortAnnotation = "keelson.dev/named-port-groups"

// The virtual pod that represents the cluster's DNS in policies. Every node answers DNS itself.
const (
	DNSNamespace = metav1.NamespaceSystem
	dnsName      = "(the cluster's DNS)" // not a valid pod name
	dnsLabel     = "k8s-app"
	dnsValue     = "kube-dns"
	dnsPort      = 53
)

// Index holds the NetworkPolicies and the address groups of their peers. It is safe for concurrent
// use.
type Index struct {
	src Source

	mu       sync.Mutex
	policies map[string]map[string]*policy // by namespace and name
	groups   map[string]*group             // by name
	within   map[string]map[string]*group  // groups of one namespace's pods, by namespace and group name
	across   map[string]*group             // groups with a namespace selector, by name
	revision uint64
	dns      *v1.Pod
}

// policy is an indexed NetworkPolicy.
type policy struct {
	sent   *networkingv1.NetworkPolicy
	pods   labels.Selector
	groups []string
}

// New returns an empty index.
func New(src Source) *Index {
	return &Index{
		src: src, policies: make(map[string]map[string]*policy), groups: make(map[string]*group),
		within: make(map[string]map[string]*group), across: make(map[string]*group),
	}
}

// Policy adds or replaces a policy, or deletes it if now is nil. It returns the names of the groups
// that were created and deleted. A created group may have existed before under the same name.
func (x *Index) Policy(namespace, name string, now *networkingv1.NetworkPolicy) (made, gone []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	old := x.policies[namespace][name]
	if now == nil {
		delete(x.policies[namespace], name)
		if len(x.policies[namespace]) == 0 {
			delete(x.policies, namespace)
		}
	} else {
		p := &policy{pods: selector(&now.Spec.PodSelector)}
		ports := portsOf(now)
		peers := peersOf(now)
		for _, port := range ports {
			peers = append(peers, peer{namespaces: labels.Everything(), pods: labels.Everything(), port: port})
		}
		for _, s := range peers {
			g, fresh := x.use(s)
			if p.groups = append(p.groups, g); fresh {
				made = append(made, g)
			}
		}
		p.sent = annotated(now, p.groups, ports)
		if x.policies[namespace] == nil {
			x.policies[namespace] = make(map[string]*policy)
		}
		x.policies[namespace][name] = p
	}
	if old != nil {
		for _, g := range old.groups { // after the new groups are in use, so that common groups stay
			if x.leave(g) {
				gone = append(gone, g)
			}
		}
	}
	return made, gone
}

// Selecting returns the sorted names of the policies in the pod's namespace that select the pod.
// For a pod with host network it returns none.
func (x *Index) Selecting(p *v1.Pod) []string {
	if p.Spec.HostNetwork {
		return nil
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	var names []string
	for name, policy := range x.policies[p.Namespace] {
		if policy.pods.Matches(labels.Set(p.Labels)) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// Sent returns a policy in the form in which nodes get it.
func (x *Index) Sent(namespace, name string) (*networkingv1.NetworkPolicy, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.policies[namespace][name]
	if p == nil {
		return nil, false
	}
	return p.sent, true
}

// Groups returns the names of a policy's groups.
func (x *Index) Groups(namespace, name string) []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.policies[namespace][name]
	if p == nil {
		return nil
	}
	return p.groups
}

// Group returns an address group in the form in which nodes get it: addresses of pods, by their
// named ports.
func (x *Index) Group(name string) (*v1.Endpoints, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.groups[name]
	if g == nil {
		return nil, false
	}
	return g.endpoints(), true
}

// Pod handles the creation, change or deletion of a pod and returns the names of the changed
// groups.
func (x *Index) Pod(old, now *v1.Pod) (changed []string) {
	if old != nil && now != nil && sameMember(old, now) {
		return nil
	}
	any := now
	if any == nil {
		any = old
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.pod(any.Namespace, any.Name, now)
}

// Rejudge evaluates Source.Peer again for a pod, after a change outside the pod. It returns the
// names of the changed groups.
func (x *Index) Rejudge(namespace, name string) (changed []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p, ok := x.src.Pod(namespace, name) // under the lock, so that a concurrently deleted pod is not added again
	if !ok {
		return nil
	}
	return x.pod(namespace, name, p)
}

// member returns the group member of a pod, or nil if no peer can select it.
func (x *Index) member(p *v1.Pod) *member {
	if p != x.dns {
		p = x.src.Peer(p)
	}
	if p == nil {
		return nil
	}
	return memberOf(p)
}

// pod updates all groups for one pod; now is nil after its deletion. The lock must be held.
func (x *Index) pod(namespace, name string, now *v1.Pod) (changed []string) {
	var m *member
	if now != nil {
		m = x.member(now)
	}
	look := func(g *group) {
		if g.means(now, m) {
			if g.put(namespace, name, m) {
				changed = append(changed, x.touch(g))
			}
		} else if g.remove(namespace, name) {
			changed = append(changed, x.touch(g))
		}
	}
	for _, g := range x.within[namespace] {
		look(g)
	}
	if len(x.across) == 0 {
		return changed
	}
	ns, ok := x.src.Namespace(namespace)
	for _, g := range x.across {
		if ok && g.namespaces.Matches(labels.Set(ns.Labels)) {
			look(g)
		} else if g.remove(namespace, name) {
			changed = append(changed, x.touch(g))
		}
	}
	return changed
}

// Namespace handles the creation, change or deletion of a namespace and returns the names of the
// changed groups.
func (x *Index) Namespace(old, now *v1.Namespace) (changed []string) {
	if old != nil && now != nil && maps.Equal(old.Labels, now.Labels) {
		return nil
	}
	any := now
	if any == nil {
		any = old
	}
	x.mu.Lock()
	defer x.mu.Unlock()
	for _, g := range x.across {
		before := len(g.members[any.Name]) > 0
		delete(g.members, any.Name)
		if now != nil && g.namespaces.Matches(labels.Set(now.Labels)) {
			x.fill(g, now.Name)
		}
		if before || len(g.members[any.Name]) > 0 {
			changed = append(changed, x.touch(g))
		}
	}
	return changed
}

// DNS sets the addresses at which nodes answer cluster DNS and returns the names of the changed
// groups.
func (x *Index) DNS(addresses []string) (changed []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: DNSNamespace, Name: dnsName, Labels: map[string]string{dnsLabel: dnsValue}}}
	p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{
		{Name: "dns", ContainerPort: dnsPort, Protocol: v1.ProtocolUDP}, {Name: "dns-tcp", ContainerPort: dnsPort, Protocol: v1.ProtocolTCP}}}}
	for _, a := range addresses {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: a})
	}
	x.dns = p
	return x.pod(DNSNamespace, dnsName, p)
}

// use adds a reference to the group of a peer and returns its name. fresh is true if the group was
// created. The lock must be held.
func (x *Index) use(s peer) (name string, fresh bool) {
	name = s.name()
	g := x.groups[name]
	if fresh = g == nil; fresh {
		g = &group{name: name, peer: s, members: make(map[string]map[string]*member)}
		x.groups[name] = g
		if s.namespaces == nil {
			if x.within[s.namespace] == nil {
				x.within[s.namespace] = make(map[string]*group)
			}
			x.within[s.namespace][name] = g
			x.fill(g, s.namespace)
		} else {
			x.across[name] = g
			for _, ns := range x.src.Namespaces() {
				if s.namespaces.Matches(labels.Set(ns.Labels)) {
					x.fill(g, ns.Name)
				}
			}
		}
		x.touch(g)
	}
	g.users++
	return name, fresh
}

// leave drops a reference to a group and reports whether the group was deleted. The lock must be
// held.
func (x *Index) leave(name string) bool {
	g := x.groups[name]
	if g.users--; g.users > 0 {
		return false
	}
	delete(x.groups, name)
	delete(x.across, name)
	delete(x.within[g.namespace], name)
	if len(x.within[g.namespace]) == 0 {
		delete(x.within, g.namespace)
	}
	return true
}

// fill adds the pods of a namespace that a group selects. The lock must be held.
func (x *Index) fill(g *group, namespace string) {
	pods := x.src.Pods(namespace)
	if namespace == DNSNamespace && x.dns != nil {
		pods = append(slices.Clone(pods), x.dns)
	}
	for _, p := range pods {
		if m := x.member(p); g.means(p, m) {
			g.put(namespace, p.Name, m)
		}
	}
}

// touch gives a changed group a new revision and returns its name. The lock must be held.
func (x *Index) touch(g *group) string {
	x.revision++
	g.revision, g.built = x.revision, nil
	return g.name
}
