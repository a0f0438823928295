package apiserver

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/apiregistration"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
)

// maxChecks is how many servers are looked at, at once: of those that answered last, and of those that did not. Servers
// that hang keep each other waiting and nobody else.
const maxChecks = 16

// checks are when the servers of APIServices are looked at, each by its own time.
type checks struct {
	mu      sync.Mutex
	of      map[string]*checking // by name of the APIService
	running [2]int               // of sound servers, and of those that failed
	turns   int
	ended   chan struct{} // has an element when a check has ended, or one is due that was not
}

// checking is what is known of when one APIService is looked at.
type checking struct {
	due      time.Time // the zero time is at once
	running  bool
	touched  bool // while it was running
	turn     int  // of the touch that made it due: the last comes first; 0 = its time has come
	remote   bool
	failures int    // in a row
	since    int    // of them, since something was heard of it: a server that has just come may need a moment
	written  string // the version that the last write of its status made: no news
}

func newChecks() *checks { return &checks{of: map[string]*checking{}, ended: make(chan struct{}, 1)} }

func (c *checks) wake() {
	select {
	case c.ended <- struct{}{}:
	default:
	}
}

// KeepConditions looks at the servers of all APIServices, each when it is due, and writes what differs of their
// conditions, until ctx ends. What TouchAPIServices is told of is due at once. The leader calls it.
func (s *Server) KeepConditions(ctx context.Context, fence uint64) error {
	var all sync.WaitGroup
	defer all.Wait()
	c := newChecks()
	s.checks.Store(c)
	defer s.checks.CompareAndSwap(c, nil)
	for _, one := range s.cachedAPIServices(ctx) {
		c.touch(one)
	}
	for {
		ready, wait := c.next(s.cfg.Clock())
		for _, name := range ready {
			all.Go(func() { s.look(ctx, fence, c, name) })
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		case <-c.ended:
		}
		t.Stop()
	}
}

// next takes what is due and has a place, and says how long nothing else will be.
func (c *checks) next(now time.Time) (ready []string, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait = time.Hour
	var due []string
	for name, one := range c.of {
		switch left := one.due.Sub(now); {
		case one.running:
		case left > 0:
			wait = min(wait, left)
		default:
			due = append(due, name)
		}
	}
	slices.SortFunc(due, func(a, b string) int {
		return cmp.Or(c.of[b].turn-c.of[a].turn, c.of[a].due.Compare(c.of[b].due))
	})
	for _, name := range due {
		one := c.of[name]
		if class := one.class(); c.running[class] < maxChecks {
			one.running, one.turn = true, 0
			c.running[class]++
			ready = append(ready, name)
		}
	}
	return ready, wait
}

// class is 1 for a server that failed, and for one that nobody knows yet.
func (one *checking) class() int {
	if one.failures > 0 {
		return 1
	}
	return 0
}

// look looks at one server and says when that is to be done again.
func (s *Server) look(ctx context.Context, fence uint64, c *checks, name string) {
	one, there := s.cachedAPIService(ctx, name)
	there = there && one.DeletionTimestamp == nil
	passed, written := true, ""
	var err error
	if there {
		passed, written, err = s.checkAPIService(ctx, fence, one)
	}
	if err != nil && ctx.Err() == nil {
		s.cfg.Log.Warn("the condition of an APIService is not written; it is tried again", "apiservice", name, "error", err)
	}
	c.done(name, func(st *checking) (gone bool) {
		if st.remote = there && one.Spec.Service != nil; written != "" {
			st.written = written
		}
		if st.failures, st.since = st.failures+1, st.since+1; passed {
			st.failures, st.since = 0, 0
		}
		again := aggregation.Again(st.since)
		if err != nil {
			again = 5 * time.Second
		} else if !st.remote {
			again = 24 * time.Hour // nothing changes unless the object does
		}
		st.due = s.cfg.Clock().Add(again)
		return !there
	})
}

// done ends a check; note says what became of it.
func (c *checks) done(name string, note func(*checking) (gone bool)) {
	c.mu.Lock()
	one := c.of[name]
	c.running[one.class()]--
	if gone := note(one); gone && !one.touched {
		delete(c.of, name)
	}
	one.running = false
	if one.touched {
		c.hasten(one)
	}
	c.mu.Unlock()
	c.wake()
}

// touch makes an APIService due, unless it is as its check wrote it.
func (c *checks) touch(a *apiregistrationv1.APIService) {
	c.mu.Lock()
	one := c.of[a.Name]
	if one == nil {
		one = &checking{}
		if a.Spec.Service != nil {
			one.failures = 1 // nobody knows it: it waits with those that fail
		}
		c.of[a.Name] = one
	} else if one.written == a.ResourceVersion {
		c.mu.Unlock()
		return
	}
	c.hasten(one)
	c.mu.Unlock()
	c.wake()
}

// hasten makes a check due at once, or after the one that is under way. The caller holds mu.
func (c *checks) hasten(one *checking) {
	c.turns++
	one.due, one.touched, one.turn, one.since = time.Time{}, one.running, c.turns, 0
}

// again makes an APIService due on which something else rests has changed.
func (c *checks) again(name string) {
	c.mu.Lock()
	if one := c.of[name]; one != nil {
		c.hasten(one)
	}
	c.mu.Unlock()
	c.wake()
}

// TouchAPIServices is told of every change of an APIService, a Service and an EndpointSlice: whose server may have come
// or gone with it is looked at at once.
func (s *Server) TouchAPIServices(obj api.Object) {
	c := s.checks.Load()
	if c == nil {
		return
	}
	name := obj.GetName()
	switch o := obj.(type) {
	case *apiregistrationv1.APIService:
		c.touch(o)
		return
	case *discoveryv1.EndpointSlice:
		name = o.Labels[discoveryv1.LabelServiceName]
	}
	for _, a := range s.cachedAPIServices(context.Background()) {
		if a.Spec.Service != nil && a.Spec.Service.Namespace == obj.GetNamespace() && a.Spec.Service.Name == name {
			c.again(a.Name)
		}
	}
}

// checkAPIService says whether the server is available, and which version the write of its condition made; "" = none
// was needed.
func (s *Server) checkAPIService(ctx context.Context, fence uint64, one *apiregistrationv1.APIService) (passed bool, written string, err error) {
	c := apiregistration.LocalAPIService(s.cfg.Clock())
	if one.Spec.Service != nil {
		c = s.aggregation.Check(ctx, s.known, one)
	}
	passed = c.Status == apiregistrationv1.ConditionTrue
	conditions, changed := aggregation.SetCondition(one.Status.Conditions, c)
	if !changed || ctx.Err() != nil {
		return passed, "", ctx.Err()
	}
	next := one.DeepCopy()
	next.Status.Conditions = conditions
	r := &api.Request{User: itself(), Verb: api.VerbUpdate, Kind: s.cfg.Kinds.ByResource(apiServices), Subresource: "status",
		Name: one.Name, Object: next, Fence: fence}
	out, err := s.chain.Do(ctx, r)
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // who changed it is told of
		return passed, "", nil
	case err != nil:
		return passed, "", fmt.Errorf("writing the status of APIService %s: %w", one.Name, err)
	}
	if o, ok := out.(api.Object); ok {
		written = o.GetResourceVersion()
	}
	return passed, written, nil
}
