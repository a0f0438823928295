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

// Position is the revision up to which a Sink has received all changes. Embed it in a Sink to
// implement ProgressReceiver. The zero Position is at revision 0.
type Position struct {
	revision atomic.Uint64

	mu      sync.Mutex
	waiting chan struct{} // closed when revision advances; nil if no goroutine waits
}

// SetReached advances the revision and wakes waiting goroutines. It implements ProgressReceiver.
func (p *Position) SetReached(resourceVersion string) {
	rev, err := strconv.ParseUint(resourceVersion, 10, 64)
	if err != nil {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if rev <= p.revision.Load() {
		return
	}
	p.revision.Store(rev)
	if p.waiting != nil {
		close(p.waiting)
		p.waiting = nil
	}
}

// Revision returns the revision that the Sink has reached.
func (p *Position) Revision() uint64 { return p.revision.Load() }

// CaughtUp waits until the Sink has received every change of the kind's objects that was
// acknowledged before the call. If cachedOnly is true, it waits only for the changes that are in
// the cache of the source.
func (p *Position) CaughtUp(ctx context.Context, src Source, kind *api.Kind, cachedOnly bool) error {
	r := &api.Request{Verb: api.VerbList, Kind: kind, Internal: api.InternalOptions{Pointers: true, Light: true},
		List: metav1.ListOptions{Limit: 1}}
	if cachedOnly {
		r.List.ResourceVersion = "0"
	}
	answer, err := src.List(ctx, r)
	if err != nil {
		return fmt.Errorf("reading the newest revision of %s: %w", kind.Resource, err)
	}
	list, ok := answer.(*api.ObjectList)
	if !ok {
		return fmt.Errorf("reading the newest revision of %s: unexpected result type %T", kind.Resource, answer)
	}
	target, err := strconv.ParseUint(list.Changed, 10, 64)
	if err != nil {
		return fmt.Errorf("reading the newest revision of %s: %w", kind.Resource, err)
	}
	for p.revision.Load() < target {
		p.mu.Lock()
		if p.waiting == nil {
			p.waiting = make(chan struct{})
		}
		changed := p.waiting
		p.mu.Unlock()
		if p.revision.Load() >= target {
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
