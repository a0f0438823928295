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

// Config is the input of Load.
type Config struct {
	Options   Options
	Compilers *cel.Compilers
	Audiences []string // of this API
	// Disallowed lists the issuer URLs of this cluster, which no file may configure.
	Disallowed []string
	Clock      func() time.Time
	Log        *slog.Logger
}

// Authentication holds the authentication methods of the options and reloads them when the files
// change.
type Authentication struct {
	options Options
	aud     []string
	clock   func() time.Time
	log     *slog.Logger
	reader  reader
	now     atomic.Pointer[state]
	mark    filewatch.Snapshot
	reloads atomic.Pointer[func(ok bool)]
	faults  *rate.Limiter // limits how often faults are logged
	// every is the interval at which the files are checked. patience is how long a reload waits for
	// the discovery of new issuers before it replaces the previous state. Tests shorten both.
	every, patience time.Duration
}

// state is the result of the last successful read of the files. It is immutable.
type state struct {
	issuers    []configured
	anonymous  anonymous
	tokens     *authn.Static
	webhook    *authn.Webhook
	service    *webhook.Service
	way        filewatch.Snapshot // the kubeconfig file of the token webhook, when it was read
	requestCAs *x509.CertPool
}

// configured is an issuer and the configuration from which it was created.
type configured struct {
	conf apiserver.JWTAuthenticator
	*issuer.Issuer
}

func (c *configured) sameAs(conf apiserver.JWTAuthenticator) bool {
	return reflect.DeepEqual(c.conf, conf)
}

// anonymous defines whether, and for which paths, unauthenticated clients are allowed; no paths =
// all paths.
type anonymous struct {
	allowed bool
	paths   map[string]bool
}

// Load reads the files and returns their Authentication. It starts nothing; Run does.
func Load(c Config) (*Authentication, error) {
	if err := c.Options.Check(); err != nil {
		return nil, err
	}
	a := &Authentication{
		options: c.Options, aud: c.Audiences, clock: c.Clock, log: c.Log,
		every: filewatch.PollInterval, patience: 10 * time.Second, faults: rate.NewLimiter(1, 5),
	}
	a.reader.compiler, a.reader.disallowed = c.Compilers.Authentication(), c.Disallowed
	a.reader.clock, a.reader.log = c.Clock, c.Log
	o := &c.Options
	a.mark = filewatch.TakeSnapshot(o.ConfigFile, o.TokenFile, o.WebhookConfig, o.RequestHeader.ClientCAFile, o.OIDC.CAFile)
	s, err := a.read(nil)
	if err != nil {
		return nil, err
	}
	a.now.Store(s)
	return a, nil
}

// read builds a state from the files. Issuers and webhooks that are unchanged since former, which
// may be nil, are reused.
func (a *Authentication) read(former *state) (*state, error) {
	o := &a.options
	s := &state{}
	var err error
	if err := a.readConfig(s, former); err != nil {
		return nil, err
	}
	if o.TokenFile != "" {
		if s.tokens, err = authn.ReadTokenFile(o.TokenFile); err != nil {
			return nil, fmt.Errorf("--token-auth-file: %w", err)
		}
	}
	if o.WebhookConfig != "" {
		if err := a.readWebhook(s, former); err != nil {
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
			return nil, fmt.Errorf("--requestheader-client-ca-file: no certificate is in %s", o.RequestHeader.ClientCAFile)
		}
	}
	return s, nil
}

// readWebhook sets the token webhook of s. If its kubeconfig file is unchanged, the webhook of
// former is reused with its cache. Otherwise every change of another file would cause a TokenReview
// for each token in use.
func (a *Authentication) readWebhook(s, former *state) (err error) {
	o := &a.options
	s.way = filewatch.TakeSnapshot(o.WebhookConfig)
	if former != nil && former.way.Equal(s.way) {
		s.service, s.webhook = former.service, former.webhook
		return nil
	}
	if s.service, err = webhook.FromKubeconfig(o.WebhookConfig, 0); err != nil {
		return fmt.Errorf("--authentication-token-webhook-config-file: %w", err)
	}
	if s.webhook, err = authn.NewWebhook(s.service, o.WebhookVersion, a.aud, o.WebhookTTL, a.clock); err != nil {
		return fmt.Errorf("--authentication-token-webhook-version: %w", err)
	}
	return nil
}

