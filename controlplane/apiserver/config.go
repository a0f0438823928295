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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/audit"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/podsecurity"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/controlplane/registry"
	"keelson.dev/keelson/internal/door"
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
	// Connections bounds those of Listener; default half of the files that the process may open, and few of those
	// who have not authenticated.
	Connections door.Limits
	ClientCAs   func() *x509.CertPool // nil = no certificate authenticates

	// ServiceTokens checks and mints service account tokens; nil = neither works.
	ServiceTokens *pki.ServiceTokens
	Audiences     []string // of this API; default: the issuer of ServiceTokens
	// Tokens recognises further bearer tokens (authn.NewStatic ...), after service account tokens; may be empty.
	Tokens []authn.TokenVerifier

	// ServiceCIDR is where ClusterIPs come from (default 10.96.0.0/16), NodePorts the inclusive range of node ports (default 30000-32767).
	ServiceCIDR netip.Prefix
	NodePorts   [2]int

	// LostNodeToleration is the tolerationSeconds that pods get which say nothing about lost and not ready nodes
	// (default 300 s).
	LostNodeToleration time.Duration

	// PodSecurity is what pods must meet where their namespace's labels say nothing; the zero value demands nothing.
	PodSecurity podsecurity.Config

	// Audit records requests; nil = none.
	Audit *audit.Auditor

	Streams  api.NodeStreams // nil = log, exec, attach and port-forward answer 503
	Timeline *api.Timeline   // nil = no stages are recorded
	// Leader names the replica that leads, for the detail of "committed"; nil = it is left out.
	Leader func() string
	// PeerStages asks the other replicas for their part of a timeline; nil = this replica only.
	PeerStages func(ctx context.Context, traceID string) []api.Stage

	// Live puts into objects that are read what is known of them now and is in no store; the objects are shared and
	// copied where they change. nil changes nothing. A read of the state at a revision is not given to it.
	Live func(ctx context.Context, kind *api.Kind, items []api.Object) []api.Object
	// Paths are further documents and verbs of this replica, by ServeMux pattern ("/cluster/status"). Who asks
	// has been authenticated, and authorized for the path, when they are called.
	Paths map[string]http.Handler

	// Ready says why this replica should get no traffic, beyond the registry and the authorizer, which are watched anyway; may be nil.
	Ready func(ctx context.Context) error
	// Metrics receives the request metrics and is what /metrics shows; default a new one.
	Metrics *prometheus.Registry
	Version version.Info // default: that of the Kubernetes modules in use

	// MemoryLimit is what this process may take; how many requests are let in at once is derived from it (flow.ForMemory). Default 2 GiB.
	MemoryLimit int64

	MaxBodyBytes     int64         // default 3 MiB
	RequestTimeout   time.Duration // of everything but watches and streams; default 60 s
	MinWatch         time.Duration // watches without a timeout end at random between this and twice this; default 30 min
	ShutdownDeadline time.Duration // how long running requests may take to finish; default 10 s

	pace pace // tests shorten it

	Clock func() time.Time // default time.Now
	Log   *slog.Logger     // default slog.Default()
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
	if c.MaxBodyBytes == 0 {
		c.MaxBodyBytes = 3 << 20
	}
}
