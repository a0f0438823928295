// Package config builds the chain of authorizers from a file or from flags, which have the same
// names as those of kube-apiserver. It reloads changed files while the replica runs. A changed file
// that cannot be read or is invalid is ignored.
package config

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/apis/apiserver"
	"k8s.io/apiserver/pkg/apis/apiserver/install"
	"k8s.io/apiserver/pkg/apis/apiserver/validation"

	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/webhook"
	"keelson.dev/keelson/internal/filewatch"
)

// Types of authorizers, with the names that Kubernetes uses in files and flags.
const (
	Node        = "Node"
	RBAC        = "RBAC"
	ABAC        = "ABAC"
	Webhook     = "Webhook"
	AlwaysAllow = "AlwaysAllow"
	AlwaysDeny  = "AlwaysDeny"
)

func knownModes() []string { return []string{ABAC, AlwaysAllow, AlwaysDeny, Node, RBAC, Webhook} }

// Options are the authorization flags of the API server. The zero value selects the authorizers
// Node and RBAC.
type Options struct {
	ConfigFile string   // --authorization-config
	Modes      []string // --authorization-mode
	PolicyFile string   // --authorization-policy-file

	WebhookConfig   string        // --authorization-webhook-config-file
	WebhookVersion  string        // --authorization-webhook-version
	AuthorizedTTL   time.Duration // --authorization-webhook-cache-authorized-ttl
	UnauthorizedTTL time.Duration // --authorization-webhook-cache-unauthorized-ttl
}

// Defaults returns the default values of the flags.
func Defaults() Options {
	return Options{WebhookVersion: "v1beta1", AuthorizedTTL: 5 * time.Minute, UnauthorizedTTL: 30 * time.Second}
}

// Check returns an error that names an invalid flag, or a flag that requires another flag that is
// not set.
func (o *Options) Check() error {
	if o.ConfigFile != "" && (len(o.Modes) > 0 || o.WebhookConfig != "") {
		return errors.New("--authorization-config cannot be combined with --authorization-mode or " +
			"--authorization-webhook-* flags: remove the flags")
	}
	for i, m := range o.Modes {
		if !slices.Contains(knownModes(), m) {
			return fmt.Errorf("--authorization-mode %q: want some of %s", m, strings.Join(knownModes(), ","))
		}
		if slices.Contains(o.Modes[:i], m) {
			return fmt.Errorf("--authorization-mode names %s twice", m)
		}
	}
	for _, f := range []struct{ mode, flag, value string }{
		{ABAC, "--authorization-policy-file", o.PolicyFile},
		{Webhook, "--authorization-webhook-config-file", o.WebhookConfig},
	} {
		has := slices.Contains(o.Modes, f.mode)
		if has && f.value == "" {
			return fmt.Errorf("--authorization-mode %s requires %s", f.mode, f.flag)
		}
		if !has && f.value != "" && o.ConfigFile == "" {
			return fmt.Errorf("%s requires --authorization-mode to include %s", f.flag, f.mode)
		}
	}
	return nil
}

// Config contains the options of an Authorization and what it needs to create authorizers.
type Config struct {
	Options   Options
	Compilers *cel.Compilers
	Clock     func() time.Time
	Log       *slog.Logger
}

// Authorization is the configured chain of authorizers. It is reloaded when the configuration files
// change. It can authorize requests only after Bind has set the Node and RBAC authorizers.
type Authorization struct {
	config       Config
	snapshot     filewatch.Snapshot
	reloadPeriod time.Duration // interval at which the files are checked; tests shorten it
	plan         *plan
	builtin      map[string]authz.Authorizer
	current      atomic.Pointer[union]
	reloads      func(ok bool)
}

// plan contains the configuration in the files and the authorizers that it requires.
type plan struct {
	config      *apiserver.AuthorizationConfiguration
	authorizers map[string]authz.Authorizer // authorizers that do not need Bind, by name in the configuration
	webhooks    []*webhook.Service
}

// union is the chain of authorizers in their configured order.
type union struct {
	authz.Union
	unlisted string // reason why a user may have permissions beyond the RBAC rules; "" = it has none
}

