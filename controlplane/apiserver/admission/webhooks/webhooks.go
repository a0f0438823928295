// Package webhooks calls the admission webhooks of a cluster. Configurations are compiled once per
// change. An attempt that matches no webhook allocates nothing. The size of a response is limited.
// A webhook's timeout limits the duration of a call. The request's deadline limits the duration of
// all calls for one write.
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
	"k8s.io/utils/ptr"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/admission/matching"
	"keelson.dev/keelson/controlplane/apiserver/cel"
)

// Services returns a dial function for the backends of a Service. The function ignores the address
// that it is given.
type Services interface {
	ForService(namespace, name string, port int32) func(ctx context.Context, _, _ string) (net.Conn, error)
}

// Config contains the dependencies of Webhooks.
type Config struct {
	Versions    matching.Versions
	Cluster     matching.Cluster
	Services    Services       // nil = webhooks behind a Service cannot be called
	Expressions *cel.Admission // compiles match conditions
	// Authorizer returns the authorizer for the variable authorizer in the match conditions of one
	// request.
	Authorizer func(ctx context.Context) authorizer.UnconditionalAuthorizer
	// Own reports whether a user is a component of the cluster itself. A webhook may need writes of
	// such a component to recover (see isEssentialWrite).
	Own     func(api.User) bool
	Metrics prometheus.Registerer // nil = metrics are not registered
	Log     *slog.Logger
}

// Webhooks are the admission webhooks of a cluster. Safe for concurrent use.
type Webhooks struct {
	cfg     Config
	metrics *metrics
	current atomic.Pointer[hookSet] // nil = no webhooks

	writeMu    sync.Mutex
	mutating   map[string]*configuration // by name of the configuration object
	validating map[string]*configuration
	endpoints  map[string]*endpoint
}

// hookSet contains the current webhooks, which are called for each write.
type hookSet struct {
	mutating, validating []*hook
	// serviceNamespaces are the namespaces of the Services of webhooks.
	serviceNamespaces map[string]bool
}

// configuration is a webhook configuration object with its compiled webhooks.
type configuration struct {
	name  string
	hooks []*hook
}

// New returns Webhooks that contain no webhook yet; the sinks add them.
func New(c Config) *Webhooks {
	return &Webhooks{
		cfg: c, metrics: newMetrics(c.Metrics),
		mutating: map[string]*configuration{}, validating: map[string]*configuration{},
		endpoints: map[string]*endpoint{},
	}
}

// IsEmpty reports whether there are no webhooks.
func (w *Webhooks) IsEmpty() bool { return w.current.Load() == nil }

// Mutating returns the sink for MutatingWebhookConfigurations.
func (w *Webhooks) Mutating() Sink { return Sink{w, w.mutating} }

// Validating returns the sink for ValidatingWebhookConfigurations.
func (w *Webhooks) Validating() Sink { return Sink{w, w.validating} }

// Sink receives the webhook configurations of one kind: first all existing objects, then each
// change.
type Sink struct {
	engine         *Webhooks
	configurations map[string]*configuration
}

// Replace replaces all webhook configurations of the sink's kind by the given objects.
func (s Sink) Replace(objects []api.Object) {
	s.updateConfigurations(func() {
		clear(s.configurations)
		for _, o := range objects {
			s.configurations[o.GetName()] = s.engine.compileConfiguration(o)
		}
	})
}

// Set adds or replaces a webhook configuration.
func (s Sink) Set(o api.Object) {
	s.updateConfigurations(func() { s.configurations[o.GetName()] = s.engine.compileConfiguration(o) })
}

// Remove removes a webhook configuration.
func (s Sink) Remove(o api.Object) {
	s.updateConfigurations(func() { delete(s.configurations, o.GetName()) })
}

func (s Sink) updateConfigurations(update func()) {
	s.engine.writeMu.Lock()
	defer s.engine.writeMu.Unlock()
	update()
	s.engine.publishSet()
}

// publishSet makes the compiled configurations the current set and closes endpoints that are no
// longer used.
func (w *Webhooks) publishSet() {
	next := &hookSet{mutating: orderedHooks(w.mutating), validating: orderedHooks(w.validating),
		serviceNamespaces: map[string]bool{}}
	used := map[string]bool{}
	names := map[string]bool{}
	for _, h := range slices.Concat(next.mutating, next.validating) {
		used[h.endpoint.key], names[h.name] = true, true
		if h.serviceNamespace != "" {
			next.serviceNamespaces[h.serviceNamespace] = true
		}
	}
	for key, e := range w.endpoints {
		if !used[key] {
			e.closeEndpoint()
			delete(w.endpoints, key)
		}
	}
	w.metrics.retainSeries(names)
	if len(next.mutating)+len(next.validating) == 0 {
		next = nil
	}
	w.current.Store(next)
}

// orderedHooks returns the webhooks sorted by the name of their configuration object. Webhooks of
// the same configuration keep their order.
func orderedHooks(configurations map[string]*configuration) (out []*hook) {
	var all []*configuration
	for _, c := range configurations {
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

// hooksOf returns the webhooks of a configuration object. Mutating webhooks are converted to the
// type of validating ones, and reinvocation contains their reinvocation policies.
func hooksOf(o api.Object) (out []arv1.ValidatingWebhook, reinvocation []arv1.ReinvocationPolicyType) {
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
			policy := ptr.Deref(h.ReinvocationPolicy, arv1.NeverReinvocationPolicy)
			reinvocation = append(reinvocation, policy)
		}
	}
	return out, reinvocation
}
