package config

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apiserver/pkg/apis/apiserver"

	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/apiserver/authn/issuer"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/webhook"
	"keelson.dev/keelson/internal/filewatch"
)

// Config contains the options of an Authentication and what it needs to verify tokens.
type Config struct {
	Options   Options
	Compilers *cel.Compilers
	Audiences []string // of this API
	// Disallowed lists the issuer URLs of this cluster, which no file may configure.
	Disallowed []string
	Clock      func() time.Time
	Log        *slog.Logger
}

// Authentication provides the authentication methods that the options configure. It reloads them
// when the configuration files change.
type Authentication struct {
	options   Options
	audiences []string
	clock     func() time.Time
	log       *slog.Logger
	reader    reader
	current   atomic.Pointer[state]
	snapshot  filewatch.Snapshot
	reloads   atomic.Pointer[func(ok bool)]
	faults    *rate.Limiter // limits how often Faults are logged
	// reloadPeriod is the interval at which the files are checked. patience is how long a reload
	// waits for the discovery of new issuers before it replaces the previous state. Tests shorten
	// both.
	reloadPeriod, patience time.Duration
}

// state contains the authentication methods from the last valid content of the files. It is
// immutable.
type state struct {
	issuers         []configuredIssuer
	anonymous       anonymous
	tokens          *authn.Static
	webhook         *authn.Webhook
	service         *webhook.Service
	webhookSnapshot filewatch.Snapshot // version of the token webhook's kubeconfig file that was read
	requestCAs      *x509.CertPool
}

// configuredIssuer is an issuer and the configuration from which it was created.
type configuredIssuer struct {
	config apiserver.JWTAuthenticator
	*issuer.Issuer
}

func (c *configuredIssuer) sameAs(conf apiserver.JWTAuthenticator) bool {
	return reflect.DeepEqual(c.config, conf)
}

// anonymous defines whether unauthenticated clients are allowed, and for which paths. An empty list
// of paths means all paths.
type anonymous struct {
	allowed bool
	paths   map[string]bool
}

// Load reads the files and returns an Authentication. It starts no goroutines; Run does.
func Load(c Config) (*Authentication, error) {
	if err := c.Options.Check(); err != nil {
		return nil, err
	}
	a := &Authentication{
		options: c.Options, audiences: c.Audiences, clock: c.Clock, log: c.Log,
		reloadPeriod: filewatch.PollInterval, patience: 10 * time.Second, faults: rate.NewLimiter(1, 5),
	}
	a.reader.compiler, a.reader.disallowed = c.Compilers.Authentication(), c.Disallowed
	a.reader.clock, a.reader.log = c.Clock, c.Log
	o := &c.Options
	a.snapshot = filewatch.TakeSnapshot(o.ConfigFile, o.TokenFile, o.WebhookConfig,
		o.RequestHeader.ClientCAFile, o.OIDC.CAFile)
	s, err := a.buildState(nil)
	if err != nil {
		return nil, err
	}
	a.current.Store(s)
	return a, nil
}

// buildState builds a state from the files. Issuers and webhooks that are unchanged since previous,
// which may be nil, are reused.
func (a *Authentication) buildState(previous *state) (*state, error) {
	o := &a.options
	s := &state{}
	var err error
	if err := a.readConfig(s, previous); err != nil {
		return nil, err
	}
	if o.TokenFile != "" {
		if s.tokens, err = authn.ReadTokenFile(o.TokenFile); err != nil {
			return nil, fmt.Errorf("--token-auth-file: %w", err)
		}
	}
	if o.WebhookConfig != "" {
		if err := a.readWebhook(s, previous); err != nil {
			return nil, err
		}
	}
	if o.RequestHeader.ClientCAFile != "" {
		pem, err := filewatch.Read(o.RequestHeader.ClientCAFile, maxFile)
		if err != nil {
			return nil, fmt.Errorf("--requestheader-client-ca-file: %w", err)
		}
		s.requestCAs = x509.NewCertPool()
		if !s.requestCAs.AppendCertsFromPEM(pem) {
			return nil, fmt.Errorf("--requestheader-client-ca-file: %s contains no certificate",
				o.RequestHeader.ClientCAFile)
		}
	}
	return s, nil
}

