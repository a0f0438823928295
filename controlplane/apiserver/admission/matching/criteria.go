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

// Criteria select the attempts to which a webhook, policy or policy binding applies.
type Criteria struct {
	rules, exclude []rule
	// everything makes the criteria match every resource, in place of rules.
	everything bool
	equivalent bool
	// namespaces and objects select by labels; nil = all.
	namespaces, objects labels.Selector
	fault               error // a selector is invalid
}

type rule struct {
	arv1.RuleWithOperations
	names []string // resource names; empty = all
}

// OfWebhook returns the criteria by which a webhook selects attempts: rules, match policy and
// selectors.
func OfWebhook(
	rules []arv1.RuleWithOperations, policy *arv1.MatchPolicyType, namespaces, objects *metav1.LabelSelector,
) Criteria {
	c := Criteria{equivalent: policy == nil || *policy == arv1.Equivalent}
	for _, r := range rules {
		c.rules = append(c.rules, rule{RuleWithOperations: r})
	}
	c.setSelectors(namespaces, objects)
	return c
}

// OfPolicy returns the criteria of an admission policy or binding. Without rules they match every
// resource.
func OfPolicy(m *arv1.MatchResources) Criteria {
	if m == nil {
		return Criteria{everything: true}
	}
	c := Criteria{
		rules: newRules(m.ResourceRules), exclude: newRules(m.ExcludeResourceRules),
		everything: len(m.ResourceRules) == 0,
		equivalent: m.MatchPolicy == nil || *m.MatchPolicy == arv1.Equivalent,
	}
	c.setSelectors(m.NamespaceSelector, m.ObjectSelector)
	return c
}

func newRules(rules []arv1.NamedRuleWithOperations) (out []rule) {
	for _, r := range rules {
		out = append(out, rule{r.RuleWithOperations, r.ResourceNames})
	}
	return out
}

func (c *Criteria) setSelectors(namespaces, objects *metav1.LabelSelector) {
	read := func(s *metav1.LabelSelector) labels.Selector {
		if s == nil || len(s.MatchLabels)+len(s.MatchExpressions) == 0 {
			return nil
		}
		out, err := metav1.LabelSelectorAsSelector(s)
		if err != nil {
			c.fault = err
		}
		return out
	}
	c.namespaces, c.objects = read(namespaces), read(objects)
}

// Match reports whether the criteria select the attempt. It also returns the target. The objects
// are converted to the API version of the target for evaluation.
func (c *Criteria) Match(ctx context.Context, a *Attempt, v Versions, cluster Cluster) (Target, bool, error) {
	if _, excluded := c.findMatch(c.exclude, a, v); excluded {
		return Target{}, false, nil
	}
	t, ok := a.Target(), c.everything
	if !ok {
		if t, ok = c.findMatch(c.rules, a, v); !ok {
			return Target{}, false, nil
		}
	}
	if c.fault != nil {
		return Target{}, false, apierrors.NewInternalError(c.fault)
	}
	if c.objects != nil && !matchesLabels(c.objects, a.Object) && !matchesLabels(c.objects, a.Old) {
		return Target{}, false, nil
	}
	home, err := c.inNamespace(ctx, a, cluster)
	return t, home && err == nil, err
}

// ExplicitResources returns the resources that the rules list by name. It omits subresources and
// rules with wildcards.
func (c *Criteria) ExplicitResources() (out []schema.GroupVersionResource) {
	for _, r := range c.rules {
		if slices.Contains(r.APIGroups, "*") || slices.Contains(r.APIVersions, "*") {
			continue
		}
		for _, group := range slices.Sorted(slices.Values(r.APIGroups)) {
			for _, version := range slices.Sorted(slices.Values(r.APIVersions)) {
				for _, resource := range slices.Sorted(slices.Values(r.Rule.Resources)) {
					if !strings.ContainsAny(resource, "*/") {
						out = append(out, schema.GroupVersionResource{Group: group, Version: version,
							Resource: resource})
					}
				}
			}
		}
	}
	return out
}

// findMatch returns the target of the first rule that matches the requested resource. If no rule
// does and the match policy is Equivalent, it returns an equivalent resource that a rule matches.
func (c *Criteria) findMatch(rules []rule, a *Attempt, v Versions) (Target, bool) {
	for i := range rules {
		if rules[i].matchesResource(a, a.Resource) {
			return a.Target(), true
		}
	}
	if !c.equivalent || len(rules) == 0 {
		return Target{}, false
	}
	others := v.Equivalents(a)
	for i := range rules {
		for _, t := range others {
			if rules[i].matchesResource(a, t.Resource) {
				return t, true
			}
		}
	}
	return Target{}, false
}

func (r *rule) matchesResource(a *Attempt, resource schema.GroupVersionResource) bool {
	return r.inScope(a) && containsAny(r.Operations, arv1.OperationAll, arv1.OperationType(a.Operation)) &&
		containsAny(r.APIGroups, "*", resource.Group) && containsAny(r.APIVersions, "*", resource.Version) &&
		r.matchesName(a) && r.matchesSubresource(resource.Resource, a.Subresource)
}

func (r *rule) matchesName(a *Attempt) bool {
	return len(r.names) == 0 || slices.Contains(r.names, a.Name)
}

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

func (r *rule) matchesSubresource(resource, subresource string) bool {
	return slices.ContainsFunc(r.Rule.Resources, func(want string) bool {
		res, sub, _ := strings.Cut(want, "/")
		return (res == "*" || res == resource) && (sub == "*" || sub == subresource)
	})
}

// matchesLabels reports whether the selector matches the object. An object without metadata never
// matches.
func matchesLabels(s labels.Selector, o runtime.Object) bool {
	m, ok := o.(metav1.Object)
	return ok && s.Matches(labels.Set(m.GetLabels()))
}

// inNamespace reports whether the namespace selector matches the attempt. Cluster-scoped objects
// always match. A Namespace is matched by its own labels.
func (c *Criteria) inNamespace(ctx context.Context, a *Attempt, cluster Cluster) (bool, error) {
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
	o, ok := cluster.Get(ctx, "namespaces", "", a.Namespace)
	if !ok {
		return false, apierrors.NewNotFound(schema.GroupResource{Resource: "namespaces"}, a.Namespace)
	}
	return c.namespaces.Matches(labels.Set(o.GetLabels())), nil
}
