// Package apiserver serves the Kubernetes REST API from the registry. Every request passes six
// stages, in the order of chain.go; HTTP clients and callers in this process use the same pipeline.
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

// Config holds the dependencies and settings of an apiserver. Fields without a default are
// required.
type Config struct {
	Name     string // name of this replica; the actor of stage records is "apiserver/<Name>"
	Registry *registry.Registry
	Kinds    *api.Kinds
	Scheme   *runtime.Scheme // from api.Scheme()

	// Listener and TLS are used by Run to serve HTTPS. Both may be nil if only Handler or Backend
	// is used. Client certificates are requested and verified against ClientCAs for each request.
	// An expired certificate is therefore a 401 with the reason, and a rotated CA needs no restart.
	// TLS.ClientAuth and TLS.ClientCAs are overwritten.
	Listener net.Listener
	TLS      *tls.Config
	// Connections limits the connections of Listener. The default is half of the files that the
	// process may open. For unauthenticated clients the default is lower if MemoryLimit requires
	// it.
	Connections connlimit.Limits
	ClientCAs   func() *x509.CertPool // nil = no client certificate is accepted
	// ClientSeen is called with the certificate of each request that a certificate authenticated.
	// It must not block; may be nil.
	ClientSeen func(leaf *x509.Certificate)

	// ServiceTokens verifies and issues service account tokens; nil disables both.
	ServiceTokens *pki.ServiceTokens
	Audiences     []string // audiences of this API; default: the issuer of ServiceTokens
	// Tokens verify further bearer tokens (authn.NewStatic ...) after service account tokens; may
	// be empty.
	Tokens []authn.TokenVerifier

	// Authentication is the authentication configured by files and flags. nil = client certificates
	// and the tokens above, and unauthenticated requests are anonymous. The caller runs its Run.
	Authentication *authnfile.Authentication
	// Authorization is the configured list of authorizers in their order; nil = Node, RBAC. The
	// caller runs its Run.
	Authorization *authzfile.Authorization

	// ServiceCIDR is the range of ClusterIPs (default 10.96.0.0/16). SecondServiceCIDR is the range
	// of the other IP family; the zero value means that Services have one family. NodePorts is the
	// inclusive range of node ports (default
	// 30000-32767).
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	// PodCIDRs are the address ranges of pods. No other object may use an address of these ranges.
	PodCIDRs []netip.Prefix
	// ExternalIPRanges are the ranges that Services may use in spec.externalIPs (admission.Config).
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns every address and TCP port on which a replica listens; nil =
	// unknown.
	ReplicaAddresses func() []netip.AddrPort
	NodePorts        [2]int
	// PodAddresses returns the index that validates the pod addresses reported by nodes. If the
	// function or its result is nil, all addresses are accepted.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called if a node's status update of a Pod or Node is refused because of an
	// address; may be nil.
	AddressRefused func(about api.Object, why error)

	// LostNodeToleration is the default tolerationSeconds of pods for the not-ready and unreachable
	// taints (default 300 s).
	LostNodeToleration time.Duration

	// PodSecurity is the pod security level of namespaces without labels for it. The zero value
	// enforces nothing.
	PodSecurity podsecurity.Config

	// AdmissionPlugins are the enabled optional admission plugins (admission.Choose).
	AdmissionPlugins []string
	// Mutators and Validators are admission phases that run after the built-in plugins and before
	// the webhooks and policies of the cluster.
	Mutators   admission.Mutators
	Validators admission.Validators

	// Audit records requests; nil = no audit.
	Audit *audit.Auditor

	Streams api.NodeStreams // nil = log, exec, attach and port-forward return 503
	// Expressions compiles the CEL expressions of admission; default: compilers of this server's
	// own.
	Expressions *cel.Compilers
	// Nodes dials pods and nodes for webhooks, aggregated APIs and proxies; nil = they are dialed
	// directly.
	Nodes api.NodeDialer
	// NodeTLS returns the TLS configuration for the HTTPS server of a node, with the client
	// certificate of this API. nil = nodes are dialed like any other HTTPS server.
	NodeTLS func(node string) *tls.Config
	// FrontProxy is the identity that this API presents to aggregated API servers. nil = no client
	// certificate, and no authentication ConfigMap is published.
	FrontProxy *FrontProxy
	Timeline   *api.Timeline // nil = no stages are recorded
	// Leader returns the name of the leader, for the detail of the stage "committed"; nil = the
	// detail is omitted.
	Leader func() string
	// PeerStages returns the other replicas' stages of a trace; nil = only stages of this replica
	// are returned.
	PeerStages func(ctx context.Context, traceID string) []api.Stage

	// Live adds current values that are not stored to objects that a client reads. The passed
	// objects are shared; Live copies an object before it changes it. nil adds nothing. Reads at an
	// old revision do not use it.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// Components returns the current health of the cluster's components, which a list of
	// ComponentStatuses shows. The result is in the order of the names. nil returns none.
	Components func(ctx context.Context) []corev1.ComponentStatus
	// Usage returns the NodeMetrics of the given Nodes or the PodMetrics of the given pods, as
	// metrics.k8s.io serves them. Objects without known usage are omitted. nil returns none.
	Usage func(of []api.Object) []api.Object
	// Paths are handlers for further paths of this replica, by ServeMux pattern
	// ("/cluster/status"). The user of a request is authenticated, and authorized for the path,
	// before the handler is called.
	Paths map[string]http.Handler
	// Wrap, if not nil, wraps the handler of all requests. Requests are not authenticated yet when
	// it is called.
	Wrap func(http.Handler) http.Handler

	// Ready returns why this replica must not receive traffic. The registry and the authorizer are
	// checked in any case; may be nil.
	Ready func(ctx context.Context) error
	// Metrics is the registry that receives the request metrics and that /metrics serves; default:
	// a new registry.
	Metrics *prometheus.Registry
	// Flags are the flags of the daemon with their values, for /flagz. They must not contain
	// secrets.
	Flags   map[string]string
	Version version.Info // default: the version of the Kubernetes modules in use

	// MemoryLimit is the memory of this process in bytes, default 2 GiB. The limits of concurrent
	// requests (flowcontrol.ForMemory) and of unauthenticated connections
	// (connlimit.UnauthenticatedLimit) derive from it.
	MemoryLimit int64

	MaxBodyBytes   int64         // default 3 MiB
	RequestTimeout time.Duration // of everything but watches and streams; default 60 s
	MinWatch       time.Duration // a watch without a timeout ends at a random time between this and twice this; default 30 min
	// ShutdownDelay is how long a shutting down replica still serves requests while it reports that
	// it is not ready. Load balancers remove the replica in this time, and the watches end one
	// after the other. Default 0.
	ShutdownDelay    time.Duration
	ShutdownDeadline time.Duration // how long running requests may take to finish; default 10 s

	pace   pace              // set by tests only
	frames framelimit.Limits // set by tests only

	Clock func() time.Time // default time.Now
	Log   *slog.Logger     // default slog.Default()
}

