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

	"keelson.dev/keelson/controlplane/api"
)

// peer selects the pods of one peer of a NetworkPolicy's rule, or the pods with one named port.
type peer struct {
	namespace  string          // namespace of the pods, if namespaces is nil
	namespaces labels.Selector // selector of the namespaces; nil selects only namespace
	pods       labels.Selector
	// port restricts the peer to pods with a container that declares this named port, unless it is
	// zero.
	port portName
}

// portName is the name and protocol of a named port in a policy's rule.
type portName struct {
	name  string
	proto v1.Protocol
}

// String returns the port as PROTOCOL/NAME, the format in PortAnnotation.
func (p portName) String() string { return strings.ToLower(string(p.proto)) + "/" + p.name }

// selectsPod reports whether the peer selects a pod in one of its namespaces. m is the pod as a
// group member; the result is false if it is nil.
func (p peer) selectsPod(pod *v1.Pod, m *member) bool {
	return m != nil && p.pods.Matches(labels.Set(pod.Labels)) && (p.port == portName{} || m.hasPort(p.port))
}

// groupName returns the name of the peer's address group. Equivalent peers have the same name.
func (p peer) groupName() string {
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

// parseSelector parses a validated label selector. If it is invalid, the result selects nothing.
func parseSelector(s *metav1.LabelSelector) labels.Selector {
	out, err := metav1.LabelSelectorAsSelector(s)
	if err != nil {
		return labels.Nothing()
	}
	return out
}

// policyPeers returns the peers of a policy that have selectors, in the order in which Annotation
// lists them.
func policyPeers(networkPolicy *networkingv1.NetworkPolicy) (out []peer) {
	add := func(peers []networkingv1.NetworkPolicyPeer) {
		for _, policyPeer := range peers {
			if policyPeer.PodSelector == nil && policyPeer.NamespaceSelector == nil {
				continue
			}
			selected := peer{namespace: networkPolicy.Namespace, pods: labels.Everything()}
			if policyPeer.PodSelector != nil {
				selected.pods = parseSelector(policyPeer.PodSelector)
			}
			if policyPeer.NamespaceSelector != nil {
				selected.namespace, selected.namespaces = "", parseSelector(policyPeer.NamespaceSelector)
			}
			out = append(out, selected)
		}
	}
	for _, r := range networkPolicy.Spec.Ingress {
		add(r.From)
	}
	for _, r := range networkPolicy.Spec.Egress {
		add(r.To)
	}
	return out
}

// egressPorts returns the named ports in egress rules that allow all destinations or address
// blocks. Such a port applies to the pods of all namespaces with a container that declares it. The
// result is sorted and without duplicates.
func egressPorts(networkPolicy *networkingv1.NetworkPolicy) (out []portName) {
	for _, r := range networkPolicy.Spec.Egress {
		if len(r.To) > 0 && !slices.ContainsFunc(r.To,
			func(at networkingv1.NetworkPolicyPeer) bool { return at.IPBlock != nil }) {
			continue
		}
		for _, port := range r.Ports {
			if port.Port == nil || port.Port.Type != intstr.String || strings.ContainsAny(port.Port.StrVal, ",=") {
				continue // the name is not a valid port name
			}
			out = append(out, portName{port.Port.StrVal, cmp.Or(ptr.Deref(port.Protocol, ""), v1.ProtocolTCP)})
		}
	}
	slices.SortFunc(out, func(a, b portName) int { return cmp.Compare(a.String(), b.String()) })
	return slices.Compact(out)
}

// annotatePolicy returns a policy as it is sent to nodes, with the names of its address groups in
// annotations. groups contains first the groups of peers and then those of ports.
func annotatePolicy(networkPolicy *networkingv1.NetworkPolicy, groups []string,
	ports []portName) *networkingv1.NetworkPolicy {
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
		ObjectMeta: metav1.ObjectMeta{Namespace: networkPolicy.Namespace, Name: networkPolicy.Name,
			UID: networkPolicy.UID, ResourceVersion: networkPolicy.ResourceVersion,
			Annotations: annotations},
		Spec: networkPolicy.Spec,
	}
}

