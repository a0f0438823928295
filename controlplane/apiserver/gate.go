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

// enter admits a request of an HTTP client at the gate and reserves bytes of memory for it. It
// returns a 429 if the limits are reached. Requests of controllers and the scheduler in this
// process do not pass the gate; these limit themselves. Requests on behalf of a node do (nodeGate).
func (s *Server) enter(ctx context.Context, r *api.Request, bytes int64) (endpoints.Pass, error) {
	p, err := s.admitted(ctx, r, bytes)
	if err != nil {
		return p, err
	}
	return countedPass{p, s.metrics.begun(r)}, nil
}

// countedPass is the pass of a request that also counts as a long-running request in the metrics.
type countedPass struct {
	pass
	ended func()
}

// Leave ends the long-running count and releases the reservation at the gate. It implements
// endpoints.Pass.
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

// nodeGate is the api.Backend for callers in this process. A request as a node counts against the
// node's limits at the gate, whether the node gateway or the node itself sends it. A hostile node
// can therefore occupy only a bounded part of the replica.
type nodeGate struct{ *Server }

// Do performs a request. As a node it first reserves a place at the gate, for the time of the
// request. It implements api.Backend.
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

// Watch starts a watch. As a node it occupies a place at the gate until the watch stops or ctx
// ends. It implements api.Backend.
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

// endingWatch is a watch that releases its place at the gate when it stops or when the context of
// its start ends.
type endingWatch struct {
	watch.Interface
	end context.CancelFunc
}

// Stop stops the watch and releases its place. It implements watch.Interface.
func (w endingWatch) Stop() {
	w.Interface.Stop()
	w.end()
}

type pass struct {
	*flowcontrol.Pass
	class  flowcontrol.Class
	caller flowcontrol.Caller
}

// Expect reserves bytes of memory for the response, or returns a 429. It implements endpoints.Pass.
func (p pass) Expect(ctx context.Context, bytes int64) error {
	return noRoom(p.Pass.Expect(ctx, bytes), p.class, p.caller)
}

// noRoom converts flowcontrol.ErrFull to a 429 with Retry-After. Other errors are returned
// unchanged.
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

// callerOf returns the flow control caller of a user. Administrators and control plane components
// are trusted and have a reserve. A node may use the reserve up to the needs of one node.
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

// flowing exports the gate's running and refused requests as metrics.
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
