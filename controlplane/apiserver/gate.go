package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
)

// enter lets a request of an HTTP client in when there is room for it. What the
// parts of this process ask for themselves does not pass here: controllers and the
// scheduler bound themselves. What they ask for a node does (nodeGate).
func (s *Server) enter(ctx context.Context, r *api.Request, bytes int64) (endpoints.Pass, error) {
	p, err := s.admitted(ctx, r, bytes)
	if err != nil {
		return p, err
	}
	return countedPass{p, s.metrics.begun(r)}, nil
}

// countedPass is that of a request that may run for long.
type countedPass struct {
	pass
	ended func()
}

// Leave implements endpoints.Pass.
func (p countedPass) Leave() {
	p.ended()
	p.pass.Leave()
}

func (s *Server) admitted(ctx context.Context, r *api.Request, bytes int64) (pass, error) {
	class, caller := classOf(r), callerOf(r.User)
	p, err := s.gate.Enter(ctx, class, caller, bytes)
	if err != nil {
		return pass{}, noRoom(err, class, caller)
	}
	return pass{p, class, caller}, nil
}

// nodeGate is the pipeline for callers in this process. What is asked as a node has
// the node's room, whether the fleet asks or the node itself by HTTP: however much a
// hostile one sends, the replica does a bounded part of it at once.
type nodeGate struct{ *Server }

// Do implements api.Backend.
func (g nodeGate) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if !asNode(r.User) {
		return g.chain.Do(ctx, r)
	}
	p, err := g.admitted(ctx, r, endpoints.Carries(r))
	if err != nil {
		return nil, err
	}
	defer p.Leave()
	obj, err := g.chain.Do(ctx, r)
	if l, ok := obj.(*api.ObjectList); ok && err == nil {
		err = p.Expect(ctx, l.Bytes)
	}
	if err != nil {
		return nil, err
	}
	return obj, nil
}

// Watch implements api.Backend.
func (g nodeGate) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if !asNode(r.User) {
		return g.chain.Watch(ctx, r)
	}
	p, err := g.admitted(ctx, r, 0)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(ctx)
	w, err := g.chain.Watch(ctx, r)
	if err != nil {
		end()
		p.Leave()
		return nil, err
	}
	context.AfterFunc(ctx, p.Leave)
	return endingWatch{w, end}, nil
}

// endingWatch gives its place back when it is stopped, or when the context in which it began ends.
type endingWatch struct {
	watch.Interface
	end context.CancelFunc
}

// Stop implements watch.Interface.
func (w endingWatch) Stop() {
	w.Interface.Stop()
	w.end()
}

type pass struct {
	*flowcontrol.Pass
	class  flowcontrol.Class
	caller flowcontrol.Caller
}

// Expect is endpoints.Pass.
func (p pass) Expect(ctx context.Context, bytes int64) error {
	return noRoom(p.Pass.Expect(ctx, bytes), p.class, p.caller)
}

// noRoom is 429 with Retry-After.
func noRoom(err error, class flowcontrol.Class, caller flowcontrol.Caller) error {
	if !errors.Is(err, flowcontrol.ErrFull) {
		return err
	}
	return apierrors.NewTooManyRequests(fmt.Sprintf("%v: this replica has no room for another %s request of %q now; try again, with fewer at once",
		err, class, api.Clip(caller.Name, 128)), 1)
}

func classOf(r *api.Request) flowcontrol.Class {
	switch r.Verb {
	case api.VerbWatch, api.VerbConnect:
		return flowcontrol.Watch
	case api.VerbGet, api.VerbList:
		return flowcontrol.Read
	}
	return flowcontrol.Write
}

// callerOf says on whose account a user's requests go. Room is kept for administrators and the parts of the control
// plane; a node may use it, as far as one node needs.
func callerOf(u api.User) flowcontrol.Caller {
	return flowcontrol.Caller{Name: u.Name, Trusted: trusted(u), Node: asNode(u)}
}

func trusted(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return slices.ContainsFunc(u.Groups, func(g string) bool {
		return g == api.GroupMasters || g == api.GroupServiceAccounts+":kube-system"
	})
}

func asNode(u api.User) bool { return slices.Contains(u.Groups, api.GroupNodes) && !trusted(u) }

// flowing shows what is under way.
type flowing struct{ gate *flowcontrol.Gate }

var (
	inFlight = prometheus.NewDesc("apiserver_current_inflight_requests",
		"Requests of HTTP clients and for nodes that are under way.", []string{"request_kind"}, nil)
	refusedAll = prometheus.NewDesc("keelson_requests_refused_total",
		"Requests of HTTP clients and for nodes that were refused (429) for want of room.", []string{"request_kind"}, nil)
)

// Describe implements prometheus.Collector.
func (f flowing) Describe(ch chan<- *prometheus.Desc) {
	ch <- inFlight
	ch <- refusedAll
}

// Collect implements prometheus.Collector.
func (f flowing) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []flowcontrol.Class{flowcontrol.Read, flowcontrol.Write, flowcontrol.Watch} {
		n, no := f.gate.Stats(c)
		ch <- prometheus.MustNewConstMetric(inFlight, prometheus.GaugeValue, float64(n), c.String())
		ch <- prometheus.MustNewConstMetric(refusedAll, prometheus.CounterValue, float64(no), c.String())
	}
}