// readWebhook sets the token webhook of s. If its kubeconfig file is unchanged, it reuses the
// webhook of previous, including its cache. Otherwise every change of another file would cause a
// TokenReview for each token in use.
func (a *Authentication) readWebhook(s, previous *state) (err error) {
	o := &a.options
	s.webhookSnapshot = filewatch.TakeSnapshot(o.WebhookConfig)
	if previous != nil && previous.webhookSnapshot.Equal(s.webhookSnapshot) {
		s.service, s.webhook = previous.service, previous.webhook
		return nil
	}
	if s.service, err = webhook.FromKubeconfig(o.WebhookConfig, 0); err != nil {
		return fmt.Errorf("--authentication-token-webhook-config-file: %w", err)
	}
	if s.webhook, err = authn.NewWebhook(s.service, o.WebhookVersion, a.audiences, o.WebhookTTL, a.clock); err != nil {
		return fmt.Errorf("--authentication-token-webhook-version: %w", err)
	}
	return nil
}

// readConfig sets the issuers and the anonymous access of s, from the AuthenticationConfiguration
// file or from flags.
func (a *Authentication) readConfig(s, previous *state) error {
	o := &a.options
	conf, algorithms := &apiserver.AuthenticationConfiguration{}, []string(nil)
	var err error
	switch {
	case o.ConfigFile != "":
		if conf, err = a.reader.readFile(o.ConfigFile); err != nil {
			return fmt.Errorf("--authentication-config: %w", err)
		}
	case o.OIDC.isSet():
		j, err := o.OIDC.jwtAuthenticator()
		if err != nil {
			return err
		}
		conf.JWT, algorithms = []apiserver.JWTAuthenticator{j}, o.OIDC.SigningAlgs
	}
	var had []configuredIssuer
	if previous != nil {
		had = previous.issuers
	}
	if s.issuers, err = a.reader.newIssuers(conf, algorithms, had); err != nil {
		if o.ConfigFile != "" {
			return fmt.Errorf("--authentication-config: %s: %w", o.ConfigFile, err)
		}
		return fmt.Errorf("--oidc-* flags: %w", err)
	}
	s.anonymous.allowed = o.Anonymous == nil || *o.Anonymous
	if c := conf.Anonymous; c != nil {
		if o.Anonymous != nil {
			return errors.New("--anonymous-auth and the field anonymous of --authentication-config " +
				"cannot be combined: remove the flag")
		}
		s.anonymous.allowed = c.Enabled
		for _, cond := range c.Conditions {
			if s.anonymous.paths == nil {
				s.anonymous.paths = map[string]bool{}
			}
			s.anonymous.paths[cond.Path] = true
		}
	}
	return nil
}

// Run discovers the keys of the issuers and reloads changed files until ctx is done.
func (a *Authentication) Run(ctx context.Context) error {
	var children sync.WaitGroup
	defer children.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &discoverer{ctx: ctx, children: &children, running: map[*issuer.Issuer]context.CancelFunc{}}
	d.updateDiscovery(a.current.Load().issuers)
	return filewatch.Follow(ctx, a.reloadPeriod, a.snapshot, func() { a.reloadFiles(ctx, d) })
}

// discoverer runs one discovery goroutine for each configured issuer.
type discoverer struct {
	ctx      context.Context
	children *sync.WaitGroup
	running  map[*issuer.Issuer]context.CancelFunc
}

func (d *discoverer) updateDiscovery(configs []configuredIssuer) {
	keep := make(map[*issuer.Issuer]bool, len(configs))
	for _, w := range configs {
		keep[w.Issuer] = true
		if _, known := d.running[w.Issuer]; known {
			continue
		}
		ctx, cancel := context.WithCancel(d.ctx)
		d.running[w.Issuer] = cancel
		d.children.Add(1)
		go func() {
			defer d.children.Done()
			defer cancel()
			_ = w.Discover(ctx) // Discover logs its errors
		}()
	}
	for i, cancel := range d.running {
		if !keep[i] {
			cancel()
			i.Close()
			delete(d.running, i)
		}
	}
}

// reloadFiles reads the files and replaces the state. The previous state stays in effect until all
// new issuers are discovered or a.patience has passed. If the files are invalid, it stays.
func (a *Authentication) reloadFiles(ctx context.Context, d *discoverer) {
	former := a.current.Load()
	s, err := a.buildState(former)
	a.countReload(err == nil)
	if err != nil {
		a.log.Error("failed to reload the authentication configuration, the previous one stays in effect", "err", err)
		return
	}
	d.updateDiscovery(append(s.issuers[:len(s.issuers):len(s.issuers)], former.issuers...))
	late := time.NewTimer(a.patience)
	defer late.Stop()
	for _, i := range s.issuers {
		select {
		case <-i.Ready():
		case <-late.C:
			late.Reset(0) // do not wait for the remaining issuers either
		case <-ctx.Done():
			return
		}
	}
	a.current.Store(s)
	d.updateDiscovery(s.issuers)
	if former.service != nil && former.service != s.service {
		former.service.Close()
	}
	a.log.Info("authentication configuration reloaded", "issuers", len(s.issuers))
}

