package storeproc

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// memberStatus returns a member's status. It waits at most one second, because the process may be
// paused.
func (g *Group) memberStatus(ctx context.Context, m *Member) (raftstore.Status, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return m.Status(ctx)
}

// Cut holds back all traffic between two replicas. Their connections stay open.
func (g *Group) Cut(ctx context.Context, a, b *Member) error {
	return g.changeLinks(ctx, func(set func(from, to *Member, hold bool)) { set(a, b, true); set(b, a, true) })
}

// CutOneWay holds back everything that sender sends to receiver.
func (g *Group) CutOneWay(ctx context.Context, sender, receiver *Member) error {
	return g.changeLinks(ctx, func(set func(sender, receiver *Member, hold bool)) { set(sender, receiver, true) })
}

// Mend ends a cut between two replicas. Traffic that was held back is delivered.
func (g *Group) Mend(ctx context.Context, a, b *Member) error {
	return g.changeLinks(ctx, func(set func(from, to *Member, hold bool)) { set(a, b, false); set(b, a, false) })
}

// Isolate cuts a replica off from all others.
func (g *Group) Isolate(ctx context.Context, m *Member) error {
	return g.changeLinks(ctx, func(set func(from, to *Member, hold bool)) {
		for _, o := range g.members {
			if o != m {
				set(m, o, true)
				set(o, m, true)
			}
		}
	})
}

// Split cuts the links between replicas that have no side in common. A replica may be on two sides,
// and is then connected to both.
func (g *Group) Split(ctx context.Context, sides ...[]*Member) error {
	together := make(map[[2]*Member]bool)
	for _, side := range sides {
		for _, a := range side {
			for _, b := range side {
				together[[2]*Member{a, b}] = true
			}
		}
	}
	return g.changeLinks(ctx, func(set func(from, to *Member, hold bool)) {
		for _, a := range g.members {
			for _, b := range g.members {
				if a != b && !together[[2]*Member{a, b}] {
					set(a, b, true)
				}
			}
		}
	})
}

// Slow delays everything that sender sends to receiver by delay, and by up to jitter more.
// Connections are delayed independently: data that is sent later on another connection may arrive
// earlier. Zero for both ends the delay.
func (g *Group) Slow(ctx context.Context, sender, receiver *Member, delay, jitter time.Duration) error {
	g.mu.Lock()
	l := g.cables[[2]string{sender.Name, receiver.Name}]
	l.Delay, l.Jitter = delay, jitter
	g.cables[[2]string{sender.Name, receiver.Name}] = l
	g.mu.Unlock()
	return g.sendLinks(ctx)
}

// SlowAll calls Slow for every link between the current members.
func (g *Group) SlowAll(ctx context.Context, delay, jitter time.Duration) error {
	g.mu.Lock()
	for _, a := range g.members {
		for _, b := range g.members {
			l := g.cables[[2]string{a.Name, b.Name}]
			l.Delay, l.Jitter = delay, jitter
			g.cables[[2]string{a.Name, b.Name}] = l
		}
	}
	g.mu.Unlock()
	return g.sendLinks(ctx)
}

// MendAll ends all cuts and delays.
func (g *Group) MendAll(ctx context.Context) error {
	g.mu.Lock()
	clear(g.cables)
	g.mu.Unlock()
	return g.sendLinks(ctx)
}

func (g *Group) changeLinks(ctx context.Context, do func(set func(from, to *Member, hold bool))) error {
	g.mu.Lock()
	do(func(from, to *Member, hold bool) {
		l := g.cables[[2]string{from.Name, to.Name}]
		l.HoldSent = hold
		g.cables[[2]string{from.Name, to.Name}] = l
	})
	g.mu.Unlock()
	return g.sendLinks(ctx)
}

// sendLinks sends every running process the state of its links. A paused process gets it when it is
// resumed. Until then the other ends of the links apply the faults.
func (g *Group) sendLinks(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var errs []error
	for _, m := range g.Members() {
		life := m.ProcessCount()
		if !m.Up() {
			continue
		}
		// A process that is killed or paused during the call gets its links when it is started or
		// resumed.
		if err := m.setLinks(ctx, g.linksOf(m.Name)); err != nil && m.Up() && m.ProcessCount() == life {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// linksOf returns one replica's side of its links.
func (g *Group) linksOf(name string) map[string]Link {
	g.mu.Lock()
	defer g.mu.Unlock()
	out := make(map[string]Link)
	for _, o := range g.members {
		sent, received := g.cables[[2]string{name, o.Name}], g.cables[[2]string{o.Name, name}]
		l := Link{HoldSent: sent.HoldSent, HoldReceived: received.HoldSent, Delay: sent.Delay, Jitter: sent.Jitter}
		if l != (Link{}) {
			out[o.Name] = l
		}
	}
	return out
}
