package nodelifecycle

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// If many nodes are lost at once, a network failure is more likely than a failure of all these
// machines. Pods of lost nodes are therefore evicted at the rate that Kubernetes documents, zone by
// zone. Normally the pods of one node are evicted every 10 seconds. If more than two nodes and at
// least 55% of a zone are lost, the interval is 100 seconds in a zone of more than 50 nodes, and no
// pods are evicted in a smaller zone. No pods are evicted while all zones are lost completely. If a
// zone is lost completely while another zone is not, the normal rate applies, because its pods can
// run elsewhere.
const (
	evictEvery       = 10 * time.Second
	evictSlowlyEvery = 100 * time.Second
	unhealthyPercent = 55
	fewNodes         = 2
	smallZone        = 50
)

// lookAgain is the retry interval of delayed evictions if no node has changed.
const lookAgain = 10 * time.Second

// Pace decides when the pods of a lost node may be evicted. Toleration times start again at the end
// of a disruption and at the start of a leadership. Nodes that return one after the other therefore
// lose no pods, and a failover alone evicts none.
type Pace struct {
	mu    sync.Mutex
	zones map[string]*zone
}

// zone is the state of one zone.
type zone struct {
	ready, lost int
	every       time.Duration   // interval between two nodes; 0 disables evictions
	next        time.Time       // when the next node may be admitted
	admitted    map[string]bool // lost nodes with permission to evict their pods
	since       time.Time       // when evictions were last enabled again
}

// NewPace returns a Pace without nodes.
func NewPace() *Pace { return &Pace{zones: map[string]*zone{}} }

// zoneOf returns the zone of a node. Nodes without labels form one zone.
func zoneOf(n *corev1.Node) string {
	return n.Labels[corev1.LabelTopologyRegion] + "/" + n.Labels[corev1.LabelTopologyZone]
}

// Look updates the zones from all nodes.
func (p *Pace) Look(nodes []*corev1.Node, now time.Time) {
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
	all := true // all zones are lost completely
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

// evictionInterval returns the interval between two nodes for the state of the zone.
func (z *zone) evictionInterval(all bool) time.Duration {
	total := z.ready + z.lost
	switch {
	case all:
		return 0
	case z.ready == 0, z.lost <= fewNodes, 100*z.lost < unhealthyPercent*total:
		return evictEvery
	case total > smallZone:
		return evictSlowlyEvery
	}
	return 0
}

// setEvictionInterval changes the interval. Nodes that were admitted at another interval are no
// longer admitted.
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

// Since returns the earliest start of the toleration times of a lost node's pods.
func (p *Pace) Since(n *corev1.Node) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if z := p.zones[zoneOf(n)]; z != nil {
		return z.since
	}
	return time.Time{}
}

// Admit reports whether the pods of a lost node may be evicted now, or else when to ask again. An
// admitted node stays admitted until it is ready again or the interval changes.
func (p *Pace) Admit(n *corev1.Node, now time.Time) (ok bool, again time.Duration) {
	p.mu.Lock()
	defer p.mu.Unlock()
	z := p.zones[zoneOf(n)]
	switch {
	case z == nil || z.every == 0:
		return false, lookAgain
	case z.admitted[n.Name]:
		return true, 0
	case now.Before(z.next):
		return false, min(z.next.Sub(now), lookAgain)
	}
	z.admitted[n.Name] = true
	z.next = now.Add(z.every)
	return true, 0
}
