package authz_test

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	authenticationv1 "k8s.io/api/authentication/v1"
	authorizationv1 "k8s.io/api/authorization/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
)

// F29, F34: a ClusterRole and a RoleBinding let donghyun create deployments in default only.
func TestRBAC(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.Admin()
	_, err := admin.RbacV1().ClusterRoles().Create(apiservertest.Within(t), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "deployer"},
		Rules: []rbacv1.PolicyRule{{Verbs: []string{"create", "get"}, APIGroups: []string{"apps"},
			Resources: []string{"deployments"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cert := r.Cert(pki.Client("donghyun", "dev-team"))
	c := r.HTTP(&cert)
	const path = "/apis/apps/v1/namespaces/default/deployments"
	body := `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},` +
		`"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},` +
		`"spec":{"containers":[{"name":"c","image":"i"}]}}}}`
	apiservertest.Refused(t, r.Call(c, "POST", path, body), 403,
		`deployments.apps is forbidden: User "donghyun" cannot create resource "deployments" in API group "apps" in `+
			`the namespace "default"`)
	group := rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "dev-team"}
	if _, err := admin.RbacV1().RoleBindings("default").Create(apiservertest.Within(t),
		apiservertest.RoleBinding("default", "deployers", "ClusterRole", "deployer", group),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// F30: at once.
	if a := r.Call(c, "POST", path, body); a.Code != 201 {
		t.Errorf("after the binding: %d %s", a.Code, a.Body)
	}
	apiservertest.Refused(t, r.Call(c, "POST", "/apis/apps/v1/namespaces/kube-system/deployments", body), 403,
		`in the namespace "kube-system"`)
	apiservertest.Refused(t, r.Call(c, "DELETE", path+"/d", ""), 403, `cannot delete resource "deployments"`)
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/nodes", ""), 403,
		`nodes is forbidden: User "donghyun" cannot list resource "nodes" in API group "" at the cluster scope`)
	apiservertest.Refused(t, r.Call(c, "GET", "/metrics", ""), 403, `User "donghyun" cannot get path "/metrics"`)

	// F28: the review answers as the request itself.
	for _, q := range []struct {
		verb, namespace string
		want            bool
	}{{"create", "default", true}, {"create", "kube-system", false}, {"delete", "default", false}} {
		got, err := admin.AuthorizationV1().SubjectAccessReviews().Create(apiservertest.Within(t),
			&authorizationv1.SubjectAccessReview{
				Spec: authorizationv1.SubjectAccessReviewSpec{User: "donghyun", Groups: []string{"dev-team"},
					ResourceAttributes: &authorizationv1.ResourceAttributes{
						Verb: q.verb, Group: "apps", Resource: "deployments", Namespace: q.namespace,
					}},
			}, metav1.CreateOptions{})
		if err != nil || got.Status.Allowed != q.want ||
			q.want && !strings.Contains(got.Status.Reason,
				`RBAC: allowed by RoleBinding "deployers/default" of ClusterRole "deployer"`) {
			t.Errorf("%s in %s: %v %+v", q.verb, q.namespace, err, got.Status)
		}
	}
}

// A user cannot grant rights that the user does not have.
func TestEscalationIsRefused(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.Admin()
	if _, err := admin.RbacV1().RoleBindings("default").Create(apiservertest.Within(t),
		apiservertest.RoleBinding("default", "owner", "ClusterRole", "admin", apiservertest.UserSubject("bob")),
		metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bob := r.Client("bob")
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "nodes"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"get"}, APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}},
	}}
	apiservertest.Eventually(t, func() error {
		_, err := bob.RbacV1().Roles("default").Create(apiservertest.Within(t), role, metav1.CreateOptions{})
		want := `user "bob" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently ` +
			`held:` + "\n" + `{APIGroups:["storage.k8s.io"], Resources:["csinodes"], Verbs:["get"]}`
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			return fmt.Errorf("%w, want %s", err, want)
		}
		return nil
	})
	role.Rules = []rbacv1.PolicyRule{{Verbs: []string{"get", "list"}, APIGroups: []string{""},
		Resources: []string{"pods", "secrets"}}}
	if _, err := bob.RbacV1().Roles("default").Create(apiservertest.Within(t), role, metav1.CreateOptions{}); err !=
		nil {
		t.Errorf("granting what he holds: %v", err)
	}
	if _, err := bob.RbacV1().RoleBindings("default").Create(apiservertest.Within(t),
		apiservertest.RoleBinding("default", "up", "ClusterRole", "cluster-admin", apiservertest.UserSubject("bob")),
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("binding himself to cluster-admin: %v", err)
	}
	if _, err := bob.RbacV1().RoleBindings("default").Create(apiservertest.Within(t),
		apiservertest.RoleBinding("default", "share", "ClusterRole", "view", apiservertest.UserSubject("eve")),
		metav1.CreateOptions{}); err != nil {
		t.Errorf("sharing view: %v", err)
	}
}

