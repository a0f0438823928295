// Package policies evaluates the admission policies of a cluster: ValidatingAdmissionPolicy and
// MutatingAdmissionPolicy with their bindings. A policy is compiled at the first attempt that it
// and one of its bindings match. Evaluation has a cost budget. A cluster without policies allocates
// nothing for them.
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

// Objects reads parameter objects. Its results are shared.
type Objects interface {
	// GetObject returns nil when the object does not exist.
	GetObject(ctx context.Context, k *api.Kind, namespace, name string) (api.Object, error)
	ListObjects(ctx context.Context, k *api.Kind, namespace string, s labels.Selector) ([]api.Object, error)
}

// Config contains the dependencies of Policies.
type Config struct {
	Versions    matching.Versions
	Cluster     matching.Cluster
	Params      Objects
	Expressions *cel.Admission
	// Authorizer returns the authorizer that the expressions of one request use.
	Authorizer func(ctx context.Context) authorizer.UnconditionalAuthorizer
	// Types returns the schema of a kind's objects, for ApplyConfiguration.
	Types   func(*api.Kind) managedfields.TypeConverter
	Metrics prometheus.Registerer // nil = metrics are not registered
	Log     *slog.Logger
}

// Policies are the admission policies of a cluster. Safe for concurrent use.
type Policies struct {
	cfg     Config
	metrics *metrics
	now     atomic.Pointer[set] // nil = no policies with bindings

	writing sync.Mutex
	objects [4]map[string]any // by role: *policy or *binding by the name of the object
}

// None reports whether there are no policies with bindings.
func (p *Policies) None() bool { return p.now.Load() == nil }

// The roles of objects.
const (
	validatingPolicies = iota
	validatingBindings
	mutatingPolicies
	mutatingBindings
)

// set contains the policies that are evaluated, which are the policies with bindings.
type set struct{ validating, mutating []*bound }

type bound struct {
	*policy
	bindings []*binding
}

// binding is a policy binding: it selects the attempts and parameters for which a policy is
// evaluated.
type binding struct {
	name, policy string
	criteria     matching.Criteria
	param        *arv1.ParamRef
	actions      []arv1.ValidationAction
}

// New returns Policies without any policy.
func New(c Config) *Policies {
	p := &Policies{cfg: c, metrics: newMetrics(c.Metrics)}
	for i := range p.objects {
		p.objects[i] = map[string]any{}
	}
	return p
}

// Sink receives the objects of one kind: first all, then changes.
type Sink struct {
	of   *Policies
	role int
}

// Sinks returns the sinks for the four kinds, by resource name.
func (p *Policies) Sinks() map[string]Sink {
	return map[string]Sink{
		"validatingadmissionpolicies": {p, validatingPolicies}, "validatingadmissionpolicybindings": {p, validatingBindings},
		"mutatingadmissionpolicies": {p, mutatingPolicies}, "mutatingadmissionpolicybindings": {p, mutatingBindings},
	}
}

// Replace sets all objects of the sink's kind.
func (s Sink) Replace(all []api.Object) {
	s.change(func(to map[string]any) {
		clear(to)
		for _, o := range all {
			to[o.GetName()] = s.of.read(o)
		}
	})
}

// Set adds or replaces an object.
func (s Sink) Set(o api.Object) { s.change(func(to map[string]any) { to[o.GetName()] = s.of.read(o) }) }

// Remove removes an object.
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

// join returns each policy that has bindings, with its bindings; both are sorted by name.
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

// read returns the *policy or *binding for an object.
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

// about returns the bindings of a policy that match an attempt, and the target of the policy. found
// is empty if the policy does not match. Matching errors are passed to complain, with a nil binding
// if they concern the policy.
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
