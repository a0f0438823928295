package policy

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	v1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"
)

// peer selects the pods of one peer of a NetworkPolicy, or of one named port.
type peer struct {
	namespace  string          // namespace of the pods if namespaces is nil
	namespaces labels.Selector // selects namespaces; nil: only namespace
	pods       labels.Selector
	// port, unless zero, restricts the peer to pods with a container that declares this named port.
	port portName
}

// portName is the name and protocol of a named port in a policy's rule.
type portName struct {
	name  string
	proto v1.Protocol
}

// String returns the port as PROTOCOL/NAME, the form in PortAnnotation.
func (p portName) String() string { return strings.ToLower(string(p.proto)) + "/" + p.name }

// means reports whether the peer selects a pod of one of its namespaces. m is the pod's group
// member; nil never matches.
func (p peer) means(pod *v1.Pod, m *member) bool {
	return m != nil && p.pods.Matches(labels.Set(pod.Labels)) && (p.port == portName{} || m.names(p.port))
}

// name returns the name of the peer's address group. Equivalent peers have the same name.
func (p peer) name() string {
	text := "pods " + p.pods.String()
	if p.namespaces != nil {
		text += "\nof namespaces " + p.namespaces.String()
	} else {
		text += "\nof namespace " + p.namespace
	}
	if p.port != (portName{}) {
		text += "\nwith port " + p.port.String()
	}
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:16])
}

// selector parses a validated label selector; an invalid one selects nothing.
func selector(s *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return out
}

// peersOf returns the peers of a policy that have selectors, in the order of Annotation.
func peersOf(p *networkingv1.NetworkPolicy) (out []peer) {
	add := func(peers []networkingv1.NetworkPolicyPeer) {
		for _, at := range peers {
			if at.PodSelector == nil && at.NamespaceSelector == nil {
				continue
			}
			one := peer{namespace: p.Namespace, pods: labels.Everything()}
			if at.PodSelector != nil {
				one.pods = selector(at.PodSelector)
			}
			if at.NamespaceSelector != nil {
				one.namespace, one.namespaces = "", selector(at.NamespaceSelector)
			}
			out = append(out, one)
		}
	}
	for _, r := range p.Spec.Ingress {
		add(r.From)
	}
	for _, r := range p.Spec.Egress {
		add(r.To)
	}
	return out
}

// portsOf returns the named ports of egress rules that allow all destinations or address blocks.
// Such a port applies to pods of all namespaces with a container that declares it. The result is
// sorted and without duplicates.
func portsOf(p *networkingv1.NetworkPolicy) (out []portName) {
	for _, r := range p.Spec.Egress {
		if len(r.To) > 0 && !slices.ContainsFunc(r.To, func(at networkingv1.NetworkPolicyPeer) bool { return at.IPBlock != nil }) {
			continue
		}
		for _, port := range r.Ports {
			if port.Port == nil || port.Port.Type != intstr.String || strings.ContainsAny(port.Port.StrVal, ",=") {
				continue // not a valid port name
			}
			out = append(out, portName{port.Port.StrVal, cmp.Or(ptr.Deref(port.Protocol, ""), v1.ProtocolTCP)})
		}
	}
	slices.SortFunc(out, func(a, b portName) int { return cmp.Compare(a.String(), b.String()) })
	return slices.Compact(out)
}

// annotated returns a policy as it is sent to nodes, with its groups in annotations. In groups, the
// groups of ports follow those of the peers.
func annotated(p *networkingv1.NetworkPolicy, groups []string, ports []portName) *networkingv1.NetworkPolicy {
	peers := len(groups) - len(ports)
	annotations := map[string]string{Annotation: strings.Join(groups[:peers], ",")}
	if len(ports) > 0 {
		named := make([]string, 0, len(ports))
		for i, port := range ports {
			named = append(named, port.String()+"="+groups[peers+i])
		}
		annotations[PortAnnotation] = strings.Join(named, ",")
	}
	return &networkingv1.NetworkPolicy{
		ObjectMeta: metav1.ObjectMeta{Namespace: p.Namespace, Name: p.Name, UID: p.UID, ResourceVersion: p.ResourceVersion,
			Annotations: annotations},
		Spec: p.Spec,
	}
}

// group is an address group: the addresses and named ports of the pods of a peer.
type group struct {
	peer
	name     string
	users    int                           // references by policies, counted with repetitions
	members  map[string]map[string]*member // by namespace and name
	revision uint64
	built    *v1.Endpoints // cached wire object; nil after a change
}

