package testcluster

import (
	"context"
	"errors"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"

	rbacv1 "k8s.io/api/rbac/v1"

	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/rebalance"
	"keelson.dev/keelson/controlplane/scheduler"
)

// CheckRules fails the test if a controller has made a call that its Rules do not permit.
func (w *Cluster) CheckRules(t *testing.T) {
	t.Helper()
	w.Calls.Mu.Lock()
	defer w.Calls.Mu.Unlock()
	for _, c := range w.Controllers {
		for a := range w.Calls.Seen {
			if a.User == engine.Identity(c).Name &&
				!slices.ContainsFunc(c.Rules, func(r rbacv1.PolicyRule) bool { return RuleAllows(r, a) }) {
				t.Errorf("%s has no right to %s %s.%s", a.User, a.Verb, a.Resource, a.Group)
			}
		}
	}
}

// NewTrial returns a simulation by the cluster's scheduler. It fails without Options.WithScheduler.
func (w *Cluster) NewTrial() (rebalance.Trial, error) {
	if w.Scheduler == nil {
		return nil, errors.New("this world has no scheduler")
	}
	t, err := w.Scheduler.Trial()
	return asTrial{t}, err
}

type asTrial struct {
	*scheduler.Trial
}

// Evaluate implements rebalance.Trial.
func (t asTrial) Evaluate(ctx context.Context, p *corev1.Pod) (rebalance.Verdict, error) {
	v, err := t.Trial.Evaluate(ctx, p)
	return rebalance.Verdict(v), err
}

// RuleAllows reports whether rule r permits call a. Wildcards are supported, but no non-resource
// URLs.
func RuleAllows(r rbacv1.PolicyRule, a Call) bool {
	has := func(list []string, s string) bool { return slices.Contains(list, s) || slices.Contains(list, "*") }
	return has(r.APIGroups, a.Group) && has(r.Resources, a.Resource) && has(r.Verbs, a.Verb)
}