// readConfig sets the issuers and the anonymous access of s, from the AuthenticationConfiguration
// file or from flags.
func (a *Authentication) readConfig(s, former *state) error {
	o := &a.options
	conf, algorithms := &apiserver.AuthenticationConfiguration{}, []string(nil)
	var err error
	switch {
	case o.ConfigFile != "":
		if conf, err = a.reader.read(o.ConfigFile); err != nil {
			return fmt.Errorf("--authentication-config: %w", err)
		}
	case o.OIDC.used():
		j, err := o.OIDC.authenticator()
		if err != nil {
			return err
		}
		conf.JWT, algorithms = []apiserver.JWTAuthenticator{j}, o.OIDC.SigningAlgs
	}
	var had []configured
	if former != nil {
		had = former.issuers
	}
	if s.issuers, err = a.reader.issuers(conf, algorithms, had); err != nil {
		if o.ConfigFile != "" {
			return fmt.Errorf("--authentication-config: %s: %w", o.ConfigFile, err)
		}
		return fmt.Errorf("--oidc-* flags: %w", err)
	}
	s.anonymous.allowed = o.Anonymous == nil || *o.Anonymous
	if c := conf.Anonymous; c != nil {
		if o.Anonymous != nil {
			return errors.New("--anonymous-auth and the field anonymous of --authentication-config say the same in two places: " +
				"leave the flag out")
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

// Run discovers the keys of the issuers and follows the files until ctx is done.
func (a *Authentication) Run(ctx context.Context) error {
	var children sync.WaitGroup
	defer children.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d := &discoverer{ctx: ctx, children: &children, under: map[*issuer.Issuer]context.CancelFunc{}}
	d.follow(a.now.Load().issuers)
	return filewatch.Follow(ctx, a.every, a.mark, func() { a.reload(ctx, d) })
}

// discoverer runs one discovery goroutine for each configured issuer.
type discoverer struct {
	ctx      context.Context
	children *sync.WaitGroup
	under    map[*issuer.Issuer]context.CancelFunc
}

func (d *discoverer) follow(wanted []configured) {
	keep := make(map[*issuer.Issuer]bool, len(wanted))
	for _, w := range wanted {
		keep[w.Issuer] = true
		if _, known := d.under[w.Issuer]; known {
			continue
		}
		ctx, cancel := context.WithCancel(d.ctx)
		d.under[w.Issuer] = cancel
		d.children.Add(1)
		go func() {
			defer d.children.Done()
			defer cancel()
			_ = w.Discover(ctx) // Discover logs its errors
		}()
	}
	for i, cancel := range d.under {
		if !keep[i] {
			cancel()
			i.Close()
			delete(d.under, i)
		}
	}
}

// reload reads the files and replaces the state. The previous state stays in effect until all new
// issuers are discovered or a.patience has passed. If the files are invalid, it stays.
func (a *Authentication) reload(ctx context.Context, d *discoverer) {
	former := a.now.Load()
	s, err := a.read(former)
	a.count(err == nil)
	if err != nil {
		a.log.Error("the authentication configuration was not taken over, the former one stays", "err", err)
		return
	}
	d.follow(append(s.issuers[:len(s.issuers):len(s.issuers)], former.issuers...))
	late := time.NewTimer(a.patience)
	defer late.Stop()
	for _, i := range s.issuers {
		select {
		case <-i.Ready():
		case <-late.C:
			late.Reset(0) // the remaining issuers are not waited for either
		case <-ctx.Done():
			return
		}
	}
	a.now.Store(s)
	d.follow(s.issuers)
	if former.service != nil && former.service != s.service {
		former.service.Close()
	}
	a.log.Info("authentication configuration read again", "issuers", len(s.issuers))
}

// OnReload sets a function that is called after each reload of changed files, with whether it
// succeeded. Call it before Run.
func (a *Authentication) OnReload(f func(ok bool)) { a.reloads.Store(&f) }

func (a *Authentication) count(ok bool) {
	if f := a.reloads.Load(); f != nil {
		(*f)(ok)
	}
}

// Anonymous reports whether a client without credentials may request the path.
func (a *Authentication) Anonymous(path string) bool {
	if a == nil {
		return true
	}
	w := a.now.Load().anonymous
	return w.allowed && (len(w.paths) == 0 || w.paths[path])
}

// Proxy returns the method that authenticates requests of authenticating proxies by their headers.
// It is nil if no such proxy is configured.
func (a *Authentication) Proxy() authn.Method {
	h := &a.options.RequestHeader
	if h.ClientCAFile == "" {
		return nil
	}
	return authn.RequestHeader{
		CAs: func() *x509.CertPool { return a.now.Load().requestCAs }, Clock: a.clock, AllowedNames: h.AllowedNames,
		UsernameHeaders: h.UsernameHeaders, UIDHeaders: h.UIDHeaders, GroupHeaders: h.GroupHeaders, ExtraPrefixes: h.ExtraPrefixes,
	}
}

// Static returns the verifier of the tokens of --token-auth-file. Like kube-apiserver, the API
// server tries it before the other verifiers.
func (a *Authentication) Static() authn.TokenVerifier {
	return authn.ForAPI{TokenVerifier: staticTokens{a}, Audiences: a.aud}
}

type staticTokens struct{ a *Authentication }

func (s staticTokens) VerifyToken(ctx context.Context, token string, audiences []string) (authn.TokenIdentity, bool, error) {
	if t := s.a.now.Load().tokens; t != nil {
		return t.VerifyToken(ctx, token, audiences)
	}
	return authn.TokenIdentity{}, false, nil
}

// Further returns the verifiers that are tried after service account tokens, in order: bootstrap
// tokens, OIDC issuers, the webhook. secret returns a Secret of kube-system by name.
func (a *Authentication) Further(secret func(ctx context.Context, name string) (*corev1.Secret, bool)) []authn.TokenVerifier {
	var out []authn.TokenVerifier
	if a.options.BootstrapTokens {
		out = append(out, authn.ForAPI{TokenVerifier: authn.Bootstrap{Secret: secret, Clock: a.clock}, Audiences: a.aud})
	}
	return append(out, authn.ForAPI{TokenVerifier: issuers{a}, Audiences: a.aud}, hooked{a})
}

type issuers struct{ a *Authentication }

// VerifyToken verifies a token by the configured issuer with the URL in the token's iss claim.
func (s issuers) VerifyToken(ctx context.Context, token string, audiences []string) (authn.TokenIdentity, bool, error) {
	all := s.a.now.Load().issuers
	if len(all) == 0 {
		return authn.TokenIdentity{}, false, nil
	}
	from := issuer.Of(token)
	for _, i := range all {
		if i.URL() != from {
			continue
		}
		if id, ok, err := i.VerifyToken(ctx, token, audiences); ok || err != nil {
			return id, ok, s.a.told(err)
		}
	}
	return authn.TokenIdentity{}, false, nil
}

type hooked struct{ a *Authentication }

// VerifyToken verifies a token by the token webhook, if one is configured.
func (h hooked) VerifyToken(ctx context.Context, token string, audiences []string) (authn.TokenIdentity, bool, error) {
	if w := h.a.now.Load().webhook; w != nil {
		id, ok, err := w.VerifyToken(ctx, token, audiences)
		return id, ok, h.a.told(err)
	}
	return authn.TokenIdentity{}, false, nil
}

// told returns err unchanged. It logs a Fault, at a limited rate because any client can cause one;
// the client receives only its public text.
func (a *Authentication) told(err error) error {
	if fault := new(authn.Fault); errors.As(err, &fault) && a.faults.Allow() {
		a.log.Warn("a token could not be judged", "what", fault.Public, "err", fault.Err)
	}
	return err
}
