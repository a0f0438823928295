// Package issuer verifies tokens of OpenID Connect issuers. It finds the keys of an issuer by
// discovery, and fetches them again when the issuer rotates them. It maps the claims of a token to
// a user as configured in an AuthenticationConfiguration. The size, duration and rate of requests
// to the issuer are limited, so that invalid tokens cannot cause unlimited requests.
package issuer

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"github.com/coreos/go-oidc/v3/oidc"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"
	authenticationcel "k8s.io/apiserver/pkg/authentication/cel"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/internal/wait"
)

// Algorithms returns the accepted signature algorithms. "none" and algorithms with a shared secret
// are not accepted.
func Algorithms() []string {
	return []string{
		oidc.RS256, oidc.RS384, oidc.RS512, oidc.ES256, oidc.ES384, oidc.ES512, oidc.PS256, oidc.PS384, oidc.PS512,
	}
}

// Config contains the configuration of an issuer as in an AuthenticationConfiguration, and further
// settings.
type Config struct {
	JWT        apiserver.JWTAuthenticator
	Compiler   authenticationcel.Compiler
	Algorithms []string // default: all of Algorithms()
	// Disallowed lists the issuer URLs of this cluster, which may not be configured.
	Disallowed []string
	Clock      func() time.Time
	Log        *slog.Logger
}

// Issuer verifies the tokens of one OpenID Connect issuer. Until Discover has found its keys, all
// of its tokens are rejected.
type Issuer struct {
	config     apiserver.JWTAuthenticator
	algorithms []string
	mapper     authenticationcel.CELMapper
	required   map[string]string
	client     *http.Client
	clock      func() time.Time
	log        *slog.Logger

	keys  atomic.Pointer[keySet] // nil until Discover has succeeded
	ready chan struct{}
}

// Limits of the size and duration of an issuer's responses, and the interval between discovery
// attempts.
const (
	maxDocument    = 1 << 20
	fetchTimeout   = 10 * time.Second
	discoverPeriod = 10 * time.Second
)

// New validates the configuration and returns its Issuer. Errors name the invalid field.
func New(c Config) (*Issuer, error) {
	if len(c.Algorithms) == 0 {
		c.Algorithms = Algorithms()
	}
	for _, a := range c.Algorithms {
		if !slices.Contains(Algorithms(), a) {
			return nil, fmt.Errorf("signing algorithm %q: want some of %s", a, strings.Join(Algorithms(), ", "))
		}
	}
	if e := c.JWT.Issuer.EgressSelectorType; e != "" {
		return nil, fmt.Errorf("issuer.egressSelectorType: %q is not supported: remove it", e)
	}
	mapper, errs := validation.CompileAndValidateJWTAuthenticator(c.Compiler, c.JWT, c.Disallowed)
	if err := errs.ToAggregate(); err != nil {
		return nil, err
	}
	client, err := clientOf(c.JWT.Issuer)
	if err != nil {
		return nil, err
	}
	i := &Issuer{
		config: c.JWT, algorithms: c.Algorithms, mapper: mapper, client: client, clock: c.Clock, log: c.Log,
		required: map[string]string{}, ready: make(chan struct{}),
	}
	for _, r := range c.JWT.ClaimValidationRules {
		if r.Claim != "" {
			i.required[r.Claim] = r.RequiredValue
		}
	}
	return i, nil
}

// clientOf returns the HTTP client for requests to an issuer. It limits the size of responses,
// trusts the CAs configured for the issuer, and uses its configured discovery URL.
func clientOf(c apiserver.Issuer) (*http.Client, error) {
	var roots *x509.CertPool // nil = system roots
	if c.CertificateAuthority != "" {
		roots = x509.NewCertPool()
		if !roots.AppendCertsFromPEM([]byte(c.CertificateAuthority)) {
			return nil, errors.New("issuer.certificateAuthority contains no certificate")
		}
	}
	bounded := &boundedTransport{next: &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: fetchTimeout}).DialContext,
		TLSClientConfig:        &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    fetchTimeout,
		ForceAttemptHTTP2:      true,
		MaxResponseHeaderBytes: 64 << 10,
		MaxConnsPerHost:        2,
		IdleConnTimeout:        30 * time.Second,
	}}
	if c.DiscoveryURL != "" {
		to, err := url.Parse(c.DiscoveryURL)
		if err != nil {
			return nil, fmt.Errorf("issuer.discoveryURL: %w", err)
		}
		bounded.discovery, bounded.override = strings.TrimSuffix(c.URL, "/")+"/.well-known/openid-configuration", to
	}
	return &http.Client{Transport: bounded, Timeout: fetchTimeout, CheckRedirect: onlyHTTPS}, nil
}

