package clusterroleaggregation_test

import (
	"fmt"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/clusterroleaggregation"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// An aggregated role follows the roles that it selects, including another aggregated role.
func TestClusterRolesAreAggregated(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{clusterroleaggregation.New(d)}
		}})
		make := func(name, label, of string, verbs ...string) {
			r := &rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: name,
				Labels: map[string]string{label: "true"}}}
			if of != "" {
				r.AggregationRule = &rbacv1.AggregationRule{
					ClusterRoleSelectors: []metav1.LabelSelector{{MatchLabels: map[string]string{of: "true"}}}}
			}
			for _, v := range verbs {
				r.Rules = append(r.Rules, rbacv1.PolicyRule{Verbs: []string{v}, APIGroups: []string{""},
					Resources: []string{"pods"}})
			}
			w.CreateObject(r)
		}
		becomes := func(name, want string) {
			t.Helper()
			w.Eventually(name, func() error {
				r, err := client.Get[*rbacv1.ClusterRole](w.Ctx, w.Admin, "", name)
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
		if err := client.Delete[*rbacv1.ClusterRole](w.Ctx, w.Admin, "", "pods", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		becomes("edit", "watch ")
	})
}
