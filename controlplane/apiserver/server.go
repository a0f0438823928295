package apiserver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/admission/builtin"
	"keelson.dev/keelson/controlplane/apiserver/admission/noderestriction"
	"keelson.dev/keelson/controlplane/apiserver/admission/objectlimits"
	"keelson.dev/keelson/controlplane/apiserver/admission/policies"
	"keelson.dev/keelson/controlplane/apiserver/admission/services"
	"keelson.dev/keelson/controlplane/apiserver/aggregation"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/bootstrap"
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
	cfg         Config
	pipeline    *pipeline
	cluster     *clusterReader
	authn       authn.Chain
	admission   *clusterAdmission
	definitions *crd.Follower
	resources   *endpoints.Handler
	aggregated  *Aggregated
	proxy       *proxyHandler
	gate        *gate
	metrics     serverMetrics
	revocations revocations
	paths       *http.ServeMux
	lifetime    lifetime
	leaderWork  leaderWork
}

// serverMetrics are the metrics of a server.
type serverMetrics struct {
	requests       *requestMetrics
	admission      *admissionMetrics
	authentication *authenticationMetrics
	health         *healthMetrics
}

// lifetime contains when a server was started, and whether it is shutting down.
type lifetime struct {
	startedAt time.Time
	closing   context.Context // ends when Run starts its shutdown
	close     context.CancelFunc
}

// leaderWork contains the components that maintain objects while this replica is the leader.
type leaderWork struct {
	setup       *bootstrap.Setup
	conditions  *aggregation.Conditions
	typeChecker *policies.TypeChecker
}

// New returns a server with the configuration cfg. It starts nothing; Run does.
func New(cfg Config) *Server {
	cfg.setDefaults()
	s := &Server{cfg: cfg, paths: http.NewServeMux()}
	s.metrics.admission, s.metrics.authentication = newAdmissionMetrics(), newAuthenticationMetrics()
	s.lifetime.startedAt = cfg.Clock()
	s.metrics.health = newHealthMetrics(s.lifetime.startedAt)
	s.lifetime.closing, s.lifetime.close = context.WithCancel(context.Background())
	s.pipeline = &pipeline{
		name: cfg.Name, registry: cfg.Registry, kinds: cfg.Kinds, ready: make(chan struct{}),
		timeline: cfg.Timeline.Stages, leader: cfg.Timeline.Leader, clock: cfg.Clock, audit: cfg.Process.Audit,
	}
	s.cluster = newClusterReader(s.pipeline)
	s.revocations = revocations{cluster: s.cluster, clientCAs: cfg.Authentication.ClientCAs}
	d := dialer.New(s.cluster, cfg.Outbound.Nodes, cfg.Network.PodAddresses)
	bearer := s.newAuthenticators()
	rbac, node := s.newAuthorizers()
	s.pipeline.verbs = &subresource.Verbs{
		Registry: cfg.Registry, Kinds: cfg.Kinds, Tokens: cfg.Authentication.ServiceTokens, Clock: cfg.Clock,
		Review: func(ctx context.Context, token string, audiences []string) (api.User, []string, error) {
			i, err := bearer.Review(ctx, token, audiences)
			return i.User, i.Audiences, err
		},
		TokenCeiling: tokenCeiling, Allowed: s.pipeline.reviewAccess,
		Rules: rbac.Rules, Components: cfg.State.Components, Usage: cfg.State.Usage,
	}
	if cfg.Authorization != nil {
		s.pipeline.verbs.Unlisted = cfg.Authorization.Unlisted
	}
	s.definitions = crd.NewFollower(cfg.Registry, cfg.Kinds, crd.Hooks{ForService: d.ForService}, cfg.Log)
	if k := cfg.Kinds.ByType(&apiextensionsv1.CustomResourceDefinition{}); k != nil {
		cfg.Registry.LoadFirst(k, s.definitions.LoadInitial)
	}
	s.newSurface(d)
	s.newLeaderWork()
	s.admission = newClusterAdmission(s, d)
	s.newAdmission(rbac, node)
	return s
}

