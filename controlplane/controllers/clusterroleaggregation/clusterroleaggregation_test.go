package clusterroleaggregation

import (
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func role(name, label string, verbs ...string) *rbacv1.ClusterRole {
	r := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name}}
	if label != "" {
		r.Labels = map[string]string{label: "true"}
	}
	for _, v := range verbs {
		r.Rules = append(r.Rules, rbacv1.PolicyRule{Verbs: []string{v}, APIGroups: []string{""},
			Resources: []string{"pods"}})
	}
	return r
}

func aggregated(name, label string, of ...string) *rbacv1.ClusterRole {
	r := role(name, label)
	r.AggregationRule = &rbacv1.AggregationRule{}
	for _, l := range of {
		r.AggregationRule.ClusterRoleSelectors = append(r.AggregationRule.ClusterRoleSelectors,
			metav1.LabelSelector{MatchLabels: map[string]string{l: "true"}})
	}
	return r
}

func TestPlan(t *testing.T) {
	a, b, other := role("a", "one", "get", "list"), role("b", "two", "list", "watch"), role("other", "", "delete")
	own := aggregated("own", "one", "one") // would select itself
	for name, c := range map[string]struct {
		role    *rbacv1.ClusterRole
		have    []string
		want    []string
		changed bool
	}{
		"no rule":      {role: role("plain", "one", "get"), have: []string{"get"}},
		"one selector": {role: aggregated("x", "", "one"), want: []string{"get", "list"}, changed: true},
		"two, each rule once": {role: aggregated("x", "", "two", "one"), want: []string{"get", "list", "watch"},
			changed: true},
		"as it should be": {role: aggregated("x", "", "one"), have: []string{"get", "list"},
			want: []string{"get", "list"}},
		"what is too much goes": {role: aggregated("x", "", "one"), have: []string{"get", "list", "delete"},
			want: []string{"get", "list"}, changed: true},
		"nothing selected":         {role: aggregated("x", "", "none"), have: []string{"get"}, changed: true},
		"nothing to nothing":       {role: aggregated("x", "", "none")},
		"itself is never selected": {role: own, want: []string{"get", "list"}, changed: true},
	} {
		t.Run(name, func(t *testing.T) {
			c.role.Rules = role("", "", c.have...).Rules
			rules, changed := PlanRules(c.role, []*rbacv1.ClusterRole{b, other, c.role, a})
			if changed != c.changed {
				t.Errorf("changed %t", changed)
			}
			if c.role.AggregationRule == nil {
				return
			}
			var got []string
			for _, r := range rules {
				got = append(got, r.Verbs[0])
			}
			if len(got) != len(c.want) {
				t.Fatalf("got %v, want %v", got, c.want)
			}
			for i := range got {
				if got[i] != c.want[i] {
					t.Errorf("got %v, want %v", got, c.want)
				}
			}
		})
	}
}
