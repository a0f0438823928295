package aggregation

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	discoveryv1 "k8s.io/api/discovery/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	apiregistrationv1 "k8s.io/kube-aggregator/pkg/apis/apiregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/apiregistration"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/internal/wakeup"
)

// MaxChecks is how many availability checks of API servers run at the same time. It applies
// separately to servers that passed their last check and to all other servers. Therefore, hanging
// servers delay only the checks of other failing or unchecked servers.
const MaxChecks = 16

// availabilityChecks schedules the availability checks of all APIServices. Each APIService has its
// own time of the next check.
type availabilityChecks struct {
	mu     sync.Mutex
	byName map[string]*availabilityCheck // by name of the APIService
	// number of running checks by failureClass: 0 = the last check passed, 1 = it failed or no
	// check has run
	running [2]int
	changes int
	wakeup  wakeup.Signal // signaled when a check has ended or an APIService has become due
}

// availabilityCheck is the schedule of the availability checks of one APIService.
type availabilityCheck struct {
	due     time.Time // when the next check is due; the zero time means at once
	running bool
	changed bool // set if the APIService changed while its check was running: another check must follow
	// number of the change that requires the check; the check for the newest change runs first; 0 =
	// the check is only periodic
	order    int
	remote   bool
	failures int // failed checks in a row
	// failed checks since the last change of the APIService or its Service: right after a change,
	// retries are frequent
	failuresSinceChange int
	// resourceVersion of the last status write by this replica: a watch event with this version
	// starts no check
	statusVersion string
}

func newAvailabilityChecks() *availabilityChecks {
	return &availabilityChecks{byName: map[string]*availabilityCheck{}, wakeup: wakeup.New()}
}

func (c *availabilityChecks) wakeLoop() {
	c.wakeup.Send()
}

// Conditions maintains the Available conditions of APIServices while this replica is the leader.
type Conditions struct {
	layer   *Layer
	cluster dialer.Cluster
	backend api.Backend
	kinds   *api.Kinds
	log     *slog.Logger
	checks  atomic.Pointer[availabilityChecks] // the schedule while Run is running, else nil

	unavailable unavailableCounts
}

// NewConditions returns Conditions that check the API servers of a layer. They read Services and
// EndpointSlices from cluster and write APIServices through backend.
func NewConditions(
	layer *Layer, cluster dialer.Cluster, backend api.Backend, kinds *api.Kinds, log *slog.Logger,
) *Conditions {
	return &Conditions{layer: layer, cluster: cluster, backend: backend, kinds: kinds, log: log}
}

// Run checks the API servers of all APIServices periodically and writes changed Available
// conditions, until ctx ends. A change that Touch reports causes a check at once. Only the leader
// replica runs it; fence is the term of its leadership.
func (s *Conditions) Run(ctx context.Context, fence uint64) error {
	var all sync.WaitGroup
	defer all.Wait()
	c := newAvailabilityChecks()
	s.checks.Store(c)
	defer s.checks.CompareAndSwap(c, nil)
	for _, one := range s.layer.cfg.All(ctx) {
		c.touchService(one)
	}
	for {
		ready, wait := c.takeDue(s.layer.cfg.Clock())
		for _, name := range ready {
			all.Go(func() { s.runCheck(ctx, fence, c, name) })
		}
		t := time.NewTimer(wait)
		select {
		case <-ctx.Done():
			t.Stop()
			return ctx.Err()
		case <-t.C:
		case <-c.wakeup:
		}
		t.Stop()
	}
}

// takeDue returns the names of the APIServices to check now, within the limit MaxChecks, and marks
// their checks as running. wait is the time until the next scheduled check, at most one hour.
func (c *availabilityChecks) takeDue(currentTime time.Time) (ready []string, wait time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	wait = time.Hour
	var due []string
	for name, one := range c.byName {
		switch left := one.due.Sub(currentTime); {
		case one.running:
		case left > 0:
			wait = min(wait, left)
		default:
			due = append(due, name)
		}
	}
	slices.SortFunc(due, func(a, b string) int {
		return cmp.Or(c.byName[b].order-c.byName[a].order, c.byName[a].due.Compare(c.byName[b].due))
	})
	for _, name := range due {
		one := c.byName[name]
		if class := one.failureClass(); c.running[class] < MaxChecks {
			one.running, one.order = true, 0
			c.running[class]++
			ready = append(ready, name)
		}
	}
	return ready, wait
}

// failureClass returns 1 if the last check failed or if no check of a remote API server has run
// yet, and 0 otherwise.
func (one *availabilityCheck) failureClass() int {
	if one.failures > 0 {
		return 1
	}
	return 0
}

