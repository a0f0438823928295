package assign

import (
	"cmp"
	"fmt"
	"sync"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/client-go/tools/cache"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/nodegateway/policy"
)

// The Service that pods use for DNS, and the node-local address at which agents also answer DNS.
const (
	dnsService   = "kube-dns"
	dnsLinkLocal = "169.254.20.10"
)

// maxGroupMarks is the maximum result of markQueuedGroups. With batchPause for each mark, the pause
// after a batch of address groups is at most 200 ms.
const maxGroupMarks = 100

// policyGroups updates the index of NetworkPolicies and their address groups. It marks changed
// policies and groups in the feeds of the nodes that hold them.
//
// Changed groups are collected until the next batch, because a change sends the whole group to all
// nodes that use it.
type policyGroups struct {
	view       *View
	index      *policy.Index
	addresses  *podaddress.Index // validates pod addresses; if nil, all reported addresses are valid
	namespaces cache.Indexer
	batches    batches

	mu      sync.Mutex
	pending map[string]bool // names of changed groups
}

func newPolicyGroups(v *View, addresses *podaddress.Index) *policyGroups {
	g := &policyGroups{view: v, addresses: addresses}
	g.index = policy.New(policySource{g})
	return g
}

// policySource implements policy.Source with the informer caches.
type policySource struct{ groups *policyGroups }

func (s policySource) Pods(namespace string) []*v1.Pod {
	list, _ := s.groups.view.stores[kindPod].ByIndex(cache.NamespaceIndex, namespace) // never fails
	pods := make([]*v1.Pod, 0, len(list))
	for _, o := range list {
		if p, ok := o.(*v1.Pod); ok {
			pods = append(pods, p)
		}
	}
	return pods
}

func (s policySource) Pod(namespace, name string) (*v1.Pod, bool) {
	return s.groups.view.Pod(namespace, name)
}

func (s policySource) Namespace(name string) (*v1.Namespace, bool) {
	o, ok, err := s.groups.namespaces.GetByKey(name)
	if err != nil || !ok {
		return nil, false
	}
	ns, ok := o.(*v1.Namespace)
	return ns, ok
}

func (s policySource) Namespaces() []*v1.Namespace {
	list := s.groups.namespaces.List()
	out := make([]*v1.Namespace, 0, len(list))
	for _, o := range list {
		if ns, ok := o.(*v1.Namespace); ok {
			out = append(out, ns)
		}
	}
	return out
}

// Peer implements policy.Source.
func (s policySource) Peer(pod *v1.Pod) *v1.Pod { return s.groups.addresses.PeerPod(pod) }

// updateForNode updates address groups after a change of a Node, which may change which pod
// addresses are valid. old is nil on creation, current on deletion.
func (g *policyGroups) updateForNode(old, current *v1.Node) {
	if old != nil && current != nil && !podaddress.IsNodeChanged(old, current) {
		return
	}
	var affected []*v1.Pod
	for _, n := range []*v1.Node{old, current} {
		if n != nil {
			affected = append(affected, g.addresses.PodsAffectedByNode(n)...)
		}
	}
	g.reevaluatePods(append(affected, g.view.PodsOfNode(cmp.Or(current, old).Name)...))
}

// reevaluatePods updates the address groups with the currently valid addresses of pods.
func (g *policyGroups) reevaluatePods(pods []*v1.Pod) {
	var changed []string
	for _, p := range pods {
		changed = append(changed, g.index.ReevaluatePod(p.Namespace, p.Name)...)
	}
	g.queueGroups(changed)
}

// updateForServiceCIDR updates address groups after a change of a ServiceCIDR, because pod
// addresses in a Service range are invalid. old is nil on creation, current on deletion.
func (g *policyGroups) updateForServiceCIDR(old, current *networkingv1.ServiceCIDR) {
	if old != nil && current != nil && !podaddress.IsRangeChanged(old, current) {
		return
	}
	var affected []*v1.Pod
	for _, r := range []*networkingv1.ServiceCIDR{old, current} {
		if r != nil {
			affected = append(affected, g.addresses.PodsAffectedByRange(r)...)
		}
	}
	g.reevaluatePods(affected)
}

// watchInformers registers handlers that update address groups when namespace labels change. If pod
// addresses are validated, they also do so when ServiceCIDRs change. It returns the registrations.
func (g *policyGroups) watchInformers(informers *client.Informers) []cache.ResourceEventHandlerRegistration {
	namespaces := client.Informer[*v1.Namespace](informers)
	g.namespaces = namespaces.GetIndexer()
	handlers := []cache.ResourceEventHandlerRegistration{addHandler(namespaces, "Namespaces", func(old, current any) {
		oldNamespace, _ := eventObject(old).(*v1.Namespace)
		namespace, _ := eventObject(current).(*v1.Namespace)
		if oldNamespace != nil || namespace != nil {
			g.queueGroups(g.index.UpdateNamespace(oldNamespace, namespace))
		}
	})}
	if g.addresses == nil {
		return handlers
	}
	ranges := client.Informer[*networkingv1.ServiceCIDR](informers)
	return append(handlers, addHandler(ranges, "ServiceCIDRs", func(old, current any) {
		oldRange, _ := eventObject(old).(*networkingv1.ServiceCIDR)
		serviceRange, _ := eventObject(current).(*networkingv1.ServiceCIDR)
		if oldRange != nil || serviceRange != nil {
			g.updateForServiceCIDR(oldRange, serviceRange)
		}
	}))
}

