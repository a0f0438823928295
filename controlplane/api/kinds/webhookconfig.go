package kinds

import (
	"time"

	admissionv1 "k8s.io/api/admissionregistration/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/validation/field"

	"keelson.dev/keelson/controlplane/api"
)

func validatingWebhookKind(o *options) *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "ValidatingWebhookConfiguration", conditional: true, plural: "validatingwebhookconfigurations",
		singular: "validatingwebhookconfiguration", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.ValidatingWebhookConfigurationList) *[]admissionv1.ValidatingWebhookConfiguration {
		return &l.Items
	})
	k.Default = defaults(func(c *admissionv1.ValidatingWebhookConfiguration) {
		for i := range c.Webhooks {
			w := &c.Webhooks[i]
			defaultWebhook(webhook{&w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector, &w.TimeoutSeconds,
				w.ClientConfig.Service, w.Rules})
		}
	})
	countsGeneration(k, func(c *admissionv1.ValidatingWebhookConfiguration) any { return c.Webhooks })
	check(k, func(c *admissionv1.ValidatingWebhookConfiguration) field.ErrorList {
		hooks := make([]admissionv1.MutatingWebhook, len(c.Webhooks))
		for i, w := range c.Webhooks {
			hooks[i] = admissionv1.MutatingWebhook{
				Name: w.Name, ClientConfig: w.ClientConfig, Rules: w.Rules, FailurePolicy: w.FailurePolicy, MatchPolicy: w.MatchPolicy,
				NamespaceSelector: w.NamespaceSelector, ObjectSelector: w.ObjectSelector, SideEffects: w.SideEffects,
				TimeoutSeconds: w.TimeoutSeconds, AdmissionReviewVersions: w.AdmissionReviewVersions, MatchConditions: w.MatchConditions,
			}
		}
		return validateWebhooks(hooks, o)
	})
	k.Columns = columns(nameCol, numCol("Webhooks"), ageCol)
	k.Row = row(func(c *admissionv1.ValidatingWebhookConfiguration, now time.Time) []any {
		return []any{c.Name, int64(len(c.Webhooks)), age(c, now)}
	})
	return k
}

func mutatingWebhookKind(o *options) *api.Kind {
	k := newKind(names{
		gv: admissionv1.SchemeGroupVersion, kind: "MutatingWebhookConfiguration", conditional: true, plural: "mutatingwebhookconfigurations",
		singular: "mutatingwebhookconfiguration", global: true, categories: []string{"api-extensions"},
	}, func(l *admissionv1.MutatingWebhookConfigurationList) *[]admissionv1.MutatingWebhookConfiguration {
		return &l.Items
	})
	k.Default = defaults(func(c *admissionv1.MutatingWebhookConfiguration) {
		for i := range c.Webhooks {
			w := &c.Webhooks[i]
			setDefaultPtr(&w.ReinvocationPolicy, admissionv1.NeverReinvocationPolicy)
			defaultWebhook(webhook{&w.FailurePolicy, &w.MatchPolicy, &w.NamespaceSelector, &w.ObjectSelector, &w.TimeoutSeconds,
				w.ClientConfig.Service, w.Rules})
		}
	})
	countsGeneration(k, func(c *admissionv1.MutatingWebhookConfiguration) any { return c.Webhooks })
	check(k, func(c *admissionv1.MutatingWebhookConfiguration) field.ErrorList {
		return validateWebhooks(c.Webhooks, o)
	})
	k.Columns = columns(nameCol, numCol("Webhooks"), ageCol)
	k.Row = row(func(c *admissionv1.MutatingWebhookConfiguration, now time.Time) []any {
		return []any{c.Name, int64(len(c.Webhooks)), age(c, now)}
	})
	return k
}

// webhook is what both kinds of webhooks have and may leave out.
type webhook struct {
	failure    **admissionv1.FailurePolicyType
	match      **admissionv1.MatchPolicyType
	namespaces **metav1.LabelSelector
	objects    **metav1.LabelSelector
	timeout    **int32
	service    *admissionv1.ServiceReference
	rules      []admissionv1.RuleWithOperations
}

// Defaults of a webhook.
const (
	webhookSeconds = 10
	webhookPort    = 443
)

func defaultWebhook(w webhook) {
	setDefaultPtr(w.failure, admissionv1.Fail)
	setDefaultPtr(w.match, admissionv1.Equivalent)
	setDefaultPtr(w.namespaces, metav1.LabelSelector{})
	setDefaultPtr(w.objects, metav1.LabelSelector{})
	setDefaultPtr(w.timeout, webhookSeconds)
	if w.service != nil {
		setDefaultPtr(&w.service.Port, webhookPort)
	}
	for i := range w.rules {
		setDefaultPtr(&w.rules[i].Scope, admissionv1.AllScopes)
	}
}