// member is a pod in an address group. It is immutable.
type member struct {
	addresses []string
	ports     []v1.EndpointPort // named container ports, sorted by name, protocol and number
}

// memberOf returns the group member of a pod, or nil if the pod has no address of its own or has
// ended.
func memberOf(p *v1.Pod) *member {
	if p.Spec.HostNetwork || p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed {
		return nil
	}
	m := &member{}
	for _, ip := range p.Status.PodIPs {
		m.addresses = append(m.addresses, ip.IP)
	}
	if len(m.addresses) == 0 && p.Status.PodIP != "" {
		m.addresses = []string{p.Status.PodIP}
	}
	if len(m.addresses) == 0 {
		return nil
	}
	name := func(containers []v1.Container, all bool) {
		for i := range containers {
			if r := containers[i].RestartPolicy; !all && (r == nil || *r != v1.ContainerRestartPolicyAlways) {
				continue
			}
			for _, port := range containers[i].Ports {
				if port.Name != "" {
					m.ports = append(m.ports, v1.EndpointPort{Name: port.Name, Port: port.ContainerPort, Protocol: cmp.Or(port.Protocol, v1.ProtocolTCP)})
				}
			}
		}
	}
	name(p.Spec.InitContainers, false) // sidecars, which run beside the other containers
	name(p.Spec.Containers, true)
	slices.SortFunc(m.ports, func(a, b v1.EndpointPort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	m.ports = slices.Compact(m.ports)
	return m
}

// names reports whether a container of the pod declares the named port.
func (m *member) names(p portName) bool {
	return slices.ContainsFunc(m.ports, func(have v1.EndpointPort) bool { return have.Name == p.name && have.Protocol == p.proto })
}

func (m *member) equal(o *member) bool {
	return slices.Equal(m.addresses, o.addresses) && slices.Equal(m.ports, o.ports)
}

// sameMember reports whether a change of a pod affects no group. Container ports need no
// comparison: they are immutable.
func sameMember(a, b *v1.Pod) bool {
	ended := func(p *v1.Pod) bool { return p.Status.Phase == v1.PodSucceeded || p.Status.Phase == v1.PodFailed }
	return a.UID == b.UID && ended(a) == ended(b) && a.Status.PodIP == b.Status.PodIP &&
		slices.Equal(a.Status.PodIPs, b.Status.PodIPs) && maps.Equal(a.Labels, b.Labels)
}

// UID returns the UID of an address group; it is the same for all revisions.
func UID(group string) types.UID { return types.UID("addresses-of-" + group) }

// put adds or replaces a member and reports whether the group changed.
func (g *group) put(namespace, name string, m *member) bool {
	if old := g.members[namespace][name]; old != nil && old.equal(m) {
		return false
	}
	if g.members[namespace] == nil {
		g.members[namespace] = make(map[string]*member)
	}
	g.members[namespace][name] = m
	return true
}

// remove removes a member and reports whether the group changed.
func (g *group) remove(namespace, name string) bool {
	if g.members[namespace][name] == nil {
		return false
	}
	delete(g.members[namespace], name)
	if len(g.members[namespace]) == 0 {
		delete(g.members, namespace)
	}
	return true
}

// endpoints returns the group as an Endpoints object with one subset per list of ports, sorted. The
// index's lock must be held. The result is shared.
func (g *group) endpoints() *v1.Endpoints {
	if g.built != nil {
		return g.built
	}
	subsets := make(map[string]*v1.EndpointSubset)
	for _, members := range g.members {
		for _, m := range members {
			k := fmt.Sprint(m.ports)
			if subsets[k] == nil {
				subsets[k] = &v1.EndpointSubset{Ports: m.ports}
			}
			for _, a := range m.addresses {
				subsets[k].Addresses = append(subsets[k].Addresses, v1.EndpointAddress{IP: a})
			}
		}
	}
	e := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: g.name, UID: UID(g.name), ResourceVersion: strconv.FormatUint(g.revision, 10)}}
	for _, k := range slices.Sorted(maps.Keys(subsets)) {
		s := subsets[k]
		slices.SortFunc(s.Addresses, func(a, b v1.EndpointAddress) int { return cmp.Compare(a.IP, b.IP) })
		s.Addresses = slices.CompactFunc(s.Addresses, func(a, b v1.EndpointAddress) bool { return a.IP == b.IP })
		e.Subsets = append(e.Subsets, *s)
	}
	g.built = e
	return e
}
