// Package policy knows which NetworkPolicies select a pod, and the addresses of
// the pods that the peers of each policy stand for, and keeps both right as
// pods, namespaces and policies change, each at the cost of what it concerns.
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

// Source is where an index reads what there is, when a policy brings a group that is new. It must show whatever a handler
// of Index has been told of.
type Source interface {
	Pods(namespace string) []*v1.Pod
	Pod(namespace, name string) (*v1.Pod, bool)
	Namespace(name string) (*v1.Namespace, bool)
	Namespaces() []*v1.Namespace
	// Peer returns the pod with those of its addresses that peers of policies stand for; nil: none.
	Peer(p *v1.Pod) *v1.Pod
}

// Annotation of a policy as nodes are sent it: a group for each of its peers that has selectors, those of the ingress rules
// in their order, then those of egress, with commas between.
const Annotation = "keelson.dev/address-groups"

// PortAnnotation of a policy as nodes are sent it: a group for each named port of an egress rule that allows destinations
// without selectors, as PROTOCOL/NAME=GROUP, with commas between. An agent of an earlier release ignores it, and allows
// nothing by such a port.
const PortAnnotation = "keelson.dev/named-port-groups"

// The pod as which policies see the cluster's DNS, which every node answers by itself.
const (
	DNSNamespace = metav1.NamespaceSystem
	dnsName      = "(the cluster's DNS)" // no pod can be named like that
	dnsLabel     = "k8s-app"
	dnsValue     = "kube-dns"
	dnsPort      = 53
)

// Index is safe for concurrent use.
type Index struct {
	src Source

	mu       sync.Mutex
	policies map[string]map[string]*policy // by namespace and name
	groups   map[string]*group             // by name
	within   map[string]map[string]*group  // of one namespace, by that and name
	across   map[string]*group             // that select namespaces, by name
	revision uint64
	dns      *v1.Pod
}

// policy is one as it is kept.
type policy struct {
	sent   *networkingv1.NetworkPolicy
	pods   labels.Selector
	groups []string
}

// New returns an index of nothing.
func New(src Source) *Index {
	return &Index{
		src: src, policies: make(map[string]map[string]*policy), groups: make(map[string]*group),
		within: make(map[string]map[string]*group), across: make(map[string]*group),
	}
}

// Policy takes a policy that is new, has changed (now) or is gone (now is nil), and names the groups that are
// new, which may have been there before and gone, and those that are no more.
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
		for _, g := range old.groups { // after the new ones are in use: what both name stays
			if x.leave(g) {
				gone = append(gone, g)
			}
		}
	}
	return made, gone
}

// Selecting names the policies of a pod's namespace that select it, in order. A pod in its node's network has none.
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

// Sent is a policy as nodes are sent it.
func (x *Index) Sent(namespace, name string) (*networkingv1.NetworkPolicy, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.policies[namespace][name]
	if p == nil {
		return nil, false
	}
	return p.sent, true
}

// Groups names the groups of a policy.
func (x *Index) Groups(namespace, name string) []string {
	x.mu.Lock()
	defer x.mu.Unlock()
	p := x.policies[namespace][name]
	if p == nil {
		return nil
	}
	return p.groups
}

// Group is a group as nodes are sent it: the addresses of its pods, by the ports that these name.
func (x *Index) Group(name string) (*v1.Endpoints, bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	g := x.groups[name]
	if g == nil {
		return nil, false
	}
	return g.endpoints(), true
}

// Pod takes a pod that is new, has changed or is gone, and names the groups that changed by it.
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

// Rejudge asks Source.Peer again about a pod, for something else than the pod has changed. It names the groups that
// changed by it.
func (x *Index) Rejudge(namespace, name string) (changed []string) {
	x.mu.Lock()
	defer x.mu.Unlock()
	p, ok := x.src.Pod(namespace, name) // under the lock: a pod that is deleted meanwhile is not added again
	if !ok {
		return nil
	}
	return x.pod(namespace, name, p)
}

// member is nil for a pod that no peer stands for.
func (x *Index) member(p *v1.Pod) *member {
	if p != x.dns {
		p = x.src.Peer(p)
	}
	if p == nil {
		return nil
	}
	return memberOf(p)
}

// pod is called under the lock.
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

// Namespace takes a namespace that is new, has changed or is gone, and names the groups that changed by it.
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

// DNS says at which addresses nodes answer for the cluster's names, and names the groups that changed by it.
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

// use returns the name of the group of a peer, and makes it when it is new. It is called under the lock.
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

// leave says whether nobody uses the group any more. It is called under the lock.
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

// fill adds the pods of a namespace that a group selects. It is called under the lock.
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

// touch gives a group a revision of its own. It is called under the lock.
func (x *Index) touch(g *group) string {
	x.revision++
	g.revision, g.built = x.revision, nil
	return g.name
}
