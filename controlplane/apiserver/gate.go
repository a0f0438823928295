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

// gate limits the concurrent requests of a replica by flow control, and counts long-running
// requests in the metrics.
type gate struct {
	*flowcontrol.Gate
	requests *requestMetrics
}

// enterGate admits a request of an HTTP client within the concurrency limits and reserves bytes of
// memory for it. It returns a 429 if the limits are reached. Requests of controllers and the
// scheduler in this process are not limited here; these components limit themselves. Requests on
// behalf of a node are (nodeGate).
func (g *gate) enterGate(ctx context.Context, r *api.Request, bytes int64) (endpoints.Pass, error) {
	p, err := g.reservePlace(ctx, r, bytes)
	if err != nil {
		return p, err
	}
	return countedPass{p, g.requests.startLongRunning(r)}, nil
}

// countedPass is the pass of a request that the metrics also count as a long-running request.
type countedPass struct {
	pass
	stopCounting func()
}

// Leave ends the counting as a long-running request and releases the reservation. It implements
// endpoints.Pass.
func (p countedPass) Leave() {
	p.stopCounting()
	p.pass.Leave()
}

func (g *gate) reservePlace(ctx context.Context, r *api.Request, bytes int64) (pass, error) {
	class, caller := classOf(r), callerOf(r.User)
	p, err := g.Enter(ctx, class, caller, bytes)
	if err != nil {
		return pass{}, tooManyRequests(err, class, caller)
	}
	return pass{p, class, caller}, nil
}

// nodeGate is the api.Backend for callers in this process. A request of a node's user counts
// against the node's concurrency limits, whether the node itself or the node gateway sends it. A
// malicious node can therefore use only a limited part of the replica.
type nodeGate struct {
	gate     *gate
	pipeline *pipeline
}

// Do performs a request. If the user is a node, it first reserves a seat of the concurrency limits,
// for the duration of the request. It implements api.Backend.
func (g nodeGate) Do(ctx context.Context, r *api.Request) (runtime.Object, error) {
	if !isNode(r.User) {
		return g.pipeline.Do(ctx, r)
	}
	p, err := g.gate.reservePlace(ctx, r, endpoints.EstimateBody(r))
	if err != nil {
		return nil, err
	}
	defer p.Leave()
	obj, err := g.pipeline.Do(ctx, r)
	if l, ok := obj.(*api.ObjectList); ok && err == nil {
		err = p.Expect(ctx, l.Bytes)
	}
	if err != nil {
		return nil, err
	}
	return obj, nil
}

// Watch starts a watch. If the user is a node, the watch occupies a seat of the concurrency limits
// until it stops or ctx ends. It implements api.Backend.
func (g nodeGate) Watch(ctx context.Context, r *api.Request) (watch.Interface, error) {
	if !isNode(r.User) {
		return g.pipeline.Watch(ctx, r)
	}
	p, err := g.gate.reservePlace(ctx, r, 0)
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(ctx)
	w, err := g.pipeline.Watch(ctx, r)
	if err != nil {
		end()
		p.Leave()
		return nil, err
	}
	context.AfterFunc(ctx, p.Leave)
	return endingWatch{w, end}, nil
}

// endingWatch is a watch that releases its seat of the concurrency limits when it stops or when the
// context with which it was started ends.
type endingWatch struct {
	watch.Interface
	cancel context.CancelFunc
}

// Stop stops the watch and releases its seat. It implements watch.Interface.
func (w endingWatch) Stop() {
	w.Interface.Stop()
	w.cancel()
}

type pass struct {
	*flowcontrol.Pass
	class  flowcontrol.Class
	caller flowcontrol.Caller
}

// Expect reserves bytes of memory for the response, or returns a 429. It implements endpoints.Pass.
func (p pass) Expect(ctx context.Context, bytes int64) error {
	return tooManyRequests(p.Pass.Expect(ctx, bytes), p.class, p.caller)
}

// tooManyRequests converts flowcontrol.ErrFull to a 429 with Retry-After. Other errors are returned
// unchanged.
func tooManyRequests(err error, class flowcontrol.Class, caller flowcontrol.Caller) error {
	if !errors.Is(err, flowcontrol.ErrFull) {
		return err
	}
	return endpoints.NewTerminationError(apierrors.NewTooManyRequests(fmt.Sprintf(
		"%v: the limits of this replica allow no further %s request of %q; retry with fewer concurrent requests",
		err, class, api.Truncate(caller.Name, 128)), 1))
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
// are trusted, so they may use the reserved part of the limits. A node may use it too, but only a
// small share of the limits.
func callerOf(u api.User) flowcontrol.Caller {
	return flowcontrol.Caller{Name: u.Name, Trusted: isTrusted(u), Node: isNode(u)}
}

func isTrusted(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return slices.ContainsFunc(u.Groups, func(g string) bool {
		return g == api.GroupMasters || g == api.GroupServiceAccounts+":kube-system"
	})
}

func isNode(u api.User) bool { return slices.Contains(u.Groups, api.GroupNodes) && !isTrusted(u) }

// gateMetrics is a prometheus.Collector for the running and refused requests of the gate.
type gateMetrics struct{ gate *flowcontrol.Gate }

var (
	inFlightRequests = prometheus.NewDesc("apiserver_current_inflight_requests",
		"Requests of HTTP clients and for nodes that are under way.", []string{"request_kind"}, nil)
	refusedRequests = prometheus.NewDesc("keelson_requests_refused_total",
		"Requests of HTTP clients and for nodes that were refused (429) for want of room.",
		[]string{"request_kind"}, nil)
)

// Describe implements prometheus.Collector.
func (f gateMetrics) Describe(ch chan<- *prometheus.Desc) {
	ch <- inFlightRequests
	ch <- refusedRequests
}

// Collect implements prometheus.Collector.
func (f gateMetrics) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []flowcontrol.Class{flowcontrol.Read, flowcontrol.Write, flowcontrol.Watch} {
		n, no := f.gate.Stats(c)
		ch <- prometheus.MustNewConstMetric(inFlightRequests, prometheus.GaugeValue, float64(n), c.String())
		ch <- prometheus.MustNewConstMetric(refusedRequests, prometheus.CounterValue, float64(no), c.String())
	}
}
