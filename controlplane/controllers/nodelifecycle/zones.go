package nodelifecycle

import (
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// When many nodes are lost at once it is more likely that something between them and here has failed than that all of
// these machines have. Pods of lost nodes are therefore evicted at the pace that Kubernetes documents, zone by zone:
// the pods of one node every 10 seconds; where more than two nodes and 55% of a zone are lost, of one node every 100
// seconds in a zone of more than 50 nodes and none in a smaller one; none at all while every zone is lost as a whole. A
// zone that is lost as a whole while others are not goes at the first pace: its pods have somewhere to go.
const (
	evictEvery       = 10 * time.Second
	evictSlowlyEvery = 100 * time.Second
	unhealthyPercent = 55
	fewNodes         = 2
	smallZone        = 50
)

// lookAgain is when evictions that are held up are considered again although no node has changed.
const lookAgain = 10 * time.Second

// Pace says when the pods of which lost node may be evicted. The times that their tolerations give run again from the
// end of a disruption, and from the beginning of a leadership, so that nodes that come back one after the other lose
// nothing, and a fail-over by itself costs no pod.
type Pace struct {
	mu    sync.Mutex
	zones map[string]*zone
}

// zone is what is known of the nodes of one zone.
type zone struct {
	ready, lost int
	every       time.Duration   // between two nodes; 0 = none at all
	next        time.Time       // when another node may be admitted
	admitted    map[string]bool // lost nodes whose pods may be evicted
	since       time.Time       // when evictions were last begun to be allowed again
}

// NewPace returns a pace that knows no nodes yet.
func NewPace() *Pace { return &Pace{zones: map[string]*zone{}} }

// zoneOf names the zone of a node; nodes without labels are one zone.
func zoneOf(n *corev1.Node) string {
	return n.Labels[corev1.LabelTopologyRegion] + "/" + n.Labels[corev1.LabelTopologyZone]
}

// Look takes in all nodes as they are now.
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
		if readiness(n) == corev1.ConditionTrue {
			z.ready++
		} else {
			z.lost++
			lost[n.Name] = true
		}
	}
	all := true // every zone is lost as a whole
	for name, z := range p.zones {
		if z.ready+z.lost == 0 {
			delete(p.zones, name)
			continue
		}
		all = all && z.ready == 0
	}
	for _, z := range p.zones {
		z.turn(z.pace(all), now)
		for name := range z.admitted {
			if !lost[name] {
				delete(z.admitted, name)
			}
		}
	}
}

// pace is the time between two nodes that the state of the zone asks for.
func (z *zone) pace(all bool) time.Duration {
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

// turn changes the pace. What was admitted at another pace is not any more.
func (z *zone) turn(every time.Duration, now time.Time) {
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

// Since says from when on the time of a lost node's pods runs at the earliest.
func (p *Pace) Since(n *corev1.Node) time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	if z := p.zones[zoneOf(n)]; z != nil {
		return z.since
	}
	return time.Time{}
}

// Admit says whether the due pods of a lost node may be evicted now, and if not when to ask again. A node that was
// admitted stays so until it is ready again or the pace changes.
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
