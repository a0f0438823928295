// Package apiserver serves the Kubernetes REST API from the registry. The six
// stages that every request passes stand in order in chain.go; HTTP callers and
// callers in the same process take the same road. The packages below are its
// parts and do not know each other: authn, authz and admission are stages,
// subresource the verbs beyond plain storage, endpoints the translation between
// HTTP and api.Request, discovery and openapi the self-description, stream
// the byte streams to containers.
package apiserver

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"log/slog"
	"net"
	"net/netip"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/version"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/registry"
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
	Listener  net.Listener
	TLS       *tls.Config
	ClientCAs func() *x509.CertPool // nil = no certificate authenticates

	// ServiceAccountTokens checks and mints service account JWTs; nil = neither works.
	ServiceAccountTokens ServiceAccountTokens
	// Issuer and Audiences of service account tokens. Defaults: "https://kubernetes.default.svc" and the issuer.
	Issuer    string
	Audiences []string
	// Tokens recognises static and bootstrap tokens, after service account tokens; may be empty.
	Tokens []authn.TokenVerifier

	// ServiceCIDR is where ClusterIPs come from (default 10.96.0.0/16), NodePorts the inclusive range of node ports (default 30000-32767).
	ServiceCIDR netip.Prefix
	NodePorts   [2]int

	Streams  api.NodeStreams // nil = log, exec, attach and port-forward answer 503
	Timeline *api.Timeline   // nil = no stages are recorded
	// PeerStages asks the other replicas for their part of a timeline; nil = this replica only.
	PeerStages func(ctx context.Context, traceID string) []api.Stage

	// Ready says why this replica should get no traffic, beyond the registry and the authorizer, which are watched anyway; may be nil.
	Ready func(ctx context.Context) error
	// Metrics receives the request metrics and is what /metrics shows; default a new one.
	Metrics *prometheus.Registry
	Version version.Info // default: that of the Kubernetes modules in use

	MaxBodyBytes     int64         // default 3 MiB
	RequestTimeout   time.Duration // of everything but watches and streams; default 60 s
	MinWatch         time.Duration // watches without a timeout end at random between this and twice this; default 30 min
	ShutdownDeadline time.Duration // how long running requests may take to finish; default 10 s

	Clock func() time.Time // default time.Now
	Log   *slog.Logger     // default slog.Default()
}

// ServiceAccountTokens checks and mints service account JWTs. Cryptography and
// time only: that the account and the pod still exist is checked by the apiserver.
type ServiceAccountTokens interface {
	// Verify checks signature, issuer and times. The error is fit for the client.
	Verify(token string) (authn.ServiceAccountClaims, error)
	// Sign mints a token.
	Sign(c authn.ServiceAccountClaims) (string, error)
}
