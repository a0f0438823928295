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

// Default and maximum values of webhook configurations.
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
	home                string // namespace of the webhook's Service; "" = it is called by URL
	timeout             time.Duration
	ignores             bool // failure policy Ignore
	sideEffects         bool // has side effects in a dry run
	again               bool
	failures            *failures
	review              string // version of AdmissionReview; "" = no supported version
}

// compile returns the webhooks of a configuration object.
func (w *Webhooks) compile(o api.Object) *configuration {
	hooks, again := hooksOf(o)
	c := &configuration{name: o.GetName()}
	for i := range hooks {
		h := w.hook(c.name, &hooks[i])
		h.id = fmt.Sprintf("%s/%s/%d", c.name, h.name, i)
		h.again = again != nil && again[i] == arv1.IfNeededReinvocationPolicy
		c.hooks = append(c.hooks, h)
	}
	return c
}

func (w *Webhooks) hook(configuration string, from *arv1.ValidatingWebhook) *hook {
	h := &hook{
		configuration: configuration, name: from.Name, timeout: defaultTimeout, failures: new(failures),
		criteria: matching.OfWebhook(from.Rules, from.MatchPolicy, from.NamespaceSelector, from.ObjectSelector),
		ignores:  from.FailurePolicy != nil && *from.FailurePolicy == arv1.Ignore,
		endpoint: w.endpoint(from.ClientConfig),
	}
	if from.TimeoutSeconds != nil {
		h.timeout = min(max(time.Duration(*from.TimeoutSeconds)*time.Second, time.Second), maxTimeout)
	}
	if s := from.ClientConfig.Service; s != nil {
		h.home = s.Namespace
	}
	h.sideEffects = from.SideEffects == nil ||
		*from.SideEffects != arv1.SideEffectClassNone && *from.SideEffects != arv1.SideEffectClassNoneOnDryRun
	for _, v := range from.AdmissionReviewVersions {
		if v == "v1" || v == "v1beta1" {
			h.review = v
			break
		}
	}
	if len(from.MatchConditions) > 0 {
		list := from.MatchConditions
		h.conditions = cel.Keep(w.cfg.Expressions, func() (*matching.Conditions, *cel.Scope) {
			s := w.cfg.Expressions.NewScope(cel.Declared{Authorizer: true}, nil)
			return matching.NewConditions(list, s), s
		})
	}
	return h
}

// endpoint is the address of a webhook. Webhooks with the same address share it and its
// connections.
type endpoint struct {
	key  string
	open func() (*webhook.Endpoint, error) // called before the first request
	mu   sync.Mutex
	made *webhook.Endpoint
}

func (e *endpoint) get() (*webhook.Endpoint, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.made != nil {
		return e.made, nil
	}
	var err error
	e.made, err = e.open()
	return e.made, err
}

func (e *endpoint) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.made != nil {
		e.made.Close()
	}
}

// endpoint returns the shared endpoint for an address and creates it if necessary. The lock must be
// held.
func (w *Webhooks) endpoint(c arv1.WebhookClientConfig) *endpoint {
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
		at.URL = (&url.URL{Scheme: "https", Host: net.JoinHostPort(at.ServerName, strconv.Itoa(int(port))), Path: path}).String()
		at.Dial = w.dialer(s.Namespace, s.Name, port)
	case c.URL != nil:
		at.URL = *c.URL
		if !strings.HasPrefix(at.URL, "https://") {
			fault = fmt.Errorf("%q is no https URL", api.Clip(at.URL, 256))
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

func (w *Webhooks) dialer(namespace, name string, port int32) func(context.Context, string, string) (net.Conn, error) {
	if w.cfg.Services != nil {
		return w.cfg.Services.ForService(namespace, name, port)
	}
	return func(context.Context, string, string) (net.Conn, error) {
		return nil, fmt.Errorf("this replica has no way to service %s/%s", namespace, name)
	}
}
