// Package policy indexes which NetworkPolicies select each pod, and the addresses of the pods that
// each policy's peers select. The index is updated incrementally when pods, namespaces and policies
// change.
package policy

import (
	"cmp"
	"maps"
	"slices"
	"sync"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
)

// Source gives an Index access to the existing pods and namespaces, for the members of a new group.
// It must contain every object that was already passed to a method of Index.
type Source interface {
	Pods(namespace string) []*v1.Pod
	Pod(namespace, name string) (*v1.Pod, bool)
	Namespace(name string) (*v1.Namespace, bool)
	Namespaces() []*v1.Namespace
	// Peer returns the pod with only its valid addresses, or nil if it has none.
	Peer(p *v1.Pod) *v1.Pod
}

// Annotation is the annotation, of a policy that is sent to nodes, with the name of the address
// group of each peer with selectors. The names are separated by commas, those of the ingress rules'
// peers first.
const Annotation = "keelson.dev/address-groups"

// PortAnnotation is the annotation, of a policy that is sent to nodes, with the address groups of
// named ports, as PROTOCOL/NAME=GROUP separated by commas. It contains the ports of egress rules
// that allow destinations without selectors. Agents of earlier releases ignore it and allow nothing
// by such a port.
const PortAnnotation = "keelson.dev/named-port-groups"

// The virtual pod that represents the cluster's DNS in policies. Every node serves DNS itself.
const (
	DNSNamespace = metav1.NamespaceSystem
	dnsName      = "(the cluster's DNS)" // not a valid pod name
	dnsLabel     = "k8s-app"
	dnsValue     = "kube-dns"
	dnsPort      = 53
)

// Index contains the NetworkPolicies and the address groups of their peers. It is safe for
// concurrent use.
type Index struct {
	source Source

	mu              sync.Mutex
	policies        map[string]map[string]*policy // by namespace, then by name
	groups          map[string]*group             // by name
	namespaceGroups map[string]map[string]*group  // groups with pods of one namespace, by namespace and group name
	selectorGroups  map[string]*group             // groups with a namespace selector, by name
	revision        uint64
	dns             *v1.Pod
}

// policy is an indexed NetworkPolicy.
type policy struct {
	sent        *networkingv1.NetworkPolicy
	podSelector labels.Selector
	groups      []string
}

// New returns an empty index. src provides the pods and namespaces.
func New(src Source) *Index {
	return &Index{
		source: src, policies: make(map[string]map[string]*policy), groups: make(map[string]*group),
		namespaceGroups: make(map[string]map[string]*group), selectorGroups: make(map[string]*group),
	}
}

// SetPolicy adds or replaces the policy with a name, or deletes it if current is nil. It returns
// the names of the groups that were created and deleted. A group with the name of a created group
// may have existed before.
func (i *Index) SetPolicy(namespace, name string, current *networkingv1.NetworkPolicy) (created, deleted []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	old := i.policies[namespace][name]
	if current == nil {
		delete(i.policies[namespace], name)
		if len(i.policies[namespace]) == 0 {
			delete(i.policies, namespace)
		}
	} else {
		indexed := &policy{podSelector: parseSelector(&current.Spec.PodSelector)}
		ports := egressPorts(current)
		peers := policyPeers(current)
		for _, port := range ports {
			peers = append(peers, peer{namespaces: labels.Everything(), pods: labels.Everything(), port: port})
		}
		for _, s := range peers {
			g, fresh := i.addGroupUser(s)
			if indexed.groups = append(indexed.groups, g); fresh {
				created = append(created, g)
			}
		}
		indexed.sent = annotatePolicy(current, indexed.groups, ports)
		if i.policies[namespace] == nil {
			i.policies[namespace] = make(map[string]*policy)
		}
		i.policies[namespace][name] = indexed
	}
	if old != nil {
		for _, g := range old.groups { // after the new groups are referenced, so that common groups are not deleted
			if i.removeGroupUser(g) {
				deleted = append(deleted, g)
			}
		}
	}
	return created, deleted
}