// newAdmission sets up stages 3 and 5: the built-in plugins, the phases of Config, and the policies
// and webhooks of the cluster.
func (s *Server) newAdmission(rbac *authz.RBAC, node *authz.Node) {
	cfg := &s.cfg
	plugins := builtin.Config{
		Cluster: s.cluster, Kinds: cfg.Kinds, ListHeld: cfg.Registry.Held, Clock: cfg.Clock,
		LostNodeToleration: cfg.Admission.LostNodeToleration, Plugins: cfg.Admission.Plugins,
		Access: builtin.Access{
			Authorized: s.cluster.isAuthorized, Signer: s.cluster.maySign, Allowed: s.cluster.authorizeAction,
			AggregatedResources: s.aggregated.ResourcesOf,
		},
		Services: services.Config{
			Cluster: s.cluster, Kinds: cfg.Kinds, ListHeld: cfg.Registry.Held,
			ServiceCIDR: cfg.Network.ServiceCIDR, SecondServiceCIDR: cfg.Network.SecondServiceCIDR,
			PodCIDRs:  cfg.Network.PodCIDRs,
			NodePorts: cfg.Network.NodePorts, ExternalIPRanges: cfg.Network.ExternalIPRanges,
			ReplicaAddresses: cfg.Network.ReplicaAddresses,
			AllocateIP:       cfg.Registry.AllocateClusterIP, AllocatePort: cfg.Registry.AllocateNodePort,
		},
		Nodes: noderestriction.Config{
			Cluster: s.cluster, Kinds: cfg.Kinds, NodeOf: authz.NameOf,
			PodAddresses: cfg.Network.PodAddresses, AddressRefused: cfg.Network.AddressRefused,
		},
		Limits: objectlimits.Config{Cluster: s.cluster, Clock: cfg.Clock, NodeOf: authz.NameOf,
			PodsOf: node.PodsOf},
		Bind:                s.pipeline.verbs.BindByWrite,
		RequireNodeFeatures: cfg.Admission.RequireNodeFeatures,
		PodSecurity:         podsecurity.New(s.cluster, cfg.Admission.PodSecurity).Admit,
		Definitions:         crd.Definitions{Definition: s.cluster.getDefinition, Kinds: cfg.Kinds}.Admit,
		Escalation:          authz.Escalation{RBAC: rbac, Authorizer: s.pipeline.authorizer}.Admit,
	}
	quotas := builtin.Quotas(plugins)
	mutating := slices.Concat(admission.Mutators{builtin.Mutating(plugins)}, cfg.Admission.Mutators,
		s.admission.mutatorPhases())
	validating := slices.Concat(admission.Validators{builtin.Validating(plugins)}, cfg.Admission.Validators,
		s.admission.validatorPhases(), admission.Validators{quotas})
	metrics := s.metrics.admission
	metrics.measurePlugins(stepMutating, mutating)
	metrics.measurePlugins(stepValidating, validating)
	s.pipeline.mutating, s.pipeline.validating = mutating, validating
	s.pipeline.mutate = metrics.measureStep(stepMutating, mutating.Admit)
	s.pipeline.validate = metrics.measureStep(stepValidating, validating.Admit)
	s.pipeline.verbs.Charge = quotas.Plugins[0].Admit
}

// newLeaderWork sets up the components that maintain objects while this replica is the leader.
func (s *Server) newLeaderWork() {
	cfg := &s.cfg
	c := bootstrap.Config{Backend: s.Backend(), Cluster: s.cluster, Registry: cfg.Registry, Kinds: cfg.Kinds,
		Scheme:      cfg.Scheme,
		APIServices: s.aggregated.services.listAll, Clock: cfg.Clock}
	if p := cfg.Outbound.FrontProxy; p != nil {
		c.ProxyCAs = &bootstrap.ProxyCAs{FrontProxy: p.CA, Client: p.ClientCA}
	}
	s.leaderWork = leaderWork{
		setup:      bootstrap.New(c),
		conditions: aggregation.NewConditions(s.aggregated.layer, s.cluster, s.Backend(), cfg.Kinds, cfg.Log),
		typeChecker: &policies.TypeChecker{Backend: s.Backend(), Source: cfg.Registry, Kinds: cfg.Kinds,
			Expressions: cfg.Admission.Expressions.Admission(), Log: cfg.Log},
	}
	cfg.Process.Metrics.MustRegister(s.leaderWork.conditions.Collector())
}

// nodeTokenCeiling is the maximum lifetime of a token that an agent requests for a pod. Agents
// renew tokens before they expire. On a lost node, they are not renewed and therefore expire.
const nodeTokenCeiling = 24 * time.Hour

