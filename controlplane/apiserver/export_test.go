package apiserver

import (
	"context"
	"crypto/tls"
	"log/slog"
	"net/http"
	"time"

	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/policies"
	"keelson.dev/keelson/controlplane/apiserver/admission/webhooks"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/crd"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/follow"
)

// ClientPace is the pace that clients must keep.
type ClientPace struct {
	Idle, Body, Stall time.Duration
	Rate              int64
}

// DefaultPace is the pace of a server without another one.
var DefaultPace = ClientPace{Idle: defaultPace.idle, Body: defaultPace.body, Stall: defaultPace.stall,
	Rate: defaultPace.rate}

func (p ClientPace) internal() clientPace {
	return clientPace{idle: p.Idle, body: p.Body, rate: p.Rate, stall: p.Stall}
}

// LimitHandler returns h with the limits of the pace.
func (p ClientPace) LimitHandler(h http.Handler) http.Handler { return p.internal().limitHandler(h) }

// SetPace sets the pace that clients must keep.
func (c *Config) SetPace(p ClientPace) { c.Serving.pace = p.internal() }

// SetDefaults sets the defaults of unset fields.
func (c *Config) SetDefaults() { c.setDefaults() }

// Settings returns the configuration with its defaults.
func (s *Server) Settings() Config { return s.cfg }

// SetAuthorizer replaces the authorizer of stage 2.
func (s *Server) SetAuthorizer(a authz.Authorizer) { s.pipeline.authorizer = a }

// SetAggregatedTimeout sets the timeout of requests to aggregated API servers.
func (s *Server) SetAggregatedTimeout(d time.Duration) { s.aggregated.timeout = d }

// SetNodeTLS sets the TLS configuration for the HTTPS servers of nodes.
func (s *Server) SetNodeTLS(f func(node string) *tls.Config) { s.proxy.nodeTLS = f }

// SetDefinitions replaces the source of CustomResourceDefinitions.
func (s *Server) SetDefinitions(source follow.Source) {
	s.definitions = crd.NewFollower(source, s.cfg.Kinds, crd.Hooks{ForService: s.proxy.dialer.ForService},
		slog.New(slog.DiscardHandler))
}

// Dialer returns the dialer of Services, pods and nodes.
func (s *Server) Dialer() *dialer.Dialer { return s.proxy.dialer }

// GateStats returns the running and refused requests of a class.
func (s *Server) GateStats(c flowcontrol.Class) (running int, refused uint64) { return s.gate.Stats(c) }

// EnterGate admits a request at the gate.
func (s *Server) EnterGate(ctx context.Context, r *api.Request, bytes int64) (endpoints.Pass, error) {
	return s.gate.enterGate(ctx, r, bytes)
}

// AdmissionReady returns a channel that is closed once all admission configurations are read.
func (s *Server) AdmissionReady() <-chan struct{} { return s.admission.ready }

// Webhooks returns the admission webhooks.
func (s *Server) Webhooks() *webhooks.Webhooks { return s.admission.webhooks }

// Policies returns the admission policies.
func (s *Server) Policies() *policies.Policies { return s.admission.policies }

// MaxKindSeries is the number of kinds with series of their own.
const MaxKindSeries = maxKindSeries

// CountOtherKinds returns how many of the kinds are counted together, when they are used in order.
func CountOtherKinds(all ...*api.Kind) (others int) {
	m := newMetrics(nil, api.NewKinds(all...), version.Info{})
	for _, k := range m.kinds.kinds.All() {
		if _, _, resource := m.kinds.kindLabels(k); resource == otherKinds {
			others++
		}
	}
	return others
}
