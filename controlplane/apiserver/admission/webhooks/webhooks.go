// Package webhooks calls the admission webhooks of a cluster. Configurations are compiled once per
// change. An attempt that matches no webhook allocates nothing. The size of a response is limited.
// The duration of a call is limited by the webhook's timeout, and that of all calls for a write by
// the request's deadline.
package webhooks

import (
	"cmp"
	"context"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
	arv1 "k8s.io/api/admissionregistration/v1"
	"k8s.io/apiserver/pkg/authorization/authorizer"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// Services returns dial functions that reach a backend of a Service. The dialed address is ignored.
type Services interface {
	ForService(namespace, name string, port int32) func(ctx context.Context, _, _ string) (net.Conn, error)
}

// Config contains the dependencies of Webhooks.
type Config struct {
	Versions    matching.Versions
	Cluster     matching.Cluster
	Services    Services       // nil = webhooks behind a Service cannot be called
	Expressions *cel.Admission // compiles match conditions
	// Authorizer returns the authorizer that the match conditions of one request use.
	Authorizer func(ctx context.Context) authorizer.UnconditionalAuthorizer
	// Own reports whether a user is a component of the cluster itself. A webhook may need writes of
	// such a component to recover (see lifeline).
	Own     func(api.User) bool
	Metrics prometheus.Registerer // nil = metrics are not registered
	Log     *slog.Logger
}

// Webhooks are the admission webhooks of a cluster. Safe for concurrent use.
type Webhooks struct {
	cfg     Config
	metrics *metrics
	now     atomic.Pointer[set] // nil = no webhooks

	writing    sync.Mutex
	mutating   map[string]*configuration // by name of the configuration object
	validating map[string]*configuration
	endpoints  map[string]*endpoint
}

// set contains the webhooks that are called.
type set struct {
	mutating, validating []*hook
	// homes are the namespaces of the Services of webhooks.
	homes map[string]bool
}

// configuration is a webhook configuration object with its compiled webhooks.
type configuration struct {
	name  string
	hooks []*hook
}

// New returns Webhooks without any webhook.
func New(c Config) *Webhooks {
	return &Webhooks{
		cfg: c, metrics: newMetrics(c.Metrics),
		mutating: map[string]*configuration{}, validating: map[string]*configuration{}, endpoints: map[string]*endpoint{},
	}
}

// None reports whether there are no webhooks.
func (w *Webhooks) None() bool { return w.now.Load() == nil }

// Mutating returns the sink for MutatingWebhookConfigurations.
func (w *Webhooks) Mutating() Sink { return Sink{w, w.mutating} }

// Validating returns the sink for ValidatingWebhookConfigurations.
func (w *Webhooks) Validating() Sink { return Sink{w, w.validating} }

// Sink receives webhook configurations: first all, then changes.
type Sink struct {
	of *Webhooks
	to map[string]*configuration
}

// Replace sets all configurations of the sink's kind.
func (s Sink) Replace(all []api.Object) {
	s.change(func() {
		clear(s.to)
		for _, o := range all {
			s.to[o.GetName()] = s.of.compile(o)
		}
	})
}

// Set adds or replaces a configuration.
func (s Sink) Set(o api.Object) { s.change(func() { s.to[o.GetName()] = s.of.compile(o) }) }

// Remove removes a configuration.
func (s Sink) Remove(o api.Object) { s.change(func() { delete(s.to, o.GetName()) }) }

func (s Sink) change(do func()) {
	s.of.writing.Lock()
	defer s.of.writing.Unlock()
	do()
	s.of.publish()
}

// publish makes the compiled configurations the current set and closes endpoints that are no longer
// used.
func (w *Webhooks) publish() {
	next := &set{mutating: ordered(w.mutating), validating: ordered(w.validating), homes: map[string]bool{}}
	used := map[string]bool{}
	names := map[string]bool{}
	for _, h := range slices.Concat(next.mutating, next.validating) {
		used[h.endpoint.key], names[h.name] = true, true
		if h.home != "" {
			next.homes[h.home] = true
		}
	}
	for key, e := range w.endpoints {
		if !used[key] {
			e.close()
			delete(w.endpoints, key)
		}
	}
	w.metrics.keep(names)
	if len(next.mutating)+len(next.validating) == 0 {
		next = nil
	}
	w.now.Store(next)
}

// ordered returns the webhooks sorted by the name of their configuration, and within it in their
// order.
func ordered(of map[string]*configuration) (out []*hook) {
	var all []*configuration
	for _, c := range of {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *configuration) int { return cmp.Compare(a.name, b.name) })
	for _, c := range all {
		out = append(out, c.hooks...)
	}
	for i, h := range out {
		h := *h
		h.index = i
		out[i] = &h
	}
	return out
}

// hooksOf returns the webhooks of a configuration object of either kind, mutating ones in the
// validating form. again contains the reinvocation policies of mutating webhooks.
func hooksOf(o api.Object) (out []arv1.ValidatingWebhook, again []arv1.ReinvocationPolicyType) {
	switch o := o.(type) {
	case *arv1.ValidatingWebhookConfiguration:
		return o.Webhooks, nil
	case *arv1.MutatingWebhookConfiguration:
		for _, h := range o.Webhooks {
			out = append(out, arv1.ValidatingWebhook{
				Name: h.Name, ClientConfig: h.ClientConfig, Rules: h.Rules, FailurePolicy: h.FailurePolicy,
				MatchPolicy: h.MatchPolicy, NamespaceSelector: h.NamespaceSelector, ObjectSelector: h.ObjectSelector,
				SideEffects: h.SideEffects, TimeoutSeconds: h.TimeoutSeconds,
				AdmissionReviewVersions: h.AdmissionReviewVersions, MatchConditions: h.MatchConditions,
			})
			policy := arv1.NeverReinvocationPolicy
			if h.ReinvocationPolicy != nil {
				policy = *h.ReinvocationPolicy
			}
			again = append(again, policy)
		}
	}
	return out, again
}
