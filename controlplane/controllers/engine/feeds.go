package engine

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"

	"k8s.io/client-go/tools/cache"
)

// informerFeeds passes the changes of the informers of one controller to its queue. It is not safe
// for concurrent use: leadController calls it first, then the goroutine of runUntilDone, then
// leadController again.
type informerFeeds struct {
	term          *Term
	dynamic       *DynamicWatch
	requeueSignal func() <-chan struct{} // the function Descriptor.RequeueAll, or nil
	byInf         map[cache.SharedIndexInformer]*informerFeed
}

// informerFeed is the event handler for one informer. Each informer has one handler, so that all
// views have processed a change before its keys are queued.
type informerFeed struct {
	term      *Term
	observers []observer
	keys      []func(ChangeType, any, any) []Key
	permanent bool // the informer belongs to Descriptor.Watches or has views: its handler is never removed
	remove    func()
}

func newInformerFeeds(c *Descriptor, t *Term) *informerFeeds {
	f := &informerFeeds{term: t, dynamic: c.Dynamic, requeueSignal: c.RequeueAll,
		byInf: map[cache.SharedIndexInformer]*informerFeed{}}
	for _, w := range c.Watches {
		f.addWatch(w).permanent = true
	}
	for inf, observers := range t.observers {
		one := f.feedFor(inf)
		one.observers, one.permanent = observers, true
	}
	return f
}

func (f *informerFeeds) feedFor(inf cache.SharedIndexInformer) *informerFeed {
	if f.byInf[inf] == nil {
		f.byInf[inf] = &informerFeed{term: f.term}
	}
	return f.byInf[inf]
}

func (f *informerFeeds) addWatch(w Watch) *informerFeed {
	one := f.feedFor(w.Informer)
	one.keys = append(one.keys, w.keys)
	return one
}

// attachHandlers registers the event handlers. changed is a channel that is closed when the set of
// kinds of the DynamicWatch changes. It is nil for a controller without a DynamicWatch.
func (f *informerFeeds) attachHandlers() (changed <-chan struct{}, err error) {
	if f.dynamic != nil {
		now := f.dynamic.Current()
		for _, one := range now.Kinds {
			f.addWatch(f.dynamic.watchKind(one))
		}
		changed = now.Changed()
	}
	for inf, one := range f.byInf {
		if err := one.attachHandler(inf); err != nil {
			return nil, err
		}
	}
	return changed, nil
}

// updateDynamicKinds registers event handlers for kinds that were added to the DynamicWatch, and
// removes the handlers of kinds that were removed. It returns the channel that is closed at the
// next change.
func (f *informerFeeds) updateDynamicKinds() (changed <-chan struct{}) {
	now := f.dynamic.Current()
	present := make(map[cache.SharedIndexInformer]bool, len(now.Kinds))
	for _, one := range now.Kinds {
		present[one.Informer] = true
		if f.byInf[one.Informer] != nil {
			continue
		}
		if err := f.addWatch(f.dynamic.watchKind(one)).attachHandler(one.Informer); err != nil {
			// The informer has stopped: the next change of the kinds removes it.
			f.term.Log.Debug("kind cannot be watched: its informer has stopped", "kind",
				one.Kind.GVK.String(), "error", err)
		}
	}
	for inf, one := range f.byInf {
		if !one.permanent && !present[inf] {
			one.detachHandler()
			delete(f.byInf, inf)
		}
	}
	return now.Changed()
}

func (f *informerFeeds) detachHandlers() {
	for _, one := range f.byInf {
		one.detachHandler()
	}
}

// runUntilDone updates the dynamic kinds when they change, removes expired entries of views, and
// queues all keys at every resync. It returns when ctx is canceled.
func (f *informerFeeds) runUntilDone(ctx context.Context, resync time.Duration, changed <-chan struct{}) {
	sweep := time.NewTicker(sweepPeriod)
	defer sweep.Stop()
	all := time.NewTicker(resync)
	defer all.Stop()
	again := f.requeueSignal
	if again == nil {
		again = func() <-chan struct{} { return nil }
	}
	renewed := again()
	if renewed != nil {
		f.enqueueAll() // the input may have changed since Lead was called
	}
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
			changed = f.updateDynamicKinds()
		case <-sweep.C:
			for _, one := range f.byInf {
				for _, o := range one.observers {
					for _, obj := range o.takeExpired() {
						one.enqueueKeys(Updated, obj, obj)
					}
				}
			}
		case <-all.C:
			f.enqueueAll()
		case <-renewed:
			renewed = again()
			f.enqueueAll()
		}
	}
}

// enqueueAll queues the keys that the watches return for all cached objects.
func (f *informerFeeds) enqueueAll() {
	for inf, one := range f.byInf {
		for _, obj := range inf.GetIndexer().List() {
			one.enqueueKeys(Added, obj, nil)
		}
	}
}

func (f *informerFeed) attachHandler(inf cache.SharedIndexInformer) error {
	reg, err := inf.AddEventHandler(cache.ResourceEventHandlerDetailedFuncs{
		AddFunc:    func(obj any, _ bool) { f.deliverChange(Added, obj, nil) },
		UpdateFunc: func(old, obj any) { f.deliverChange(Updated, obj, old) },
		DeleteFunc: func(obj any) {
			if gone, ok := obj.(cache.DeletedFinalStateUnknown); ok {
				obj = gone.Obj
			}
			f.deliverChange(Deleted, obj, nil)
		},
	})
	if err != nil {
		return fmt.Errorf("adding an event handler: %w", err)
	}
	f.remove = func() { _ = inf.RemoveEventHandler(reg) }
	return nil
}

func (f *informerFeed) detachHandler() {
	if f.remove != nil {
		f.remove()
	}
}

// deliverChange passes a change of an object to the views and queues its keys. It recovers from a
// panic, so that only this controller misses a malformed object.
func (f *informerFeed) deliverChange(t ChangeType, obj, old any) {
	defer func() {
		if p := recover(); p != nil {
			f.term.Log.Error("handling a change panicked; the change is dropped", "panic", p, "stack",
				string(debug.Stack()))
		}
	}()
	for _, o := range f.observers {
		o.handleChange(t, obj)
	}
	f.enqueueKeys(t, obj, old)
}

func (f *informerFeed) enqueueKeys(t ChangeType, obj, old any) {
	for _, keys := range f.keys {
		for _, k := range keys(t, obj, old) {
			f.term.queue.Add(k)
		}
	}
}