// onlyHTTPS is a redirect policy: it allows at most 3 redirects, all to https URLs, so that a
// response cannot be modified in transit.
func onlyHTTPS(r *http.Request, previous []*http.Request) error {
	if r.URL.Scheme != "https" || len(previous) > 3 {
		return fmt.Errorf("the issuer redirects to %s://%s after %d redirects", r.URL.Scheme,
			api.Truncate(r.URL.Host, 128), len(previous)-1)
	}
	return nil
}

// URL returns the issuer URL.
func (i *Issuer) URL() string { return i.config.Issuer.URL }

// Discover fetches the issuer's discovery document, which contains the URL of the keys. It retries
// until it succeeds or ctx is done. It logs an error if it differs from the previous one.
func (i *Issuer) Discover(ctx context.Context) error {
	for said := ""; ; {
		err := i.runDiscovery(ctx)
		if err == nil {
			return nil
		}
		text := err.Error()
		if text != said && ctx.Err() == nil {
			said = text
			i.log.Warn("failed to discover the keys of a token issuer, its tokens are rejected", "issuer",
				i.URL(), "err", err)
		}
		if err := wait.Delay(ctx, discoverPeriod); err != nil {
			return err
		}
	}
}

func (i *Issuer) runDiscovery(ctx context.Context) error {
	provider, err := oidc.NewProvider(oidc.ClientContext(ctx, i.client), i.URL())
	if err != nil {
		return errors.New(api.Truncate(err.Error(), 1024)) // the error may contain text of the issuer
	}
	var document struct {
		Keys string `json:"jwks_uri"`
	}
	if err := provider.Claims(&document); err != nil {
		return err
	}
	if u, err := url.Parse(document.Keys); err != nil || u.Scheme != "https" {
		return fmt.Errorf("jwks_uri %q: want an https URL", api.Truncate(document.Keys, 256))
	}
	i.keys.Store(newKeySet(document.Keys, i.client))
	close(i.ready)
	i.log.Info("discovered the keys of a token issuer, its tokens are accepted", "issuer", i.URL())
	return nil
}

// Ready returns a channel that is closed when Discover has succeeded and tokens can be verified.
func (i *Issuer) Ready() <-chan struct{} { return i.ready }

// VerifyToken verifies a token of this issuer. ok is false for tokens of other issuers.
func (i *Issuer) VerifyToken(ctx context.Context, token string, _ []string) (authn.TokenIdentity, bool, error) {
	var none authn.TokenIdentity
	if Of(token) != i.URL() {
		return none, false, nil
	}
	keys := i.keys.Load()
	if keys == nil {
		return none, false, fmt.Errorf("oidc: the keys of issuer %s are not discovered yet", i.URL())
	}
	once := &keyUse{keySet: keys}
	verified, err := oidc.NewVerifier(i.URL(), once, &oidc.Config{
		// all configured audiences are checked below
		SkipClientIDCheck: true, SupportedSigningAlgs: i.algorithms, Now: i.clock,
	}).Verify(ctx, token)
	if err != nil && once.fault != nil {
		return none, false, &authn.Fault{Public: fmt.Sprintf("oidc: the keys of issuer %s cannot be fetched", i.URL()),
			Err: once.fault}
	}
	if err != nil {
		return none, false, fmt.Errorf("oidc: verify token: %w", err)
	}
	if !slices.ContainsFunc(verified.Audience, func(a string) bool {
		return slices.Contains(i.config.Issuer.Audiences, a)
	}) {
		return none, false, fmt.Errorf("oidc: expected audience in %q got %q", i.config.Issuer.Audiences,
			clipAll(verified.Audience))
	}
	var c claims
	if err := verified.Claims(&c); err != nil {
		return none, false, fmt.Errorf("oidc: parse claims: %w", err)
	}
	u, err := i.mapUser(ctx, c)
	if err != nil {
		return none, false, fmt.Errorf("oidc: %w", err)
	}
	return authn.TokenIdentity{User: u}, true, nil
}

func clipAll(texts []string) []string {
	texts = slices.Clone(texts[:min(len(texts), 8)])
	for n, t := range texts {
		texts[n] = api.Truncate(t, 128)
	}
	return texts
}

// google is the issuer URL of Google. The iss claim of Google's tokens may omit the scheme https.
const google = "https://accounts.google.com"

// Of returns the iss claim of a token without verifying the token; "" if it cannot be read.
func Of(token string) string {
	_, rest, _ := strings.Cut(token, ".")
	payload, _, ok := strings.Cut(rest, ".")
	if !ok {
		return ""
	}
	data, err := base64.RawURLEncoding.DecodeString(payload)
	if err != nil {
		return ""
	}
	var c struct {
		Issuer string `json:"iss"`
	}
	if json.Unmarshal(data, &c) != nil {
		return ""
	}
	if "https://"+c.Issuer == google {
		return google
	}
	return c.Issuer
}

// Close closes the idle connections to the issuer.
func (i *Issuer) Close() { i.client.CloseIdleConnections() }
