package controllers

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"k8s.io/client-go/tools/cache"
)

// feeds join the informers of one controller to its queue. They belong to one goroutine after another: that which
// begins the leadership, then run, then that which ends it.
type feeds struct {
	term  *Term
	every *Every
	again func() <-chan struct{} // see Controller.Renewed
	byInf map[cache.SharedIndexInformer]*feed
}

// feed is one informer. There is one handler for each, so that views have observed a change before its keys are queued.
type feed struct {
	term      *Term
	observers []observer
	keys      []func(ChangeType, any, any) []Key
	fixed     bool // one of the controller's Watches or views: it stays
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

// attach registers the handlers. changed is closed when there are other kinds; it is nil where nobody asked for them.
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

// follow registers handlers for kinds that have come and removes those of kinds that have gone.
func (f *feeds) follow() (changed <-chan struct{}) {
	now := f.every.Now()
	present := make(map[cache.SharedIndexInformer]bool, len(now.Kinds))
	for _, one := range now.Kinds {
		present[one.Informer] = true
		if f.byInf[one.Informer] != nil {
			continue
		}
		if err := f.watch(f.every.watch(one)).attach(one.Informer); err != nil {
			// It has ended already: the next change will say so.
			f.term.Log.Debug("a kind is not watched", "kind", one.Kind.GVK.String(), "error", err)
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

// run follows the kinds, sweeps views and resyncs until ctx ends.
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
		f.everything() // something may have been renewed since Lead
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

// everything queues the keys of all objects that are cached.
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

// deliver hands one change on. An object over which a controller stumbles is lost to that controller only.
func (f *feed) deliver(t ChangeType, obj, old any) {
	defer func() {
		if p := recover(); p != nil {
			f.term.Log.Error("a change was not understood", "panic", p, "stack", string(debug.Stack()))
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
