package controllers

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

// minStatusInterval is the minimum time between two status writes of one object. While a thousand
// pods become ready, the status of their owner is at most this old.
const minStatusInterval = 50 * time.Millisecond

// StatusPace spaces the status writes of a controller's objects. The zero value is ready for use.
type StatusPace struct {
	mu   sync.Mutex
	last map[types.UID]time.Time
}

// Reserve returns how long the status of an object must not be written. 0 means that the caller may
// write now; the write is then recorded at now.
func (p *StatusPace) Reserve(uid types.UID, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last, ok := p.last[uid]; ok {
		if left := last.Add(minStatusInterval).Sub(now); left > 0 && left <= minStatusInterval {
			return left
		}
	}
	for other, last := range p.last { // only the objects written within the last interval remain
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

// StatusWriter writes the statuses of a controller's objects, spaced by StatusPace.
type StatusWriter[T api.Object] struct {
	term     *Term
	view     *View[T]
	kindName string // the kind in error messages: "stateful set"
	pace     StatusPace
}

// NewStatusWriter returns a writer for the objects of a view. kindName is the kind in error
// messages.
func NewStatusWriter[T api.Object](t *Term, view *View[T], word string) *StatusWriter[T] {
	return &StatusWriter[T]{term: t, view: view, kindName: word}
}

// Write stores next, a copy of an object with a new status. If wait is not 0, the status was
// written recently and nothing is stored: the caller must compute the status again after wait. An
// object that no longer exists is not an error.
func (w *StatusWriter[T]) Write(ctx context.Context, next T) (stored T, wait time.Duration, err error) {
	if wait := w.pace.Reserve(next.GetUID(), w.term.Now()); wait > 0 {
		return next, wait, nil
	}
	stored, err = w.storeStatus(ctx, next)
	return stored, 0, err
}

// WriteNow is Write without a delay, for a status that the controller could not compute again
// later.
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