// kubectl --as: a user with the impersonate verb acts as the other user, and every other user is
// rejected.
func TestImpersonation(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	apiservertest.GrantEdit(t, r, "alice")
	as := func(user string, groups ...string) kubernetes.Interface {
		conf := r.ClientConfig(user, groups...)
		conf.Impersonate.UserName = "alice"
		c, err := kubernetes.NewForConfig(conf)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	me, err := as("admin", api.GroupMasters).AuthenticationV1().SelfSubjectReviews().Create(apiservertest.Within(t),
		&authenticationv1.SelfSubjectReview{
			ObjectMeta: metav1.ObjectMeta{Name: "of-mine", Labels: map[string]string{"a": "b"}}},
		metav1.CreateOptions{})
	if err != nil || me.Status.UserInfo.Username != "alice" || me.Name != "" || me.Labels != nil ||
		me.CreationTimestamp.IsZero() {
		t.Errorf("%v %+v", err, me)
	}
	if _, err := as("admin", api.GroupMasters).CoreV1().Nodes().List(apiservertest.Within(t),
		metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("alice listed nodes: %v", err)
	}
	if _, err := as("mallory").CoreV1().Pods("default").List(apiservertest.Within(t),
		metav1.ListOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(),
			`User "mallory" cannot impersonate resource "users" in API group "" at the cluster scope`) {
		t.Errorf("mallory: %v", err)
	}
}

// F32: an agent reads and writes its own node's objects and no others.
func TestNodeAuthorizer(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	for _, n := range []string{"a", "b"} {
		r.Must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}})
		r.CreatePodOn("pod-"+n, n)
	}
	agent := r.Client(api.NodeUserPrefix+"a", api.GroupNodes)
	core := agent.CoreV1()
	ctx := apiservertest.Within(t)
	try := tryAs(t)
	try("own pod", true, func() error {
		_, err := core.Pods("default").Get(ctx, "pod-a", metav1.GetOptions{})
		return err
	})
	try("other's pod", false, func() error {
		_, err := core.Pods("default").Get(ctx, "pod-b", metav1.GetOptions{})
		return err
	})
	try("own secret", true, func() error {
		_, err := core.Secrets("default").Get(ctx, "pod-a-secret", metav1.GetOptions{})
		return err
	})
	try("other's secret", false, func() error {
		_, err := core.Secrets("default").Get(ctx, "pod-b-secret", metav1.GetOptions{})
		return err
	})
	try("all secrets", false, func() error {
		_, err := core.Secrets("default").List(ctx, metav1.ListOptions{})
		return err
	})
	try("all pods", false, func() error { _, err := core.Pods("").List(ctx, metav1.ListOptions{}); return err })
	try("own pods", true, func() error {
		l, err := core.Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=a"})
		if err == nil && len(l.Items) != 1 {
			err = fmt.Errorf("%d pods", len(l.Items))
		}
		return err
	})
	try("other's pods", false, func() error {
		_, err := core.Pods("").List(ctx, metav1.ListOptions{FieldSelector: "spec.nodeName=b"})
		return err
	})
	status := []byte(`{"status":{"phase":"Running"}}`)
	try("own pod's status", true, func() error {
		_, err := core.Pods("default").Patch(ctx, "pod-a", types.MergePatchType, status,
			metav1.PatchOptions{}, "status")
		return err
	})
	try("other pod's status", false, func() error {
		_, err := core.Pods("default").Patch(ctx, "pod-b", types.MergePatchType, status,
			metav1.PatchOptions{}, "status")
		return err
	})
	try("own node", true, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{"annotations":{"x":"y"}}}`),
			metav1.PatchOptions{}, "status")
		return err
	})
	try("other node", false, func() error {
		_, err := core.Nodes().Patch(ctx, "b", types.MergePatchType, []byte(`{"metadata":{"annotations":{"x":"y"}}}`),
			metav1.PatchOptions{}, "status")
		return err
	})
	try("own node's taints", false, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType,
			[]byte(`{"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
		return err
	})
	try("restricted label", false, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType,
			[]byte(`{"metadata":{"labels":{"node-restriction.kubernetes.io/x":"y"}}}`), metav1.PatchOptions{})
		return err
	})
	try("an ordinary pod", false, func() error {
		_, err := core.Pods("default").Create(ctx, apiservertest.NewPod("sneaky"), metav1.CreateOptions{})
		return err
	})
	tryNodeObjects(t, r, agent)
}

