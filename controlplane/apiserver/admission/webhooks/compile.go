package webhooks

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"

	arv1 "k8s.io/api/admissionregistration/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
	"keelson.dev/keelson/controlplane/apiserver/webhook"
)

// Default timeout, maximum timeout and default Service port of webhooks.
const (
	defaultTimeout = 10 * time.Second
	maxTimeout     = 30 * time.Second
	defaultPort    = 443
)

// hook is one webhook with its compiled configuration.
type hook struct {
	configuration, name string
	index               int
	id                  string // unique; unchanged when other webhooks change
	criteria            matching.Criteria
	conditions          func() *matching.Conditions // compiled on use; nil = none
	endpoint            *endpoint
	serviceNamespace    string // namespace of the webhook's Service; "" = it is called by URL
	timeout             time.Duration
	ignores             bool // failure policy Ignore
	sideEffects         bool // has side effects in a dry run
	reinvoke            bool
	failures            *failureLog
	review              string // version of AdmissionReview; "" = no supported version
}

// compileConfiguration returns the compiled webhooks of a webhook configuration object.
func (w *Webhooks) compileConfiguration(o api.Object) *configuration {
	hooks, again := hooksOf(o)
	c := &configuration{name: o.GetName()}
	for i := range hooks {
		h := w.newHook(c.name, &hooks[i])
		h.id = fmt.Sprintf("%s/%s/%d", c.name, h.name, i)
		h.reinvoke = again != nil && again[i] == arv1.IfNeededReinvocationPolicy
		c.hooks = append(c.hooks, h)
	}
	return c
}

func (w *Webhooks) newHook(configuration string, config *arv1.ValidatingWebhook) *hook {
	h := &hook{
		configuration: configuration, name: config.Name, timeout: defaultTimeout, failures: new(failureLog),
		criteria: matching.OfWebhook(config.Rules, config.MatchPolicy, config.NamespaceSelector, config.ObjectSelector),
		ignores:  config.FailurePolicy != nil && *config.FailurePolicy == arv1.Ignore,
		endpoint: w.sharedEndpoint(config.ClientConfig),
	}
	if config.TimeoutSeconds != nil {
		h.timeout = min(max(time.Duration(*config.TimeoutSeconds)*time.Second, time.Second), maxTimeout)
	}
	if s := config.ClientConfig.Service; s != nil {
		h.serviceNamespace = s.Namespace
	}
	h.sideEffects = config.SideEffects == nil ||
		*config.SideEffects != arv1.SideEffectClassNone && *config.SideEffects != arv1.SideEffectClassNoneOnDryRun
	for _, v := range config.AdmissionReviewVersions {
		if v == "v1" || v == "v1beta1" {
			h.review = v
			break
		}
	}
	if len(config.MatchConditions) > 0 {
		list := config.MatchConditions
		h.conditions = cel.Memoize(w.cfg.Expressions, func() (*matching.Conditions, *cel.Scope) {
			s := w.cfg.Expressions.NewScope(cel.Declared{Authorizer: true}, nil)
			return matching.NewConditions(list, s), s
		})
	}
	return h
}

// endpoint is the address of a webhook. Webhooks with the same address share it and its
// connections.
type endpoint struct {
	key    string
	open   func() (*webhook.Endpoint, error) // called before the first request
	mu     sync.Mutex
	opened *webhook.Endpoint
}

func (e *endpoint) openEndpoint() (*webhook.Endpoint, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.opened != nil {
		return e.opened, nil
	}
	var err error
	e.opened, err = e.open()
	return e.opened, err
}

func (e *endpoint) closeEndpoint() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.opened != nil {
		e.opened.Close()
	}
}

// sharedEndpoint returns the shared endpoint for an address and creates it if necessary. The lock
// must be held.
func (w *Webhooks) sharedEndpoint(c arv1.WebhookClientConfig) *endpoint {
	at := webhook.Address{CA: c.CABundle}
	var fault error
	switch s := c.Service; {
	case s != nil:
		port, path := int32(defaultPort), ""
		if s.Port != nil {
			port = *s.Port
		}
		if s.Path != nil {
			path = *s.Path
		}
		at.ServerName = s.Name + "." + s.Namespace + ".svc"
		host := net.JoinHostPort(at.ServerName, strconv.Itoa(int(port)))
		at.URL = (&url.URL{Scheme: "https", Host: host, Path: path}).String()
		at.Dial = w.serviceDialer(s.Namespace, s.Name, port)
	case c.URL != nil:
		at.URL = *c.URL
		if !strings.HasPrefix(at.URL, "https://") {
			fault = fmt.Errorf("%q is not an https URL", api.Truncate(at.URL, 256))
		}
	default:
		fault = errors.New("webhook configuration must have either service or URL")
	}
	sum := sha256.Sum256(c.CABundle)
	key := at.URL + " " + at.ServerName + " " + hex.EncodeToString(sum[:])
	if e := w.endpoints[key]; e != nil {
		return e
	}
	e := &endpoint{key: key, open: func() (*webhook.Endpoint, error) {
		if fault != nil {
			return nil, fault
		}
		return webhook.NewEndpoint(at)
	}}
	w.endpoints[key] = e
	return e
}

func (w *Webhooks) serviceDialer(
	namespace, name string, port int32,
) func(context.Context, string, string) (net.Conn, error) {
	if w.cfg.Services != nil {
		return w.cfg.Services.ForService(namespace, name, port)
	}
	return func(context.Context, string, string) (net.Conn, error) {
		return nil, fmt.Errorf("this replica cannot connect to service %s/%s", namespace, name)
	}
}
