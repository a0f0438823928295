package apiserver

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/crd"
	"keelson.dev/keelson/controlplane/apiserver/dialer"
	"keelson.dev/keelson/controlplane/apiserver/discovery"
	"keelson.dev/keelson/controlplane/apiserver/endpoints"
	"keelson.dev/keelson/controlplane/apiserver/flowcontrol"
	"keelson.dev/keelson/controlplane/apiserver/openapi"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/apiserver/stream"
	"keelson.dev/keelson/controlplane/apiserver/subresource"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/lifecycle"
)

// Server is the API server of one replica. New creates it and Run runs it.
type Server struct {
	cfg       Config
	chain     *chain
	known     *known
	dialer    *dialer.Dialer
	authn     authn.Chain
	follower  *authz.Follower
	outside   *outside
	custom    *crd.Follower
	resources *endpoints.Handler
	discovery *discovery.Documents

	aggregation *aggregation.Layer
	checks      atomic.Pointer[checks] // schedule of APIService checks while this replica is the leader, else nil
	openapi     *openapi.Spec
	metrics     *metrics

	admitting      *admissionMetrics
	authenticating *authenticationMetrics

	gate    *flowcontrol.Gate
	flows   flowIndex
	shown   shownConns
	paths   *http.ServeMux
	ready   chan struct{}   // closed once the authorizer has read its rules
	closing context.Context // ends when Run starts its shutdown
	close   context.CancelFunc
	began   time.Time
}

// New returns a server for cfg. It starts nothing; Run does.
func New(cfg Config) *Server {
	cfg.defaults()
	s := &Server{cfg: cfg, admitting: newAdmissionMetrics(), authenticating: newAuthenticationMetrics(), ready: make(chan struct{}), paths: http.NewServeMux()}
	s.closing, s.close = context.WithCancel(context.Background())
	s.began = cfg.Clock()
	s.chain = &chain{
		name: cfg.Name, registry: cfg.Registry, kinds: cfg.Kinds, ready: s.ready,
		timeline: cfg.Timeline, leader: cfg.Leader, clock: cfg.Clock, audit: cfg.Audit,
	}
	s.known = newKnown(s.chain)
	s.dialer = dialer.New(s.known, cfg.Nodes, cfg.PodAddresses)
	s.aggregation = s.newAggregation()
	bearer := s.authenticators()
	rbac, node := s.authorizers()
	s.chain.verbs = &subresource.Verbs{
		Registry: cfg.Registry, Kinds: cfg.Kinds, Tokens: cfg.ServiceTokens, Clock: cfg.Clock,
		Review: func(ctx context.Context, token string, audiences []string) (api.User, []string, error) {
			i, err := bearer.Review(ctx, token, audiences)
			return i.User, i.Audiences, err
		},
		TokenCeiling: tokenCeiling, Allowed: s.chain.allowed,
		Rules: rbac.Rules, Components: cfg.Components, Usage: cfg.Usage,
	}
	if cfg.Authorization != nil {
		s.chain.verbs.Unlisted = cfg.Authorization.Unlisted
	}
	s.custom = crd.NewFollower(cfg.Registry, cfg.Kinds, crd.Hooks{ForService: s.dialer.ForService}, cfg.Log)
	if k := cfg.Kinds.ByType(&apiextensionsv1.CustomResourceDefinition{}); k != nil {
		cfg.Registry.LoadFirst(k, s.custom.Begin)
	}
	plugins := admission.Config{
		Cluster: s.known, Kinds: cfg.Kinds, Held: cfg.Registry.Held, ServiceCIDR: cfg.ServiceCIDR, SecondServiceCIDR: cfg.SecondServiceCIDR, PodCIDRs: cfg.PodCIDRs, NodePorts: cfg.NodePorts, Clock: cfg.Clock,
		ExternalIPRanges: cfg.ExternalIPRanges, ReplicaAddresses: cfg.ReplicaAddresses, PodAddresses: cfg.PodAddresses, AddressRefused: cfg.AddressRefused,
		LostNodeToleration: cfg.LostNodeToleration,
		Plugins:            cfg.AdmissionPlugins, Allowed: s.known.may, AggregatedResources: s.aggregatedResources,
		Authorized: s.known.authorized, Signer: s.known.signer, NodeOf: authz.NameOf, PodsOf: node.PodsOf, Bind: s.chain.verbs.BindByWrite,
		AllocateIP: cfg.Registry.AllocateClusterIP, AllocatePort: cfg.Registry.AllocateNodePort,
		PodSecurity: podsecurity.New(s.known, cfg.PodSecurity).Admit,
		Definitions: crd.Definitions{Definition: s.known.definition, Kinds: cfg.Kinds}.Admit,
		Escalation:  authz.Escalation{RBAC: rbac, Authorizer: s.chain.authorizer}.Admit,
	}
	s.outside = newOutside(s)
	quotas := admission.Quotas(plugins)
	s.chain.mutating = slices.Concat(admission.Mutators{admission.Mutating(plugins)}, cfg.Mutators, s.outside.mutators())
	s.chain.validating = slices.Concat(admission.Validators{admission.Validating(plugins)}, cfg.Validators, s.outside.validators(),
		admission.Validators{quotas})
	s.admitting.measured(stepMutating, s.chain.mutating)
	s.admitting.measured(stepValidating, s.chain.validating)
	s.chain.mutate = s.admitting.step(stepMutating, s.chain.mutating.Admit)
	s.chain.validate = s.admitting.step(stepValidating, s.chain.validating.Admit)
	s.chain.verbs.Charge = quotas.Plugins[0].Admit
	s.surface()
	return s
}

