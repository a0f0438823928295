package endpointslice

import (
	"cmp"
	"fmt"
	"maps"
	"math/big"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/saturate"
)

// Nodes holds the properties of nodes from which slices and topology hints are computed.
type Nodes struct {
	Zone map[string]string // zone by node name
	// CPU is the allocatable CPU of each zone in thousandths. It is nil if it cannot be computed
	// because a node has no zone or no CPU.
	CPU map[string]int64
}

// Reasons of Events about the topology hints of a Service.
const (
	hintsEnabled  = "TopologyAwareHintsEnabled"
	hintsDisabled = "TopologyAwareHintsDisabled"
)

// HintEvent is an Event to record about the topology hints of a Service. The zero HintEvent means
// no Event.
type HintEvent struct{ Type, Reason, Message string }

// wantsTopologyHints reports whether an annotation of a Service requests that its endpoints are
// allocated to zones in proportion to their CPUs. trafficDistribution is then ignored. As in
// Kubernetes, the deprecated annotation has precedence over the current annotation.
func wantsTopologyHints(svc *corev1.Service) bool {
	mode, ok := svc.Annotations[corev1.DeprecatedAnnotationTopologyAwareHints]
	if !ok {
		mode = svc.Annotations[corev1.AnnotationTopologyMode]
	}
	return mode == "Auto" || mode == "auto"
}

// spreadIndex indexes the Services for which wantsTopologyHints returns true, under value "auto".
const spreadIndex = "keelson.spread"

func spreadKey(o api.Object) []string {
	if wantsTopologyHints(o.(*corev1.Service)) {
		return []string{"auto"}
	}
	return nil
}

// trafficDistributionHints returns the topology hints that spec.trafficDistribution requests for
// endpoint e: its own zone and, with PreferSameNode, its own node. It returns nil if e is not
// ready.
func trafficDistributionHints(svc *corev1.Service, e *discoveryv1.Endpoint) *discoveryv1.EndpointHints {
	if !ptr.Deref(e.Conditions.Ready, false) || wantsTopologyHints(svc) {
		return nil
	}
	var hints discoveryv1.EndpointHints
	switch ptr.Deref(svc.Spec.TrafficDistribution, "") {
	case corev1.ServiceTrafficDistributionPreferSameNode:
		if e.NodeName != nil {
			hints.ForNodes = []discoveryv1.ForNode{{Name: *e.NodeName}}
		}
	case corev1.ServiceTrafficDistributionPreferClose, corev1.ServiceTrafficDistributionPreferSameZone:
	default:
		return nil
	}
	if e.Zone != nil {
		hints.ForZones = []discoveryv1.ForZone{{Name: *e.Zone}}
	}
	if hints.ForNodes == nil && hints.ForZones == nil {
		return nil
	}
	return &hints
}

// setZoneHints sets zone hints on the ready endpoints of an address family, in proportion to the
// CPUs of the zones. cpu is the CPU by zone. Each zone gets at least its exact share divided by
// 1.2. While the hints in the existing slices satisfy this, they are kept, so that few slices are
// written. setZoneHints returns an Event if it starts to set hints or cannot set hints.
func (a addresses) setZoneHints(
	family discoveryv1.AddressType, existing []*discoveryv1.EndpointSlice, cpu map[string]int64,
) HintEvent {
	hints := map[string]string{}
	for _, s := range existing {
		for i := range s.Endpoints {
			if h := s.Endpoints[i].Hints; h != nil && len(h.ForZones) == 1 && s.AddressType == family {
				hints[endpointIdentity(s.Endpoints[i])] = h.ForZones[0].Name
			}
		}
	}
	ready := a.readyEndpoints(family)
	if why := hintObstacle(ready, cpu); why != "" {
		return HintEvent{corev1.EventTypeWarning, hintsDisabled,
			fmt.Sprintf("no hints for %s endpoints: %s", family, why)}
	}
	for e, zone := range allocateZones(ready, hints, cpu) {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: zone}}}
	}
	if len(hints) > 0 {
		return HintEvent{}
	}
	return HintEvent{corev1.EventTypeNormal, hintsEnabled,
		fmt.Sprintf("%s endpoints are allocated to %d zones", family, len(cpu))}
}

// readyEndpoints returns the ready endpoints of an address family, sorted by endpointIdentity.
func (a addresses) readyEndpoints(family discoveryv1.AddressType) []*discoveryv1.Endpoint {
	var out []*discoveryv1.Endpoint
	for g, c := range a {
		for i := range c.endpoints {
			if g.family == family && ptr.Deref(c.endpoints[i].Conditions.Ready, false) {
				out = append(out, &c.endpoints[i])
			}
		}
	}
	slices.SortFunc(out, func(a, b *discoveryv1.Endpoint) int {
		return cmp.Compare(endpointIdentity(*a), endpointIdentity(*b))
	})
	return out
}

// hintObstacle returns why the ready endpoints cannot be allocated to zones with these CPUs, or ""
// if they can be allocated.
func hintObstacle(ready []*discoveryv1.Endpoint, cpu map[string]int64) string {
	switch {
	case cpu == nil:
		return "a node has no zone, or no allocatable CPU"
	case len(cpu) < 2:
		return "there are no ready nodes in two zones"
	case len(ready) < len(cpu):
		return fmt.Sprintf("there are %d ready endpoints for %d zones", len(ready), len(cpu))
	case slices.ContainsFunc(ready, func(e *discoveryv1.Endpoint) bool { return ptr.Deref(e.Zone, "") == "" }):
		return "an endpoint is in no zone"
	}
	sum := 0
	for _, least := range zoneMinimums(len(ready), cpu) {
		sum += least
	}
	if sum > len(ready) {
		return fmt.Sprintf("%d ready endpoints cannot be divided among %d zones without too few in one",
			len(ready), len(cpu))
	}
	return ""
}

