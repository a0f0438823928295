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

// Follower updates the table of kinds from the CustomResourceDefinitions in this replica's watch
// cache.
type Follower struct {
	source follow.Source
	kinds  *api.Kinds
	hooks  Hooks
	log    *slog.Logger
	ready  chan struct{}

	change sync.Mutex             // held while served changes, in Run and Begin
	served map[string]*definition // by definition name

	follow.Place // revision up to which definitions are applied
}

// NewFollower returns a Follower. It serves no kinds before Begin or Run.
func NewFollower(source follow.Source, kinds *api.Kinds, hooks Hooks, log *slog.Logger) *Follower {
	return &Follower{
		source: source, kinds: kinds, hooks: hooks, log: log, ready: make(chan struct{}),
		served: map[string]*definition{},
	}
}

// Ready is closed once the kinds of all definitions that existed when Run started are served.
func (f *Follower) Ready() <-chan struct{} { return f.ready }

// kind returns the kind CustomResourceDefinition.
func (f *Follower) kind() *api.Kind { return definitions(f.kinds) }

func definitions(k *api.Kinds) *api.Kind {
	return k.ByGVK(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
}

// Run follows the definitions until ctx is done.
func (f *Follower) Run(ctx context.Context) error {
	return follow.Run(ctx, f.log, f.source, f.kind(), f, sync.OnceFunc(func() { close(f.ready) }))
}

// Complete waits until every definition that any client has seen is served by this replica.
func (f *Follower) Complete(ctx context.Context) error {
	select {
	case <-f.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	return f.CaughtUp(ctx, f.source, f.kind(), false)
}

// Begin serves the definitions in the state from which the watch cache is loaded, before Run
// follows them. The objects of their kinds can then be loaded with them. Definitions that are
// already served are unchanged.
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
			continue // Run logs it
		}
		next[c.Name] = d
		add = append(add, d.kinds...)
	}
	if len(next) > 0 && f.kinds.Change(nil, add) == nil {
		maps.Copy(f.served, next)
	}
}

// TakesLight implements follow.Lighter: the follower accepts definitions with packed schemas, which
// are unpacked when an object needs them.
func (f *Follower) TakesLight() {}

// Replace serves exactly the given definitions. All changes take effect in one step, unless one of
// them fails; then each definition is changed separately.
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
	for name, d := range next { // one of the definitions cannot be served; serve the others
		f.exchange(name, d)
	}
}

// Remove stops serving the kinds of a definition.
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

// Set serves the kinds of a new or changed definition. It stops serving them if the definition is
// not established.
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

// exchange replaces the served definition of a name by d; nil only removes it. A definition that
// cannot be served is logged and changes nothing.
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

// keep stores the served definition of a name and closes the converter of the previous one.
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