func tokenCeiling(u api.User) time.Duration {
	if _, node := authz.NameOf(u); node {
		return nodeTokenCeiling
	}
	return 0
}

// newAuthenticators sets up stage 1 in this order: authenticating proxies, client certificates,
// bearer tokens. It returns the verifier of bearer tokens.
func (s *Server) newAuthenticators() authn.Bearer {
	cfg := &s.cfg
	var bearer authn.Bearer
	if cfg.Authentication.Configured != nil {
		bearer.Verifiers = append(bearer.Verifiers, cfg.Authentication.Configured.StaticTokens())
	}
	if cfg.Authentication.ServiceTokens != nil {
		bearer.Verifiers = append(bearer.Verifiers,
			authn.NewServiceAccounts(cfg.Authentication.ServiceTokens, cfg.Authentication.Audiences, s.cluster,
				s.markTokenUsed, cfg.Clock))
	}
	// Join tokens are accepted by the node gateway only; here they authenticate no user.
	bearer.Verifiers = append(bearer.Verifiers, cfg.Authentication.Tokens...)
	var methods authn.Chain
	if cfg.Authentication.Configured != nil {
		bearer.Verifiers = append(bearer.Verifiers,
			cfg.Authentication.Configured.FurtherVerifiers(s.cluster.getSystemSecret)...)
		if proxy := cfg.Authentication.Configured.Proxy(); proxy != nil {
			methods = append(methods, proxy)
		}
	}
	s.authn = append(methods, authn.X509{CAs: cfg.Authentication.ClientCAs, Clock: cfg.Clock,
		Revoked: s.revocations.checkRevoked, Seen: s.recordCertificate}, bearer)
	return bearer
}

// recordCertificate records the client certificate that authenticated a request.
func (s *Server) recordCertificate(leaf *x509.Certificate) {
	s.metrics.authentication.expiration.Observe(leaf.NotAfter.Sub(s.cfg.Clock()).Seconds())
	if seen := s.cfg.Authentication.ClientSeen; seen != nil {
		seen(leaf)
	}
}

// markTokenUsed writes the day on which a token was last used into a label of its Secret. It writes
// as the user of the API server itself.
func (s *Server) markTokenUsed(ctx context.Context, secret *corev1.Secret, day string) error {
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{
		"uid": secret.UID, "labels": map[string]string{authn.LastUsedLabel: day},
	}})
	if err == nil {
		_, err = s.pipeline.Do(ctx, &api.Request{
			User: api.APIServerUser(), Verb: api.VerbPatch, Kind: s.cfg.Kinds.ByType(&corev1.Secret{}),
			Namespace: secret.Namespace, Name: secret.Name,
			Patch: api.PatchRequest{Type: types.MergePatchType, Body: patch},
		})
	}
	if err != nil {
		s.cfg.Log.Warn("failed to record the last use of a token Secret", "secret",
			secret.Namespace+"/"+secret.Name, "err", err)
	}
	return err
}

// newAuthorizers sets up stage 2: Config.Authorization, or by default administrators, nodes and
// RBAC in this order.
func (s *Server) newAuthorizers() (*authz.RBAC, *authz.Node) {
	rbac, node := authz.NewRBAC(), authz.NewNode(s.cluster.Get)
	s.pipeline.authorizer = authz.Union{authz.Privileged{}, node, rbac}
	if s.cfg.Authorization != nil {
		s.cfg.Authorization.Bind(map[string]authz.Authorizer{authzfile.Node: node, authzfile.RBAC: rbac})
		s.pipeline.authorizer = s.cfg.Authorization
	}
	s.pipeline.rules = &authz.Follower{Source: s.cfg.Registry, Kinds: s.cfg.Kinds, RBAC: rbac, Node: node,
		Log: s.cfg.Log}
	return rbac, node
}

