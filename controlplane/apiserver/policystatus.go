package apiserver

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/policies"
	"keelson.dev/keelson/controlplane/apiserver/follow"
	"keelson.dev/keelson/internal/wait"
)

// checkPause is the pause between two type checks, so that they do not occupy a CPU core.
const checkPause = 10 * time.Millisecond

// KeepPolicyTypes type-checks the expressions of ValidatingAdmissionPolicies and writes the
// warnings into their status, until ctx ends. It repeats a check if a CustomResourceDefinition
// changes a type that the policy matches. The leader calls it; fence is the term of its leadership.
func (s *Server) KeepPolicyTypes(ctx context.Context, fence uint64) error {
	kind := s.cfg.Kinds.ByType(&arv1.ValidatingAdmissionPolicy{})
	if kind == nil {
		<-ctx.Done() // policies are not served
		return ctx.Err()
	}
	c := &policyTypes{server: s, kind: kind, fence: fence, wake: make(chan struct{}, 1),
		policies: map[string]*arv1.ValidatingAdmissionPolicy{}, due: map[string]bool{}, checked: map[string]checkedPolicy{}}
	inner, cancel := context.WithCancel(ctx)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- follow.Run(inner, s.cfg.Log, s.cfg.Registry, kind, c, func() {}) }()
	changed := s.cfg.Kinds.Table().Changed()
	for {
		if err := c.work(ctx); err != nil { // the next call checks all policies again
			cancel()
			<-done
			return err
		}
		select {
		case err := <-done:
			return err
		case <-c.wake:
		case <-changed:
			changed = s.cfg.Kinds.Table().Changed()
			c.typesChanged()
		}
	}
}

// policyTypes holds the ValidatingAdmissionPolicies and which of them must be type-checked. It
// implements follow.Sink.
type policyTypes struct {
	server *Server
	kind   *api.Kind
	fence  uint64
	wake   chan struct{} // capacity 1

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

// Replace replaces all policies and makes them due for a check. It implements follow.Sink.
func (c *policyTypes) Replace(all []api.Object) {
	c.mu.Lock()
	clear(c.policies)
	c.mu.Unlock()
	for _, o := range all {
		c.Set(o)
	}
}

// Set stores a created or changed policy and makes it due for a check. It implements follow.Sink.
func (c *policyTypes) Set(o api.Object) {
	p, ok := o.(*arv1.ValidatingAdmissionPolicy)
	if !ok {
		return
	}
	c.mu.Lock()
	c.policies[p.Name], c.due[p.Name] = p, true
	c.mu.Unlock()
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// Remove deletes a policy and its check result. It implements follow.Sink.
func (c *policyTypes) Remove(o api.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.policies, o.GetName())
	delete(c.checked, o.GetName())
}

// typesChanged makes the policies due that depend on custom resources.
func (c *policyTypes) typesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, was := range c.checked {
		if was.custom {
			c.due[name] = true
		}
	}
}

// next removes a policy from the due set and returns it with its last check; nil if no policy is
// due.
func (c *policyTypes) next() (*arv1.ValidatingAdmissionPolicy, checkedPolicy) {
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

// work checks the due policies and stores the kinds they were checked against. It returns at the
// first error.
func (c *policyTypes) work(ctx context.Context) error {
	for ctx.Err() == nil {
		p, was := c.next()
		if p == nil {
			return nil
		}
		now := checkedPolicy{uid: p.UID, generation: p.Generation}
		now.kinds, now.custom = policies.Types(p, c.server.cfg.Kinds)
		told := p.Status.ObservedGeneration >= p.Generation && p.Status.TypeChecking != nil
		same := was.uid == now.uid && was.generation == now.generation && slices.Equal(was.kinds, now.kinds)
		if !told || now.custom && !same {
			if settled, err := c.check(ctx, p, told); err != nil {
				return err
			} else if !settled {
				continue
			}
			_ = wait.Delay(ctx, checkPause) // the loop condition checks ctx
		}
		c.mu.Lock()
		if c.policies[p.Name] != nil {
			c.checked[p.Name] = now
		}
		c.mu.Unlock()
	}
	return nil
}

// check type-checks a policy and writes the warnings into its status if they differ. told reports
// whether the status already has warnings of this generation. settled is false if the policy was
// changed or deleted meanwhile.
func (c *policyTypes) check(ctx context.Context, p *arv1.ValidatingAdmissionPolicy, told bool) (settled bool, err error) {
	found := policies.Check(p, c.server.cfg.Kinds, c.server.cfg.Expressions.Admission())
	if told && equality.Semantic.DeepEqual(found, p.Status.TypeChecking.ExpressionWarnings) {
		return true, nil
	}
	next := p.DeepCopy()
	next.Status.TypeChecking = &arv1.TypeChecking{ExpressionWarnings: found}
	next.Status.ObservedGeneration = p.Generation
	_, err = c.server.Backend().Do(ctx, &api.Request{
		User: itself(), Verb: api.VerbUpdate, Kind: c.kind, Subresource: "status", Name: p.Name, Object: next, Fence: c.fence,
	})
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) {
		return false, nil // the policy is deleted, or its next version will be checked
	}
	if err != nil {
		return false, fmt.Errorf("writing the status of policy %s: %w", p.Name, err)
	}
	return true, nil
}
