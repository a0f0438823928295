package apiserver

import (
	"context"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/admission/policies"
	"keelson.dev/keelson/controlplane/apiserver/admission/webhooks"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/follow"
	"keelson.dev/keelson/internal/lifecycle"
)

// outside runs the admission that is configured in the cluster: admission policies, then webhooks.
type outside struct {
	server   *Server
	webhooks *webhooks.Webhooks
	policies *policies.Policies

	following atomic.Bool   // run has started
	ready     chan struct{} // closed once all configurations have been read
}

func newOutside(s *Server) *outside {
	compilers, reg := s.cfg.Expressions, s.cfg.Metrics
	o := &outside{server: s, ready: make(chan struct{})}
	versions := matching.Versions{Kinds: s.cfg.Kinds}
	o.webhooks = webhooks.New(webhooks.Config{
		Versions: versions, Cluster: s.known, Services: s.dialer, Expressions: compilers.Admission(),
		Authorizer: s.chain.inner, Metrics: reg, Log: s.cfg.Log.With("part", "admission webhooks"),
		Own: func(u api.User) bool { _, node := authz.NameOf(u); return node },
	})
	o.policies = policies.New(policies.Config{
		Versions: versions, Cluster: s.known, Params: params{s.chain}, Expressions: compilers.Admission(),
		Authorizer: s.chain.inner, Types: s.cfg.Registry.Types, Metrics: reg,
		Log: s.cfg.Log.With("part", "admission policies"),
	})
	return o
}

// mutators and validators return the admission phases that run after the built-in plugins.
func (o *outside) mutators() admission.Mutators {
	return admission.Mutators{
		{Name: "policies", Plugins: []admission.Plugin{{Name: "MutatingAdmissionPolicy", Admit: o.mutating(o.policies.Mutate)}}},
		{Name: "webhooks", Plugins: []admission.Plugin{{Name: "MutatingAdmissionWebhook", Admit: o.mutating(o.webhooks.Mutate)}}},
	}
}

func (o *outside) validators() admission.Validators {
	return admission.Validators{
		{Name: "policies", Plugins: []admission.Plugin{{Name: "ValidatingAdmissionPolicy", Admit: o.validating(o.policies.Validate)}}},
		{Name: "webhooks", Plugins: []admission.Plugin{{Name: "ValidatingAdmissionWebhook", Admit: o.validating(o.webhooks.Validate)}}},
	}
}

// validating returns a plugin function that calls ask, a validating policy or webhook engine, for
// each attempt.
func (o *outside) validating(ask func(context.Context, *matching.Attempt) error) func(context.Context, *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if o.idle() {
			return nil
		}
		if err := o.await(ctx); err != nil {
			return err
		}
		return ask(ctx, matching.Of(a))
	}
}

// mutating returns a plugin function that calls ask, a mutating policy or webhook engine. It copies
// the changes into the attempt's object and requests reinvocation if needed.
func (o *outside) mutating(ask func(context.Context, *matching.Attempt, *matching.Rounds) error) func(context.Context, *api.Attempt) error {
	type rounds struct{ matching.Rounds }
	key := new(byte) // identifies the state of this plugin in an attempt
	return func(ctx context.Context, a *api.Attempt) error {
		if o.idle() {
			return nil
		}
		if err := o.await(ctx); err != nil {
			return err
		}
		r := a.Kept(key, func() any { return &rounds{} }).(*rounds)
		if a.Again() {
			r.Second()
		}
		seen := matching.Of(a)
		given := seen.Object
		if err := ask(ctx, seen, &r.Rounds); err != nil {
			return err
		}
		if r.Again() {
			a.Reinvoke()
		}
		return assign(a, given, seen.Object)
	}
}

// assign copies the value of from into to, an object of the attempt. It fails if their types
// differ.
func assign(a *api.Attempt, to, from runtime.Object) error {
	if to == from {
		return nil
	}
	t, f := reflect.ValueOf(to), reflect.ValueOf(from)
	if t.Type() != f.Type() || t.Kind() != reflect.Pointer {
		return apierrors.NewInternalError(fmt.Errorf("admission made a %T of a %T", from, to))
	}
	t.Elem().Set(f.Elem())
	return nil
}

// idle reports whether all configurations are read and the cluster has neither policies nor
// webhooks.
func (o *outside) idle() bool {
	return (!o.following.Load() || isClosed(o.ready)) && o.webhooks.None() && o.policies.None()
}

