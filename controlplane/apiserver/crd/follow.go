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

// Follower keeps the table of kinds up to date with the CustomResourceDefinitions in this replica's
// watch cache.
type Follower struct {
	source follow.Source
	kinds  *api.Kinds
	hooks  Hooks
	log    *slog.Logger
	ready  chan struct{}

	change sync.Mutex             // held while served changes, in Run and LoadInitial
	served map[string]*definition // by definition name

	follow.Position // revision up to which definitions are applied
}

// NewFollower returns a Follower. It serves no kinds before LoadInitial or Run.
func NewFollower(source follow.Source, kinds *api.Kinds, hooks Hooks, log *slog.Logger) *Follower {
	return &Follower{
		source: source, kinds: kinds, hooks: hooks, log: log, ready: make(chan struct{}),
		served: map[string]*definition{},
	}
}

// Ready returns a channel that is closed once the kinds of all definitions that existed when Run
// started are served.
func (f *Follower) Ready() <-chan struct{} { return f.ready }

// definitionKind returns the kind CustomResourceDefinition.
func (f *Follower) definitionKind() *api.Kind { return definitionsKind(f.kinds) }

func definitionsKind(k *api.Kinds) *api.Kind {
	return k.ByGVK(apiextensionsv1.SchemeGroupVersion.WithKind("CustomResourceDefinition"))
}

// Run applies the definitions and their changes to the table of kinds until ctx is done.
func (f *Follower) Run(ctx context.Context) error {
	return follow.Run(ctx, f.log, f.source, f.definitionKind(), f, sync.OnceFunc(func() { close(f.ready) }))
}

// AwaitAll waits until this replica serves every definition that was committed before the call.
func (f *Follower) AwaitAll(ctx context.Context) error {
	select {
	case <-f.ready:
	case <-ctx.Done():
		return ctx.Err()
	}
	return f.CaughtUp(ctx, f.source, f.definitionKind(), false)
}

// LoadInitial serves the given definitions before Run follows them. They come from the state from
// which the watch cache is loaded. The custom resources in this state can then be loaded too.
// Definitions that are already served are unchanged.
func (f *Follower) LoadInitial(objects []api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	var add []*api.Kind
	next := map[string]*definition{}
	for _, o := range objects {
		c := o.(*apiextensionsv1.CustomResourceDefinition)
		if !isServed(c) || f.served[c.Name] != nil {
			continue
		}
		d, err := newDefinition(c, f.definitionKind(), f.hooks)
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

// TakesLight declares that the follower accepts definitions in the light form, with packed schemas.
// It unpacks a schema when an object needs it. TakesLight implements follow.LightReceiver.
func (f *Follower) TakesLight() {}

// Replace serves exactly the given definitions. It changes the table of kinds in one step. If a
// definition cannot be served, it changes the table separately for each definition.
func (f *Follower) Replace(objects []api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	there := make(map[string]bool, len(objects))
	var drop, add []*api.Kind
	next := map[string]*definition{}
	for _, o := range objects {
		c := o.(*apiextensionsv1.CustomResourceDefinition)
		there[c.Name] = true
		have := f.served[c.Name]
		if !isServed(c) || have != nil && isCompatible(have.CustomResourceDefinition, c) {
			continue
		}
		d, err := newDefinition(c, f.definitionKind(), f.hooks)
		if err != nil {
			f.log.Error("failed to serve a custom resource definition", "name", c.Name, "err", err)
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
			f.storeServed(name, d)
		}
		return
	}
	for name, d := range next { // one of the definitions cannot be served; serve the others
		f.replaceServed(name, d)
	}
}

// Remove stops serving the kinds of a deleted definition.
func (f *Follower) Remove(o api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	f.removeDefinition(o)
}

func (f *Follower) removeDefinition(o api.Object) {
	if f.served[o.GetName()] != nil {
		f.replaceServed(o.GetName(), nil)
	}
}

// Set serves the kinds of a new or changed definition. It stops serving them if the definition is
// not established.
func (f *Follower) Set(o api.Object) {
	f.change.Lock()
	defer f.change.Unlock()
	c := o.(*apiextensionsv1.CustomResourceDefinition)
	have := f.served[c.Name]
	if !isServed(c) {
		f.removeDefinition(c)
		return
	}
	if have != nil && isCompatible(have.CustomResourceDefinition, c) {
		return
	}
	d, err := newDefinition(c, f.definitionKind(), f.hooks)
	if err != nil {
		f.log.Error("failed to serve a custom resource definition", "name", c.Name, "err", err)
		return
	}
	f.replaceServed(c.Name, d)
}

// replaceServed replaces the served definition with this name by d. A nil d removes it. If d cannot
// be served, the error is logged and nothing changes.
func (f *Follower) replaceServed(name string, d *definition) {
	var drop, add []*api.Kind
	if have := f.served[name]; have != nil {
		drop = have.kinds
	}
	if d != nil {
		add = d.kinds
	}
	if err := f.kinds.Change(drop, add); err != nil {
		f.log.Error("failed to serve a custom resource definition", "name", name, "err", err)
		return
	}
	f.storeServed(name, d)
}

// storeServed stores d as the served definition with this name, and closes the converter of the
// previous definition.
func (f *Follower) storeServed(name string, d *definition) {
	if have := f.served[name]; have != nil && have.convert.close != nil {
		have.convert.close()
	}
	if d == nil {
		delete(f.served, name)
	} else {
		f.served[name] = d
	}
}
