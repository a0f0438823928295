// Package config builds the chain of authorizers from a file or flags with the names of
// kube-apiserver. It follows the files: a change takes effect while the replica runs. A file that
// cannot be read or is invalid changes nothing.
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

// The authorizer types of Kubernetes.
const (
	Node        = "Node"
	RBAC        = "RBAC"
	ABAC        = "ABAC"
	Webhook     = "Webhook"
	AlwaysAllow = "AlwaysAllow"
	AlwaysDeny  = "AlwaysDeny"
)

func known() []string { return []string{ABAC, AlwaysAllow, AlwaysDeny, Node, RBAC, Webhook} }

// Options are the authorization flags of the API server. The zero value selects Node, RBAC.
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

// Check returns an error that names an invalid flag, or a flag without another flag that it
// requires.
func (o *Options) Check() error {
	if o.ConfigFile != "" && (len(o.Modes) > 0 || o.WebhookConfig != "") {
		return errors.New("--authorization-config and --authorization-mode or --authorization-webhook-* flags " +
			"say the same in two places: leave the flags out")
	}
	for i, m := range o.Modes {
		if !slices.Contains(known(), m) {
			return fmt.Errorf("--authorization-mode %q: want some of %s", m, strings.Join(known(), ","))
		}
		if slices.Contains(o.Modes[:i], m) {
			return fmt.Errorf("--authorization-mode names %s twice", m)
		}
	}
	for _, f := range []struct{ mode, flag, value string }{
		{ABAC, "--authorization-policy-file", o.PolicyFile}, {Webhook, "--authorization-webhook-config-file", o.WebhookConfig},
	} {
		has := slices.Contains(o.Modes, f.mode)
		if has && f.value == "" {
			return fmt.Errorf("--authorization-mode %s needs %s", f.mode, f.flag)
		}
		if !has && f.value != "" && o.ConfigFile == "" {
			return fmt.Errorf("%s needs --authorization-mode with %s among the modes", f.flag, f.mode)
		}
	}
	return nil
}

// Config is the input of Load.
type Config struct {
	Options   Options
	Compilers *cel.Compilers
	Clock     func() time.Time
	Log       *slog.Logger
}

// Authorization is the configured chain of authorizers, reloaded when the files change. It can
// authorize only after Bind has set the Node and RBAC authorizers.
type Authorization struct {
	conf    Config
	mark    filewatch.Snapshot
	every   time.Duration // interval at which the files are checked; tests shorten it
	plan    *plan
	builtin map[string]authz.Authorizer
	now     atomic.Pointer[union]
	reloads func(ok bool)
}

// plan is the result of reading the files.
type plan struct {
	conf *apiserver.AuthorizationConfiguration
	made map[string]authz.Authorizer // authorizers that do not need Bind, by name in the configuration
	hook []*webhook.Service
}

// union is the chain of authorizers in their configured order.
type union struct {
	authz.Union
	unlisted string // reason why a list of a user's permissions is incomplete; "" = complete
}

// Load reads the files and returns their Authorization. It starts nothing; Run does.
func Load(c Config) (*Authorization, error) {
	if err := c.Options.Check(); err != nil {
		return nil, err
	}
	a := &Authorization{conf: c, every: filewatch.PollInterval}
	a.mark = filewatch.TakeSnapshot(c.Options.ConfigFile, c.Options.PolicyFile, c.Options.WebhookConfig)
	var err error
	a.plan, err = a.read()
	return a, err
}

// Bind sets the Node and RBAC authorizers, by type name. It must be called before Authorize.
func (a *Authorization) Bind(builtin map[string]authz.Authorizer) {
	a.builtin = builtin
	a.now.Store(a.union(a.plan))
}

// Authorize returns the decision of the configured chain.
func (a *Authorization) Authorize(ctx context.Context, at *authz.Attributes) (authz.Decision, string) {
	return a.now.Load().Authorize(ctx, at)
}

// Unlisted returns the reason why a user may have permissions beyond the RBAC rules. It is "" when
// the RBAC rules are complete.
func (a *Authorization) Unlisted() string { return a.now.Load().unlisted }

// OnReload sets a function that is called after each reload of changed files, with whether it
// succeeded. Call it before Run.
func (a *Authorization) OnReload(f func(ok bool)) { a.reloads = f }

// Run reloads the files when they change, until ctx is done.
func (a *Authorization) Run(ctx context.Context) error {
	return filewatch.Follow(ctx, a.every, a.mark, a.reload)
}

func (a *Authorization) reload() {
	p, err := a.read()
	if a.reloads != nil {
		a.reloads(err == nil)
	}
	if err != nil {
		a.conf.Log.Error("the authorization configuration was not taken over, the former one stays", "err", err)
		return
	}
	for _, s := range a.plan.hook {
		s.Close()
	}
	a.plan = p
	a.now.Store(a.union(p))
	a.conf.Log.Info("authorization configuration read again", "authorizers", len(p.conf.Authorizers))
}

