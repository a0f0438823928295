package controllers_test

import (
	"fmt"
	"slices"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/authz"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers"
	"keelson.dev/keelson/internal/virtual"
)

// With an identity of its own, every controller does its work with the rights that it declares.
func TestControllersStayWithinTheirRules(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true}, quiet: true})
		w.create(service("web"))
		w.create(volume("v", "2Gi"))
		w.create(claim("data", "1Gi"))
		w.create(app("web", 6, "web:1"))
		w.rolledOut("web", 6)
		update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.rolledOut("web", 6)
		w.lose("w1")
		w.setReady("w1", corev1.ConditionUnknown)
		w.eventually("eviction", func() error {
			for _, p := range w.pods() {
				if p.Spec.NodeName == "w1" {
					return fmt.Errorf("%s is on w1", p.Name)
				}
			}
			return nil
		})
		if err := client.Delete[*corev1.Node](w.ctx, w.admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("volumes", func() error { return w.volumeIs("v", corev1.VolumeBound) })
		for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground} {
			if err := client.Delete[*appsv1.Deployment](w.ctx, w.admin, "default", "web", metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
				t.Fatal(err)
			}
		}
		w.eventually("pods of all nodes go", func() error {
			list, err := client.List[*corev1.Pod](w.ctx, w.admin, "", metav1.ListOptions{})
			if err != nil || len(list) > 0 {
				return fmt.Errorf("%d pods, %v", len(list), err)
			}
			return nil
		})
		w.create(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
		w.create(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "doomed", Name: "a"}})
		if err := client.Delete[*corev1.Namespace](w.ctx, w.admin, "", "doomed", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.eventually("the namespace goes", func() error {
			if _, err := client.Get[*corev1.Namespace](w.ctx, w.admin, "", "doomed"); err == nil {
				return fmt.Errorf("still there")
			}
			return nil
		})

		rules := map[string][]rbacv1.PolicyRule{}
		for _, c := range w.all {
			rules[controllers.Identity(c).Name] = c.Rules
		}
		w.calls.mu.Lock()
		defer w.calls.mu.Unlock()
		users := map[string]bool{}
		for a := range w.calls.asked {
			r, ok := rules[a.user]
			if !ok || a.user == "system:serviceaccount:kube-system:fake-nodes" {
				continue // the informers' own identity, and the nodes
			}
			users[a.user] = true
			if !slices.ContainsFunc(r, func(r rbacv1.PolicyRule) bool { return allows(r, a) }) {
				t.Errorf("%s has no right to %s %s.%s", a.user, a.verb, a.resource, a.group)
			}
		}
		if len(users) < 12 {
			t.Errorf("only %d controllers did anything: %v", len(users), users)
		}
	})
}

func allows(r rbacv1.PolicyRule, a call) bool {
	has := func(list []string, s string) bool { return slices.Contains(list, s) || slices.Contains(list, "*") }
	return has(r.APIGroups, a.group) && has(r.Resources, a.resource) && has(r.Verbs, a.verb)
}

// Without their own identities the controllers share one identity, which has the permissions that
// each of them declares. A cluster gets the snapshot kinds later, so their permissions are easily
// omitted.
func TestSharedIdentityMayDoAllOfIt(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := start(t, options{engine: controllers.Options{OwnIdentity: true}, quiet: true})
		var shared []rbacv1.PolicyRule
		for _, o := range authz.BootstrapObjects() {
			if role, ok := o.(*rbacv1.ClusterRole); ok && role.Name == api.UserController {
				shared = role.Rules
			}
		}
		for _, c := range w.all {
			for _, r := range c.Rules {
				for _, a := range callsOf(r) {
					if c.Name != "fake-nodes" && !slices.ContainsFunc(shared, func(r rbacv1.PolicyRule) bool { return allows(r, a) }) {
						t.Errorf("controller %s: %s has no right to %s %s.%s", c.Name, api.UserController, a.verb, a.resource, a.group)
					}
				}
			}
		}
	})
}

// callsOf returns the calls that a rule allows by name.
func callsOf(r rbacv1.PolicyRule) (out []call) {
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			for _, verb := range r.Verbs {
				out = append(out, call{verb: verb, group: group, resource: resource})
			}
		}
	}
	return out
}