// group is an address group: the addresses and named ports of the pods that a peer selects.
type group struct {
	peer
	name     string
	users    int                           // number of references by policies, including repeated references
	members  map[string]map[string]*member // by namespace, then by name
	revision uint64
	built    *v1.Endpoints // cached result of buildEndpoints; nil after a change
}

// member is a pod in an address group. It is immutable.
type member struct {
	addresses []string
	ports     []v1.EndpointPort // named container ports, sorted by name, protocol and number
}

// buildMember returns the group member for a pod. It returns nil if the pod has no address of its
// own or has terminated.
func buildMember(pod *v1.Pod) *member {
	if pod.Spec.HostNetwork || api.IsPodTerminal(pod) {
		return nil
	}
	m := &member{}
	for _, ip := range pod.Status.PodIPs {
		m.addresses = append(m.addresses, ip.IP)
	}
	if len(m.addresses) == 0 && pod.Status.PodIP != "" {
		m.addresses = []string{pod.Status.PodIP}
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
					m.ports = append(m.ports, v1.EndpointPort{Name: port.Name, Port: port.ContainerPort,
						Protocol: cmp.Or(port.Protocol, v1.ProtocolTCP)})
				}
			}
		}
	}
	name(pod.Spec.InitContainers, false) // sidecar containers, which run as long as the other containers
	name(pod.Spec.Containers, true)
	slices.SortFunc(m.ports, func(a, b v1.EndpointPort) int {
		return cmp.Or(cmp.Compare(a.Name, b.Name), cmp.Compare(a.Protocol, b.Protocol), cmp.Compare(a.Port, b.Port))
	})
	m.ports = slices.Compact(m.ports)
	return m
}

// hasPort reports whether a container of the pod declares the named port.
func (m *member) hasPort(port portName) bool {
	return slices.ContainsFunc(m.ports, func(have v1.EndpointPort) bool {
		return have.Name == port.name &&
			have.Protocol == port.proto
	})
}

func (m *member) equalsMember(o *member) bool {
	return slices.Equal(m.addresses, o.addresses) && slices.Equal(m.ports, o.ports)
}

// equalsForGroups reports whether the change of a pod from a to b affects no group. Container ports
// need no comparison: they are immutable.
func equalsForGroups(a, b *v1.Pod) bool {
	return a.UID == b.UID && api.IsPodTerminal(a) == api.IsPodTerminal(b) && a.Status.PodIP == b.Status.PodIP &&
		slices.Equal(a.Status.PodIPs, b.Status.PodIPs) && maps.Equal(a.Labels, b.Labels)
}

// UID returns the UID of the address group with a name. It is the same for all revisions of the
// group.
func UID(group string) types.UID { return types.UID("addresses-of-" + group) }

// setMember adds or replaces the member with a name, and reports whether the group has changed.
func (g *group) setMember(namespace, name string, m *member) bool {
	if old := g.members[namespace][name]; old != nil && old.equalsMember(m) {
		return false
	}
	if g.members[namespace] == nil {
		g.members[namespace] = make(map[string]*member)
	}
	g.members[namespace][name] = m
	return true
}

// removeMember removes the member with a name, and reports whether the group has changed.
func (g *group) removeMember(namespace, name string) bool {
	if g.members[namespace][name] == nil {
		return false
	}
	delete(g.members[namespace], name)
	if len(g.members[namespace]) == 0 {
		delete(g.members, namespace)
	}
	return true
}

// buildEndpoints returns the group as an Endpoints object with one subset for each distinct list of
// ports, sorted. The index's lock must be held. The result is shared.
func (g *group) buildEndpoints() *v1.Endpoints {
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
	e := &v1.Endpoints{ObjectMeta: metav1.ObjectMeta{Name: g.name, UID: UID(g.name),
		ResourceVersion: strconv.FormatUint(g.revision, 10)}}
	for _, k := range slices.Sorted(maps.Keys(subsets)) {
		s := subsets[k]
		slices.SortFunc(s.Addresses, func(a, b v1.EndpointAddress) int { return cmp.Compare(a.IP, b.IP) })
		s.Addresses = slices.CompactFunc(s.Addresses, func(a, b v1.EndpointAddress) bool { return a.IP == b.IP })
		e.Subsets = append(e.Subsets, *s)
	}
	g.built = e
	return e
}
