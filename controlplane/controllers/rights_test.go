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
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// With an identity of its own, every controller does its work with the rights that it declares.
func TestControllersStayWithinTheirRules(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true},
			NoMutationGuard: true})
		w.CreateObject(testcluster.NewService("web"))
		w.CreateObject(testcluster.NewVolume("v", "2Gi"))
		w.CreateObject(testcluster.NewClaim("data", "1Gi"))
		w.CreateObject(testcluster.NewDeployment("web", 6, "web:1"))
		w.AwaitRollout("web", 6)
		testcluster.Update(w, "web", func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "web:2" })
		w.AwaitRollout("web", 6)
		w.LoseNode("w1")
		w.SetNodeReady("w1", corev1.ConditionUnknown)
		w.Eventually("eviction", func() error {
			for _, p := range w.LivePods() {
				if p.Spec.NodeName == "w1" {
					return fmt.Errorf("%s is on w1", p.Name)
				}
			}
			return nil
		})
		if err := client.Delete[*corev1.Node](w.Ctx, w.Admin, "", "w1", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("volumes", func() error { return w.CheckVolumePhase("v", corev1.VolumeBound) })
		for _, policy := range []metav1.DeletionPropagation{metav1.DeletePropagationForeground} {
			if err := client.Delete[*appsv1.Deployment](w.Ctx, w.Admin, "default", "web",
				metav1.DeleteOptions{PropagationPolicy: &policy}); err != nil {
				t.Fatal(err)
			}
		}
		w.Eventually("pods of all nodes go", func() error {
			list, err := client.List[*corev1.Pod](w.Ctx, w.Admin, "", metav1.ListOptions{})
			if err != nil || len(list) > 0 {
				return fmt.Errorf("%d pods, %v", len(list), err)
			}
			return nil
		})
		w.CreateObject(&corev1.Namespace{ObjectMeta: metav1.ObjectMeta{Name: "doomed"}})
		w.CreateObject(&corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Namespace: "doomed", Name: "a"}})
		if err := client.Delete[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed", metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		w.Eventually("the namespace goes", func() error {
			if _, err := client.Get[*corev1.Namespace](w.Ctx, w.Admin, "", "doomed"); err == nil {
				return fmt.Errorf("still there")
			}
			return nil
		})

		rules := map[string][]rbacv1.PolicyRule{}
		for _, c := range w.Controllers {
			rules[engine.Identity(c).Name] = c.Rules
		}
		w.Calls.Mu.Lock()
		defer w.Calls.Mu.Unlock()
		users := map[string]bool{}
		for a := range w.Calls.Seen {
			r, ok := rules[a.User]
			if !ok || a.User == "system:serviceaccount:kube-system:fake-nodes" {
				continue // the informers' own identity, and the nodes
			}
			users[a.User] = true
			if !slices.ContainsFunc(r, func(r rbacv1.PolicyRule) bool { return testcluster.RuleAllows(r, a) }) {
				t.Errorf("%s has no right to %s %s.%s", a.User, a.Verb, a.Resource, a.Group)
			}
		}
		if len(users) < 12 {
			t.Errorf("only %d controllers did anything: %v", len(users), users)
		}
	})
}

// Without their own identities the controllers share one identity, which has the permissions that
// each of them declares. A cluster gets the snapshot kinds later, so their permissions are easily
// omitted.
func TestSharedIdentityMayDoAllOfIt(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Engine: engine.Options{OwnIdentity: true},
			NoMutationGuard: true})
		var shared []rbacv1.PolicyRule
		for _, o := range authz.BootstrapObjects() {
			if role, ok := o.(*rbacv1.ClusterRole); ok && role.Name == api.UserController {
				shared = role.Rules
			}
		}
		for _, c := range w.Controllers {
			for _, r := range c.Rules {
				for _, a := range callsOf(r) {
					if c.Name != "fake-nodes" && !slices.ContainsFunc(shared, func(r rbacv1.PolicyRule) bool {
						return testcluster.RuleAllows(r, a)
					}) {
						t.Errorf("controller %s: %s has no right to %s %s.%s", c.Name, api.UserController, a.Verb,
							a.Resource, a.Group)
					}
				}
			}
		}
	})
}

// callsOf returns the calls that a rule allows by name.
func callsOf(r rbacv1.PolicyRule) (out []testcluster.Call) {
	for _, group := range r.APIGroups {
		for _, resource := range r.Resources {
			for _, verb := range r.Verbs {
				out = append(out, testcluster.Call{Verb: verb, Group: group, Resource: resource})
			}
		}
	}
	return out
}
