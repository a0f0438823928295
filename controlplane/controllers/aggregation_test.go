package controllers_test

import (
	"fmt"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/controlplane/controllers/clusterroleaggregation"
	"keelson.dev/keelson/internal/virtual"
)

// An aggregated role follows the roles that it selects, including another aggregated role.
func TestClusterRolesAreAggregated(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{only: func(d controllers.Deps) []*controllers.Controller {
			return []*controllers.Controller{clusterroleaggregation.New(d)}
		}})
		make := func(name, label, of string, verbs ...string) {
			r := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name, Labels: map[string]string{label: "true"}}}
			if of != "" {
				r.AggregationRule = &rbacv1.AggregationRule{ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{of: "true"}}}}
			}
			for _, v := range verbs {
				r.Rules = append(r.Rules, rbacv1.PolicyRule{Verbs: []string{v}, APIGroups: []string{""}, Resources: []string{"pods"}})
			}
			w.create(r)
		}
		becomes := func(name, want string) {
			t.Helper()
			w.eventually(name, func() error {
				r, err := client.Get[*rbacv1.ClusterRole](w.ctx, w.admin, "", name)
				if err != nil {
					return err
				}
				got := ""
				for _, p := range r.Rules {
					got += p.Verbs[0] + " "
				}
				if got != want {
					return fmt.Errorf("%s has %q, want %q", name, got, want)
				}
				return nil
			})
		}
		make("view", "to-edit", "to-view")
		make("edit", "unused", "to-edit", "delete")
		make("pods", "to-view", "", "get", "list")
		becomes("view", "get list ")
		becomes("edit", "get list ")
		make("more", "to-view", "", "watch")
		becomes("edit", "watch get list ") // by the names of the roles: more, pods
		if err := client.Delete[*rbacv1.ClusterRole](w.ctx, w.admin, "", "pods", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		becomes("edit", "watch ")
	})
}