// tryNodeObjects tries what a node may do with leases, tokens, and the deletion of pods.
func tryNodeObjects(t *testing.T, r *apiservertest.Replica, agent kubernetes.Interface) {
	t.Helper()
	try, ctx, core := tryAs(t), apiservertest.Within(t), agent.CoreV1()
	lease := func(name string) error {
		_, err := agent.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx,
			&coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}
	try("own lease", true, func() error { return lease("a") })
	try("other's lease", false, func() error { return lease("b") })
	token := func(pod string) error {
		p, err := r.Admin().CoreV1().Pods("default").Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		_, err = core.ServiceAccounts("default").CreateToken(ctx, "default",
			&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
				BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod",
					Name: pod, UID: p.UID},
			}}, metav1.CreateOptions{})
		return err
	}
	try("token of own pod", true, func() error { return token("pod-a") })
	try("token of other's pod", false, func() error { return token("pod-b") })
	try("delete own pod", true, func() error {
		return core.Pods("default").Delete(ctx, "pod-a", metav1.DeleteOptions{})
	})
	try("delete other's pod", false, func() error {
		return core.Pods("default").Delete(ctx, "pod-b", metav1.DeleteOptions{})
	})
	try("a deployment", false, func() error {
		_, err := agent.AppsV1().Deployments("default").List(ctx, metav1.ListOptions{})
		return err
	})
}

// tryAs returns a function that fails the test if a call is not allowed or refused as stated.
func tryAs(t *testing.T) func(what string, allowed bool, f func() error) {
	return func(what string, allowed bool, f func() error) {
		t.Helper()
		err := f()
		if allowed && err != nil || !allowed && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// The paths in Config.Serving.Paths require authentication and authorization too.
func TestExtraPaths(t *testing.T) {
	r := apiservertest.StartReplica(t, func(c *apiserver.Config) {
		c.Serving.Paths = map[string]http.Handler{
			"/cluster/status": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "fine") })}
	})
	if a := r.Call(r.AdminHTTP(), "GET", "/cluster/status", ""); a.Code != 200 || a.Body != "fine" {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/cluster/status", ""), 401, "Unauthorized")
	apiservertest.Refused(t, r.Call(r.HTTP(nil), "GET", "/cluster/status", "", "Authorization", "Bearer alice-token"),
		403, `User "alice" cannot get path "/cluster/status"`)
}

// A label that aggregates a role into another role grants its rules to the subjects of the other
// role. Setting the label therefore requires the rights of the role, and so does removing an
// aggregation rule.
func TestAggregationIsNoEscalation(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	admin := r.Admin().RbacV1()
	for _, role := range []*rbacv1.ClusterRole{
		{ObjectMeta: metav1.ObjectMeta{Name: "labeller"}, Rules: []rbacv1.PolicyRule{
			{Verbs: []string{"get", "update"}, APIGroups: []string{rbacv1.GroupName},
				Resources: []string{"clusterroles"}},
		}},
		{ObjectMeta: metav1.ObjectMeta{Name: "held"}, Rules: []rbacv1.PolicyRule{
			{Verbs: []string{"get"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"}},
		}},
	} {
		if _, err := admin.ClusterRoles().Create(ctx, role, metav1.CreateOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	_, err := admin.ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "labeller"},
		Subjects:   []rbacv1.Subject{apiservertest.UserSubject("mallory")},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "labeller"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mallory := r.Client("mallory").RbacV1().ClusterRoles()
	change := func(name string, f func(c *rbacv1.ClusterRole)) error {
		c, err := mallory.Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		f(c)
		_, err = mallory.Update(ctx, c, metav1.UpdateOptions{})
		return err
	}
	label := func(c *rbacv1.ClusterRole) {
		if c.Labels == nil {
			c.Labels = map[string]string{}
		}
		c.Labels["rbac.authorization.k8s.io/aggregate-to-view"] = "true"
	}
	// the binding takes an instant to have effect
	apiservertest.Eventually(t, func() error { return change("held", label) })
	if err := change("cluster-admin", label); !apierrors.IsForbidden(err) {
		t.Errorf("cluster-admin is made a part of view: %v", err)
	}
	if err := change("view", func(c *rbacv1.ClusterRole) { c.AggregationRule = nil }); !apierrors.IsForbidden(err) {
		t.Errorf("view is aggregated no more: %v", err)
	}
}
