package nodelifecycle

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Parameters of the rate at which the pods of lost nodes are evicted in each zone. If many nodes
// are lost at once, a network failure is more likely than a failure of all these machines. The
// rates are those that Kubernetes documents:
//   - Normally, the pods of one node are evicted every 10 seconds.
//   - If more than two nodes and at least 55% of a zone are lost, the interval is 100 seconds in a
//     zone of more than 50 nodes. No pods are evicted in a smaller zone.
//   - No pods are evicted while all nodes of all zones are lost.
//   - If all nodes of one zone are lost while another zone has ready nodes, the normal rate
//     applies: the pods can run in other zones.
const (
	evictEvery       = 10 * time.Second
	evictSlowlyEvery = 100 * time.Second
	unhealthyPercent = 55
	fewNodes         = 2
	smallZone        = 50
)

// admissionRetryDelay is the retry delay of an eviction that EvictionLimiter.Admit has refused.
const admissionRetryDelay = 10 * time.Second

// EvictionLimiter decides when the pods of a lost node may be evicted. The toleration times of
// these pods start again when a disruption of the zone ends, and after a change of the leader.
// Nodes that return one after the other therefore lose no pods, and a new leader does not evict
// pods at once.
type EvictionLimiter struct {
	mu    sync.Mutex
	zones map[string]*zone
}

// zone is the eviction state of one zone.
type zone struct {
	ready, lost int
	every       time.Duration   // interval between the evictions of two nodes; 0 disables evictions
	next        time.Time       // earliest time at which another node may be admitted
	admitted    map[string]bool // lost nodes from which pods may be evicted
	since       time.Time       // when the normal eviction rate last started
}

// NewEvictionLimiter returns an EvictionLimiter without nodes.
func NewEvictionLimiter() *EvictionLimiter { return &EvictionLimiter{zones: map[string]*zone{}} }

// zoneOf returns the region and zone in the labels of a node as one text. All nodes without these
// labels form one zone.
func zoneOf(n *corev1.Node) string {
	return n.Labels[corev1.LabelTopologyRegion] + "/" + n.Labels[corev1.LabelTopologyZone]
}

// UpdateZones counts the ready and lost nodes of each zone and updates the eviction rates. nodes
// are all nodes of the cluster.
func (p *EvictionLimiter) UpdateZones(nodes []*corev1.Node, now time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, z := range p.zones {
		z.ready, z.lost = 0, 0
	}
	lost := map[string]bool{}
	for _, n := range nodes {
		z := p.zones[zoneOf(n)]
		if z == nil {
			z = &zone{every: evictEvery, admitted: map[string]bool{}, since: now}
			p.zones[zoneOf(n)] = z
		}
		if readyStatus(n) == corev1.ConditionTrue {
			z.ready++
		} else {
			z.lost++
			lost[n.Name] = true
		}
	}
	all := true // no zone has a ready node
	for name, z := range p.zones {
		if z.ready+z.lost == 0 {
			delete(p.zones, name)
			continue
		}
		all = all && z.ready == 0
	}
	for _, z := range p.zones {
		z.setEvictionInterval(z.evictionInterval(all), now)
		for name := range z.admitted {
			if !lost[name] {
				delete(z.admitted, name)
			}
		}
	}
}

// evictionInterval returns the interval between the evictions of two nodes in z. 0 means that
// nothing is evicted. allLost reports that no zone has a ready node.
func (z *zone) evictionInterval(allLost bool) time.Duration {
	total := z.ready + z.lost
	switch {
	case allLost:
		return 0
	case z.ready == 0, z.lost <= fewNodes, 100*z.lost < unhealthyPercent*total:
		return evictEvery
	case total > smallZone:
		return evictSlowlyEvery
	}
	return 0
}

// setEvictionInterval sets the interval between the evictions of two nodes in z. If the interval
// changes, the admitted nodes must be admitted again.
func (z *zone) setEvictionInterval(every time.Duration, now time.Time) {
	if every == z.every {
		return
	}
	clear(z.admitted)
	switch every {
	case evictEvery:
		z.since, z.next = now, now
	case evictSlowlyEvery:
		z.next = now.Add(evictSlowlyEvery)
	}
	z.every = every
}

// Since returns the earliest time from which toleration times of the pods on lost node n are
// counted.
func (p *EvictionLimiter) Since(n *corev1.Node) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if z := p.zones[zoneOf(n)]; z != nil {
		return z.since
	}
	return time.Time{}
}

// Admit reports whether the pods of lost node n may be evicted now. Otherwise again is the delay
// until the next call. An admitted node stays admitted until it is ready again or the rate of its
// zone changes.
func (p *EvictionLimiter) Admit(n *corev1.Node, now time.Time) (ok bool, again time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	z := p.zones[zoneOf(n)]
	switch {
	case z == nil || z.every == 0:
		return false, admissionRetryDelay
	case z.admitted[n.Name]:
		return true, 0
	case now.Before(z.next):
		return false, min(z.next.Sub(now), admissionRetryDelay)
	}
	z.admitted[n.Name] = true
	z.next = now.Add(z.every)
	return true, 0
}
