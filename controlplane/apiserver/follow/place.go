package follow

import (
	"context"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
)

// Place is the revision up to which a Sink has received all changes. Embed it in a Sink to
// implement Progress. The zero Place is at revision 0.
type Place struct {
	at atomic.Uint64

	mu      sync.Mutex
	waiting chan struct{} // closed when at advances; nil if no goroutine waits
}

// Reached advances the revision and wakes waiting goroutines. It implements Progress.
func (p *Place) Reached(resourceVersion string) {
	rev, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if rev <= p.at.Load() {
		return
	}
	p.at.Store(rev)
	if p.waiting != nil {
		close(p.waiting)
		p.waiting = nil
	}
}

// At returns the revision that the Sink has reached.
func (p *Place) At() uint64 { return p.at.Load() }

// CaughtUp waits until the Sink has received every acknowledged change of the kind's objects. With
// known set, it waits only for the changes that the cache of the source already has.
func (p *Place) CaughtUp(ctx context.Context, src Source, kind *api.Kind, known bool) error {
	r := &api.Request{Verb: api.VerbList, Kind: kind, Pointers: true, Light: true, List: metav1.ListOptions{Limit: 1}}
	if known {
		r.List.ResourceVersion = "0"
	}
	answer, err := src.List(ctx, r)
	if err != nil {
		return fmt.Errorf("looking for the newest change of %s: %w", kind.Resource, err)
	}
	list, ok := answer.(*api.ObjectList)
	if !ok {
		return fmt.Errorf("looking for the newest change of %s: the answer is a %T", kind.Resource, answer)
	}
	target, err := strconv.ParseUint(list.Changed, 10, 64)
	if err != nil {
		return fmt.Errorf("looking for the newest change of %s: %w", kind.Resource, err)
	}
	for p.at.Load() < target {
		p.mu.Lock()
		if p.waiting == nil {
			p.waiting = make(chan struct{})
		}
		changed := p.waiting
		p.mu.Unlock()
		if p.at.Load() >= target {
			return nil // the revision advanced before waiting was set
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}
