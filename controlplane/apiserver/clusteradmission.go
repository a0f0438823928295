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

// clusterAdmission runs the admission that is configured by objects in the cluster: admission
// policies, then webhooks.
type clusterAdmission struct {
	server   *Server
	webhooks *webhooks.Webhooks
	policies *policies.Policies

	following atomic.Bool   // run has started
	ready     chan struct{} // closed once all configurations have been read
}

func newClusterAdmission(s *Server, services webhooks.Services) *clusterAdmission {
	compilers, reg := s.cfg.Admission.Expressions, s.cfg.Process.Metrics
	o := &clusterAdmission{server: s, ready: make(chan struct{})}
	versions := matching.Versions{Kinds: s.cfg.Kinds}
	o.webhooks = webhooks.New(webhooks.Config{
		Versions: versions, Cluster: s.cluster, Services: services, Expressions: compilers.Admission(),
		Authorizer: s.pipeline.authorizerForCEL, Metrics: reg, Log: s.cfg.Log.With("part", "admission webhooks"),
		Own: func(u api.User) bool { _, node := authz.NameOf(u); return node },
	})
	o.policies = policies.New(policies.Config{
		Versions: versions, Cluster: s.cluster, Params: policyParamReader{s.pipeline},
		Expressions: compilers.Admission(),
		Authorizer:  s.pipeline.authorizerForCEL, Types: s.cfg.Registry.Types, Metrics: reg,
		Log: s.cfg.Log.With("part", "admission policies"),
	})
	return o
}

// mutatorPhases returns the phases of mutating policies and webhooks. They run after the built-in
// plugins.
func (o *clusterAdmission) mutatorPhases() admission.Mutators {
	return admission.Mutators{
		{Name: "policies", Plugins: []admission.Plugin{{Name: "MutatingAdmissionPolicy",
			Admit: o.mutatingPlugin(o.policies.Mutate)}}},
		{Name: "webhooks", Plugins: []admission.Plugin{{Name: "MutatingAdmissionWebhook",
			Admit: o.mutatingPlugin(o.webhooks.Mutate)}}},
	}
}

func (o *clusterAdmission) validatorPhases() admission.Validators {
	return admission.Validators{
		{Name: "policies", Plugins: []admission.Plugin{{Name: "ValidatingAdmissionPolicy",
			Admit: o.validatingPlugin(o.policies.Validate)}}},
		{Name: "webhooks", Plugins: []admission.Plugin{{Name: "ValidatingAdmissionWebhook",
			Admit: o.validatingPlugin(o.webhooks.Validate)}}},
	}
}

// validatingPlugin returns a plugin function that evaluates validating policies or calls validating
// webhooks. call is the function of the policies or webhooks for one attempt.
func (o *clusterAdmission) validatingPlugin(
	call func(context.Context, *matching.Attempt) error,
) func(context.Context, *api.Attempt) error {
	return func(ctx context.Context, a *api.Attempt) error {
		if o.isIdle() {
			return nil
		}
		if err := o.awaitReady(ctx); err != nil {
			return err
		}
		return call(ctx, matching.Of(a))
	}
}

// mutatingPlugin returns a plugin function that evaluates mutating policies or calls mutating
// webhooks. call is the function of the policies or webhooks for one attempt. The plugin copies the
// changes into the attempt's object, and requests a second round if a reinvocation is needed.
func (o *clusterAdmission) mutatingPlugin(
	call func(context.Context, *matching.Attempt, *matching.Rounds) error,
) func(context.Context, *api.Attempt) error {
	type rounds struct{ matching.Rounds }
	key := new(byte) // identifies the state of this plugin in an attempt
	return func(ctx context.Context, a *api.Attempt) error {
		if o.isIdle() {
			return nil
		}
		if err := o.awaitReady(ctx); err != nil {
			return err
		}
		r := a.PluginState(key, func() any { return &rounds{} }).(*rounds)
		if a.IsSecondRound() {
			r.StartSecond()
		}
		seen := matching.Of(a)
		given := seen.Object
		if err := call(ctx, seen, &r.Rounds); err != nil {
			return err
		}
		if r.NeedsReinvocation() {
			a.RequestSecondRound()
		}
		return assignObject(a, given, seen.Object)
	}
}

// assignObject copies the value of source into target, an object of the attempt. It fails if their
// types differ.
func assignObject(a *api.Attempt, target, source runtime.Object) error {
	if target == source {
		return nil
	}
	t, f := reflect.ValueOf(target), reflect.ValueOf(source)
	if t.Type() != f.Type() || t.Kind() != reflect.Pointer {
		return apierrors.NewInternalError(fmt.Errorf("admission returned a %T for a %T", source, target))
	}
	t.Elem().Set(f.Elem())
	return nil
}