// newSurface creates everything that serves HTTP: the gate, metrics, resources, documents, proxies
// and Config.Serving.Paths.
func (s *Server) newSurface(d *dialer.Dialer) {
	cfg := &s.cfg
	serving := &cfg.Serving
	limits := flowcontrol.New(flowcontrol.ForMemory(serving.MemoryLimit))
	s.metrics.requests = newMetrics(cfg.Process.Metrics, cfg.Kinds, cfg.Process.Version,
		undecodableObjects{cfg.Registry}, storedObjects{cfg.Kinds, cfg.Registry}, gateMetrics{limits},
		s.metrics.admission.plugins, s.metrics.admission.steps, s.metrics.authentication.attempts,
		s.metrics.authentication.duration, s.metrics.authentication.expiration, cfg.Registry.Collector())
	s.gate = &gate{Gate: limits, requests: s.metrics.requests}
	streams := &stream.Server{Nodes: cfg.Outbound.Streams, Log: cfg.Log}
	s.resources = endpoints.New(endpoints.Config{
		Backend: front{s.pipeline}, Kinds: cfg.Kinds, Scheme: cfg.Scheme, Streams: streams,
		MaxBodyBytes: serving.MaxBodyBytes, RequestTimeout: serving.RequestTimeout, MinWatch: serving.MinWatch,
		Clock: cfg.Clock, Closing: s.lifetime.closing, Spread: serving.ShutdownDelay, Live: cfg.State.Live,
		Enter:        s.gate.enterGate,
		WatchMetrics: s.metrics.requests.newWatchObserver,
		CatchUp:      s.awaitDefinitions,
		Refused:      func(ctx context.Context, status *metav1.Status) { audit.Of(ctx).SetStatus(status) },
	})
	streams.Error = s.resources.WriteError
	cached := cachedAPIServices{s.cluster}
	s.aggregated = &Aggregated{
		layer: newAggregationLayer(cfg, cached, d), pipeline: s.pipeline, resources: s.resources, gate: s.gate,
		timeout: serving.RequestTimeout, services: cached,
		discovery: discovery.New(cfg.Kinds, s.resources),
		openapi:   openapi.New(cfg.Kinds, cfg.Process.Version.GitVersion),
	}
	s.proxy = &proxyHandler{pipeline: s.pipeline, resources: s.resources, gate: s.gate, dialer: d,
		nodeTLS: cfg.Outbound.NodeTLS}
	for path, h := range serving.Paths {
		s.paths.Handle(path, h)
	}
}

// Handler returns the handler of all HTTP requests. Before Run has been called, it authorizes only
// administrators.
func (s *Server) Handler() http.Handler { return s }

// Backend returns the pipeline for callers in this process, without stage 1 (authentication). The
// caller sets the user of each request.
func (s *Server) Backend() api.Backend { return nodeGate{s.gate, s.pipeline} }

// Ready returns a channel that is closed once the authorizer has read its rules.
func (s *Server) Ready() <-chan struct{} { return s.pipeline.ready }

// Aggregated returns the component that serves and calls aggregated API servers.
func (s *Server) Aggregated() *Aggregated { return s.aggregated }

// Authorizer returns the authorizer of stage 2.
func (s *Server) Authorizer() authz.Authorizer { return s.pipeline.authorizer }

// Bootstrap returns the Setup that creates and repairs the objects that every cluster has. Only the
// leader calls its methods.
func (s *Server) Bootstrap() *bootstrap.Setup { return s.leaderWork.setup }

// Conditions returns the component that maintains the conditions of APIServices. Only the leader
// runs it.
func (s *Server) Conditions() *aggregation.Conditions { return s.leaderWork.conditions }

// PolicyTypes returns the component that type-checks admission policies. Only the leader runs it.
func (s *Server) PolicyTypes() *policies.TypeChecker { return s.leaderWork.typeChecker }

// CustomKinds returns a channel that is closed once the kinds of all CustomResourceDefinitions that
// existed at the start are served.
func (s *Server) CustomKinds() <-chan struct{} { return s.definitions.Ready() }

// catchUpWait is how long a request for an unknown kind waits at most until this replica serves all
// committed CustomResourceDefinitions.
const catchUpWait = 5 * time.Second

func (s *Server) awaitDefinitions(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, catchUpWait)
	defer cancel()
	if err := s.definitions.AwaitAll(ctx); err != nil {
		s.cfg.Log.Warn("cannot resolve a request for an unknown kind", "err", err)
		return newStatus(http.StatusServiceUnavailable, metav1.StatusReasonServiceUnavailable,
			"this replica has not read all custom resource definitions yet")
	}
	return nil
}

