package matching

import (
	"context"
	"fmt"
	"slices"
	"strings"

	arv1 "k8s.io/api/admissionregistration/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Criteria select the attempts to which a webhook, policy or binding applies.
type Criteria struct {
	rules, exclude []rule
	// everything makes the criteria match every resource, in place of rules.
	everything bool
	equivalent bool
	// namespaces and objects select by labels; nil = all.
	namespaces, objects labels.Selector
	broken              error // a selector is invalid
}

type rule struct {
	arv1.RuleWithOperations
	names []string // resource names; empty = all
}

// OfWebhook returns the criteria of a webhook.
func OfWebhook(rules []arv1.RuleWithOperations, policy *arv1.MatchPolicyType, namespaces, objects *metav1.LabelSelector) Criteria {
	c := Criteria{equivalent: policy == nil || *policy == arv1.Equivalent}
	for _, r := range rules {
		c.rules = append(c.rules, rule{RuleWithOperations: r})
	}
	c.selectors(namespaces, objects)
	return c
}

// OfPolicy returns the criteria of an admission policy or binding. Without rules they match every
// resource.
func OfPolicy(m *arv1.MatchResources) Criteria {
	if m == nil {
		return Criteria{everything: true}
	}
	c := Criteria{
		rules: named(m.ResourceRules), exclude: named(m.ExcludeResourceRules), everything: len(m.ResourceRules) == 0,
		equivalent: m.MatchPolicy == nil || *m.MatchPolicy == arv1.Equivalent,
	}
	c.selectors(m.NamespaceSelector, m.ObjectSelector)
	return c
}

func named(rules []arv1.NamedRuleWithOperations) (out []rule) {
	for _, r := range rules {
		out = append(out, rule{r.RuleWithOperations, r.ResourceNames})
	}
	return out
}

func (c *Criteria) selectors(namespaces, objects *metav1.LabelSelector) {
	read := func(s *metav1.LabelSelector) labels.Selector {
		if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			return nil
		}
		out, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			c.broken = err
		}
		return out
	}
	c.namespaces, c.objects = read(namespaces), read(objects)
}

// Match reports whether the criteria select the attempt. It also returns the target version to
// which the objects are converted for evaluation.
func (c *Criteria) Match(ctx context.Context, a *Attempt, v Versions, in Cluster) (Target, bool, error) {
	if _, excluded := c.find(c.exclude, a, v); excluded {
		return Target{}, false, nil
	}
	t, ok := a.Target(), c.everything
	if !ok {
		if t, ok = c.find(c.rules, a, v); !ok {
			return Target{}, false, nil
		}
	}
	if c.broken != nil {
		return Target{}, false, apierrors.NewInternalError(c.broken)
	}
	if c.objects != nil && !labelled(c.objects, a.Object) && !labelled(c.objects, a.Old) {
		return Target{}, false, nil
	}
	home, err := c.inNamespace(ctx, a, in)
	return t, home && err == nil, err
}

// Resources returns the resources that the rules name without wildcards and subresources.
func (c *Criteria) Resources() (out []schema.GroupVersionResource) {
	for _, r := range c.rules {
		if slices.Contains(r.APIGroups, "*") || slices.Contains(r.APIVersions, "*") {
			continue
		}
		for _, group := range slices.Sorted(slices.Values(r.APIGroups)) {
			for _, version := range slices.Sorted(slices.Values(r.APIVersions)) {
				for _, resource := range slices.Sorted(slices.Values(r.Rule.Resources)) {
					if !strings.ContainsAny(resource, "*/") {
						out = append(out, schema.GroupVersionResource{Group: group, Version: version, Resource: resource})
					}
				}
			}
		}
	}
	return out
}

// find returns the target of the first rule that matches the requested resource. Otherwise, if the
// match policy is Equivalent, it returns that of a rule that matches an equivalent resource.
func (c *Criteria) find(rules []rule, a *Attempt, v Versions) (Target, bool) {
	for i := range rules {
		if rules[i].about(a, a.Resource) {
			return a.Target(), true
		}
	}
	if !c.equivalent || len(rules) == 0 {
		return Target{}, false
	}
	others := v.Equivalents(a)
	for i := range rules {
		for _, t := range others {
			if rules[i].about(a, t.Resource) {
				return t, true
			}
		}
	}
	return Target{}, false
}

func (r *rule) about(a *Attempt, at schema.GroupVersionResource) bool {
	return r.inScope(a) && has(r.Operations, arv1.OperationAll, arv1.OperationType(a.Operation)) &&
		has(r.APIGroups, "*", at.Group) && has(r.APIVersions, "*", at.Version) &&
		r.named(a) && r.resource(at.Resource, a.Subresource)
}

func (r *rule) named(a *Attempt) bool { return len(r.names) == 0 || slices.Contains(r.names, a.Name) }

func (r *rule) inScope(a *Attempt) bool {
	if r.Scope == nil {
		return true
	}
	namespaced := a.Namespace != "" && !a.isNamespace()
	switch *r.Scope {
	case arv1.NamespacedScope:
		return namespaced
	case arv1.ClusterScope:
		return !namespaced
	}
	return *r.Scope == arv1.AllScopes
}

func (r *rule) resource(resource, subresource string) bool {
	return slices.ContainsFunc(r.Rule.Resources, func(want string) bool {
		res, sub, _ := strings.Cut(want, "/")
		return (res == "*" || res == resource) && (sub == "*" || sub == subresource)
	})
}

// labelled reports whether the selector matches the object. An object without metadata never
// matches.
func labelled(s labels.Selector, o runtime.Object) bool {
	m, ok := o.(metav1.Object)
	return ok && s.Matches(labels.Set(m.GetLabels()))
}

// inNamespace reports whether the namespace selector matches the attempt. Cluster-scoped objects
// always match. A Namespace is matched by its own labels.
func (c *Criteria) inNamespace(ctx context.Context, a *Attempt, in Cluster) (bool, error) {
	if c.namespaces == nil || a.Namespace == "" && !a.isNamespace() {
		return true, nil
	}
	if a.isNamespace() && a.Subresource == "" && (a.Operation == api.Create || a.Operation == api.Update) {
		m, ok := a.Object.(metav1.Object)
		if !ok {
			return false, apierrors.NewInternalError(fmt.Errorf("a %T has no labels", a.Object))
		}
		return c.namespaces.Matches(labels.Set(m.GetLabels())), nil
	}
	o, ok := in.Get(ctx, "namespaces", "", a.Namespace)
	if !ok {
		return false, apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, a.Namespace)
	}
	return c.namespaces.Matches(labels.Set(o.GetLabels())), nil
}