// Load reads the files and returns an Authorization. It starts no goroutines; Run does.
func Load(c Config) (*Authorization, error) {
	if err := c.Options.Check(); err != nil {
		return nil, err
	}
	a := &Authorization{config: c, reloadPeriod: filewatch.PollInterval}
	a.snapshot = filewatch.TakeSnapshot(c.Options.ConfigFile, c.Options.PolicyFile, c.Options.WebhookConfig)
	var err error
	a.plan, err = a.readPlan()
	return a, err
}

// Bind sets the Node and RBAC authorizers, by type name. It must be called before Authorize.
func (a *Authorization) Bind(builtin map[string]authz.Authorizer) {
	a.builtin = builtin
	a.current.Store(a.newUnion(a.plan))
}

// Authorize returns the decision of the configured chain.
func (a *Authorization) Authorize(ctx context.Context, attributes *authz.Attributes) (authz.Decision, string) {
	return a.current.Load().Authorize(ctx, attributes)
}

// Unlisted returns the reason why a user may have permissions beyond the RBAC rules. It is "" when
// the RBAC rules are complete.
func (a *Authorization) Unlisted() string { return a.current.Load().unlisted }

// OnReload sets a function that is called after each reload of changed files. ok reports whether
// the reload succeeded. OnReload must be called before Run.
func (a *Authorization) OnReload(notify func(ok bool)) { a.reloads = notify }

// Run reloads the files when they change, until ctx is done.
func (a *Authorization) Run(ctx context.Context) error {
	return filewatch.Follow(ctx, a.reloadPeriod, a.snapshot, a.reloadFiles)
}

func (a *Authorization) reloadFiles() {
	p, err := a.readPlan()
	if a.reloads != nil {
		a.reloads(err == nil)
	}
	if err != nil {
		a.config.Log.Error("failed to reload the authorization configuration, the previous one stays in effect", "err",
			err)
		return
	}
	for _, s := range a.plan.webhooks {
		s.Close()
	}
	a.plan = p
	a.current.Store(a.newUnion(p))
	a.config.Log.Info("authorization configuration reloaded", "authorizers", len(p.config.Authorizers))
}

// newDecoder returns a strict decoder: an unknown field is an error.
func newDecoder() runtime.Decoder {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder()
}

// maxFile is the maximum size of a configuration file in bytes.
const maxFile = 4 << 20

// readPlan reads the files and creates the authorizers of the configuration that do not need Bind.
func (a *Authorization) readPlan() (*plan, error) {
	o := &a.config.Options
	conf := o.asConfiguration()
	if o.ConfigFile != "" {
		data, err := filewatch.Read(o.ConfigFile, maxFile)
		if err != nil {
			return nil, fmt.Errorf("--authorization-config: %w", err)
		}
		obj, err := runtime.Decode(newDecoder(), data)
		if err != nil {
			return nil, fmt.Errorf("--authorization-config: %s: %w", o.ConfigFile, err)
		}
		var ok bool
		if conf, ok = obj.(*apiserver.AuthorizationConfiguration); !ok {
			return nil, fmt.Errorf("--authorization-config: %s contains a %T: want an AuthorizationConfiguration",
				o.ConfigFile, obj)
		}
		errs := validation.ValidateAuthorizationConfiguration(
			a.config.Compilers.Authorization(), nil, conf, sets.New(knownModes()...), sets.New(Webhook))
		if err := errs.ToAggregate(); err != nil {
			return nil, fmt.Errorf("--authorization-config: %s: %w", o.ConfigFile, err)
		}
	}
	p := &plan{config: conf, authorizers: map[string]authz.Authorizer{}}
	for i, c := range conf.Authorizers {
		if err := a.makeAuthorizer(p, c); err != nil {
			if o.ConfigFile != "" {
				return nil, fmt.Errorf("--authorization-config: %s: authorizers[%d]: %w", o.ConfigFile, i, err)
			}
			return nil, fmt.Errorf("--authorization-mode %s: %w", c.Type, err)
		}
	}
	return p, nil
}

