// Package apiserver serves the Kubernetes REST API from the registry. Every request passes six
// stages, in the order of pipeline.go; HTTP clients and callers in this process use the same
// pipeline.
//
// The packages below it are its parts. authn, authz and admission are stages of the pipeline, and
// subresource implements the verbs beyond plain storage. endpoints translates between HTTP and
// api.Request. flowcontrol limits the concurrent requests. discovery and openapi describe the API,
// and stream proxies the byte streams to containers.
package apiserver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/podaddress"
	"keelson.dev/keelson/controlplane/apiserver/admission"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	authnfile "keelson.dev/keelson/controlplane/apiserver/authn/config"
	authzfile "keelson.dev/keelson/controlplane/apiserver/authz/config"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/connlimit"
	"keelson.dev/keelson/internal/framelimit"
)

// Config holds the dependencies and settings of an API server. Fields without a default are
// required.
type Config struct {
	Name     string // name of this replica; the actor of stage records is "apiserver/<Name>"
	Registry *registry.Registry
	Kinds    *api.Kinds
	Scheme   *runtime.Scheme  // from api.Scheme()
	Clock    func() time.Time // default time.Now
	Log      *slog.Logger     // default slog.Default()

	Serving        ServingConfig
	Authentication AuthenticationConfig
	// Authorization is the chain of authorizers configured by files and flags; nil = Node, RBAC.
	// The caller must call its Run.
	Authorization *authzfile.Authorization
	Network       NetworkConfig
	Admission     AdmissionConfig
	Outbound      OutboundConfig
	Timeline      TimelineConfig
	State         StateConfig
	Process       ProcessConfig
}

// ServingConfig is the configuration of the HTTPS server and of its limits.
type ServingConfig struct {
	// Listener and TLS are used by Run to serve HTTPS. Both may be nil if only Handler or Backend
	// is used. Client certificates are requested, and verified against Authentication.ClientCAs for
	// each request. An expired certificate therefore causes a 401 with the reason, and a rotated CA
	// needs no restart. TLS.ClientAuth and TLS.ClientCAs are overwritten.
	Listener net.Listener
	TLS      *tls.Config
	// Connections limits the connections of Listener. The default is half of the number of files
	// that the process may open. For unauthenticated clients, the default is lower if MemoryLimit
	// requires it.
	Connections connlimit.Limits
	// Paths are handlers for further paths of this replica. The keys are ServeMux patterns, such as
	// "/cluster/status". The user of a request is authenticated, and authorized for the path,
	// before the handler is called.
	Paths map[string]http.Handler
	// Wrap, if not nil, wraps the handler of all requests. Requests are not authenticated yet when
	// it is called.
	Wrap func(http.Handler) http.Handler
	// MemoryLimit is the memory of this process in bytes, default 2 GiB. The limits of concurrent
	// requests (flowcontrol.ForMemory) and of unauthenticated connections
	// (connlimit.UnauthenticatedLimit) derive from it.
	MemoryLimit int64

	MaxBodyBytes   int64         // default 3 MiB
	RequestTimeout time.Duration // for everything but watches and byte streams; default 60 s
	// a watch without a timeout ends at a random time between MinWatch and twice MinWatch; default
	// 30 min
	MinWatch time.Duration
	// ShutdownDelay is how long a replica still serves requests during shutdown while it reports
	// that it is not ready. Load balancers remove the replica in this time, and its watches end one
	// after the other. Default 0.
	ShutdownDelay    time.Duration
	ShutdownDeadline time.Duration // how long running requests may take to finish; default 10 s

	pace   clientPace        // set by tests only
	frames framelimit.Limits // set by tests only
}

// AuthenticationConfig determines which credentials authenticate clients.
type AuthenticationConfig struct {
	ClientCAs func() *x509.CertPool // nil = no client certificate is accepted
	// ClientSeen is called with the client certificate of each request that the certificate
	// authenticated. It must not block; it may be nil.
	ClientSeen func(leaf *x509.Certificate)
	// ServiceTokens verifies and issues service account tokens; nil disables both.
	ServiceTokens *pki.ServiceTokens
	Audiences     []string // audiences of this API; default: the issuer of ServiceTokens
	// Tokens are verifiers of further bearer tokens, such as authn.NewStatic. They run after the
	// verifier of service account tokens; may be empty.
	Tokens []authn.TokenVerifier
	// Configured is the authentication configured by files and flags. nil = client certificates and
	// the tokens above, and unauthenticated requests are anonymous. The caller must call its Run.
	Configured *authnfile.Authentication
}

// NetworkConfig contains the addresses of the cluster.
type NetworkConfig struct {
	// ServiceCIDR is the range of ClusterIPs (default 10.96.0.0/16). SecondServiceCIDR is the range
	// of the other IP family; the zero value means that Services have one family.
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	NodePorts                      [2]int // inclusive range of node ports; default 30000-32767
	// PodCIDRs are the address ranges of pods. No other object may use an address of these ranges.
	PodCIDRs []netip.Prefix
	// ExternalIPRanges are the ranges that Services may use in spec.externalIPs (services.Config).
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns every address and TCP port on which a replica listens; nil =
	// unknown.
	ReplicaAddresses func() []netip.AddrPort
	// PodAddresses returns the index that validates the pod addresses reported by nodes. If the
	// function or its result is nil, all addresses are accepted.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called if a node's status update of a Pod or Node is rejected because of an
	// address; may be nil.
	AddressRefused func(about api.Object, why error)
}