// OnReload sets a function that is called after each reload of changed files. ok reports whether
// the reload succeeded. OnReload must be called before Run.
func (a *Authentication) OnReload(notify func(ok bool)) { a.reloads.Store(&notify) }

func (a *Authentication) countReload(ok bool) {
	if f := a.reloads.Load(); f != nil {
		(*f)(ok)
	}
}

// Anonymous reports whether a client without credentials may request the path.
func (a *Authentication) Anonymous(path string) bool {
	if a == nil {
		return true
	}
	w := a.current.Load().anonymous
	return w.allowed && (len(w.paths) == 0 || w.paths[path])
}

// Proxy returns the method that authenticates requests forwarded by authenticating proxies, by
// their headers. It is nil if no such proxy is configured.
func (a *Authentication) Proxy() authn.Method {
	h := &a.options.RequestHeader
	if h.ClientCAFile == "" {
		return nil
	}
	return authn.RequestHeader{
		CAs: func() *x509.CertPool { return a.current.Load().requestCAs }, Clock: a.clock, AllowedNames: h.AllowedNames,
		UsernameHeaders: h.UsernameHeaders, UIDHeaders: h.UIDHeaders, GroupHeaders: h.GroupHeaders,
		ExtraPrefixes: h.ExtraPrefixes,
	}
}

// StaticTokens returns the verifier of the tokens in --token-auth-file. The API server tries it
// before all other verifiers, like kube-apiserver.
func (a *Authentication) StaticTokens() authn.TokenVerifier {
	return authn.ForAPI{TokenVerifier: staticTokens{a}, Audiences: a.audiences}
}

type staticTokens struct{ a *Authentication }

func (s staticTokens) VerifyToken(ctx context.Context, token string, audiences []string) (
	authn.TokenIdentity, bool, error,
) {
	if t := s.a.current.Load().tokens; t != nil {
		return t.VerifyToken(ctx, token, audiences)
	}
	return authn.TokenIdentity{}, false, nil
}

// FurtherVerifiers returns the verifiers that are tried after the verifier of service account
// tokens, in order: bootstrap tokens, OIDC issuers, the webhook. secret returns a Secret of
// kube-system by name.
func (a *Authentication) FurtherVerifiers(
	secret func(ctx context.Context, name string) (*corev1.Secret, bool),
) []authn.TokenVerifier {
	var out []authn.TokenVerifier
	if a.options.BootstrapTokens {
		out = append(out, authn.ForAPI{TokenVerifier: authn.Bootstrap{Secret: secret, Clock: a.clock},
			Audiences: a.audiences})
	}
	return append(out, authn.ForAPI{TokenVerifier: issuerTokens{a}, Audiences: a.audiences}, webhookTokens{a})
}

type issuerTokens struct{ a *Authentication }

// VerifyToken verifies a token with the configured issuer that has the URL in the iss claim of the
// token.
func (s issuerTokens) VerifyToken(ctx context.Context, token string, audiences []string) (
	authn.TokenIdentity, bool, error,
) {
	all := s.a.current.Load().issuers
	if len(all) == 0 {
		return authn.TokenIdentity{}, false, nil
	}
	from := issuer.Of(token)
	for _, i := range all {
		if i.URL() != from {
			continue
		}
		if id, ok, err := i.VerifyToken(ctx, token, audiences); ok || err != nil {
			return id, ok, s.a.logFault(err)
		}
	}
	return authn.TokenIdentity{}, false, nil
}

type webhookTokens struct{ a *Authentication }

// VerifyToken verifies a token with the token webhook. ok is false if no webhook is configured.
func (h webhookTokens) VerifyToken(ctx context.Context, token string, audiences []string) (
	authn.TokenIdentity, bool, error,
) {
	if w := h.a.current.Load().webhook; w != nil {
		id, ok, err := w.VerifyToken(ctx, token, audiences)
		return id, ok, h.a.logFault(err)
	}
	return authn.TokenIdentity{}, false, nil
}

// logFault returns err unchanged. If err is a Fault, it logs the fault, at a limited rate because
// any client can cause faults. The client receives only the public text of a Fault.
func (a *Authentication) logFault(err error) error {
	if fault := new(authn.Fault); errors.As(err, &fault) && a.faults.Allow() {
		a.log.Warn("failed to verify a token", "what", fault.Public, "err", fault.Err)
	}
	return err
}
