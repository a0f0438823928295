package authz

import (
	"context"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"keelson.dev/keelson/controlplane/api"
)

// Escalation is an admission step that prevents users from granting permissions that they do not
// have. A user that writes a role must have all permissions in it, or the verb "escalate" on the
// role. A user that writes a binding must have all permissions of the bound role, or the verb
// "bind" on it.
type Escalation struct {
	RBAC       *RBAC
	Authorizer Authorizer
}

// Admit rejects a write of an RBAC object that escalates permissions. It allows all other requests.
func (e Escalation) Admit(ctx context.Context, a *api.Attempt) error {
	r, old := a.Request, a.Stored
	if a.Whole == nil || r.Kind.GVK.Group != rbacv1.GroupName {
		return nil
	}
	switch o := a.Whole.(type) {
	case *rbacv1.Role:
		before, _ := old.(*rbacv1.Role)
		if before != nil && reflect.DeepEqual(before.Rules, o.Rules) {
			return nil
		}
		return e.checkRole(ctx, r, o.Namespace, o.Name, o.Rules)
	case *rbacv1.ClusterRole:
		before, _ := old.(*rbacv1.ClusterRole)
		if before != nil && grantsAsBefore(o, before) {
			return nil
		}
		rules := o.Rules
		if o.AggregationRule != nil || before != nil && before.AggregationRule != nil {
			// The rules to be aggregated are unknown and could grant everything.
			rules = append(slices.Clone(rules), newRule("*", "*", "*"), pathRule("*", "*"))
		}
		return e.checkRole(ctx, r, "", o.Name, rules)
	case *rbacv1.RoleBinding:
		before, _ := old.(*rbacv1.RoleBinding)
		if before != nil && before.RoleRef == o.RoleRef && reflect.DeepEqual(before.Subjects, o.Subjects) {
			return nil
		}
		return e.checkBinding(ctx, r, o.Namespace, o.Name, o.RoleRef)
	case *rbacv1.ClusterRoleBinding:
		before, _ := old.(*rbacv1.ClusterRoleBinding)
		if before != nil && before.RoleRef == o.RoleRef && reflect.DeepEqual(before.Subjects, o.Subjects) {
			return nil
		}
		return e.checkBinding(ctx, r, "", o.Name, o.RoleRef)
	}
	return nil
}

// grantsAsBefore reports whether a ClusterRole grants the same permissions as its stored state old.
// The labels must be equal too, because other roles select its rules by these labels (aggregation).
func grantsAsBefore(o, old *rbacv1.ClusterRole) bool {
	return reflect.DeepEqual(old.Rules, o.Rules) && reflect.DeepEqual(old.AggregationRule, o.AggregationRule) &&
		maps.Equal(old.Labels, o.Labels)
}

func (e Escalation) checkRole(
	ctx context.Context, r *api.Request, namespace, name string, rules []rbacv1.PolicyRule,
) error {
	return e.requireRules(ctx, r, "escalate", r.Kind.Resource, namespace, name, name, rules)
}

func (e Escalation) checkBinding(
	ctx context.Context, r *api.Request, namespace, name string, ref rbacv1.RoleRef,
) error {
	rules, ok := e.RBAC.Role(ref.Kind, namespace, ref.Name)
	if !ok {
		// A role that does not exist yet could later grant everything.
		rules = []rbacv1.PolicyRule{newRule("*", "*", "*"), pathRule("*", "*")}
	}
	err := e.requireRules(ctx, r, "bind", strings.ToLower(ref.Kind)+"s", namespace, ref.Name, name, rules)
	if err != nil && !ok {
		gr := schema.GroupResource{Group: rbacv1.GroupName, Resource: strings.ToLower(ref.Kind) + "s"}
		return apierrors.NewNotFound(gr, ref.Name)
	}
	return err
}

func (e Escalation) requireRules(
	ctx context.Context, r *api.Request, verb, resource, namespace, role, name string, rules []rbacv1.PolicyRule,
) error {
	d, _ := e.Authorizer.Authorize(ctx, &Attributes{
		User: r.User, Verb: verb, Namespace: namespace, Name: role,
		APIGroup: rbacv1.GroupName, APIVersion: "v1", Resource: resource,
	})
	if d == Allow {
		return nil
	}
	missing := Uncovered(e.RBAC.Rules(r.User, namespace), rules)
	if len(missing) == 0 {
		return nil
	}
	words := make([]string, 0, len(missing))
	for i := range missing {
		words = append(words, compactRule(&missing[i]))
	}
	slices.Sort(words)
	return apierrors.NewForbidden(r.Kind.GroupResource(), name, fmt.Errorf(
		"user %q (groups=%q) is attempting to grant RBAC permissions not currently held:\n%s",
		r.User.Name, r.User.Groups, strings.Join(slices.Compact(words), "\n")))
}

// compactRule formats a rule with a single value per field in Kubernetes' notation:
// {APIGroups:[""], Resources:["pods"], Verbs:["get"]}.
func compactRule(r *rbacv1.PolicyRule) string {
	var parts []string
	add := func(name string, values []string) {
		if len(values) > 0 {
			parts = append(parts, fmt.Sprintf("%s:%s", name, strings.ReplaceAll(fmt.Sprintf("%q", values), " ", ",")))
		}
	}
	add("NonResourceURLs", r.NonResourceURLs)
	add("APIGroups", r.APIGroups)
	add("Resources", r.Resources)
	add("ResourceNames", r.ResourceNames)
	add("Verbs", r.Verbs)
	return "{" + strings.Join(parts, ", ") + "}"
}
