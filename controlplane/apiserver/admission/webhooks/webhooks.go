// Package webhooks asks the admission webhooks of a cluster. What stands in the configurations is compiled once per
// change; an attempt that concerns no webhook is looked at and nothing is made for it. An answer is bounded in bytes,
// a question in time: by the webhook's own timeout, and all questions about one write by the deadline of the request.
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

// Services are ways to what stands behind a Service, whatever the address.
type Services interface {
	ForService(namespace, name string, port int32) func(ctx context.Context, _, _ string) (net.Conn, error)
}

// Config is what webhooks are asked with.
type Config struct {
	Versions    matching.Versions
	Cluster     matching.Cluster
	Services    Services       // nil = webhooks behind a Service cannot be called
	Expressions *cel.Admission // compiles match conditions
	// Authorizer answers the questions of match conditions, for one request.
	Authorizer func(ctx context.Context) authorizer.UnconditionalAuthorizer
	// Own says that a user is a part of the cluster itself, whose writes may be what brings a webhook back.
	Own     func(api.User) bool
	Metrics prometheus.Registerer // nil = nothing is counted for others to see
	Log     *slog.Logger
}

// Webhooks are the webhooks of a cluster. Safe for concurrent use.
type Webhooks struct {
	cfg     Config
	metrics *metrics
	now     atomic.Pointer[set] // nil = none exist

	writing    sync.Mutex
	mutating   map[string]*configuration // by name of the object
	validating map[string]*configuration
	endpoints  map[string]*endpoint
}

// set is what is asked now.
type set struct {
	mutating, validating []*hook
	// homes are the namespaces in which services of webhooks run.
	homes map[string]bool
}

// configuration is one object with webhooks.
type configuration struct {
	name  string
	hooks []*hook
}

// New returns webhooks without any.
func New(c Config) *Webhooks {
	return &Webhooks{
		cfg: c, metrics: newMetrics(c.Metrics),
		mutating: map[string]*configuration{}, validating: map[string]*configuration{}, endpoints: map[string]*endpoint{},
	}
}

// None says that there are no webhooks.
func (w *Webhooks) None() bool { return w.now.Load() == nil }

// Mutating keeps the mutating webhooks equal to the objects that it is given.
func (w *Webhooks) Mutating() Sink { return Sink{w, w.mutating} }

// Validating does so with validating webhooks.
func (w *Webhooks) Validating() Sink { return Sink{w, w.validating} }

// Sink takes configurations: first all, then changes.
type Sink struct {
	of *Webhooks
	to map[string]*configuration
}

// Replace sets all configurations.
func (s Sink) Replace(all []api.Object) {
	s.change(func() {
		clear(s.to)
		for _, o := range all {
			s.to[o.GetName()] = s.of.compile(o)
		}
	})
}

// Set adds or changes one.
func (s Sink) Set(o api.Object) { s.change(func() { s.to[o.GetName()] = s.of.compile(o) }) }

// Remove removes one.
func (s Sink) Remove(o api.Object) { s.change(func() { delete(s.to, o.GetName()) }) }

func (s Sink) change(do func()) {
	s.of.writing.Lock()
	defer s.of.writing.Unlock()
	do()
	s.of.publish()
}

// publish makes what has been compiled the set of now, and closes the endpoints that nobody uses any more.
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

// ordered lists the webhooks by the name of their configuration, and within it as they stand.
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

// configurations of both kinds are read alike.
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
