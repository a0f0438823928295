package crd

import (
	"context"
	"log/slog"
	"maps"
	"sync"

	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/follow"
)

// Follower keeps the table of kinds in step with the definitions of this replica's watch cache.
type Follower struct {
	source follow.Source
	kinds  *api.Kinds
	hooks  Hooks
	log    *slog.Logger
	ready  chan struct{}

	change sync.Mutex             // held while served changes, which Run and Begin do
	served map[string]*definition // by the definition's name

	follow.Place // up to where definitions have been seen
}

// NewFollower returns a follower. Nothing is served until Run.
func NewFollower(source follow.Source, kinds *api.Kinds, hooks Hooks, log *slog.Logger) *Follower {
	return &Follower{
		source: source, kinds: kinds, hooks: hooks, log: log, ready: make(chan struct{}),
		served: map[string]*definition{},
	}
}

// Ready is closed once the kinds of all definitions that were there when Run began are served.
func (f *Follower) Ready() <-chan struct{} { return f.ready }

// kind is that of the definitions themselves.
func (f *Follower) kind() *api.Kind { return definitions(f.kinds) }

func definitions(k *api.Kinds) *api.Kind {
	return k.ByGVK(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
}

// Run follows until ctx ends.
func (f *Follower) Run(ctx context.Context) error {
	return follow.Run(ctx, f.log, f.source, f.kind(), f, sync.OnceFunc(func() { close(f.ready) }))
}

// Complete returns once every definition that anybody has been told of is served here.
func (f *Follower) Complete(ctx context.Context) error {
	select {
	case <-f.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	return f.CaughtUp(ctx, f.source, f.kind(), false)
}

// Begin serves the definitions that the watch cache is being loaded with, in the state that it is loaded from, before
// Run follows them: the objects of their kinds are loaded with them. What is served already stays.
func (f *Follower) Begin(all []api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	var add []*api.Kind
	next := map[string]*definition{}
	for _, o := range all {
		c := o.(*apiextensionsv1.CustomResourceDefinition)
		if !served(c) || f.served[c.Name] != nil {
			continue
		}
		d, err := define(c, f.kind(), f.hooks)
		if err != nil {
			continue // Run tells of it
		}
		next[c.Name] = d
		add = append(add, d.kinds...)
	}
	if len(next) > 0 && f.kinds.Change(nil, add) == nil {
		maps.Copy(f.served, next)
	}
}

// TakesLight is follow.Lighter: schemas are kept packed until an object needs them.
func (f *Follower) TakesLight() {}

// Replace is follow.Sink. It makes the table that of these definitions and of no others: in one step where nothing stands against it.
func (f *Follower) Replace(all []api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	there := make(map[string]bool, len(all))
	var drop, add []*api.Kind
	next := map[string]*definition{}
	for _, o := range all {
		c := o.(*apiextensionsv1.CustomResourceDefinition)
		there[c.Name] = true
		have := f.served[c.Name]
		if !served(c) || have != nil && same(have.CustomResourceDefinition, c) {
			continue
		}
		d, err := define(c, f.kind(), f.hooks)
		if err != nil {
			f.log.Error("a custom resource definition cannot be served", "name", c.Name, "err", err)
			continue
		}
		next[c.Name] = d
		add = append(add, d.kinds...)
		if have != nil {
			drop = append(drop, have.kinds...)
		}
	}
	for name, d := range f.served {
		if !there[name] {
			next[name] = nil
			drop = append(drop, d.kinds...)
		}
	}
	if len(next) == 0 {
		return
	}
	if f.kinds.Change(drop, add) == nil {
		for name, d := range next {
			f.keep(name, d)
		}
		return
	}
	for name, d := range next { // one of them cannot be served: the others can
		f.exchange(name, d)
	}
}

// Remove is follow.Sink.
func (f *Follower) Remove(o api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	f.remove(o)
}

func (f *Follower) remove(o api.Object) {
	if f.served[o.GetName()] != nil {
		f.exchange(o.GetName(), nil)
	}
}

// Set is follow.Sink.
func (f *Follower) Set(o api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	c := o.(*apiextensionsv1.CustomResourceDefinition)
	have := f.served[c.Name]
	if !served(c) {
		f.remove(c)
		return
	}
	if have != nil && same(have.CustomResourceDefinition, c) {
		return
	}
	d, err := define(c, f.kind(), f.hooks)
	if err != nil {
		f.log.Error("a custom resource definition cannot be served", "name", c.Name, "err", err)
		return
	}
	f.exchange(c.Name, d)
}

// exchange serves a definition in place of what is served under its name; nil serves none.
func (f *Follower) exchange(name string, d *definition) {
	var drop, add []*api.Kind
	if have := f.served[name]; have != nil {
		drop = have.kinds
	}
	if d != nil {
		add = d.kinds
	}
	if err := f.kinds.Change(drop, add); err != nil {
		f.log.Error("a custom resource definition cannot be served", "name", name, "err", err)
		return
	}
	f.keep(name, d)
}

// keep notes what is served under a name, and lets go what was.
func (f *Follower) keep(name string, d *definition) {
	if have := f.served[name]; have != nil && have.convert.close != nil {
		have.convert.close()
	}
	if d == nil {
		delete(f.served, name)
	} else {
		f.served[name] = d
	}
}
