// Package apiserver serves the Kubernetes REST API from the registry. The six
// stages that every request passes stand in order in chain.go; HTTP callers and
// callers in the same process take the same road. The packages below are its
// parts and do not know each other: authn, authz and admission are stages,
// subresource the verbs beyond plain storage, endpoints the translation between
// HTTP and api.Request, flow the bounds of what is under way at once, discovery and openapi the self-description, stream
// the byte streams to containers.
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

// Config is everything an apiserver is made of. Fields without a default are required.
type Config struct {
	Name     string // of this replica; the actor of stage records is "apiserver/<Name>"
	Registry *registry.Registry
	Kinds    *api.Kinds
	Scheme   *runtime.Scheme // of api.Scheme()

	// Listener and TLS are where Run serves; both may be left out by those who use Handler or Backend only.
	// Client certificates are asked for and verified against ClientCAs per request, so that an expired one is a
	// 401 with its reason and a rotated CA needs no restart; TLS.ClientAuth and TLS.ClientCAs are overwritten.
	Listener net.Listener
	TLS      *tls.Config
	// Connections bounds those of Listener; default half of the files that the process may open, and of those who
	// have not authenticated as few as MemoryLimit has room for.
	Connections connlimit.Limits
	ClientCAs   func() *x509.CertPool // nil = no certificate authenticates
	// ClientSeen is told of each request by which certificate it was authenticated. It must not wait; may be nil.
	ClientSeen func(leaf *x509.Certificate)

	// ServiceTokens checks and mints service account tokens; nil = neither works.
	ServiceTokens *pki.ServiceTokens
	Audiences     []string // of this API; default: the issuer of ServiceTokens
	// Tokens recognises further bearer tokens (authn.NewStatic ...), after service account tokens; may be empty.
	Tokens []authn.TokenVerifier

	// Authentication is what files and flags say of who may come and how; nil = certificates and the tokens above, and
	// strangers are anonymous. Its Run is the owner's.
	Authentication *authnfile.Authentication
	// Authorization says which authorizers are asked, in which order; nil = Node, RBAC. Its Run is the owner's.
	Authorization *authzfile.Authorization

	// ServiceCIDR is where ClusterIPs come from (default 10.96.0.0/16), NodePorts the inclusive range of node ports (default 30000-32767).
	// SecondServiceCIDR is that of the other family; the zero value: Services have one family.
	ServiceCIDR, SecondServiceCIDR netip.Prefix
	// PodCIDRs are where pods have their addresses: nothing else gets one of them.
	PodCIDRs []netip.Prefix
	// ExternalIPRanges are the addresses that Services may name in spec.externalIPs (admission.Config).
	ExternalIPRanges []netip.Prefix
	// ReplicaAddresses returns every address and TCP port on which a replica listens; nil = not known.
	ReplicaAddresses func() []netip.AddrPort
	NodePorts        [2]int
	// PodAddresses returns the judge of the addresses that nodes report for pods; nil, or a nil Index: all of them count.
	PodAddresses func() *podaddress.Index
	// AddressRefused is called when a node's report about a Pod or a Node is refused for an address; may be nil.
	AddressRefused func(about api.Object, why error)

	// LostNodeToleration is the tolerationSeconds that pods get which say nothing about lost and not ready nodes
	// (default 300 s).
	LostNodeToleration time.Duration

	// PodSecurity is what pods must meet where their namespace's labels say nothing; the zero value demands nothing.
	PodSecurity podsecurity.Config

	// AdmissionPlugins are those that run on request (admission.Choose).
	AdmissionPlugins []string
	// Mutators and Validators are the phases of admission after what is built in: policies, webhooks.
	Mutators   admission.Mutators
	Validators admission.Validators

	// Audit records requests; nil = none.
	Audit *audit.Auditor

	Streams api.NodeStreams // nil = log, exec, attach and port-forward answer 503
	// Expressions compiles the expressions of admission; default ones of its own.
	Expressions *cel.Compilers
	// Nodes is the way to pods and nodes for webhooks, aggregated APIs and proxies; nil = they are dialled directly.
	Nodes api.NodeDialer
	// NodeTLS is how this API speaks to the HTTPS server of a node, which knows it by a certificate; nil = as to anybody's.
	NodeTLS func(node string) *tls.Config
	// FrontProxy is how this API shows aggregated APIs who it is; nil = not at all, and nobody is told whom to believe.
	FrontProxy *FrontProxy
	Timeline   *api.Timeline // nil = no stages are recorded
	// Leader names the replica that leads, for the detail of "committed"; nil = it is left out.
	Leader func() string
	// PeerStages asks the other replicas for their part of a timeline; nil = this replica only.
	PeerStages func(ctx context.Context, traceID string) []api.Stage

	// Live puts into objects that are read what is known of them now and is in no store; the objects are shared and
	// copied where they change. nil changes nothing. A read of the state at a revision is not given to it.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// Components tells how the parts of the cluster are, each call anew: what a list of ComponentStatuses shows, in the
	// order of their names. nil shows none.
	Components func(ctx context.Context) []corev1.ComponentStatus
	// Usage is the NodeMetrics of Nodes and the PodMetrics of pods, for those of which some are known: what metrics.k8s.io
	// shows. nil shows none.
	Usage func(of []api.Object) []api.Object
	// Paths are further documents and verbs of this replica, by ServeMux pattern ("/cluster/status"). Who asks
	// has been authenticated, and authorized for the path, when they are called.
	Paths map[string]http.Handler
	// Wrap, where it is set, wraps the handler of all requests. Clients have not been authenticated when it is called.
	Wrap func(http.Handler) http.Handler

	// Ready says why this replica should get no traffic, beyond the registry and the authorizer, which are watched anyway; may be nil.
	Ready func(ctx context.Context) error
	// Metrics receives the request metrics and is what /metrics shows; default a new one.
	Metrics *prometheus.Registry
	// Flags are those of the daemon with their values, for /flagz. None may be a secret.
	Flags   map[string]string
	Version version.Info // default: that of the Kubernetes modules in use

	// MemoryLimit is what this process may take; how many requests and strangers are let in at once is derived from
	// it (flow.ForMemory, connlimit.Strangers). Default 2 GiB.
	MemoryLimit int64

	MaxBodyBytes   int64         // default 3 MiB
	RequestTimeout time.Duration // of everything but watches and streams; default 60 s
	MinWatch       time.Duration // watches without a timeout end at random between this and twice this; default 30 min
	// ShutdownDelay is for how long everything is still answered, but by an unready replica: whoever spreads requests
	// over replicas leaves it out in that time, and the watches end one after the other. Default 0.
	ShutdownDelay    time.Duration
	ShutdownDeadline time.Duration // how long running requests may take to finish; default 10 s

	pace   pace              // tests shorten it
	frames framelimit.Limits // tests change them

	Clock func() time.Time // default time.Now
	Log   *slog.Logger     // default slog.Default()
}

// FrontProxy is how aggregated APIs know a request that this API has authenticated.
type FrontProxy struct {
	Certificate *pki.Rotator  // by CA
	CA          func() []byte // PEM
	ClientCA    func() []byte // PEM, of the users' certificates
}

// defaults fills what was left out.
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