// nodeTokenCeiling is the longest lifetime of a token that an agent requests for a pod. Agents
// renew tokens in time, and the tokens on a lost node expire.
const nodeTokenCeiling = 24 * time.Hour

func tokenCeiling(u api.User) time.Duration {
	if _, node := authz.NameOf(u); node {
		return nodeTokenCeiling
	}
	return 0
}

// authenticators sets up stage 1 in this order: authenticating proxies, client certificates, bearer
// tokens. It returns the verifier of bearer tokens.
func (s *Server) authenticators() authn.Bearer {
	cfg := &s.cfg
	var bearer authn.Bearer
	if cfg.Authentication != nil {
		bearer.Verifiers = append(bearer.Verifiers, cfg.Authentication.Static())
	}
	if cfg.ServiceTokens != nil {
		bearer.Verifiers = append(bearer.Verifiers, authn.NewServiceAccounts(cfg.ServiceTokens, cfg.Audiences, s.known, s.markTokenUsed, cfg.Clock))
	}
	// Join tokens are accepted by the node gateway only; here they authenticate no user.
	bearer.Verifiers = append(bearer.Verifiers, cfg.Tokens...)
	var methods authn.Chain
	if cfg.Authentication != nil {
		bearer.Verifiers = append(bearer.Verifiers, cfg.Authentication.Further(s.known.systemSecret)...)
		if proxy := cfg.Authentication.Proxy(); proxy != nil {
			methods = append(methods, proxy)
		}
	}
	s.authn = append(methods, authn.X509{CAs: cfg.ClientCAs, Clock: cfg.Clock, Revoked: s.revoked, Seen: cfg.ClientSeen}, bearer)
	return bearer
}

// markTokenUsed labels a token Secret with the day of its last use. It writes as the apiserver
// itself.
func (s *Server) markTokenUsed(ctx context.Context, secret *corev1.Secret, day string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": secret.UID, "labels": map[string]string{authn.LastUsedLabel: day},
	}})
	if err == nil {
		_, err = s.chain.Do(ctx, &api.Request{
			User: itself(), Verb: api.VerbPatch, Kind: s.cfg.Kinds.ByType(&corev1.Secret{}), Namespace: secret.Namespace, Name: secret.Name,
			PatchType: types.MergePatchType, Patch: patch,
		})
	}
	if err != nil {
		s.cfg.Log.Warn("the day on which the token of a Secret was used is not written", "secret", secret.Namespace+"/"+secret.Name, "err", err)
	}
	return err
}

// authorizers sets up stage 2: Config.Authorization, or by default administrators, nodes and RBAC
// in this order.
func (s *Server) authorizers() (*authz.RBAC, *authz.Node) {
	rbac, node := authz.NewRBAC(), authz.NewNode(s.known.Get)
	s.chain.authorizer = authz.Union{authz.Privileged{}, node, rbac}
	if s.cfg.Authorization != nil {
		s.cfg.Authorization.Bind(map[string]authz.Authorizer{authzfile.Node: node, authzfile.RBAC: rbac})
		s.chain.authorizer = s.cfg.Authorization
	}
	s.follower = &authz.Follower{Source: s.cfg.Registry, Kinds: s.cfg.Kinds, RBAC: rbac, Node: node, Log: s.cfg.Log}
	s.chain.rules = s.follower
	return rbac, node
}

// surface sets up the HTTP side: resources, discovery, OpenAPI, the gate, metrics and Config.Paths.
func (s *Server) surface() {
	cfg := &s.cfg
	streams := &stream.Server{Nodes: cfg.Streams, Log: cfg.Log}
	s.resources = endpoints.New(endpoints.Config{
		Backend: front{s.chain}, Kinds: cfg.Kinds, Scheme: cfg.Scheme, Streams: streams,
		MaxBodyBytes: cfg.MaxBodyBytes, RequestTimeout: cfg.RequestTimeout, MinWatch: cfg.MinWatch,
		Clock: cfg.Clock, Closing: s.closing, Spread: cfg.ShutdownDelay, Live: cfg.Live, Enter: s.enter,
		Sends:   func(k *api.Kind) func(int) { return s.metrics.sends(k) },
		CatchUp: s.catchUp,
		Refused: func(ctx context.Context, status *metav1.Status) { audit.Of(ctx).Refused(status) },
	})
	streams.Error = s.resources.Error
	s.discovery = discovery.New(cfg.Kinds, s.resources)
	s.openapi = openapi.New(cfg.Kinds, cfg.Version.GitVersion)
	s.gate = flowcontrol.New(flowcontrol.ForMemory(cfg.MemoryLimit))
	s.metrics = newMetrics(cfg.Metrics, cfg.Kinds, cfg.Version.GitVersion,
		undecodable{cfg.Registry}, storedObjects{cfg.Kinds, cfg.Registry}, flowing{s.gate},
		s.admitting.plugins, s.admitting.steps, s.authenticating.attempts, s.authenticating.duration)
	for path, h := range cfg.Paths {
		s.paths.Handle(path, h)
	}
}