// isIdle reports whether all configurations are read and the cluster has neither policies nor
// webhooks.
func (o *clusterAdmission) isIdle() bool {
	return (!o.following.Load() || isClosed(o.ready)) && o.webhooks.IsEmpty() && o.policies.IsEmpty()
}

// awaitReady waits until this replica has read all policies and webhook configurations.
func (o *clusterAdmission) awaitReady(ctx context.Context) error {
	if !o.following.Load() || isClosed(o.ready) {
		return nil
	}
	return awaitInitialRead(ctx, o.ready, "admission configurations")
}

// followConfigurations keeps the policies and webhook configurations up to date with the stored
// objects until ctx ends.
func (o *clusterAdmission) followConfigurations(ctx context.Context) error {
	o.following.Store(true)
	select {
	case <-o.server.cfg.Registry.Ready():
	case <-ctx.Done():
		return ctx.Err()
	}
	sinks := map[string]follow.Sink{
		"validatingwebhookconfigurations": o.webhooks.Validating(),
		"mutatingwebhookconfigurations":   o.webhooks.Mutating(),
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
			return follow.Run(ctx, o.server.cfg.Log, o.server.cfg.Registry, kind, sink, func() {
				once.Do(waiting.Done)
			})
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

// policyParamReader reads the parameter objects of policies.
type policyParamReader struct{ pipeline *pipeline }

// GetObject returns an object from the cache, or from the store if the cache does not have it. It
// returns nil if the object does not exist. It implements policies.Objects.
func (p policyParamReader) GetObject(ctx context.Context, k *api.Kind, namespace, name string) (api.Object, error) {
	r := &api.Request{Verb: api.VerbGet, Kind: k, Namespace: namespace, Name: name}
	r.Get.ResourceVersion = "0"
	o, err := p.pipeline.registry.GetObject(ctx, r)
	if apierrors.IsNotFound(err) {
		r.Get.ResourceVersion = ""
		o, err = p.pipeline.registry.GetObject(ctx, r)
	}
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	return o, err
}

// ListObjects returns the objects in the cache that match a label selector. It implements
// policies.Objects.
func (p policyParamReader) ListObjects(ctx context.Context, k *api.Kind, namespace string, s labels.Selector) (
	[]api.Object, error,
) {
	r := &api.Request{Verb: api.VerbList, Kind: k, Namespace: namespace, Internal: api.InternalOptions{Pointers: true}}
	r.List.ResourceVersion, r.List.LabelSelector = "0", s.String()
	l, err := p.pipeline.registry.List(ctx, r)
	if err != nil {
		return nil, err
	}
	return l.(*api.ObjectList).Items, nil
}

// authorizerForCEL returns the authorizer for the CEL expressions of one request. It caches each
// decision for the request.
func (c *pipeline) authorizerForCEL(ctx context.Context) authorizer.UnconditionalAuthorizer {
	return &cachingAuthorizer{pipeline: c, ctx: ctx, decisions: map[string]cachedDecision{}}
}

type cachedDecision struct {
	decided authorizer.Decision
	reason  string
}

type cachingAuthorizer struct {
	pipeline  *pipeline
	ctx       context.Context
	mu        sync.Mutex
	decisions map[string]cachedDecision
}

// Authorize returns the decision on a, cached for this request. It uses the context of the request
// instead of its argument. It implements authorizer.UnconditionalAuthorizer.
func (q *cachingAuthorizer) Authorize(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	u := a.GetUser()
	of := &authz.Attributes{
		User: api.User{Name: u.GetName(), UID: u.GetUID(), Groups: u.GetGroups(), Extra: u.GetExtra()},
		Verb: a.GetVerb(), Namespace: a.GetNamespace(), APIGroup: a.GetAPIGroup(), APIVersion: a.GetAPIVersion(),
		Resource: a.GetResource(), Subresource: a.GetSubresource(), Name: a.GetName(),
	}
	if !a.IsResourceRequest() {
		of.Path = a.GetPath()
	}
	key := fmt.Sprintf("%q", []any{of.User, of.Verb, of.Namespace, of.APIGroup, of.APIVersion, of.Resource,
		of.Subresource, of.Name, of.Path})
	q.mu.Lock()
	defer q.mu.Unlock()
	d, ok := q.decisions[key]
	if !ok {
		answer, reason := q.pipeline.authorizer.Authorize(q.ctx, of)
		d = cachedDecision{map[authz.Decision]authorizer.Decision{
			authz.Allow: authorizer.DecisionAllow, authz.Deny: authorizer.DecisionDeny,
			authz.NoOpinion: authorizer.DecisionNoOpinion,
		}[answer], reason}
		q.decisions[key] = d
	}
	return d.decided, d.reason, nil
}
