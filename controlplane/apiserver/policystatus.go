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

// checkPause is between one type check and the next, so that they do not take a core.
const checkPause = 10 * time.Millisecond

// KeepPolicyTypes checks the expressions of validating policies against the types that they name, and writes what it
// finds into their status, until ctx ends: again when a definition changes one of these types. It is the leader's work;
// fence is the term of its leadership.
func (s *Server) KeepPolicyTypes(ctx context.Context, fence uint64) error {
	kind := s.cfg.Kinds.ByType(&arv1.ValidatingAdmissionPolicy{})
	if kind == nil {
		<-ctx.Done() // no policy can exist
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
		if err := c.work(ctx); err != nil { // begun again, everything is looked at once more
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

// policyTypes are the policies that there are, and which of them are to be looked at.
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

// checkedPolicy is what a policy was checked against under this leadership.
type checkedPolicy struct {
	uid        types.UID
	generation int64
	kinds      []*api.Kind
	custom     bool // definitions make some of them, or may
}

// Replace is follow.Sink.
func (c *policyTypes) Replace(all []api.Object) {
	c.mu.Lock()
	clear(c.policies)
	c.mu.Unlock()
	for _, o := range all {
		c.Set(o)
	}
}

// Set is follow.Sink.
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

// Remove is follow.Sink.
func (c *policyTypes) Remove(o api.Object) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.policies, o.GetName())
	delete(c.checked, o.GetName())
}

// typesChanged has the policies looked at whose types may be others now.
func (c *policyTypes) typesChanged() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, was := range c.checked {
		if was.custom {
			c.due[name] = true
		}
	}
}

// next takes a policy that is to be looked at, and what it was checked against; nil = none is.
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

// work looks at the policies that are due.
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
			_ = wait.Delay(ctx, checkPause) // the loop asks whether ctx has ended
		}
		c.mu.Lock()
		if c.policies[p.Name] != nil {
			c.checked[p.Name] = now
		}
		c.mu.Unlock()
	}
	return nil
}

// check checks a policy; told says that its status tells what was found before. It is not settled when a newer one comes.
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
		return false, nil // it is gone, or a newer one comes
	}
	if err != nil {
		return false, fmt.Errorf("writing the status of policy %s: %w", p.Name, err)
	}
	return true, nil
}