// asConfiguration converts the flags to an AuthorizationConfiguration, as a file contains it.
func (o *Options) asConfiguration() *apiserver.AuthorizationConfiguration {
	modes := o.Modes
	if len(modes) == 0 {
		modes = []string{Node, RBAC}
	}
	conf := &apiserver.AuthorizationConfiguration{}
	for _, m := range modes {
		c := apiserver.AuthorizerConfiguration{Type: apiserver.AuthorizerType(m), Name: strings.ToLower(m)}
		if m == Webhook {
			c.Webhook = &apiserver.WebhookConfiguration{
				AuthorizedTTL:           metav1.Duration{Duration: o.AuthorizedTTL},
				UnauthorizedTTL:         metav1.Duration{Duration: o.UnauthorizedTTL},
				CacheAuthorizedRequests: true, CacheUnauthorizedRequests: true,
				Timeout: metav1.Duration{Duration: 30 * time.Second}, SubjectAccessReviewVersion: o.WebhookVersion,
				FailurePolicy: apiserver.FailurePolicyNoOpinion,
				ConnectionInfo: apiserver.WebhookConnectionInfo{
					Type:           apiserver.AuthorizationWebhookConnectionInfoTypeKubeConfigFile,
					KubeConfigFile: &o.WebhookConfig,
				},
			}
		}
		conf.Authorizers = append(conf.Authorizers, c)
	}
	return conf
}

// makeAuthorizer creates the authorizer of one configuration entry and adds it to draft. It does
// nothing for Node and RBAC, which Bind provides.
func (a *Authorization) makeAuthorizer(draft *plan, c apiserver.AuthorizerConfiguration) error {
	switch string(c.Type) {
	case AlwaysAllow:
		draft.authorizers[c.Name] = authz.AlwaysAllow{}
	case AlwaysDeny:
		draft.authorizers[c.Name] = authz.AlwaysDeny{}
	case ABAC:
		if a.config.Options.PolicyFile == "" {
			return errors.New("type ABAC requires the flag --authorization-policy-file")
		}
		z, err := authz.ReadABAC(a.config.Options.PolicyFile)
		if err != nil {
			return err
		}
		draft.authorizers[c.Name] = z
	case Webhook:
		return a.makeWebhook(draft, c)
	}
	return nil
}

func (a *Authorization) makeWebhook(draft *plan, c apiserver.AuthorizerConfiguration) error {
	w := c.Webhook
	if w.ConnectionInfo.Type == apiserver.AuthorizationWebhookConnectionInfoTypeInCluster {
		return errors.New("webhook.connectionInfo.type: InClusterConfig would call this API server itself: " +
			"use KubeConfigFile")
	}
	matcher, errs := validation.ValidateAndCompileMatchConditions(a.config.Compilers.Authorization(), w.MatchConditions)
	if err := errs.ToAggregate(); err != nil {
		return err
	}
	s, err := webhook.FromKubeconfig(*w.ConnectionInfo.KubeConfigFile, w.Timeout.Duration)
	if err != nil {
		return err
	}
	draft.webhooks = append(draft.webhooks, s)
	conf := authz.WebhookConfig{
		Name: c.Name, Service: s, Version: w.SubjectAccessReviewVersion, OnError: authz.NoOpinion,
		Clock: a.config.Clock,
		Log:   a.config.Log,
	}
	if w.FailurePolicy == apiserver.FailurePolicyDeny {
		conf.OnError = authz.Deny
	}
	if w.CacheAuthorizedRequests {
		conf.AllowedTTL = w.AuthorizedTTL.Duration
	}
	if w.CacheUnauthorizedRequests {
		conf.OtherTTL = w.UnauthorizedTTL.Duration
	}
	if matcher != nil {
		conf.Match = matcher
	}
	draft.authorizers[c.Name], err = authz.NewWebhook(conf)
	return err
}

// newUnion returns the chain of authorizers in their configured order. Privileged always precedes
// them, so that no configuration locks out administrators.
func (a *Authorization) newUnion(draft *plan) *union {
	u := &union{Union: authz.Union{authz.Privileged{}}}
	var unlisted []string
	for _, c := range draft.config.Authorizers {
		z := draft.authorizers[c.Name]
		if z == nil {
			z = a.builtin[string(c.Type)]
		} else {
			unlisted = append(unlisted, strings.ToLower(string(c.Type))+
				" authorizer does not support user rule resolution")
		}
		u.Union = append(u.Union, z)
	}
	u.unlisted = strings.Join(slices.Compact(unlisted), ", ")
	return u
}
