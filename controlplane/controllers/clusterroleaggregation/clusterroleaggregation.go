// Package clusterroleaggregation maintains the rules of ClusterRoles with an aggregation rule: they
// are the rules of the ClusterRoles that the aggregation rule selects.
package clusterroleaggregation

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"slices"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
)

// PlanRules returns the rules that role must have, and whether they differ from its rules. They are
// the rules of all selected roles in the order of the roles' names, without duplicates. A role
// never selects itself. A role without an aggregation rule is not changed.
func PlanRules(role *rbacv1.ClusterRole, all []*rbacv1.ClusterRole) (rules []rbacv1.PolicyRule, changed bool) {
	if role.AggregationRule == nil {
		return nil, false
	}
	rules = []rbacv1.PolicyRule{}
	for _, one := range selectRoles(role, all) {
		for _, r := range one.Rules {
			if !slices.ContainsFunc(rules, func(have rbacv1.PolicyRule) bool { return reflect.DeepEqual(have, r) }) {
				rules = append(rules, r)
			}
		}
	}
	return rules, len(rules) != len(role.Rules) || len(rules) > 0 && !reflect.DeepEqual(rules, role.Rules)
}

// selectRoles returns those of the given roles that match a selector in the aggregation rule of
// role, sorted by name.
func selectRoles(role *rbacv1.ClusterRole, roles []*rbacv1.ClusterRole) []*rbacv1.ClusterRole {
	var out []*rbacv1.ClusterRole
	for i := range role.AggregationRule.ClusterRoleSelectors {
		s, err := metav1.LabelSelectorAsSelector(&role.AggregationRule.ClusterRoleSelectors[i])
		if err != nil {
			continue // validation refuses invalid selectors
		}
		for _, one := range roles {
			if one.Name != role.Name && s.Matches(labels.Set(one.Labels)) && !slices.Contains(out, one) {
				out = append(out, one)
			}
		}
	}
	slices.SortFunc(out, func(a, b *rbacv1.ClusterRole) int { return cmp.Compare(a.Name, b.Name) })
	return out
}

// New returns the controller of aggregated ClusterRoles.
func New(d engine.Deps) *engine.Descriptor {
	roles := client.Informer[*rbacv1.ClusterRole](d.Informers)
	return &engine.Descriptor{
		Name:    "clusterrole-aggregation-controller",
		Workers: 1,
		Watches: []engine.Watch{engine.OnInformer(roles, func(engine.Change[*rbacv1.ClusterRole]) []engine.Key {
			var keys []engine.Key
			for _, r := range engine.CachedAll[*rbacv1.ClusterRole](roles) {
				if r.AggregationRule != nil {
					keys = append(keys, engine.KeyOf(r))
				}
			}
			return keys
		})},
		Rules: []rbacv1.PolicyRule{
			// The verb escalate permits granting rules that the controller does not have.
			{
				APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"},
				Verbs: []string{"escalate", "get", "list", "update", "watch"},
			},
		},
		Lead: func(t *engine.Term) engine.Reconcile {
			view := engine.ViewOf[*rbacv1.ClusterRole](t, roles)
			return func(ctx context.Context, key engine.Key) (time.Duration, error) {
				return 0, reconcileClusterRole(ctx, t, view, key.Name)
			}
		},
	}
}

func reconcileClusterRole(
	ctx context.Context, t *engine.Term, view *engine.View[*rbacv1.ClusterRole], name string,
) error {
	role, ok := view.Get("", name)
	if !ok || role.DeletionTimestamp != nil {
		return nil
	}
	rules, changed := PlanRules(role, view.All())
	if !changed {
		return nil
	}
	next := role.DeepCopy()
	next.Rules = rules
	stored, err := client.Update(ctx, t.Client, next)
	switch {
	case apierrors.IsNotFound(err):
		return nil
	case err != nil:
		return fmt.Errorf("writing the aggregated rules of cluster role %s: %w", name, err)
	}
	view.RecordWrite(stored)
	return nil
}