// AdmissionConfig is the configuration of admission.
type AdmissionConfig struct {
	// Plugins are the enabled optional admission plugins (builtin.Choose).
	Plugins []string
	// Mutators and Validators are admission phases that run after the built-in plugins and before
	// the webhooks and policies of the cluster.
	Mutators   admission.Mutators
	Validators admission.Validators
	// LostNodeToleration is the default tolerationSeconds of pods for the not-ready and unreachable
	// taints (default 300 s).
	LostNodeToleration time.Duration
	// PodSecurity contains the pod security levels for namespaces without labels for them. The zero
	// value enforces nothing.
	PodSecurity podsecurity.Config
	// RequireNodeFeatures returns an error while the feature level of the cluster is too low for
	// pods that require features of their node (builtin.Config); nil = it is never too low.
	RequireNodeFeatures func(ctx context.Context, feature string) error
	// Expressions compiles the CEL expressions of admission; nil = this server creates its own
	// compilers.
	Expressions *cel.Compilers
}

// OutboundConfig determines how this replica connects to nodes and other servers.
type OutboundConfig struct {
	Streams api.NodeStreams // nil = log, exec, attach and port-forward return 503
	// Nodes dials pods and nodes for webhooks, aggregated APIs and proxies; nil = they are dialed
	// directly.
	Nodes api.NodeDialer
	// NodeTLS returns the TLS configuration for the HTTPS server of a node, with the client
	// certificate of this API server. nil = nodes are treated like any other HTTPS server.
	NodeTLS func(node string) *tls.Config
	// FrontProxy is the identity that this API server presents to aggregated API servers. nil = it
	// presents no client certificate, and publishes no authentication ConfigMap.
	FrontProxy *FrontProxy
}

// TimelineConfig configures the timeline, which records the stages of requests.
type TimelineConfig struct {
	Stages *api.Timeline // nil = no stages are recorded
	// Leader returns the name of the leader, which the stage "committed" records; nil = the name is
	// not recorded.
	Leader func() string
	// PeerStages returns the stages that the other replicas have recorded for a trace; nil = only
	// stages of this replica are returned.
	PeerStages func(ctx context.Context, traceID string) []api.Stage
}

// StateConfig provides current values that are not stored.
type StateConfig struct {
	// Live adds current values that are not stored to objects that a client reads. Live must copy
	// an object before it changes it. nil adds nothing. Reads at an old revision do not use it.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// Components returns the current health of the components of the cluster, sorted by name, as a
	// list of ComponentStatuses shows it. nil = the list is empty.
	Components func(ctx context.Context) []corev1.ComponentStatus
	// Usage returns the NodeMetrics of the given Nodes or the PodMetrics of the given pods, as
	// metrics.k8s.io serves them. Objects without known usage are omitted. nil = no usage is known.
	Usage func(objects []api.Object) []api.Object
	// Ready returns an error with the reason if this replica must not receive traffic. The registry
	// and the authorizer are always checked; Ready may be nil.
	Ready func(ctx context.Context) error
}

// ProcessConfig describes this process, and receives its metrics and audit records.
type ProcessConfig struct {
	// Audit records requests; nil = no audit.
	Audit *audit.Auditor
	// Metrics is the registry that receives the request metrics and that /metrics serves; default:
	// a new registry.
	Metrics *prometheus.Registry
	// Flags are the flags of the daemon with their values, for /flagz. They must not contain
	// secrets.
	Flags   map[string]string
	Version version.Info // default: the version of the Kubernetes modules in use
}

// FrontProxy is the identity with which this API server authenticates to aggregated API servers.
// They trust the user that it passes in the headers of a request.
type FrontProxy struct {
	Certificate *pki.Rotator  // client certificate, issued by CA
	CA          func() []byte // PEM of the CA that issues Certificate
	ClientCA    func() []byte // PEM of the CA of users' client certificates
}

// setDefaults sets the default values of fields that are unset.
func (c *Config) setDefaults() {
	if c.Authentication.ServiceTokens != nil && len(c.Authentication.Audiences) == 0 {
		c.Authentication.Audiences = []string{c.Authentication.ServiceTokens.Issuer()}
	}
	if !c.Network.ServiceCIDR.IsValid() {
		c.Network.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/16")
	}
	if c.Admission.LostNodeToleration == 0 {
		c.Admission.LostNodeToleration = 300 * time.Second
	}
	if c.Network.NodePorts == [2]int{} {
		c.Network.NodePorts = [2]int{30000, 32767}
	}
	if c.Process.Version.GitVersion == "" {
		c.Process.Version = version.Info{Major: "1", Minor: "37", GitVersion: "v1.37.0+keelson"}
	}
	if c.Process.Metrics == nil {
		c.Process.Metrics = newRegistry()
	}
	if c.Admission.Expressions == nil {
		c.Admission.Expressions = cel.New()
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if !c.Admission.PodSecurity.Defaults.Enforce.Valid() {
		c.Admission.PodSecurity.Defaults = podsecurity.Default().Defaults
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&c.Serving.RequestTimeout, time.Minute}, {&c.Serving.MinWatch, 30 * time.Minute},
		{&c.Serving.ShutdownDeadline, 10 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.Serving.pace == (clientPace{}) {
		c.Serving.pace = defaultPace
	}
	if c.Serving.MemoryLimit == 0 {
		c.Serving.MemoryLimit = 2 << 30
	}
	if c.Serving.Connections.Unauthenticated == 0 {
		c.Serving.Connections.Unauthenticated = min(connlimit.UnauthenticatedLimit(c.Serving.MemoryLimit),
			connlimit.OpenFilesShare(1, 4))
	}
	if c.Serving.MaxBodyBytes == 0 {
		c.Serving.MaxBodyBytes = 3 << 20
	}
}