// runCheck checks the API server of one APIService and schedules its next check. If the APIService
// no longer exists or is being deleted, its schedule is deleted.
func (s *Conditions) runCheck(ctx context.Context, fence uint64, c *availabilityChecks, name string) {
	one, there := s.layer.cfg.Cached(ctx, name)
	there = there && one.DeletionTimestamp == nil
	passed, written := true, ""
	var err error
	if there {
		passed, written, err = s.CheckService(ctx, fence, one)
	}
	if err != nil && ctx.Err() == nil {
		s.log.Warn("failed to write the condition of an APIService, retrying", "apiservice", name, "error", err)
	}
	c.finishCheck(name, func(st *availabilityCheck) (gone bool) {
		if st.remote = there && one.Spec.Service != nil; written != "" {
			st.statusVersion = written
		}
		if st.failures, st.failuresSinceChange = st.failures+1, st.failuresSinceChange+1; passed {
			st.failures, st.failuresSinceChange = 0, 0
		}
		again := NextCheckDelay(st.failuresSinceChange)
		if err != nil {
			again = 5 * time.Second
		} else if !st.remote {
			again = 24 * time.Hour // the condition of a local APIService changes only with the object
		}
		st.due = s.layer.cfg.Clock().Add(again)
		return !there
	})
}

// finishCheck marks a check as ended. It calls record, which stores the result in the schedule and
// reports whether the APIService no longer exists. In this case the schedule is deleted, unless the
// APIService changed during the check.
func (c *availabilityChecks) finishCheck(name string, record func(*availabilityCheck) (gone bool)) {
	c.mu.Lock()
	one := c.byName[name]
	c.running[one.failureClass()]--
	if gone := record(one); gone && !one.changed {
		delete(c.byName, name)
	}
	one.running = false
	if one.changed {
		c.makeDue(one)
	}
	c.mu.Unlock()
	c.wakeLoop()
}

// touchService schedules an immediate check of a created or changed APIService. It ignores the
// change that the last check made by writing the status.
func (c *availabilityChecks) touchService(a *apiregistrationv1.APIService) {
	c.mu.Lock()
	one := c.byName[a.Name]
	if one == nil {
		one = &availabilityCheck{}
		if a.Spec.Service != nil {
			one.failures = 1 // unchecked servers share the limit of failing servers
		}
		c.byName[a.Name] = one
	} else if one.statusVersion == a.ResourceVersion {
		c.mu.Unlock()
		return
	}
	c.makeDue(one)
	c.mu.Unlock()
	c.wakeLoop()
}

// makeDue schedules an immediate check. If a check is running, the new one follows it. The caller
// holds mu.
func (c *availabilityChecks) makeDue(check *availabilityCheck) {
	c.changes++
	check.due, check.changed, check.order, check.failuresSinceChange = time.Time{}, check.running, c.changes, 0
}

// recheck schedules an immediate check of an APIService after a change of its Service or of an
// EndpointSlice of the Service. It ignores an unknown APIService.
func (c *availabilityChecks) recheck(name string) {
	c.mu.Lock()
	if one := c.byName[name]; one != nil {
		c.makeDue(one)
	}
	c.mu.Unlock()
	c.wakeLoop()
}

// Touch schedules immediate checks of the API servers that a changed object affects. The caller
// passes every changed APIService, Service and EndpointSlice. A Service or EndpointSlice affects
// the APIServices that reference the Service.
func (s *Conditions) Touch(obj api.Object) {
	c := s.checks.Load()
	if c == nil {
		return
	}
	name := obj.GetName()
	switch o := obj.(type) {
	case *apiregistrationv1.APIService:
		c.touchService(o)
		return
	case *discoveryv1.EndpointSlice:
		name = o.Labels[discoveryv1.LabelServiceName]
	}
	for _, a := range s.layer.cfg.All(context.Background()) {
		if a.Spec.Service != nil && a.Spec.Service.Namespace == obj.GetNamespace() && a.Spec.Service.Name == name {
			c.recheck(a.Name)
		}
	}
}

// CheckService checks the API server of an APIService and writes its Available condition if it
// changed. passed reports whether the server is available. written is the resourceVersion of the
// status write, "" if nothing was written.
func (s *Conditions) CheckService(ctx context.Context, fence uint64, service *apiregistrationv1.APIService) (
	passed bool, written string, err error,
) {
	c := apiregistration.LocalAPIService(s.layer.cfg.Clock())
	if service.Spec.Service != nil {
		c = s.layer.Check(ctx, s.cluster, service)
	}
	passed = c.Status == apiregistrationv1.ConditionTrue
	conditions, changed := SetCondition(service.Status.Conditions, c)
	if !changed || ctx.Err() != nil {
		return passed, "", ctx.Err()
	}
	next := service.DeepCopy()
	next.Status.Conditions = conditions
	r := &api.Request{User: api.APIServerUser(), Verb: api.VerbUpdate, Kind: s.kinds.ByResource(APIServices),
		Subresource: "status",
		Name:        service.Name, Object: next, Internal: api.InternalOptions{Fence: fence}}
	out, err := s.backend.Do(ctx, r)
	switch {
	case apierrors.IsNotFound(err) || apierrors.IsConflict(err): // a change of the APIService triggers the next check
		return passed, "", nil
	case err != nil:
		return passed, "", fmt.Errorf("writing the status of APIService %s: %w", service.Name, err)
	}
	if o, ok := out.(api.Object); ok {
		written = o.GetResourceVersion()
	}
	s.unavailable.countChange(service, c)
	return passed, written, nil
}
