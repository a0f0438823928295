package apiserver

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flow"
	"keelson.dev/keelson/controlplane/apiserver/openapi"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/apiserver/stream"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
	"keelson.dev/keelson/internal/door"
	"keelson.dev/keelson/internal/lifecycle"
)

// Server is one replica's API.
type Server struct {
	cfg       Config
	chain     *chain
	known     *known
	authn     authn.Chain
	follower  authz.Follower
	resources *endpoints.Handler
	discovery *discovery.Documents
	openapi   *openapi.Spec
	metrics   *metrics
	gate      *flow.Gate
	nodeConns nodeConns
	paths     *http.ServeMux
	ready     chan struct{} // the authorizer has its rules
	closing   chan struct{} // Run is ending
	endOnce   sync.Once
}

// New builds a server. Nothing runs until Run.
func New(cfg Config) *Server {
	cfg.defaults()
	s := &Server{cfg: cfg, ready: make(chan struct{}), closing: make(chan struct{}), paths: http.NewServeMux()}
	s.chain = &chain{
		name: cfg.Name, registry: cfg.Registry, kinds: cfg.Kinds, ready: s.ready,
		timeline: cfg.Timeline, leader: cfg.Leader, clock: cfg.Clock, audit: cfg.Audit,
	}
	s.known = newKnown(s.chain)
	bearer := s.authenticators()
	rbac := s.authorizers()
	s.chain.verbs = &subresource.Verbs{
		Registry: cfg.Registry, Kinds: cfg.Kinds, Tokens: cfg.ServiceTokens, Clock: cfg.Clock,
		Review: func(ctx context.Context, token string, audiences []string) (api.User, []string, error) {
			i, err := bearer.Review(ctx, token, audiences)
			return i.User, i.Audiences, err
		},
		TokenCeiling: tokenCeiling, Allowed: s.chain.allowed,
		Rules: rbac.Rules,
	}
	plugins := admission.Config{
		Cluster: s.known, ServiceCIDR: cfg.ServiceCIDR, NodePorts: cfg.NodePorts, Clock: cfg.Clock,
		LostNodeToleration: cfg.LostNodeToleration,
		Authorized:         s.known.authorized, NodeOf: authz.NameOf, Bind: s.chain.verbs.BindByWrite,
		AllocateIP: cfg.Registry.AllocateClusterIP, AllocatePort: cfg.Registry.AllocateNodePort,
		PodSecurity: podsecurity.New(s.known, cfg.PodSecurity).Admit,
		Escalation:  authz.Escalation{RBAC: rbac, Authorizer: s.chain.authorizer}.Admit,
	}
	s.chain.mutating, s.chain.validating = admission.Mutating(plugins), admission.Validating(plugins)
	s.surface()
	return s
}

// nodeTokenCeiling is the longest life of a token that an agent gets for a pod. An
// agent renews in time, and what a lost node has taken along ends by itself.
const nodeTokenCeiling = 24 * time.Hour

func tokenCeiling(u api.User) time.Duration {
	if _, node := authz.NameOf(u); node {
		return nodeTokenCeiling
	}
	return 0
}

// authenticators sets up stage 1: certificates first, then tokens of all sorts.
func (s *Server) authenticators() authn.Bearer {
	cfg := &s.cfg
	var bearer authn.Bearer
	if cfg.ServiceTokens != nil {
		bearer.Verifiers = append(bearer.Verifiers, authn.NewServiceAccounts(cfg.ServiceTokens, cfg.Audiences, s.known, cfg.Clock))
	}
	// A join token lets a machine in at the fleet's door and is nobody here.
	bearer.Verifiers = append(bearer.Verifiers, cfg.Tokens...)
	s.authn = authn.Chain{authn.X509{CAs: cfg.ClientCAs, Clock: cfg.Clock, Revoked: s.revoked}, bearer}
	return bearer
}

// authorizers sets up stage 2: administrators, then agents, then RBAC.
func (s *Server) authorizers() *authz.RBAC {
	rbac, node := authz.NewRBAC(), authz.NewNode(s.known.Get)
	s.chain.authorizer = authz.Union{authz.Privileged{}, node, rbac}
	s.follower = authz.Follower{Source: s.cfg.Registry, Kinds: s.cfg.Kinds, RBAC: rbac, Node: node, Log: s.cfg.Log}
	return rbac
}