// decoder returns a strict decoder: an unknown field is an error.
func decoder() runtime.Decoder {
	scheme := runtime.NewScheme()
	install.Install(scheme)
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDecoder()
}

// maxFile is the maximum size of a configuration file in bytes.
const maxFile = 4 << 20

// read reads the files and creates the authorizers of the configuration that do not need Bind.
func (a *Authorization) read() (*plan, error) {
	o := &a.conf.Options
	conf := o.configuration()
	if o.ConfigFile != "" {
		data, err := filewatch.Read(o.ConfigFile, maxFile)
		if err != nil {
			return nil, fmt.Errorf("--authorization-config: %w", err)
		}
		obj, err := runtime.Decode(decoder(), data)
		if err != nil {
			return nil, fmt.Errorf("--authorization-config: %s: %w", o.ConfigFile, err)
		}
		var ok bool
		if conf, ok = obj.(*apiserver.AuthorizationConfiguration); !ok {
			return nil, fmt.Errorf("--authorization-config: %s holds a %T: want an AuthorizationConfiguration", o.ConfigFile, obj)
		}
		errs := validation.ValidateAuthorizationConfiguration(
			a.conf.Compilers.Authorization(), nil, conf, sets.New(known()...), sets.New(Webhook))
		if err := errs.ToAggregate(); err != nil {
			return nil, fmt.Errorf("--authorization-config: %s: %w", o.ConfigFile, err)
		}
	}
	p := &plan{conf: conf, made: map[string]authz.Authorizer{}}
	for i, c := range conf.Authorizers {
		if err := a.make(p, c); err != nil {
			if o.ConfigFile != "" {
				return nil, fmt.Errorf("--authorization-config: %s: authorizers[%d]: %w", o.ConfigFile, i, err)
			}
			return nil, fmt.Errorf("--authorization-mode %s: %w", c.Type, err)
		}
	}
	return p, nil
}

// configuration returns the flags in the form of an AuthorizationConfiguration file.
func (o *Options) configuration() *apiserver.AuthorizationConfiguration {
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
					Type: apiserver.AuthorizationWebhookConnectionInfoTypeKubeConfigFile, KubeConfigFile: &o.WebhookConfig,
				},
			}
		}
		conf.Authorizers = append(conf.Authorizers, c)
	}
	return conf
}

// make creates the authorizer of a configuration entry and adds it to p. It does nothing for Node
// and RBAC, which Bind provides.
func (a *Authorization) make(p *plan, c apiserver.AuthorizerConfiguration) error {
	switch string(c.Type) {
	case AlwaysAllow:
		p.made[c.Name] = authz.AlwaysAllow{}
	case AlwaysDeny:
		p.made[c.Name] = authz.AlwaysDeny{}
	case ABAC:
		if a.conf.Options.PolicyFile == "" {
			return errors.New("type ABAC needs the flag --authorization-policy-file")
		}
		z, err := authz.ReadABAC(a.conf.Options.PolicyFile)
		if err != nil {
			return err
		}
		p.made[c.Name] = z
	case Webhook:
		return a.hook(p, c)
	}
	return nil
}

func (a *Authorization) hook(p *plan, c apiserver.AuthorizerConfiguration) error {
	w := c.Webhook
	if w.ConnectionInfo.Type == apiserver.AuthorizationWebhookConnectionInfoTypeInCluster {
		return errors.New("webhook.connectionInfo.type: InClusterConfig would ask this API itself: use KubeConfigFile")
	}
	matcher, errs := validation.ValidateAndCompileMatchConditions(a.conf.Compilers.Authorization(), w.MatchConditions)
	if err := errs.ToAggregate(); err != nil {
		return err
	}
	s, err := webhook.FromKubeconfig(*w.ConnectionInfo.KubeConfigFile, w.Timeout.Duration)
	if err != nil {
		return err
	}
	p.hook = append(p.hook, s)
	conf := authz.WebhookConfig{
		Name: c.Name, Service: s, Version: w.SubjectAccessReviewVersion, OnError: authz.NoOpinion, Clock: a.conf.Clock,
		Log: a.conf.Log,
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
	p.made[c.Name], err = authz.NewWebhook(conf)
	return err
}

// union returns the chain of authorizers in their configured order. Privileged always precedes
// them, so that no configuration locks out administrators.
func (a *Authorization) union(p *plan) *union {
	u := &union{Union: authz.Union{authz.Privileged{}}}
	var unlisted []string
	for _, c := range p.conf.Authorizers {
		z := p.made[c.Name]
		if z == nil {
			z = a.builtin[string(c.Type)]
		} else {
			unlisted = append(unlisted, strings.ToLower(string(c.Type))+" authorizer does not support user rule resolution")
		}
		u.Union = append(u.Union, z)
	}
	u.unlisted = strings.Join(slices.Compact(unlisted), ", ")
	return u
}