// Handler returns the handler of all HTTP requests. Until Run is running, it authorizes
// administrators only.
func (s *Server) Handler() http.Handler { return s }

// Backend returns the pipeline for callers in this process, from stage 2 on. The caller sets the
// user of each request.
func (s *Server) Backend() api.Backend { return nodeGate{s} }

// Ready returns a channel that is closed once authorization has read its rules.
func (s *Server) Ready() <-chan struct{} { return s.ready }

// CustomKinds returns a channel that is closed once the kinds of all CustomResourceDefinitions are
// served.
func (s *Server) CustomKinds() <-chan struct{} { return s.custom.Ready() }

// catchUpWait is how long a request for an unknown kind waits for pending
// CustomResourceDefinitions.
const catchUpWait = 5 * time.Second

func (s *Server) catchUp(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, catchUpWait)
	defer cancel()
	if err := s.custom.Complete(ctx); err != nil {
		s.cfg.Log.Warn("a request for a kind that is not served cannot be answered", "err", err)
		return status(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
			"this replica has not read all custom resource definitions yet")
	}
	return nil
}

// Run follows the objects for authorization and admission and serves HTTPS on the listener, if set,
// until ctx ends. It returns when all requests have ended or the shutdown deadline has passed.
func (s *Server) Run(ctx context.Context) error {
	parts := []lifecycle.Part{{Name: "authorizer", Run: func(ctx context.Context) error {
		select {
		case <-s.cfg.Registry.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.follower.Run(ctx, func() { close(s.ready) })
	}}, {Name: "admission", Run: s.outside.run}, {Name: "custom resources", Run: func(ctx context.Context) error {
		select {
		case <-s.cfg.Registry.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.custom.Run(ctx)
	}}}
	if s.cfg.Listener != nil {
		parts = append(parts, lifecycle.Part{Name: "https", Run: s.serveTLS}, lifecycle.Part{Name: "revoked nodes", Run: s.sweepRevoked})
	}
	return lifecycle.Run(ctx, parts...)
}

// doorKey is the context key of the request's connection in the connection limiter.
type doorKey struct{}

// serveTLS serves HTTPS on the listener. When ctx ends, the replica first reports not ready, and
// its watches end during the shutdown delay. Then it accepts no more connections, waits for running
// requests and closes those that exceed the shutdown deadline.
func (s *Server) serveTLS(ctx context.Context) error {
	// Requests continue during the shutdown, after ctx has ended.
	requests, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	conf := s.cfg.TLS.Clone()
	conf.ClientAuth, conf.ClientCAs = tls.RequestClientCert, nil
	conf.NextProtos = []string{"h2", "http/1.1"}
	conf.VerifyPeerCertificate, conf.VerifyConnection = nil, nil
	var handler http.Handler = s
	if s.cfg.Wrap != nil {
		handler = s.cfg.Wrap(s)
	}
	srv := &http.Server{
		Handler: s.cfg.pace.paced(handler), TLSConfig: conf, ReadHeaderTimeout: slowHeaders, IdleTimeout: s.cfg.pace.idle, MaxHeaderBytes: maxHeaderBytes,
		// The server allocates the memory of a frame when its header arrives. With the usual frame
		// size of 1 MiB, nine bytes of an unauthenticated client would reserve that much.
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: 250, MaxReadFrameSize: 16 << 10},
		BaseContext: func(net.Listener) context.Context { return requests },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(authn.ConnContext(ctx, c), doorKey{}, connlimit.FromConn(c))
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	if err := limitFrames(srv, s.cfg.frames); err != nil {
		return err
	}
	served := make(chan error, 1)
	front := connlimit.New(s.cfg.Listener, s.cfg.Connections)
	go func() { served <- srv.ServeTLS(front, "", "") }()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", s.cfg.Listener.Addr(), err)
	case <-ctx.Done():
	}
	s.close()
	if err := s.linger(served); err != nil {
		return err
	}
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

// linger waits for the shutdown delay while the server still responds. It returns an error if
// serving fails.
func (s *Server) linger(served <-chan error) error {
	if s.cfg.ShutdownDelay <= 0 {
		return nil
	}
	t := time.NewTimer(s.cfg.ShutdownDelay)
	defer t.Stop()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", s.cfg.Listener.Addr(), err)
	case <-t.C:
		return nil
	}
}
