package policies

import (
	"context"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// evaluator creates the CEL inputs with which policies are evaluated for one attempt.
type evaluator struct {
	engine   *Policies
	attempt  *matching.Attempt
	authz    authorizer.UnconditionalAuthorizer
	views    map[matching.Target]*matching.View
	home     *corev1.Namespace
	homeRead bool
}

func (p *Policies) newEvaluator(ctx context.Context, a *matching.Attempt) *evaluator {
	e := &evaluator{engine: p, attempt: a}
	if p.cfg.Authorizer != nil {
		e.authz = p.cfg.Authorizer(ctx)
	}
	return e
}

// newInput returns the CEL input for the attempt in the API version of the target t. param is the
// policy's parameter object; it may be nil.
func (e *evaluator) newInput(ctx context.Context, t matching.Target, param api.Object) (*cel.Input, error) {
	v, err := e.viewAs(ctx, t)
	if err != nil {
		return nil, err
	}
	if !e.homeRead {
		if e.home, err = e.attempt.Home(ctx, e.engine.cfg.Cluster); err != nil {
			return nil, err
		}
		e.homeRead = true
	}
	in := &cel.Input{
		Object: v.Object, Old: v.Old, Request: e.attempt.Request(t), Namespace: e.home, User: e.attempt.User,
		Authorizer: e.authz,
	}
	if param != nil {
		in.Params = param
	}
	return in, nil
}

func (e *evaluator) viewAs(ctx context.Context, t matching.Target) (*matching.View, error) {
	if v := e.views[t]; v != nil {
		return v, nil
	}
	v, err := e.engine.cfg.Versions.View(ctx, e.attempt, t)
	if err != nil {
		return nil, err
	}
	if e.views == nil {
		e.views = make(map[matching.Target]*matching.View, 1)
	}
	e.views[t] = v
	return v, nil
}