// await waits until this replica has read the policies and webhook configurations.
func (o *outside) await(ctx context.Context) error {
	if !o.following.Load() || isClosed(o.ready) {
		return nil
	}
	return awaitRead(ctx, o.ready, "admission configurations")
}

// run follows the policies and webhook configurations until ctx ends.
func (o *outside) run(ctx context.Context) error {
	o.following.Store(true)
	select {
	case <-o.server.cfg.Registry.Ready():
	case <-ctx.Done():
		return ctx.Err()
	}
	sinks := map[string]follow.Sink{
		"validatingwebhookconfigurations": o.webhooks.Validating(), "mutatingwebhookconfigurations": o.webhooks.Mutating(),
	}
	for resource, sink := range o.policies.Sinks() {
		sinks[resource] = sink
	}
	var parts []lifecycle.Part
	var waiting sync.WaitGroup
	for resource, sink := range sinks {
		kind := o.server.cfg.Kinds.ByResource(schema.GroupVersionResource{
			Group: "admissionregistration.k8s.io", Version: "v1", Resource: resource,
		})
		if kind == nil {
			continue
		}
		waiting.Add(1)
		var once sync.Once
		parts = append(parts, lifecycle.Part{Name: "admission " + resource, Run: func(ctx context.Context) error {
			return follow.Run(ctx, o.server.cfg.Log, o.server.cfg.Registry, kind, sink, func() { once.Do(waiting.Done) })
		}})
	}
	parts = append(parts, lifecycle.Part{Name: "admission ready", Run: func(ctx context.Context) error {
		seen := make(chan struct{})
		go func() { waiting.Wait(); close(seen) }()
		select {
		case <-seen:
			close(o.ready)
		case <-ctx.Done():
		}
		<-ctx.Done()
		return ctx.Err()
	}})
	return lifecycle.Run(ctx, parts...)
}

// params reads the parameter objects of policies.
type params struct{ chain *chain }

// GetObject returns an object from the cache, or from the store if the cache does not have it. It
// returns nil if the object does not exist. It implements policies.Objects.
func (p params) GetObject(ctx context.Context, k *api.Kind, namespace, name string) (api.Object, error) {
	r := &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := p.chain.registry.Get(ctx, r)
	if apierrors.IsNotFound(err) {
		r.Get.ResourceVersion = ""
		o, err = p.chain.registry.Get(ctx, r)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return o, err
}

// ListObjects lists objects of the cache by label selector. It implements policies.Objects.
func (p params) ListObjects(ctx context.Context, k *api.Kind, namespace string, s labels.Selector) ([]api.Object, error) {
	r := &api.Request{Verb: api.VerbList, Kind: k, Namespace: namespace, Pointers: true}
	r.List.ResourceVersion, r.List.LabelSelector = "0", s.String()
	l, err := p.chain.registry.List(ctx, r)
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}

// inner returns the authorizer for the CEL expressions of one request. It caches each decision for
// the request.
func (c *chain) inner(ctx context.Context) authorizer.UnconditionalAuthorizer {
	return &questions{chain: c, ctx: ctx, known: map[string]decision{}}
}

type decision struct {
	decided authorizer.Decision
	reason  string
}

type questions struct {
	chain *chain
	ctx   context.Context
	mu    sync.Mutex
	known map[string]decision
}

// Authorize implements authorizer.UnconditionalAuthorizer. It uses the context of the request, not
// its argument.
func (q *questions) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	u := a.GetUser()
	of := &authz.Attributes{
		User: api.User{Name: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: u.GetExtra()},
		Verb: a.GetVerb(), Namespace: a.GetNamespace(), APIGroup: a.GetAPIGroup(), APIVersion: a.GetAPIVersion(),
		Resource: a.GetResource(), Subresource: a.GetSubresource(), Name: a.GetName(),
	}
	if !a.IsResourceRequest() {
		of.Path = a.GetPath()
	}
	key := fmt.Sprintf("%q", []any{of.User, of.Verb, of.Namespace, of.APIGroup, of.APIVersion, of.Resource, of.Subresource, of.Name, of.Path})
	q.mu.Lock()
	defer q.mu.Unlock()
	d, ok := q.known[key]
	if !ok {
		answer, reason := q.chain.authorizer.Authorize(q.ctx, of)
		d = decision{map[authz.Decision]authorizer.Decision{
			authz.Allow: authorizer.DecisionAllow, authz.Deny: authorizer.DecisionDeny, authz.NoOpinion: authorizer.DecisionNoOpinion,
		}[answer], reason}
		q.known[key] = d
	}
	return d.decided, d.reason, nil
}
