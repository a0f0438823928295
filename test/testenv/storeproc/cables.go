package storeproc

import (
	"context"
	"errors"
	"time"

	"keelson.dev/keelson/raftstore"
)

// look asks for a status, but not for long: the process may have been paused.
func (g *Group) look(ctx context.Context, m *Member) (raftstore.Status, bool, error) {
	ctx, cancel := context.WithTimeout(ctx, time.Second)
	defer cancel()
	return m.Status(ctx)
}

// Cut stops all traffic between two replicas, silently: bytes wait.
func (g *Group) Cut(ctx context.Context, a, b *Member) error {
	return g.change(ctx, func(set func(from, to *Member, hold bool)) { set(a, b, true); set(b, a, true) })
}

// CutOneWay stops what one replica sends to another.
func (g *Group) CutOneWay(ctx context.Context, from, to *Member) error {
	return g.change(ctx, func(set func(from, to *Member, hold bool)) { set(from, to, true) })
}

// Mend makes the cable between two replicas whole. What has waited arrives.
func (g *Group) Mend(ctx context.Context, a, b *Member) error {
	return g.change(ctx, func(set func(from, to *Member, hold bool)) { set(a, b, false); set(b, a, false) })
}

// Isolate cuts a replica off from all others.
func (g *Group) Isolate(ctx context.Context, m *Member) error {
	return g.change(ctx, func(set func(from, to *Member, hold bool)) {
		for _, o := range g.members {
			if o != m {
				set(m, o, true)
				set(o, m, true)
			}
		}
	})
}

// Split cuts every cable between replicas of different sides. One that is on
// two sides is a bridge between them.
func (g *Group) Split(ctx context.Context, sides ...[]*Member) error {
	together := make(map[[2]*Member]bool)
	for _, side := range sides {
		for _, a := range side {
			for _, b := range side {
				together[[2]*Member{a, b}] = true
			}
		}
	}
	return g.change(ctx, func(set func(from, to *Member, hold bool)) {
		for _, a := range g.members {
			for _, b := range g.members {
				if a != b && !together[[2]*Member{a, b}] {
					set(a, b, true)
				}
			}
		}
	})
}

// Slow makes what one replica sends to another arrive later, by delay and up
// to jitter more. Connections do not wait for each other: what was sent later
// on one may arrive earlier. Zero of both makes it quick again.
func (g *Group) Slow(ctx context.Context, from, to *Member, delay, jitter time.Duration) error {
	g.mu.Lock()
	l := g.cables[[2]string{from.Name, to.Name}]
	l.Delay, l.Jitter = delay, jitter
	g.cables[[2]string{from.Name, to.Name}] = l
	g.mu.Unlock()
	return g.spread(ctx)
}

// SlowAll is Slow for every cable there is now.
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
	return g.spread(ctx)
}

// MendAll makes every cable whole and quick.
func (g *Group) MendAll(ctx context.Context) error {
	g.mu.Lock()
	clear(g.cables)
	g.mu.Unlock()
	return g.spread(ctx)
}

func (g *Group) change(ctx context.Context, do func(set func(from, to *Member, hold bool))) error {
	g.mu.Lock()
	do(func(from, to *Member, hold bool) {
		l := g.cables[[2]string{from.Name, to.Name}]
		l.HoldSent = hold
		g.cables[[2]string{from.Name, to.Name}] = l
	})
	g.mu.Unlock()
	return g.spread(ctx)
}

// spread tells every process that is up of its cables. One that is paused is
// told when it goes on: until then the others' ends do what is needed.
func (g *Group) spread(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var errs []error
	for _, m := range g.Members() {
		life := m.Lives()
		if !m.Up() {
			continue
		}
		// It may be killed or paused under the call, and learns when it comes back.
		if err := m.setLinks(ctx, g.linksOf(m.Name)); err != nil && m.Up() && m.Lives() == life {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// linksOf is one replica's side of its cables.
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