// Run keeps the data for authorization and admission up to date, and serves HTTPS on the listener
// if there is one, until ctx ends. It returns when all requests have ended or the shutdown deadline
// has passed.
func (s *Server) Run(ctx context.Context) error {
	parts := []lifecycle.Part{{Name: "authorizer", Run: func(ctx context.Context) error {
		select {
		case <-s.cfg.Registry.Ready():
		case <-ctx.Done():
			return ctx.Err()
		}
		return s.pipeline.rules.Run(ctx, func() { close(s.pipeline.ready) })
	}}, {Name: "admission", Run: s.admission.followConfigurations},
		{Name: "custom resources", Run: func(ctx context.Context) error {
			select {
			case <-s.cfg.Registry.Ready():
			case <-ctx.Done():
				return ctx.Err()
			}
			return s.definitions.Run(ctx)
		}}}
	if s.cfg.Serving.Listener != nil {
		parts = append(parts, lifecycle.Part{Name: "https", Run: s.serveTLS},
			lifecycle.Part{Name: "revoked nodes", Run: s.revocations.sweepRevoked})
	}
	return lifecycle.Run(ctx, parts...)
}

// connKey is the key of the request context under which the connection limiter's connection is
// stored.
type connKey struct{}

// serveTLS serves HTTPS on the listener until ctx ends. Then the replica reports that it is not
// ready, and its watches end during the shutdown delay. After the delay it accepts no more
// connections, waits for running requests, and aborts those that exceed the shutdown deadline.
func (s *Server) serveTLS(ctx context.Context) error {
	// Requests continue during the shutdown, after ctx has ended.
	requests, cut := context.WithCancel(context.WithoutCancel(ctx))
	defer cut()
	conf := s.cfg.Serving.TLS.Clone()
	conf.ClientAuth, conf.ClientCAs = tls.RequestClientCert, nil
	conf.NextProtos = []string{"h2", "http/1.1"}
	conf.VerifyPeerCertificate, conf.VerifyConnection = nil, nil
	var handler http.Handler = s
	if s.cfg.Serving.Wrap != nil {
		handler = s.cfg.Serving.Wrap(s)
	}
	srv := &http.Server{
		Handler: s.cfg.Serving.pace.limitHandler(handler), TLSConfig: conf, ReadHeaderTimeout: headerTimeout,
		IdleTimeout: s.cfg.Serving.pace.idle, MaxHeaderBytes: maxHeaderBytes,
		// The server allocates the memory of a frame when its header arrives. With the usual frame
		// size of 1 MiB, nine bytes of an unauthenticated client would reserve that much.
		HTTP2:       &http.HTTP2Config{MaxConcurrentStreams: 250, MaxReadFrameSize: 16 << 10},
		BaseContext: func(net.Listener) context.Context { return requests },
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			return context.WithValue(authn.ConnContext(ctx, c), connKey{}, connlimit.FromConn(c))
		},
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
	}
	if err := limitFrames(srv, s.cfg.Serving.frames); err != nil {
		return err
	}
	served := make(chan error, 1)
	front := connlimit.New(s.cfg.Serving.Listener, s.cfg.Serving.Connections)
	go func() { served <- srv.ServeTLS(front, "", "") }()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", s.cfg.Serving.Listener.Addr(), err)
	case <-ctx.Done():
	}
	s.lifetime.close()
	if err := s.awaitShutdownDelay(served); err != nil {
		return err
	}
	late, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.cfg.Serving.ShutdownDeadline)
	defer cancel()
	err := srv.Shutdown(late)
	cut()
	if errors.Is(err, context.DeadlineExceeded) {
		s.cfg.Log.Warn("running requests were closed at the shutdown deadline", "after", s.cfg.Serving.ShutdownDeadline)
		err = srv.Close()
	}
	<-served
	return err
}

// awaitShutdownDelay waits for the shutdown delay, while the server still responds. It returns an
// error if serving fails in this time.
func (s *Server) awaitShutdownDelay(served <-chan error) error {
	if s.cfg.Serving.ShutdownDelay <= 0 {
		return nil
	}
	t := time.NewTimer(s.cfg.Serving.ShutdownDelay)
	defer t.Stop()
	select {
	case err := <-served:
		return fmt.Errorf("serving HTTPS on %s: %w", s.cfg.Serving.Listener.Addr(), err)
	case <-t.C:
		return nil
	}
}
