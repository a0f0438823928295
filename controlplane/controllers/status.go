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

// statusPause is how long at least passes between two writes of one object's status. While a thousand pods become
// ready, each of which changes it, what a reader sees is this old at most.
const statusPause = 50 * time.Millisecond

// StatusPace spaces the status writes of a controller's objects. The zero value is ready.
type StatusPace struct {
	mu   sync.Mutex
	last map[types.UID]time.Time
}

// Wait says how long the status of an object is to be left alone still. 0 means that it may be written, and counts as
// written.
func (p *StatusPace) Wait(uid types.UID, now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if last, ok := p.last[uid]; ok {
		if left := last.Add(statusPause).Sub(now); left > 0 && left <= statusPause {
			return left
		}
	}
	for other, last := range p.last { // those of one pause remain, which are few
		if now.Sub(last) > statusPause {
			delete(p.last, other)
		}
	}
	if p.last == nil {
		p.last = map[types.UID]time.Time{}
	}
	p.last[uid] = now
	return 0
}

// StatusWriter writes the statuses of a controller's objects, spaced.
type StatusWriter[T api.Object] struct {
	term *Term
	view *View[T]
	word string // of the kind, for errors: "stateful set"
	pace StatusPace
}

// NewStatusWriter returns a writer for the objects of a view.
func NewStatusWriter[T api.Object](t *Term, view *View[T], word string) *StatusWriter[T] {
	return &StatusWriter[T]{term: t, view: view, word: word}
}

// Write stores next, a copy with another status. wait says that it was written only just now: nothing is stored, and
// the status is to be judged again after that long. That the object is gone is no error.
func (w *StatusWriter[T]) Write(ctx context.Context, next T) (stored T, wait time.Duration, err error) {
	if wait := w.pace.Wait(next.GetUID(), w.term.Now()); wait > 0 {
		return next, wait, nil
	}
	stored, err = w.put(ctx, next)
	return stored, 0, err
}

// WriteNow is Write without a pause: for what would be forgotten by then.
func (w *StatusWriter[T]) WriteNow(ctx context.Context, next T) (stored T, err error) {
	w.pace.Wait(next.GetUID(), w.term.Now())
	return w.put(ctx, next)
}

func (w *StatusWriter[T]) put(ctx context.Context, next T) (T, error) {
	stored, err := client.UpdateStatus(ctx, w.term.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return next, nil
	case err != nil:
		return next, fmt.Errorf("updating the status of %s %s: %w", w.word, storeKey(next), err)
	}
	w.view.Wrote(stored)
	return stored, nil
}
