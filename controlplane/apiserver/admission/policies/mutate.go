package policies

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// mutation is the evaluation of one attempt by the mutating policies.
type mutation struct {
	*evaluator
	rounds *matching.Rounds
	faults []string
}

// Mutate applies the mutating policies to an attempt one after the other; each sees the changes of
// the previous ones. If a policy changes the object, a.Object is a new object. The caller keeps
// rounds between the rounds of a write.
func (p *Policies) Mutate(ctx context.Context, a *matching.Attempt, rounds *matching.Rounds) error {
	s := p.now.Load()
	if s == nil || len(s.mutating) == 0 || a.Operation == api.Delete || a.Exempt() {
		return nil
	}
	rounds.Begin(a.Object)
	defer func() { rounds.End(a.Object) }()
	m := &mutation{evaluator: p.evaluator(ctx, a), rounds: rounds}
	for _, b := range s.mutating {
		if err := m.policy(ctx, b); err != nil {
			return err
		}
	}
	if len(m.faults) == 0 {
		return nil
	}
	err := apierrors.NewForbidden(a.Resource.GroupResource(), a.Name, errors.New(m.faults[0]))
	err.ErrStatus.Message, err.ErrStatus.Reason, err.ErrStatus.Code = m.faults[0], metav1.StatusReasonInvalid, http.StatusForbidden
	for _, f := range m.faults {
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Message: f})
	}
	return err
}

func (m *mutation) policy(ctx context.Context, b *bound) error {
	complain := func(one *binding, err error) {
		switch {
		case b.ignores():
		case one == nil:
			m.faults = append(m.faults, fmt.Sprintf("policy %q denied request: %v", b.name, err))
		default:
			m.faults = append(m.faults, fmt.Sprintf("policy '%s' with binding '%s' denied request: %v", b.name, one.name, err))
		}
	}
	t, found := m.of.about(ctx, b, m.attempt, complain)
	for _, one := range found {
		params, err := m.of.params(ctx, b.policy, one, m.attempt.Namespace)
		if err != nil {
			complain(one, err)
			continue
		}
		for _, param := range params {
			if ctx.Err() != nil {
				return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
			}
			err := m.invoke(ctx, b.policy, one, t, param)
			var status apierrors.APIStatus
			if errors.As(err, &status) {
				return err
			}
			if err != nil {
				complain(one, err)
			}
		}
	}
	return nil
}

// invoke evaluates a policy for one binding and parameter.
func (m *mutation) invoke(ctx context.Context, p *policy, b *binding, t matching.Target, param api.Object) error {
	who := p.name + "/" + b.name
	if param != nil {
		who += "/" + param.GetNamespace() + "/" + param.GetName()
	}
	in, err := m.input(ctx, t, param)
	if err != nil {
		return err
	}
	c := p.compiled()
	if met, err := c.conditions.Met(ctx, in); err != nil || !met {
		return err
	}
	if m.rounds.Skips(who) {
		return nil
	}
	before, start := m.attempt.Object, time.Now()
	for i := range p.mutations {
		if err = m.apply(ctx, p, c, i, t, param); err != nil {
			break
		}
	}
	m.of.metrics.mutating.observe(time.Since(start), p.name, b.name, errorType(err))
	if !equality.Semantic.DeepEqual(before, m.attempt.Object) {
		m.rounds.Changed()
	}
	if p.again {
		m.rounds.Asked(who)
	}
	return err
}

// apply applies one mutation to the object, including the changes of previous mutations.
func (m *mutation) apply(ctx context.Context, p *policy, of *programs, i int, t matching.Target, param api.Object) error {
	in, err := m.input(ctx, t, param)
	if err != nil || in.Object == nil {
		return err
	}
	c := of.main[i]
	if c.err != nil {
		return c.err
	}
	value, err := of.scope.Evaluate(ctx, in, cel.Budget).Eval(ctx, c.program)
	if err != nil {
		return err
	}
	before := in.Object.(runtime.Object)
	var next runtime.Object
	if p.mutations[i].PatchType == arv1.PatchTypeJSONPatch || p.mutations[i].ApplyConfiguration == nil {
		next, err = m.jsonPatch(ctx, t, before, value)
	} else {
		next, err = m.merge(t, before, value)
	}
	if err != nil || next == nil {
		return err
	}
	m.of.cfg.Versions.Default(m.attempt, t.Kind, next)
	if err := m.of.cfg.Versions.Keep(m.attempt, t.Kind, next, before); err != nil {
		return err
	}
	m.attempt.Object, err = m.of.cfg.Versions.Back(ctx, m.attempt, &matching.View{Target: t, Object: next})
	m.views = nil // later policies need views of the new object
	return err
}