// surface sets up what HTTP clients see.
func (s *Server) surface() {
	cfg := &s.cfg
	streams := &stream.Server{Nodes: cfg.Streams, Log: cfg.Log}
	s.resources = endpoints.New(endpoints.Config{
		Backend: front{s.chain}, Kinds: cfg.Kinds, Scheme: cfg.Scheme, Streams: streams,
		MaxBodyBytes: cfg.MaxBodyBytes, RequestTimeout: cfg.RequestTimeout, MinWatch: cfg.MinWatch,
		Clock: cfg.Clock, Closing: s.closing, Live: cfg.Live, Enter: s.enter,
		Refused: func(ctx context.Context, status *metav1.Status) { audit.Of(ctx).Refused(status) },
	})
	streams.Error = s.resources.Error
	s.discovery = discovery.New(cfg.Kinds)
	s.openapi = openapi.New(cfg.Kinds, cfg.Version.GitVersion)
	s.gate = flow.New(flow.ForMemory(cfg.MemoryLimit))
	s.metrics = newMetrics(cfg.Metrics, undecodable{cfg.Registry}, flowing{s.gate})
	for path, h := range cfg.Paths {
		s.paths.Handle(path, h)
	}
}

// Handler answers the whole HTTP surface. Without a running Run it authorizes administrators only.
func (s *Server) Handler() http.Handler { return s }

// Backend is the same pipeline for callers in this process, from stage 2 on.
func (s *Server) Backend() api.Backend { return s.chain }

// Ready is closed once authorization has read its rules.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// Run serves until ctx ends: it follows the objects that authorization needs,
// and answers HTTPS on the listener when there is one. It returns when all
// requests have ended or the shutdown deadline passed.
func (s *Server) Run(ctx context.Context) error {
	parts := []lifecycle.Part{{Name: "authorizer", Run: func(ctx context.Context) error {
		select {
		case <-s.cfg.Registry.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.follower.Run(ctx, func() { close(s.ready) })
	}}}
	if s.cfg.Listener != nil {
		parts = append(parts, lifecycle.Part{Name: "https", Run: s.serveTLS}, lifecycle.Part{Name: "revoked nodes", Run: s.sweepRevoked})
	}
	return lifecycle.Run(ctx, parts...)
}

// doorKey is where a request's context has the connection's place at the door.
type doorKey struct{}

// serveTLS answers on the listener. When ctx ends it takes no more connections,
// ends watches, waits for what runs and cuts off what does not end in time.
func (s *Server) serveTLS(ctx context.Context) error {
	// Requests outlive ctx for the time of the shutdown.
	requests, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	conf := s.cfg.TLS.Clone()
	conf.ClientAuth, conf.ClientCAs = tls.RequestClientCert, nil
	conf.NextProtos = []string{"h2", "http/1.1"}
	conf.VerifyPeerCertificate, conf.VerifyConnection = nil, nil
	srv := &http.Server{
		Handler: s.cfg.pace.paced(s), TLSConfig: conf, ReadHeaderTimeout: slowHeaders, IdleTimeout: s.cfg.pace.idle, MaxHeaderBytes: 64 << 10,
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: 250},
		BaseContext: func(net.Listener) context.Context { return requests },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(authn.ConnContext(ctx, c), doorKey{}, door.Of(c))
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	front := door.New(s.cfg.Listener, s.cfg.Connections)
	go func() { served <- srv.ServeTLS(front, "", "") }()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", s.cfg.Listener.Addr(), err)
	case <-ctx.Done():
	}
	s.endOnce.Do(func() { close(s.closing) })
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.ShutdownDeadline)
	defer cancel()
	err := srv.Shutdown(late)
	cut()
	if errors.Is(err, context.DeadlineExceeded) {
		s.cfg.Log.Warn("requests were cut off at shutdown", "after", s.cfg.ShutdownDeadline)
		err = srv.Close()
	}
	<-served
	return err
}