// zoneMinimums returns the minimum number of endpoints of each zone if n endpoints are allocated:
// the share of the zone in the total CPU, multiplied by n, divided by 1.2 and rounded up.
func zoneMinimums(n int, cpu map[string]int64) map[string]int {
	var total int64
	for _, c := range cpu {
		total = saturate.Add(total, c)
	}
	out := map[string]int{}
	for zone, c := range cpu { // ceil(n·c·5 / (total·6)), with integers that cannot overflow
		num := new(big.Int).Mul(big.NewInt(int64(n)*5), big.NewInt(c))
		den := new(big.Int).Mul(big.NewInt(6), big.NewInt(total))
		num.Add(num, den).Sub(num, big.NewInt(1))
		out[zone] = int(num.Div(num, den).Int64())
	}
	return out
}

// zoneCounts returns how many of n endpoints are allocated to each zone. Each zone gets its minimum
// from zoneMinimums. Each remaining endpoint goes to the zone that is furthest below its share of
// the CPU.
func zoneCounts(n int, cpu map[string]int64) map[string]int {
	var total int64
	for _, c := range cpu {
		total = saturate.Add(total, c)
	}
	parts := zoneMinimums(n, cpu)
	left := n
	for _, p := range parts {
		left -= p
	}
	zones := slices.Sorted(maps.Keys(cpu))
	for range left {
		lack := func(zone string) float64 { return float64(n)*float64(cpu[zone])/float64(total) - float64(parts[zone]) }
		parts[slices.MaxFunc(zones, func(a, b string) int { return cmp.Compare(lack(a), lack(b)) })]++
	}
	return parts
}

// allocateZones returns the zone to which each endpoint is allocated. hints has the zone in an
// endpoint's current hint, by endpointIdentity. An endpoint keeps its current hint; an endpoint
// without a hint gets its own zone. If a zone then has less than its minimum, all endpoints are
// allocated again. Each zone gets its number from zoneCounts: first endpoints in the zone, then
// endpoints that were allocated to it before, then any other endpoints.
func allocateZones(
	ready []*discoveryv1.Endpoint, hints map[string]string, cpu map[string]int64,
) map[*discoveryv1.Endpoint]string {
	out, count := map[*discoveryv1.Endpoint]string{}, map[string]int{}
	for _, e := range ready {
		zone := hints[endpointIdentity(*e)]
		if _, known := cpu[zone]; !known {
			zone = *e.Zone
		}
		out[e] = zone
		count[zone]++
	}
	enough := true
	for zone, least := range zoneMinimums(len(ready), cpu) {
		enough = enough && count[zone] >= least
	}
	for zone := range count {
		_, known := cpu[zone]
		enough = enough && known
	}
	if enough {
		return out
	}
	room := zoneCounts(len(ready), cpu)
	clear(out)
	take := func(zone func(e *discoveryv1.Endpoint) string) {
		for _, e := range ready {
			if z := zone(e); out[e] == "" && room[z] > 0 {
				out[e] = z
				room[z]--
			}
		}
	}
	stays := func(e *discoveryv1.Endpoint) string {
		if hints[endpointIdentity(*e)] != *e.Zone {
			return ""
		}
		return *e.Zone
	}
	take(stays)
	// An endpoint that is already in another zone stays there if its own zone cannot hold all of
	// its endpoints.
	take(func(e *discoveryv1.Endpoint) string {
		if hints[endpointIdentity(*e)] == "" || room[*e.Zone] > 0 {
			return *e.Zone
		}
		return hints[endpointIdentity(*e)]
	})
	take(func(e *discoveryv1.Endpoint) string { return *e.Zone })
	for _, zone := range slices.Sorted(maps.Keys(room)) {
		take(func(*discoveryv1.Endpoint) string { return zone })
	}
	return out
}

// zoneCPUs returns the total allocatable CPU of the ready nodes of each zone, in thousandths. It
// returns nil if a node has no zone or no CPU. Control-plane nodes do not count, because workloads
// usually do not run there.
func zoneCPUs(nodes []*corev1.Node) map[string]int64 {
	out := map[string]int64{}
	for _, n := range nodes {
		zone, excluded, ready, cpu := nodeCapacity(n)
		if excluded || !ready {
			continue
		}
		if zone == "" || cpu == 0 {
			return nil
		}
		out[zone] = saturate.Add(out[zone], cpu)
	}
	return out
}

// nodeCapacity returns the properties of node n that zoneCPUs needs: its zone, whether it is
// excluded as a control-plane node, whether it is ready, and its allocatable CPU in thousandths.
func nodeCapacity(n *corev1.Node) (zone string, excluded, ready bool, cpu int64) {
	_, plane := n.Labels["node-role.kubernetes.io/control-plane"]
	_, master := n.Labels["node-role.kubernetes.io/master"]
	ready = api.IsNodeReady(n)
	return n.Labels[corev1.LabelTopologyZone], plane || master, ready, saturate.MilliValue(n.Status.Allocatable.Cpu())
}

// sameCapacity reports whether versions a and b of a node have the same effect on zoneCPUs.
func sameCapacity(a, b *corev1.Node) bool {
	zoneA, exA, readyA, cpuA := nodeCapacity(a)
	zoneB, exB, readyB, cpuB := nodeCapacity(b)
	return zoneA == zoneB && exA == exB && readyA == readyB && cpuA == cpuB
}
