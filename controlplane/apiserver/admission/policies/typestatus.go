package policies

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/follow"
	"keelson.dev/keelson/internal/wait"
	"keelson.dev/keelson/internal/wakeup"
)

// typeCheckPause is the pause between two type checks, so that they do not occupy a CPU core.
const typeCheckPause = 10 * time.Millisecond

// TypeChecker maintains the type checking results in the status of ValidatingAdmissionPolicies.
type TypeChecker struct {
	Backend     api.Backend // performs the writes
	Source      follow.Source
	Kinds       *api.Kinds
	Expressions *cel.Admission
	Log         *slog.Logger
}

// Run type-checks the expressions of ValidatingAdmissionPolicies and writes the warnings into their
// status, until ctx ends. It repeats a check if a CustomResourceDefinition changes a type that the
// policy matches. Only the leader replica runs it; fence is the term of its leadership.
func (s *TypeChecker) Run(ctx context.Context, fence uint64) error {
	kind := s.Kinds.ByType(&arv1.ValidatingAdmissionPolicy{})
	if kind == nil {
		<-ctx.Done() // policies are not served
		return ctx.Err()
	}
	c := &policyTypeChecks{checker: s, kind: kind, fence: fence, wake: wakeup.New(),
		policies: map[string]*arv1.ValidatingAdmissionPolicy{}, due: map[string]bool{},
		checked: map[string]checkedPolicy{}}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- follow.Run(inner, s.Log, s.Source, kind, c, func() {}) }()
	changed := s.Kinds.Table().Changed()
	for {
		if err := c.checkDue(ctx); err != nil { // the next call checks all policies again
			cancel()
			<-done
			return err
		}
		select {
		case err := <-done:
			return err
		case <-c.wake:
		case <-changed:
			changed = s.Kinds.Table().Changed()
			c.typesChanged()
		}
	}
}

// policyTypeChecks holds the ValidatingAdmissionPolicies and which of them must be type-checked. It
// implements follow.Sink.
type policyTypeChecks struct {
	checker *TypeChecker
	kind    *api.Kind
	fence   uint64
	wake    wakeup.Signal

	mu       sync.Mutex
	policies map[string]*arv1.ValidatingAdmissionPolicy
	due      map[string]bool
	checked  map[string]checkedPolicy
}

// checkedPolicy records the policy version and the kinds that the last check under this leadership
// used.
type checkedPolicy struct {
	uid        types.UID
	generation int64
	kinds      []*api.Kind
	custom     bool // set if a CustomResourceDefinition defines or may define one of the kinds
}

// Replace replaces all policies and marks them for a check. It implements follow.Sink.
func (c *policyTypeChecks) Replace(objects []api.Object) {
	c.mu.Lock()
	clear(c.policies)
	c.mu.Unlock()
	for _, o := range objects {
		c.Set(o)
	}
}

// Set stores a created or changed policy and marks it for a check. It implements follow.Sink.
func (c *policyTypeChecks) Set(o api.Object) {
	p, ok := o.(*arv1.ValidatingAdmissionPolicy)
	if !ok {
		return
	}
	c.mu.Lock()
	c.policies[p.Name], c.due[p.Name] = p, true
	c.mu.Unlock()
	c.wake.Send()
}

// Remove deletes a policy and its check result. It implements follow.Sink.
func (c *policyTypeChecks) Remove(o api.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.policies, o.GetName())
	delete(c.checked, o.GetName())
}

// typesChanged marks policies for another check if their kinds include custom resources.
func (c *policyTypeChecks) typesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, was := range c.checked {
		if was.custom {
			c.due[name] = true
		}
	}
}

// takeDue removes a policy that is marked for a check from the set of marked policies. It returns
// the policy and its last check; nil if no policy is marked.
func (c *policyTypeChecks) takeDue() (*arv1.ValidatingAdmissionPolicy, checkedPolicy) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name := range c.due {
		delete(c.due, name)
		if p := c.policies[name]; p != nil {
			return p, c.checked[name]
		}
	}
	return nil, checkedPolicy{}
}

// checkDue checks all policies that are marked for a check, and stores the kinds for which they
// were checked. It stops at the first error and returns it.
func (c *policyTypeChecks) checkDue(ctx context.Context) error {
	for ctx.Err() == nil {
		p, was := c.takeDue()
		if p == nil {
			return nil
		}
		now := checkedPolicy{uid: p.UID, generation: p.Generation}
		now.kinds, now.custom = Types(p, c.checker.Kinds)
		told := p.Status.ObservedGeneration >= p.Generation && p.Status.TypeChecking != nil
		same := was.uid == now.uid && was.generation == now.generation && slices.Equal(was.kinds, now.kinds)
		if !told || now.custom && !same {
			if settled, err := c.checkPolicy(ctx, p, told); err != nil {
				return err
			} else if !settled {
				continue
			}
			_ = wait.Delay(ctx, typeCheckPause) // the loop condition checks ctx
		}
		c.mu.Lock()
		if c.policies[p.Name] != nil {
			c.checked[p.Name] = now
		}
		c.mu.Unlock()
	}
	return nil
}

// checkPolicy type-checks a policy and writes the warnings into its status. If hasWarnings is true,
// the status has the warnings of this generation, and is written only if they differ. settled is
// false if the policy was changed or deleted meanwhile.
func (c *policyTypeChecks) checkPolicy(
	ctx context.Context, admissionPolicy *arv1.ValidatingAdmissionPolicy, hasWarnings bool,
) (settled bool, err error) {
	found := CheckTypes(admissionPolicy, c.checker.Kinds, c.checker.Expressions)
	if hasWarnings && equality.Semantic.DeepEqual(found, admissionPolicy.Status.TypeChecking.ExpressionWarnings) {
		return true, nil
	}
	next := admissionPolicy.DeepCopy()
	next.Status.TypeChecking = &arv1.TypeChecking{ExpressionWarnings: found}
	next.Status.ObservedGeneration = admissionPolicy.Generation
	_, err = c.checker.Backend.Do(ctx, &api.Request{
		User: api.APIServerUser(), Verb: api.VerbUpdate, Kind: c.kind, Subresource: "status",
		Name: admissionPolicy.Name, Object: next, Internal: api.InternalOptions{Fence: c.fence},
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // the policy is deleted, or its next version will be checked
	}
	if err != nil {
		return false, fmt.Errorf("writing the status of policy %s: %w", admissionPolicy.Name, err)
	}
	return true, nil
}
