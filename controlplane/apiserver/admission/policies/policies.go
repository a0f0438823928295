// Package policies evaluates the admission policies of a cluster: ValidatingAdmissionPolicy and
// MutatingAdmissionPolicy with their bindings. A policy is compiled at the first attempt that both
// the policy and one of its bindings match. Evaluation has a cost budget. A cluster without
// policies allocates nothing for them.
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

// Objects reads parameter objects. The caller must not change them.
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
	// Authorizer returns the authorizer for the variable authorizer in the expressions of one
	// request.
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
	current atomic.Pointer[policySet] // nil = no policies with bindings

	writeMu sync.Mutex
	objects [4]map[string]any // by role: *policy or *binding by the name of the object
}

// IsEmpty reports whether there are no policies with bindings.
func (p *Policies) IsEmpty() bool { return p.current.Load() == nil }

// Roles of the four kinds of policy objects. A role is an index of Policies.objects.
const (
	validatingPolicies = iota
	validatingBindings
	mutatingPolicies
	mutatingBindings
)

// policySet contains the policies that are evaluated. These are the policies with bindings.
type policySet struct{ validating, mutating []*boundPolicy }

type boundPolicy struct {
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

// New returns Policies that contain no policy yet; Sinks adds them.
func New(c Config) *Policies {
	p := &Policies{cfg: c, metrics: newMetrics(c.Metrics)}
	for i := range p.objects {
		p.objects[i] = map[string]any{}
	}
	return p
}

// Sink receives the policies or bindings of one kind: first all existing objects, then each change.
type Sink struct {
	engine *Policies
	role   int
}

// Sinks returns a Sink for each of the four kinds of policies and bindings, by resource name.
func (p *Policies) Sinks() map[string]Sink {
	return map[string]Sink{
		"validatingadmissionpolicies":       {p, validatingPolicies},
		"validatingadmissionpolicybindings": {p, validatingBindings},
		"mutatingadmissionpolicies":         {p, mutatingPolicies},
		"mutatingadmissionpolicybindings":   {p, mutatingBindings},
	}
}

// Replace replaces all policies or bindings of the sink's kind by the given objects.
func (s Sink) Replace(objects []api.Object) {
	s.updatePolicies(func(to map[string]any) {
		clear(to)
		for _, o := range objects {
			to[o.GetName()] = s.engine.compileObject(o)
		}
	})
}

// Set adds or replaces a policy or binding.
func (s Sink) Set(o api.Object) {
	s.updatePolicies(func(to map[string]any) { to[o.GetName()] = s.engine.compileObject(o) })
}

// Remove removes a policy or binding.
func (s Sink) Remove(o api.Object) {
	s.updatePolicies(func(to map[string]any) { delete(to, o.GetName()) })
}

func (s Sink) updatePolicies(update func(map[string]any)) {
	p := s.engine
	p.writeMu.Lock()
	defer p.writeMu.Unlock()
	update(p.objects[s.role])
	next := &policySet{
		validating: joinBindings(p.objects[validatingPolicies], p.objects[validatingBindings]),
		mutating:   joinBindings(p.objects[mutatingPolicies], p.objects[mutatingBindings]),
	}
	p.metrics.retainSeries(p.objects[validatingPolicies], p.objects[mutatingPolicies])
	if len(next.validating)+len(next.mutating) == 0 {
		next = nil
	}
	p.current.Store(next)
}

// joinBindings returns each policy that has bindings, with its bindings; both are sorted by name.
func joinBindings(policies, bindings map[string]any) (out []*boundPolicy) {
	by := map[string][]*binding{}
	for _, v := range bindings {
		b := v.(*binding)
		by[b.policy] = append(by[b.policy], b)
	}
	for name, v := range policies {
		if of := by[name]; len(of) > 0 {
			slices.SortFunc(of, func(a, b *binding) int { return cmp.Compare(a.name, b.name) })
			out = append(out, &boundPolicy{v.(*policy), of})
		}
	}
	slices.SortFunc(out, func(a, b *boundPolicy) int { return cmp.Compare(a.name, b.name) })
	return out
}

// compileObject returns the *policy for a policy object, or the *binding for a binding object.
func (p *Policies) compileObject(o api.Object) any {
	switch o := o.(type) {
	case *arv1.ValidatingAdmissionPolicyBinding:
		return &binding{o.Name, o.Spec.PolicyName, matching.OfPolicy(o.Spec.MatchResources), o.Spec.ParamRef,
			o.Spec.ValidationActions}
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
			reinvoke: o.Spec.ReinvocationPolicy == arv1.IfNeededReinvocationPolicy,
		}, o.Spec.MatchConstraints)
	}
	return nil
}

// matchBindings returns the bindings of a policy that match an attempt, and the target of the
// policy. found is empty if the policy does not match. Errors in matching are passed to complain,
// together with the binding, or with nil if the error concerns the policy.
func (p *Policies) matchBindings(
	ctx context.Context, b *boundPolicy, a *matching.Attempt, complain func(*binding, error),
) (
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
