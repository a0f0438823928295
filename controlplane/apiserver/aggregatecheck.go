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

// maxChecks is how many availability checks of API servers run at once. It applies separately to
// servers that passed their last check and to all others. Therefore hanging servers delay only
// other failing or unchecked servers.
const maxChecks = 16

// checks schedules the availability checks of all APIServices. Each APIService has its own due
// time.
type checks struct {
	mu      sync.Mutex
	of      map[string]*checking // by name of the APIService
	running [2]int               // running checks by checking.class: 0 = the last check passed, 1 = it failed or no check has run
	turns   int
	ended   chan struct{} // signaled when a check has ended or an APIService has become due; capacity 1
}

// checking is the schedule of the availability checks of one APIService.
type checking struct {
	due      time.Time // when the next check is due; the zero time means at once
	running  bool
	touched  bool // set if the APIService changed while its check was running: another check must follow
	turn     int  // order of the change that made the check due: the newest is checked first; 0 = due by time only
	remote   bool
	failures int    // failed checks in a row
	since    int    // failed checks since the last change of the APIService or its Service: right after a change, retries are frequent
	written  string // resourceVersion of this server's last status write: an event with this version starts no check
}

func newChecks() *checks { return &checks{of: map[string]*checking{}, ended: make(chan struct{}, 1)} }

func (c *checks) wake() {
	select {
	case c.ended <- struct{}{}:
	default:
	}
}

// KeepConditions checks the API servers of all APIServices when they are due and writes changed
// Available conditions, until ctx ends. A change that TouchAPIServices reports makes the check due
// at once. The leader calls it; fence is the term of its leadership.
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

// next returns the names of the due APIServices that fit within maxChecks, and marks their checks
// as running. wait is the time until the next check becomes due, at most one hour.
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

// class returns 1 if the last check failed or if no check of a remote API server has run yet, and 0
// otherwise.
func (one *checking) class() int {
	if one.failures > 0 {
		return 1
	}
	return 0
}

// look checks the API server of one APIService and schedules its next check. If the APIService no
// longer exists or is being deleted, its schedule is removed.
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
			again = 24 * time.Hour // the condition of a local APIService changes only with the object
		}
		st.due = s.cfg.Clock().Add(again)
		return !there
	})
}

// done marks a check as ended. note updates the schedule with the result and reports whether the
// APIService is gone; the schedule is then deleted, unless the APIService changed during the check.
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

// touch makes the check of a created or changed APIService due at once. It ignores the change that
// the last check's own status write made.
func (c *checks) touch(a *apiregistrationv1.APIService) {
	c.mu.Lock()
	one := c.of[a.Name]
	if one == nil {
		one = &checking{}
		if a.Spec.Service != nil {
			one.failures = 1 // unchecked servers share the limit of failing servers
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

// hasten makes a check due at once, or right after the running check. The caller holds mu.
func (c *checks) hasten(one *checking) {
	c.turns++
	one.due, one.touched, one.turn, one.since = time.Time{}, one.running, c.turns, 0
}

// again makes the check of a known APIService due because its Service or an EndpointSlice of the
// Service has changed.
func (c *checks) again(name string) {
	c.mu.Lock()
	if one := c.of[name]; one != nil {
		c.hasten(one)
	}
	c.mu.Unlock()
	c.wake()
}

// TouchAPIServices makes checks of API servers due at once. The caller passes every changed
// APIService, Service and EndpointSlice. A changed Service or EndpointSlice affects the APIServices
// that reference the Service.
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

// checkAPIService checks the API server of an APIService and writes its Available condition if it
// changed. passed reports whether the server is available. written is the resourceVersion of the
// status write, "" if nothing was written.
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
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // a change of the APIService triggers the next check
		return passed, "", nil
	case err != nil:
		return passed, "", fmt.Errorf("writing the status of APIService %s: %w", one.Name, err)
	}
	if o, ok := out.(api.Object); ok {
		written = o.GetResourceVersion()
	}
	return passed, written, nil
}