// addHandler registers changed with an informer that has not started. changed receives nil as the
// old state of a new object, and as the current state of a deleted object.
func addHandler(informer cache.SharedIndexInformer, kind string,
	changed func(old, current any)) cache.ResourceEventHandlerRegistration {
	registration, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc: func(o any) { changed(nil, o) }, UpdateFunc: changed, DeleteFunc: func(o any) { changed(o, nil) },
	})
	if err != nil {
		panic(fmt.Sprintf("fleet: watch %s: %v", kind, err)) // never happens, because the informer has not started
	}
	return registration
}

// updateForPod updates address groups after a change of a pod. old is nil on creation, current on
// deletion.
func (g *policyGroups) updateForPod(old, current api.Object) {
	oldPod, _ := old.(*v1.Pod)
	pod, _ := current.(*v1.Pod)
	if oldPod != nil || pod != nil {
		g.queueGroups(g.index.UpdatePod(oldPod, pod))
	}
}

// updatePolicy updates the index after a change of the NetworkPolicy id. In the affected feeds, it
// marks the policy, and the pods that it selects or selected before. old is nil on creation,
// current on deletion.
func (g *policyGroups) updatePolicy(id key, old, current *networkingv1.NetworkPolicy) {
	created, deleted := g.index.SetPolicy(id.namespace, id.name, current)
	for _, name := range deleted {
		g.view.encodings.forgetObject(policy.UID(name))
	}
	for _, name := range created { // an agent may hold a previous group with the same name
		g.view.markWatchers(key{kindAddressGroup, "", name})
	}
	g.view.markWatchers(id)
	for _, pod := range (policySource{g}).Pods(id.namespace) {
		if pod.Spec.NodeName != "" && (selectsPod(old, pod) || selectsPod(current, pod)) {
			g.view.markPod(keyOf(kindPod, pod), pod)
		}
	}
}

func selectsPod(networkPolicy *networkingv1.NetworkPolicy, pod *v1.Pod) bool {
	if networkPolicy == nil {
		return false
	}
	selector, err := metav1.LabelSelectorAsSelector(&networkPolicy.Spec.PodSelector)
	return err == nil && selector.Matches(labels.Set(pod.Labels))
}

// updateDNSAddresses updates the index with the addresses at which nodes serve cluster DNS. It does
// nothing unless id is the DNS Service.
func (g *policyGroups) updateDNSAddresses(id key, current api.Object) {
	if id.namespace != policy.DNSNamespace || id.name != dnsService {
		return
	}
	var addresses []string
	if svc, ok := current.(*v1.Service); ok {
		addresses = append(addresses, dnsLinkLocal)
		for _, ip := range svc.Spec.ClusterIPs {
			if ip != v1.ClusterIPNone {
				addresses = append(addresses, ip)
			}
		}
	}
	g.queueGroups(g.index.SetDNSAddresses(addresses))
}

// policyReferences returns the policies that select the pod o, or the address groups of the policy
// o.
func (g *policyGroups) policyReferences(o api.Object) (keys []key) {
	switch o := o.(type) {
	case *v1.Pod:
		for _, name := range g.index.PoliciesOfPod(o) {
			keys = append(keys, key{kindNetworkPolicy, o.Namespace, name})
		}
	case *networkingv1.NetworkPolicy:
		var r refSet // removes duplicates, because several peers may share a group
		for _, name := range g.index.GroupsOfPolicy(o.Namespace, o.Name) {
			r.addReference(kindAddressGroup, "", name)
		}
		return r.list
	}
	return keys
}

// queueGroups requests a batch in which the groups with these names are marked.
func (g *policyGroups) queueGroups(names []string) {
	if len(names) == 0 {
		return
	}
	g.mu.Lock()
	if g.pending == nil {
		g.pending = make(map[string]bool)
	}
	for _, name := range names {
		g.pending[name] = true
	}
	g.mu.Unlock()
	g.batches.requestBatch(g.markQueuedGroups)
}

// markQueuedGroups marks all queued address groups in all feeds that use them. It returns the
// number of marks, or maxGroupMarks if that is less; the pause until the next batch is proportional
// to the result.
func (g *policyGroups) markQueuedGroups() (marks int) {
	g.mu.Lock()
	names := g.pending
	g.pending = nil
	g.mu.Unlock()
	for name := range names {
		marks += g.view.markWatchers(key{kindAddressGroup, "", name})
	}
	return min(marks, maxGroupMarks)
}
