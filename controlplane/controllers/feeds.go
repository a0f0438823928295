package controllers

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"k8s.io/client-go/tools/cache"
)

// feeds connects the informers of one controller to its queue. It is not safe for concurrent use:
// lead calls it first, then the goroutine of run, then lead again.
type feeds struct {
	term  *Term
	every *Every
	again func() <-chan struct{} // see Controller.RequeueAll
	byInf map[cache.SharedIndexInformer]*feed
}

// feed is the event handler of one informer. Each informer has a single handler, so that all views
// have processed a change before its keys are queued.
type feed struct {
	term      *Term
	observers []observer
	keys      []func(ChangeType, any, any) []Key
	fixed     bool // the informer is in the controller's Watches or has views: its feed is never removed
	remove    func()
}

func newFeeds(c *Controller, t *Term) *feeds {
	f := &feeds{term: t, every: c.Every, again: c.Renewed, byInf: map[cache.SharedIndexInformer]*feed{}}
	for _, w := range c.Watches {
		f.watch(w).fixed = true
	}
	for inf, observers := range t.observers {
		one := f.of(inf)
		one.observers, one.fixed = observers, true
	}
	return f
}

func (f *feeds) of(inf cache.SharedIndexInformer) *feed {
	if f.byInf[inf] == nil {
		f.byInf[inf] = &feed{term: f.term}
	}
	return f.byInf[inf]
}

func (f *feeds) watch(w Watch) *feed {
	one := f.of(w.Informer)
	one.keys = append(one.keys, w.keys)
	return one
}

// attach registers the event handlers. The channel is closed when the set of dynamic kinds changes.
// It is nil for a controller without a Every.
func (f *feeds) attach() (changed <-chan struct{}, err error) {
	if f.every != nil {
		now := f.every.Now()
		for _, one := range now.Kinds {
			f.watch(f.every.watch(one))
		}
		changed = now.Changed()
	}
	for inf, one := range f.byInf {
		if err := one.attach(inf); err != nil {
			return nil, err
		}
	}
	return changed, nil
}

// follow registers handlers for added kinds and removes the handlers of removed kinds.
func (f *feeds) follow() (changed <-chan struct{}) {
	now := f.every.Now()
	present := make(map[cache.SharedIndexInformer]bool, len(now.Kinds))
	for _, one := range now.Kinds {
		present[one.Informer] = true
		if f.byInf[one.Informer] != nil {
			continue
		}
		if err := f.watch(f.every.watch(one)).attach(one.Informer); err != nil {
			// The informer has stopped already: the next change of the kinds removes it.
			f.term.Log.Debug("kind cannot be watched: its informer has stopped", "kind", one.Kind.GVK.String(), "error", err)
		}
	}
	for inf, one := range f.byInf {
		if !one.fixed && !present[inf] {
			one.detach()
			delete(f.byInf, inf)
		}
	}
	return now.Changed()
}

func (f *feeds) detach() {
	for _, one := range f.byInf {
		one.detach()
	}
}

// run follows the dynamic kinds, drops expired entries of views, and queues all keys at every
// resync. It returns when ctx is canceled.
func (f *feeds) run(ctx context.Context, resync time.Duration, changed <-chan struct{}) {
	sweep := time.NewTicker(sweepPeriod)
	defer sweep.Stop()
	all := time.NewTicker(resync)
	defer all.Stop()
	again := f.again
	if again == nil {
		again = func() <-chan struct{} { return nil }
	}
	renewed := again()
	if renewed != nil {
		f.everything() // the inputs may have changed since Lead
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			changed = f.follow()
		case <-sweep.C:
			for _, one := range f.byInf {
				for _, o := range one.observers {
					for _, obj := range o.expired() {
						one.enqueue(Updated, obj, obj)
					}
				}
			}
		case <-all.C:
			f.everything()
		case <-renewed:
			renewed = again()
			f.everything()
		}
	}
}

// everything queues the keys of all cached objects.
func (f *feeds) everything() {
	for inf, one := range f.byInf {
		for _, obj := range inf.GetIndexer().List() {
			one.enqueue(Added, obj, nil)
		}
	}
}

func (f *feed) attach(inf cache.SharedIndexInformer) error {
	reg, err := inf.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(obj any, _ bool) { f.deliver(Added, obj, nil) },
		UpdateFunc: func(old, obj any) { f.deliver(Updated, obj, old) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			f.deliver(Deleted, obj, nil)
		},
	})
	if err != nil {
		return fmt.Errorf("adding an event handler: %w", err)
	}
	f.remove = func() { _ = inf.RemoveEventHandler(reg) }
	return nil
}

func (f *feed) detach() {
	if f.remove != nil {
		f.remove()
	}
}

// deliver passes one change to the views and queues its keys. It recovers a panic: a malformed
// object is lost only to this controller.
func (f *feed) deliver(t ChangeType, obj, old any) {
	defer func() {
		if p := recover(); p != nil {
			f.term.Log.Error("handling a change panicked; the change is dropped", "panic", p, "stack", string(debug.Stack()))
		}
	}()
	for _, o := range f.observers {
		o.observed(t, obj)
	}
	f.enqueue(t, obj, old)
}

func (f *feed) enqueue(t ChangeType, obj, old any) {
	for _, keys := range f.keys {
		for _, k := range keys(t, obj, old) {
			f.term.queue.Add(k)
		}
	}
}