// PoliciesOfPod returns the sorted names of the policies in the pod's namespace that select the
// pod. It returns none for a pod with host network.
func (i *Index) PoliciesOfPod(pod *v1.Pod) []string {
	if pod.Spec.HostNetwork {
		return nil
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	var names []string
	for name, policy := range i.policies[pod.Namespace] {
		if policy.podSelector.Matches(labels.Set(pod.Labels)) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

// SentPolicy returns the policy with a name as it is sent to nodes, with annotations.
func (i *Index) SentPolicy(namespace, name string) (*networkingv1.NetworkPolicy, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	p := i.policies[namespace][name]
	if p == nil {
		return nil, false
	}
	return p.sent, true
}

// GroupsOfPolicy returns the names of the address groups of the policy with a name.
func (i *Index) GroupsOfPolicy(namespace, name string) []string {
	i.mu.Lock()
	defer i.mu.Unlock()
	p := i.policies[namespace][name]
	if p == nil {
		return nil
	}
	return p.groups
}

// Group returns the address group with a name as it is sent to nodes: addresses of pods, by their
// named ports.
func (i *Index) Group(name string) (*v1.Endpoints, bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	g := i.groups[name]
	if g == nil {
		return nil, false
	}
	return g.buildEndpoints(), true
}

// UpdatePod updates the groups after the creation, change or deletion of a pod and returns the
// names of the changed groups. old is nil on creation, current on deletion.
func (i *Index) UpdatePod(old, current *v1.Pod) (changed []string) {
	if old != nil && current != nil && equalsForGroups(old, current) {
		return nil
	}
	pod := cmp.Or(current, old)
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.updateGroups(pod.Namespace, pod.Name, current)
}

// ReevaluatePod calls Source.Peer again for a pod whose valid addresses may have changed, and
// updates the groups. It returns the names of the changed groups.
func (i *Index) ReevaluatePod(namespace, name string) (changed []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	p, ok := i.source.Pod(namespace, name) // under the lock: a deleted pod is not added again
	if !ok {
		return nil
	}
	return i.updateGroups(namespace, name, p)
}

// buildPodMember returns the group member for a pod, or nil if no peer can select it.
func (i *Index) buildPodMember(pod *v1.Pod) *member {
	if pod != i.dns {
		pod = i.source.Peer(pod)
	}
	if pod == nil {
		return nil
	}
	return buildMember(pod)
}

// updateGroups adds the pod with a name to all groups that select it, and removes it from the
// others. pod is nil after its deletion. It returns the names of the changed groups. The lock must
// be held.
func (i *Index) updateGroups(namespace, name string, pod *v1.Pod) (changed []string) {
	var m *member
	if pod != nil {
		m = i.buildPodMember(pod)
	}
	update := func(g *group) {
		if g.selectsPod(pod, m) {
			if g.setMember(namespace, name, m) {
				changed = append(changed, i.touchGroup(g))
			}
		} else if g.removeMember(namespace, name) {
			changed = append(changed, i.touchGroup(g))
		}
	}
	for _, g := range i.namespaceGroups[namespace] {
		update(g)
	}
	if len(i.selectorGroups) == 0 {
		return changed
	}
	ns, ok := i.source.Namespace(namespace)
	for _, g := range i.selectorGroups {
		if ok && g.namespaces.Matches(labels.Set(ns.Labels)) {
			update(g)
		} else if g.removeMember(namespace, name) {
			changed = append(changed, i.touchGroup(g))
		}
	}
	return changed
}

// UpdateNamespace updates the groups after the creation, change or deletion of a namespace and
// returns the names of the changed groups. old is nil on creation, current on deletion.
func (i *Index) UpdateNamespace(old, current *v1.Namespace) (changed []string) {
	if old != nil && current != nil && maps.Equal(old.Labels, current.Labels) {
		return nil
	}
	name := cmp.Or(current, old).Name
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, g := range i.selectorGroups {
		before := len(g.members[name]) > 0
		delete(g.members, name)
		if current != nil && g.namespaces.Matches(labels.Set(current.Labels)) {
			i.fillGroup(g, name)
		}
		if before || len(g.members[name]) > 0 {
			changed = append(changed, i.touchGroup(g))
		}
	}
	return changed
}

// SetDNSAddresses sets the addresses at which nodes serve cluster DNS and returns the names of the
// changed groups.
func (i *Index) SetDNSAddresses(addresses []string) (changed []string) {
	i.mu.Lock()
	defer i.mu.Unlock()
	p := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: DNSNamespace, Name: dnsName,
		Labels: map[string]string{dnsLabel: dnsValue}}}
	p.Spec.Containers = []v1.Container{{Ports: []v1.ContainerPort{
		{Name: "dns", ContainerPort: dnsPort, Protocol: v1.ProtocolUDP}, {Name: "dns-tcp", ContainerPort: dnsPort,
			Protocol: v1.ProtocolTCP}}}}
	for _, a := range addresses {
		p.Status.PodIPs = append(p.Status.PodIPs, v1.PodIP{IP: a})
	}
	i.dns = p
	return i.updateGroups(DNSNamespace, dnsName, p)
}

// addGroupUser adds a reference to the group of the peer s and returns the group's name. fresh is
// true if the group was created. The lock must be held.
func (i *Index) addGroupUser(s peer) (name string, fresh bool) {
	name = s.groupName()
	g := i.groups[name]
	if fresh = g == nil; fresh {
		g = &group{name: name, peer: s, members: make(map[string]map[string]*member)}
		i.groups[name] = g
		if s.namespaces == nil {
			if i.namespaceGroups[s.namespace] == nil {
				i.namespaceGroups[s.namespace] = make(map[string]*group)
			}
			i.namespaceGroups[s.namespace][name] = g
			i.fillGroup(g, s.namespace)
		} else {
			i.selectorGroups[name] = g
			for _, ns := range i.source.Namespaces() {
				if s.namespaces.Matches(labels.Set(ns.Labels)) {
					i.fillGroup(g, ns.Name)
				}
			}
		}
		i.touchGroup(g)
	}
	g.users++
	return name, fresh
}

// removeGroupUser removes a reference to the group with a name, and reports whether the group was
// deleted. The lock must be held.
func (i *Index) removeGroupUser(name string) bool {
	g := i.groups[name]
	if g.users--; g.users > 0 {
		return false
	}
	delete(i.groups, name)
	delete(i.selectorGroups, name)
	delete(i.namespaceGroups[g.namespace], name)
	if len(i.namespaceGroups[g.namespace]) == 0 {
		delete(i.namespaceGroups, g.namespace)
	}
	return true
}

// fillGroup adds the pods in a namespace that the group selects. The lock must be held.
func (i *Index) fillGroup(g *group, namespace string) {
	pods := i.source.Pods(namespace)
	if namespace == DNSNamespace && i.dns != nil {
		pods = append(slices.Clone(pods), i.dns)
	}
	for _, p := range pods {
		if m := i.buildPodMember(p); g.selectsPod(p, m) {
			g.setMember(namespace, p.Name, m)
		}
	}
}

// touchGroup sets a new revision for a changed group and returns the group's name. The lock must be
// held.
func (i *Index) touchGroup(g *group) string {
	i.revision++
	g.revision, g.built = i.revision, nil
	return g.name
}