// FrontProxy is the identity by which aggregated API servers recognize requests that this API has
// authenticated.
type FrontProxy struct {
	Certificate *pki.Rotator  // client certificate, issued by CA
	CA          func() []byte // PEM of the CA that issues Certificate
	ClientCA    func() []byte // PEM of the CA of users' client certificates
}

// defaults sets the default values of fields that are unset.
func (c *Config) defaults() {
	if c.ServiceTokens != nil && len(c.Audiences) == 0 {
		c.Audiences = []string{c.ServiceTokens.Issuer()}
	}
	if !c.ServiceCIDR.IsValid() {
		c.ServiceCIDR = netip.MustParsePrefix("10.96.0.0/16")
	}
	if c.LostNodeToleration == 0 {
		c.LostNodeToleration = 300 * time.Second
	}
	if c.NodePorts == [2]int{} {
		c.NodePorts = [2]int{30000, 32767}
	}
	if c.Version.GitVersion == "" {
		c.Version = version.Info{Major: "1", Minor: "37", GitVersion: "v1.37.0+keelson"}
	}
	if c.Metrics == nil {
		c.Metrics = newRegistry()
	}
	if c.Expressions == nil {
		c.Expressions = cel.New()
	}
	if c.Clock == nil {
		c.Clock = time.Now
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	if !c.PodSecurity.Defaults.Enforce.Valid() {
		c.PodSecurity.Defaults = podsecurity.Default().Defaults
	}
	for _, d := range []struct {
		field *time.Duration
		value time.Duration
	}{{&c.RequestTimeout, time.Minute}, {&c.MinWatch, 30 * time.Minute}, {&c.ShutdownDeadline, 10 * time.Second}} {
		if *d.field == 0 {
			*d.field = d.value
		}
	}
	if c.pace == (pace{}) {
		c.pace = usualPace
	}
	if c.MemoryLimit == 0 {
		c.MemoryLimit = 2 << 30
	}
	if c.Connections.Unauthenticated == 0 {
		c.Connections.Unauthenticated = min(connlimit.UnauthenticatedLimit(c.MemoryLimit), connlimit.OpenFilesShare(1, 4))
	}
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 3 << 20
	}
}
