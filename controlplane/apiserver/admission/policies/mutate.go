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

// Mutate applies the mutating policies to an attempt one after the other; each policy receives the
// object with the changes of the previous policies. If a policy changes the object, a.Object
// becomes a new object. The caller passes the same rounds in both rounds of a write.
func (p *Policies) Mutate(ctx context.Context, a *matching.Attempt, rounds *matching.Rounds) error {
	s := p.current.Load()
	if s == nil || len(s.mutating) == 0 || a.Operation == api.Delete || a.Exempt() {
		return nil
	}
	rounds.StartRound(a.Object)
	defer func() { rounds.FinishRound(a.Object) }()
	m := &mutation{evaluator: p.newEvaluator(ctx, a), rounds: rounds}
	for _, b := range s.mutating {
		if err := m.mutateByPolicy(ctx, b); err != nil {
			return err
		}
	}
	if len(m.faults) == 0 {
		return nil
	}
	err := apierrors.NewForbidden(a.Resource.GroupResource(), a.Name, errors.New(m.faults[0]))
	err.ErrStatus.Message, err.ErrStatus.Reason, err.ErrStatus.Code = m.faults[0], metav1.StatusReasonInvalid,
		http.StatusForbidden
	for _, f := range m.faults {
		err.ErrStatus.Details.Causes = append(err.ErrStatus.Details.Causes, metav1.StatusCause{Message: f})
	}
	return err
}

func (m *mutation) mutateByPolicy(ctx context.Context, b *boundPolicy) error {
	complain := func(one *binding, err error) {
		switch {
		case b.ignoresFailure():
		case one == nil:
			m.faults = append(m.faults, fmt.Sprintf("policy %q denied request: %v", b.name, err))
		default:
			m.faults = append(m.faults, fmt.Sprintf("policy '%s' with binding '%s' denied request: %v", b.name,
				one.name, err))
		}
	}
	t, found := m.engine.matchBindings(ctx, b, m.attempt, complain)
	for _, one := range found {
		params, err := m.engine.findParams(ctx, b.policy, one, m.attempt.Namespace)
		if err != nil {
			complain(one, err)
			continue
		}
		for _, param := range params {
			if ctx.Err() != nil {
				return apierrors.NewTimeoutError("request did not complete within requested timeout", 0)
			}
			err := m.invokePolicy(ctx, b.policy, one, t, param)
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

// invokePolicy evaluates a policy for one binding and one parameter object, and applies its
// mutations.
func (m *mutation) invokePolicy(
	ctx context.Context, admissionPolicy *policy, b *binding, t matching.Target, param api.Object,
) error {
	who := admissionPolicy.name + "/" + b.name
	if param != nil {
		who += "/" + param.GetNamespace() + "/" + param.GetName()
	}
	in, err := m.newInput(ctx, t, param)
	if err != nil {
		return err
	}
	c := admissionPolicy.compiled()
	if met, err := c.conditions.AreMet(ctx, in); err != nil || !met {
		return err
	}
	if m.rounds.Skips(who) {
		return nil
	}
	before, start := m.attempt.Object, time.Now()
	for i := range admissionPolicy.mutations {
		if err = m.applyMutation(ctx, admissionPolicy, c, i, t, param); err != nil {
			break
		}
	}
	m.engine.metrics.mutating.observeCheck(time.Since(start), admissionPolicy.name, b.name, errorTypeLabel(err))
	if !equality.Semantic.DeepEqual(before, m.attempt.Object) {
		m.rounds.Changed()
	}
	if admissionPolicy.reinvoke {
		m.rounds.MarkCalled(who)
	}
	return err
}

// applyMutation applies one mutation to the object, including the changes of previous mutations.
func (m *mutation) applyMutation(
	ctx context.Context, admissionPolicy *policy, programs *programs, i int, t matching.Target, param api.Object,
) error {
	in, err := m.newInput(ctx, t, param)
	if err != nil || in.Object == nil {
		return err
	}
	c := programs.main[i]
	if c.err != nil {
		return c.err
	}
	value, err := programs.scope.Evaluate(ctx, in, cel.Budget).Eval(ctx, c.program)
	if err != nil {
		return err
	}
	before := in.Object.(runtime.Object)
	var next runtime.Object
	if admissionPolicy.mutations[i].PatchType == arv1.PatchTypeJSONPatch ||
		admissionPolicy.mutations[i].ApplyConfiguration == nil {
		next, err = m.jsonPatch(ctx, t, before, value)
	} else {
		next, err = m.mergeApply(t, before, value)
	}
	if err != nil || next == nil {
		return err
	}
	m.engine.cfg.Versions.Default(m.attempt, t.Kind, next)
	if err := m.engine.cfg.Versions.RestoreImmutable(m.attempt, t.Kind, next, before); err != nil {
		return err
	}
	m.attempt.Object, err = m.engine.cfg.Versions.ToStored(ctx, m.attempt, &matching.View{Target: t, Object: next})
	m.views = nil // later policies need views of the new object
	return err
}
