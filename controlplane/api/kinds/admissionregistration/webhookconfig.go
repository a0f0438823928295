package admissionregistration

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/api/kinds/builder"
	"keelson.dev/keelson/controlplane/api/kinds/expressions"
)

// ValidatingWebhookKind returns the definition of the kind ValidatingWebhookConfiguration.
func ValidatingWebhookKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "ValidatingWebhookConfiguration", Conditional: true,
		Plural:   "validatingwebhookconfigurations",
		Singular: "validatingwebhookconfiguration", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingWebhookConfigurationList) *[]admissionv1.ValidatingWebhookConfiguration {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(c *admissionv1.ValidatingWebhookConfiguration) {
		for i := range c.Webhooks {
			w := &c.Webhooks[i]
			defaultWebhook(webhook{&w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
				&w.TimeoutSeconds,
				w.ClientConfig.Service, w.Rules})
		}
	})
	builder.CountGenerations(k, func(c *admissionv1.ValidatingWebhookConfiguration) any { return c.Webhooks })
	builder.AddValidation(k, func(c *admissionv1.ValidatingWebhookConfiguration) field.ErrorList {
		hooks := make([]admissionv1.MutatingWebhook, len(c.Webhooks))
		for i, w := range c.Webhooks {
			hooks[i] = admissionv1.MutatingWebhook{
				Name: w.Name, ClientConfig: w.ClientConfig, Rules: w.Rules, FailurePolicy: w.FailurePolicy,
				MatchPolicy:       w.MatchPolicy,
				NamespaceSelector: w.NamespaceSelector, ObjectSelector: w.ObjectSelector, SideEffects: w.SideEffects,
				TimeoutSeconds: w.TimeoutSeconds, AdmissionReviewVersions: w.AdmissionReviewVersions,
				MatchConditions: w.MatchConditions,
			}
		}
		return validateWebhooks(hooks, o)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Webhooks"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *admissionv1.ValidatingWebhookConfiguration, now time.Time) []any {
		return []any{c.Name, int64(len(c.Webhooks)), builder.Age(c, now)}
	})
	return k
}

// MutatingWebhookKind returns the definition of the kind MutatingWebhookConfiguration.
func MutatingWebhookKind(o *expressions.Options) *api.Kind {
	k := builder.New(builder.Names{
		GroupVersion: admissionv1.SchemeGroupVersion, Kind: "MutatingWebhookConfiguration", Conditional: true,
		Plural:   "mutatingwebhookconfigurations",
		Singular: "mutatingwebhookconfiguration", ClusterScoped: true, Categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingWebhookConfigurationList) *[]admissionv1.MutatingWebhookConfiguration {
		return &l.Items
	})
	k.Writes.Default = builder.Default(func(c *admissionv1.MutatingWebhookConfiguration) {
		for i := range c.Webhooks {
			w := &c.Webhooks[i]
			builder.SetDefaultPtr(&w.ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
			defaultWebhook(webhook{&w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector,
				&w.TimeoutSeconds,
				w.ClientConfig.Service, w.Rules})
		}
	})
	builder.CountGenerations(k, func(c *admissionv1.MutatingWebhookConfiguration) any { return c.Webhooks })
	builder.AddValidation(k, func(c *admissionv1.MutatingWebhookConfiguration) field.ErrorList {
		return validateWebhooks(c.Webhooks, o)
	})
	k.Lists.Columns = builder.Columns(builder.NameColumn, builder.NumberColumn("Webhooks"), builder.AgeColumn)
	k.Lists.Row = builder.Row(func(c *admissionv1.MutatingWebhookConfiguration, now time.Time) []any {
		return []any{c.Name, int64(len(c.Webhooks)), builder.Age(c, now)}
	})
	return k
}

// webhook contains pointers to the optional fields that both kinds of webhooks have, for
// defaulting.
type webhook struct {
	failure    **admissionv1.FailurePolicyType
	match      **admissionv1.MatchPolicyType
	namespaces **metav1.LabelSelector
	objects    **metav1.LabelSelector
	timeout    **int32
	service    *admissionv1.ServiceReference
	rules      []admissionv1.RuleWithOperations
}

// Default values of a webhook's fields.
const (
	webhookSeconds = 10
	webhookPort    = 443
)

func defaultWebhook(w webhook) {
	builder.SetDefaultPtr(w.failure, admissionv1.Fail)
	builder.SetDefaultPtr(w.match, admissionv1.Equivalent)
	builder.SetDefaultPtr(w.namespaces, metav1.LabelSelector{})
	builder.SetDefaultPtr(w.objects, metav1.LabelSelector{})
	builder.SetDefaultPtr(w.timeout, webhookSeconds)
	if w.service != nil {
		builder.SetDefaultPtr(&w.service.Port, webhookPort)
	}
	for i := range w.rules {
		builder.SetDefaultPtr(&w.rules[i].Scope, admissionv1.AllScopes)
	}
}
