// Package policies holds attempts to the admission policies of a cluster: ValidatingAdmissionPolicy and
// MutatingAdmissionPolicy with their bindings. A policy is compiled when the first attempt comes that it and one of its
// bindings are about, and what it evaluates has a budget; a cluster without policies makes nothing.
package policies

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/managedfields"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// Objects are where parameters are read. What they return is shared.
type Objects interface {
	// GetObject returns nil when none exists.
	GetObject(ctx context.Context, k *api.Kind, namespace, name string) (api.Object, error)
	ListObjects(ctx context.Context, k *api.Kind, namespace string, s labels.Selector) ([]api.Object, error)
}

// Config is what policies are evaluated with.
type Config struct {
	Versions    matching.Versions
	Cluster     matching.Cluster
	Params      Objects
	Expressions *cel.Admission
	// Authorizer answers the questions of expressions, for one request.
	Authorizer func(ctx context.Context) authorizer.UnconditionalAuthorizer
	// Types is the schema of a kind's objects, for ApplyConfiguration.
	Types   func(*api.Kind) managedfields.TypeConverter
	Metrics prometheus.Registerer // nil = nothing is counted for others to see
	Log     *slog.Logger
}

// Policies are the admission policies of a cluster. Safe for concurrent use.
type Policies struct {
	cfg     Config
	metrics *metrics
	now     atomic.Pointer[set] // nil = none exist

	writing sync.Mutex
	objects [4]map[string]any // by role: *policy or *binding by the name of the object
}

// None says that there are no policies with bindings.
func (p *Policies) None() bool { return p.now.Load() == nil }

// The roles of objects.
const (
	validatingPolicies = iota
	validatingBindings
	mutatingPolicies
	mutatingBindings
)

// set is what is evaluated now: the policies that have bindings.
type set struct{ validating, mutating []*bound }

type bound struct {
	*policy
	bindings []*binding
}

// binding says where a policy holds.
type binding struct {
	name, policy string
	criteria     matching.Criteria
	param        *arv1.ParamRef
	actions      []arv1.ValidationAction
}

// New returns policies without any.
func New(c Config) *Policies {
	p := &Policies{cfg: c, metrics: newMetrics(c.Metrics)}
	for i := range p.objects {
		p.objects[i] = map[string]any{}
	}
	return p
}

// Sink takes the objects of one kind: first all, then changes.
type Sink struct {
	of   *Policies
	role int
}

// Sinks take the objects of the four kinds, by the names of their resources.
func (p *Policies) Sinks() map[string]Sink {
	return map[string]Sink{
		"validatingadmissionpolicies": {p, validatingPolicies}, "validatingadmissionpolicybindings": {p, validatingBindings},
		"mutatingadmissionpolicies": {p, mutatingPolicies}, "mutatingadmissionpolicybindings": {p, mutatingBindings},
	}
}

// Replace sets all objects.
func (s Sink) Replace(all []api.Object) {
	s.change(func(to map[string]any) {
		clear(to)
		for _, o := range all {
			to[o.GetName()] = s.of.read(o)
		}
	})
}

// Set adds or changes one.
func (s Sink) Set(o api.Object) { s.change(func(to map[string]any) { to[o.GetName()] = s.of.read(o) }) }

// Remove removes one.
func (s Sink) Remove(o api.Object) { s.change(func(to map[string]any) { delete(to, o.GetName()) }) }

func (s Sink) change(do func(map[string]any)) {
	p := s.of
	p.writing.Lock()
	defer p.writing.Unlock()
	do(p.objects[s.role])
	next := &set{
		validating: join(p.objects[validatingPolicies], p.objects[validatingBindings]),
		mutating:   join(p.objects[mutatingPolicies], p.objects[mutatingBindings]),
	}
	p.metrics.keep(p.objects[validatingPolicies], p.objects[mutatingPolicies])
	if len(next.validating)+len(next.mutating) == 0 {
		next = nil
	}
	p.now.Store(next)
}

// join finds the bindings of each policy; both are ordered by name.
func join(policies, bindings map[string]any) (out []*bound) {
	by := map[string][]*binding{}
	for _, v := range bindings {
		b := v.(*binding)
		by[b.policy] = append(by[b.policy], b)
	}
	for name, v := range policies {
		if of := by[name]; len(of) > 0 {
			slices.SortFunc(of, func(a, b *binding) int { return cmp.Compare(a.name, b.name) })
			out = append(out, &bound{v.(*policy), of})
		}
	}
	slices.SortFunc(out, func(a, b *bound) int { return cmp.Compare(a.name, b.name) })
	return out
}

// read makes of an object what is kept of it.
func (p *Policies) read(o api.Object) any {
	switch o := o.(type) {
	case *arv1.ValidatingAdmissionPolicyBinding:
		return &binding{o.Name, o.Spec.PolicyName, matching.OfPolicy(o.Spec.MatchResources), o.Spec.ParamRef, o.Spec.ValidationActions}
	case *arv1.MutatingAdmissionPolicyBinding:
		return &binding{o.Name, o.Spec.PolicyName, matching.OfPolicy(o.Spec.MatchResources), o.Spec.ParamRef, nil}
	case *arv1.ValidatingAdmissionPolicy:
		return p.newPolicy(source{
			name: o.Name, param: o.Spec.ParamKind, variables: o.Spec.Variables, conditions: o.Spec.MatchConditions,
			failure: o.Spec.FailurePolicy, validations: o.Spec.Validations, annotations: o.Spec.AuditAnnotations,
		}, o.Spec.MatchConstraints)
	case *arv1.MutatingAdmissionPolicy:
		return p.newPolicy(source{
			name: o.Name, param: o.Spec.ParamKind, variables: o.Spec.Variables, conditions: o.Spec.MatchConditions,
			failure: o.Spec.FailurePolicy, mutations: o.Spec.Mutations,
			again: o.Spec.ReinvocationPolicy == arv1.IfNeededReinvocationPolicy,
		}, o.Spec.MatchConstraints)
	}
	return nil
}

// about says whether a policy and which of its bindings are about an attempt. complain is told what cannot be found out.
func (p *Policies) about(ctx context.Context, b *bound, a *matching.Attempt, complain func(*binding, error)) (
	t matching.Target, found []*binding,
) {
	v, in := p.cfg.Versions, p.cfg.Cluster
	t, ok, err := b.criteria.Match(ctx, a, v, in)
	if err != nil {
		complain(nil, err)
	}
	if !ok {
		return t, nil
	}
	for _, one := range b.bindings {
		switch _, ok, err := one.criteria.Match(ctx, a, v, in); {
		case err != nil:
			complain(one, err)
		case ok:
			found = append(found, one)
		}
	}
	return t, found
}
