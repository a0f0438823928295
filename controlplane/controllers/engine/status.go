package engine

import (
	"context"
	"fmt"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
)

// minStatusInterval is the minimum time between two writes of the status of one object. While many
// pods of the object change, its status may be this long out of date.
const minStatusInterval = 50 * time.Millisecond

// StatusPace limits how often the status of each object is written: once per minStatusInterval. The
// zero value is ready for use.
type StatusPace struct {
	mu   sync.Mutex
	last map[types.UID]time.Time
}

// Reserve returns the remaining time during which the status of the object with this UID must not
// be written. If it returns 0, the caller may write now, and the write is recorded.
func (p *StatusPace) Reserve(uid types.UID, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last, ok := p.last[uid]; ok {
		if left := last.Add(minStatusInterval).Sub(now); left > 0 && left <= minStatusInterval {
			return left
		}
	}
	for other, last := range p.last { // remove all objects that were not written within the last interval
		if now.Sub(last) > minStatusInterval {
			delete(p.last, other)
		}
	}
	if p.last == nil {
		p.last = map[types.UID]time.Time{}
	}
	p.last[uid] = now
	return 0
}

// StatusWriter writes the statuses of a controller's objects, at most as often as StatusPace
// permits.
type StatusWriter[T api.Object] struct {
	term     *Term
	view     *View[T]
	kindName string // name of the kind in error messages, such as "stateful set"
	pace     StatusPace
}

// NewStatusWriter returns a StatusWriter for the objects of a view. kindName is the name of the
// kind in error messages.
func NewStatusWriter[T api.Object](t *Term, view *View[T], kindName string) *StatusWriter[T] {
	return &StatusWriter[T]{term: t, view: view, kindName: kindName}
}

// Write stores next, a copy of an object with a new status. If wait is not 0, the last write was
// too recent and nothing is stored: the caller must compute the status again after wait. It is not
// an error if the object no longer exists.
func (w *StatusWriter[T]) Write(ctx context.Context, next T) (stored T, wait time.Duration, err error) {
	if wait := w.pace.Reserve(next.GetUID(), w.term.Now()); wait > 0 {
		return next, wait, nil
	}
	stored, err = w.storeStatus(ctx, next)
	return stored, 0, err
}

// WriteNow does the same as Write, but always stores the status at once. It is for a status that
// the controller cannot compute again later.
func (w *StatusWriter[T]) WriteNow(ctx context.Context, next T) (stored T, err error) {
	w.pace.Reserve(next.GetUID(), w.term.Now())
	return w.storeStatus(ctx, next)
}

func (w *StatusWriter[T]) storeStatus(ctx context.Context, next T) (T, error) {
	stored, err := client.UpdateStatus(ctx, w.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return next, nil
	case err != nil:
		return next, fmt.Errorf("updating the status of %s %s: %w", w.kindName, storeKey(next), err)
	}
	w.view.RecordWrite(stored)
	return stored, nil
}
