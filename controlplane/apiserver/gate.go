package apiserver

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flow"
)

// enter lets a request of an HTTP client in when there is room for it. Callers in
// this process do not pass here: the fleet and the controllers bound themselves.
func (s *Server) enter(ctx context.Context, r *api.Request, bytes int64) (endpoints.Pass, error) {
	class, caller := classOf(r), flow.Caller{Name: r.User.Name, Trusted: trusted(r.User)}
	p, err := s.gate.Enter(ctx, class, caller, bytes)
	if err != nil {
		return nil, noRoom(err, class, caller)
	}
	return pass{p, class, caller}, nil
}

type pass struct {
	*flow.Pass
	class  flow.Class
	caller flow.Caller
}

// Expect is endpoints.Pass.
func (p pass) Expect(ctx context.Context, bytes int64) error {
	return noRoom(p.Pass.Expect(ctx, bytes), p.class, p.caller)
}

// noRoom is 429 with Retry-After.
func noRoom(err error, class flow.Class, caller flow.Caller) error {
	if !errors.Is(err, flow.ErrFull) {
		return err
	}
	return apierrors.NewTooManyRequests(fmt.Sprintf("%v: this replica has no room for another %s request of %q now; try again, with fewer at once",
		err, class, api.Clip(caller.Name, 128)), 1)
}

func classOf(r *api.Request) flow.Class {
	switch r.Verb {
	case api.VerbWatch, api.VerbConnect:
		return flow.Watch
	case api.VerbGet, api.VerbList:
		return flow.Read
	}
	return flow.Write
}

// trusted are administrators, agents and the parts of the control plane, for whom room is kept.
func trusted(u api.User) bool {
	switch u.Name {
	case api.UserController, api.UserScheduler, api.UserAPIServer:
		return true
	}
	return slices.ContainsFunc(u.Groups, func(g string) bool {
		return g == api.GroupMasters || g == api.GroupNodes || g == api.GroupServiceAccounts+":kube-system"
	})
}

// flowing shows what is under way.
type flowing struct{ gate *flow.Gate }

var (
	inFlight   = prometheus.NewDesc("apiserver_current_inflight_requests", "Requests of HTTP clients that are under way.", []string{"request_kind"}, nil)
	refusedAll = prometheus.NewDesc("keelson_requests_refused_total", "Requests of HTTP clients that were refused (429) for want of room.", []string{"request_kind"}, nil)
)

// Describe implements prometheus.Collector.
func (f flowing) Describe(ch chan<- *prometheus.Desc) {
	ch <- inFlight
	ch <- refusedAll
}

// Collect implements prometheus.Collector.
func (f flowing) Collect(ch chan<- prometheus.Metric) {
	for _, c := range []flow.Class{flow.Read, flow.Write, flow.Watch} {
		n, no := f.gate.Stats(c)
		ch <- prometheus.MustNewConstMetric(inFlight, prometheus.GaugeValue, float64(n), c.String())
		ch <- prometheus.MustNewConstMetric(refusedAll, prometheus.CounterValue, float64(no), c.String())
	}
}
