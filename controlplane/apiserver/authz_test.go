package apiserver

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

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
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

func userSubject(name string) rbacv1.Subject {
	return rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: name}
}

func roleBinding(namespace, name, roleKind, role string, who ...rbacv1.Subject) *rbacv1.RoleBinding {
	return &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: roleKind, Name: role}, Subjects: who,
	}
}

// F29, F34: a ClusterRole and a RoleBinding let donghyun create deployments in default only.
func TestRBAC(t *testing.T) {
	r := start(t, nil)
	admin := r.admin()
	_, err := admin.RbacV1().ClusterRoles().Create(within(t), &rbacv1.ClusterRole{
		ObjectMeta: metav1.ObjectMeta{Name: "deployer"},
		Rules:      []rbacv1.PolicyRule{{Verbs: []string{"create", "get"}, APIGroups: []string{"apps"}, Resources: []string{"deployments"}}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	cert := r.cert(pki.Client("donghyun", "dev-team"))
	c := r.http(&cert)
	const path = "/apis/apps/v1/namespaces/default/deployments"
	body := `{"apiVersion":"apps/v1","kind":"Deployment","metadata":{"name":"d"},"spec":{"selector":{"matchLabels":{"a":"b"}},"template":{"metadata":{"labels":{"a":"b"}},"spec":{"containers":[{"name":"c","image":"i"}]}}}}`
	refused(t, r.call(c, "POST", path, body), 403,
		`deployments.apps is forbidden: User "donghyun" cannot create resource "deployments" in API group "apps" in the namespace "default"`)
	group := rbacv1.Subject{APIGroup: rbacv1.GroupName, Kind: rbacv1.GroupKind, Name: "dev-team"}
	if _, err := admin.RbacV1().RoleBindings("default").Create(within(t), roleBinding("default", "deployers", "ClusterRole", "deployer", group), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	// F30: at once.
	if a := r.call(c, "POST", path, body); a.code != 201 {
		t.Errorf("after the binding: %d %s", a.code, a.body)
	}
	refused(t, r.call(c, "POST", "/apis/apps/v1/namespaces/kube-system/deployments", body), 403, `in the namespace "kube-system"`)
	refused(t, r.call(c, "DELETE", path+"/d", ""), 403, `cannot delete resource "deployments"`)
	refused(t, r.call(c, "GET", "/api/v1/nodes", ""), 403, `nodes is forbidden: User "donghyun" cannot list resource "nodes" in API group "" at the cluster scope`)
	refused(t, r.call(c, "GET", "/metrics", ""), 403, `User "donghyun" cannot get path "/metrics"`)

	// F28: the review answers as the request itself.
	for _, q := range []struct {
		verb, namespace string
		want            bool
	}{{"create", "default", true}, {"create", "kube-system", false}, {"delete", "default", false}} {
		got, err := admin.AuthorizationV1().SubjectAccessReviews().Create(within(t), &authorizationv1.SubjectAccessReview{
			Spec: authorizationv1.SubjectAccessReviewSpec{User: "donghyun", Groups: []string{"dev-team"}, ResourceAttributes: &authorizationv1.ResourceAttributes{
				Verb: q.verb, Group: "apps", Resource: "deployments", Namespace: q.namespace,
			}},
		}, metav1.CreateOptions{})
		if err != nil || got.Status.Allowed != q.want || q.want && !strings.Contains(got.Status.Reason, `RBAC: allowed by RoleBinding "deployers/default" of ClusterRole "deployer"`) {
			t.Errorf("%s in %s: %v %+v", q.verb, q.namespace, err, got.Status)
		}
	}
}

// Nobody grants what they do not hold.
func TestEscalationIsRefused(t *testing.T) {
	r := start(t, nil)
	admin := r.admin()
	if _, err := admin.RbacV1().RoleBindings("default").Create(within(t), roleBinding("default", "owner", "ClusterRole", "admin", userSubject("bob")), metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	bob := r.client("bob")
	role := &rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "nodes"}, Rules: []rbacv1.PolicyRule{
		{Verbs: []string{"get"}, APIGroups: []string{"storage.k8s.io"}, Resources: []string{"csinodes"}},
	}}
	eventually(t, func() error {
		_, err := bob.RbacV1().Roles("default").Create(within(t), role, metav1.CreateOptions{})
		want := `user "bob" (groups=["system:authenticated"]) is attempting to grant RBAC permissions not currently held:` + "\n" + `{APIGroups:["storage.k8s.io"], Resources:["csinodes"], Verbs:["get"]}`
		if !apierrors.IsForbidden(err) || !strings.Contains(err.Error(), want) {
			return fmt.Errorf("%w, want %s", err, want)
		}
		return nil
	})
	role.Rules = []rbacv1.PolicyRule{{Verbs: []string{"get", "list"}, APIGroups: []string{""}, Resources: []string{"pods", "secrets"}}}
	if _, err := bob.RbacV1().Roles("default").Create(within(t), role, metav1.CreateOptions{}); err != nil {
		t.Errorf("granting what he holds: %v", err)
	}
	if _, err := bob.RbacV1().RoleBindings("default").Create(within(t), roleBinding("default", "up", "ClusterRole", "cluster-admin", userSubject("bob")), metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("binding himself to cluster-admin: %v", err)
	}
	if _, err := bob.RbacV1().RoleBindings("default").Create(within(t), roleBinding("default", "share", "ClusterRole", "view", userSubject("eve")), metav1.CreateOptions{}); err != nil {
		t.Errorf("sharing view: %v", err)
	}
}

// kubectl --as: who may impersonate acts as the other, everybody else is refused.
func TestImpersonation(t *testing.T) {
	r := start(t, nil)
	grantEdit(t, r, "alice")
	as := func(user string, groups ...string) kubernetes.Interface {
		conf := r.config(user, groups...)
		conf.Impersonate.UserName = "alice"
		c, err := kubernetes.NewForConfig(conf)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	me, err := as("admin", api.GroupMasters).AuthenticationV1().SelfSubjectReviews().Create(within(t), &authenticationv1.SelfSubjectReview{
		ObjectMeta: metav1.ObjectMeta{Name: "of-mine", Labels: map[string]string{"a": "b"}}}, metav1.CreateOptions{})
	if err != nil || me.Status.UserInfo.Username != "alice" || me.Name != "" || me.Labels != nil || me.CreationTimestamp.IsZero() {
		t.Errorf("%v %+v", err, me)
	}
	if _, err := as("admin", api.GroupMasters).CoreV1().Nodes().List(within(t), metav1.ListOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("alice listed nodes: %v", err)
	}
	if _, err := as("mallory").CoreV1().Pods("default").List(within(t), metav1.ListOptions{}); !apierrors.IsForbidden(err) ||
		!strings.Contains(err.Error(), `User "mallory" cannot impersonate resource "users" in API group "" at the cluster scope`) {
		t.Errorf("mallory: %v", err)
	}
}

// podOn creates a pod that is bound to a node, with a secret of its own.
func podOn(r *replica, name, node string) *corev1.Pod {
	r.must(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name + "-secret"}})
	p := newPod(name)
	p.Spec.Volumes = []corev1.Volume{{Name: "s", VolumeSource: corev1.VolumeSource{Secret: &corev1.SecretVolumeSource{SecretName: name + "-secret"}}}}
	made := r.must(p).(*corev1.Pod)
	err := r.admin().CoreV1().Pods("default").Bind(within(r.t), &corev1.Binding{
		ObjectMeta: metav1.ObjectMeta{Name: name}, Target: corev1.ObjectReference{Kind: "Node", Name: node},
	}, metav1.CreateOptions{})
	if err != nil {
		r.t.Fatal(err)
	}
	return made
}

// F32: an agent reads and writes its own node's objects and no others.
func TestNodeAuthorizer(t *testing.T) {
	r := start(t, nil)
	for _, n := range []string{"a", "b"} {
		r.must(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: n}})
		podOn(r, "pod-"+n, n)
	}
	agent := r.client(api.NodeUserPrefix+"a", api.GroupNodes)
	core := agent.CoreV1()
	ctx := within(t)
	try := func(what string, allowed bool, f func() error) {
		t.Helper()
		err := f()
		if allowed && err != nil || !allowed && !apierrors.IsForbidden(err) {
			t.Errorf("%s: %v", what, err)
		}
	}
	try("own pod", true, func() error { _, err := core.Pods("default").Get(ctx, "pod-a", metav1.GetOptions{}); return err })
	try("other's pod", false, func() error { _, err := core.Pods("default").Get(ctx, "pod-b", metav1.GetOptions{}); return err })
	try("own secret", true, func() error {
		_, err := core.Secrets("default").Get(ctx, "pod-a-secret", metav1.GetOptions{})
		return err
	})
	try("other's secret", false, func() error {
		_, err := core.Secrets("default").Get(ctx, "pod-b-secret", metav1.GetOptions{})
		return err
	})
	try("all secrets", false, func() error { _, err := core.Secrets("default").List(ctx, metav1.ListOptions{}); return err })
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
		_, err := core.Pods("default").Patch(ctx, "pod-a", types.MergePatchType, status, metav1.PatchOptions{}, "status")
		return err
	})
	try("other pod's status", false, func() error {
		_, err := core.Pods("default").Patch(ctx, "pod-b", types.MergePatchType, status, metav1.PatchOptions{}, "status")
		return err
	})
	try("own node", true, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{"annotations":{"x":"y"}}}`), metav1.PatchOptions{}, "status")
		return err
	})
	try("other node", false, func() error {
		_, err := core.Nodes().Patch(ctx, "b", types.MergePatchType, []byte(`{"metadata":{"annotations":{"x":"y"}}}`), metav1.PatchOptions{}, "status")
		return err
	})
	try("own node's taints", false, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType, []byte(`{"spec":{"taints":[{"key":"k","effect":"NoSchedule"}]}}`), metav1.PatchOptions{})
		return err
	})
	try("restricted label", false, func() error {
		_, err := core.Nodes().Patch(ctx, "a", types.MergePatchType, []byte(`{"metadata":{"labels":{"node-restriction.kubernetes.io/x":"y"}}}`), metav1.PatchOptions{})
		return err
	})
	try("an ordinary pod", false, func() error {
		_, err := core.Pods("default").Create(ctx, newPod("sneaky"), metav1.CreateOptions{})
		return err
	})
	lease := func(name string) error {
		_, err := agent.CoordinationV1().Leases(corev1.NamespaceNodeLease).Create(ctx, &coordinationv1.Lease{ObjectMeta: metav1.ObjectMeta{Name: name}}, metav1.CreateOptions{})
		return err
	}
	try("own lease", true, func() error { return lease("a") })
	try("other's lease", false, func() error { return lease("b") })
	token := func(pod string) error {
		p, err := r.admin().CoreV1().Pods("default").Get(ctx, pod, metav1.GetOptions{})
		if err != nil {
			return err
		}
		_, err = core.ServiceAccounts("default").CreateToken(ctx, "default", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: pod, UID: p.UID},
		}}, metav1.CreateOptions{})
		return err
	}
	try("token of own pod", true, func() error { return token("pod-a") })
	try("token of other's pod", false, func() error { return token("pod-b") })
	try("delete own pod", true, func() error { return core.Pods("default").Delete(ctx, "pod-a", metav1.DeleteOptions{}) })
	try("delete other's pod", false, func() error { return core.Pods("default").Delete(ctx, "pod-b", metav1.DeleteOptions{}) })
	try("a deployment", false, func() error {
		_, err := agent.AppsV1().Deployments("default").List(ctx, metav1.ListOptions{})
		return err
	})
}

// F22, F25: a token of a service account says who it is, until what it is bound to is gone.
func TestServiceAccountTokens(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	admin := r.admin()
	pod, err := admin.CoreV1().Pods("default").Create(ctx, newPod("p"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
		BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod", Name: "p", UID: pod.UID},
	}}, metav1.CreateOptions{})
	if err != nil || tr.Status.Token == "" || tr.Status.ExpirationTimestamp.Time.Before(time.Now().Add(50*time.Minute)) {
		t.Fatalf("%v %+v", err, tr)
	}
	review := func() authenticationv1.TokenReviewStatus {
		t.Helper()
		got, err := admin.AuthenticationV1().TokenReviews().Create(ctx, &authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: tr.Status.Token}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return got.Status
	}
	s := review()
	if !s.Authenticated || s.User.Username != "system:serviceaccount:default:default" || s.User.Extra["authentication.kubernetes.io/pod-name"][0] != "p" {
		t.Errorf("%+v", s)
	}
	bearer := []string{"Authorization", "Bearer " + tr.Status.Token}
	c := r.http(nil)
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...), 403, `User "system:serviceaccount:default:default" cannot list resource "pods"`)
	if err := admin.CoreV1().Pods("default").Delete(ctx, "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	r.await(func() bool { return r.call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...).code != 403 }) // it has heard of that
	refused(t, r.call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...), 401, `pod "p" no longer exists`)
	if s := review(); s.Authenticated || !strings.Contains(s.Error, "no longer exists") {
		t.Errorf("%+v", s)
	}
	// A request that makes no sense says why.
	short := int64(5)
	_, err = admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default", &authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &short}}, metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "may not specify a duration less than 10 minutes") {
		t.Errorf("%v", err)
	}
}

// A join token opens the fleet's door and is no identity of the API, neither as a bearer nor in a review.
func TestJoinTokenIsNobody(t *testing.T) {
	r := start(t, nil)
	token := pki.NewToken(pki.RoleNode, r.trust.CA.Cert)
	record := r.trust.TokenKey().Record(token, pki.Grant{Expires: time.Now().Add(time.Hour), Uses: 1})
	if _, err := r.admin().CoreV1().Secrets(record.Namespace).Create(within(t), record, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a record of a join token that an administrator writes: %v", err)
	}
	other := record.DeepCopy()
	other.Type = corev1.SecretTypeOpaque
	r.must(other) // what does not claim to be one is a Secret like any other
	if err := r.admin().CoreV1().Secrets(record.Namespace).Delete(within(t), record.Name, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	system := api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}
	if _, err := client.Create(within(t), client.New(r.Backend(), r.cfg.Kinds).As(system).ForClusterVerb(), record); err != nil {
		t.Fatal(err)
	}
	if _, err := r.admin().CoreV1().Secrets(record.Namespace).Patch(within(t), record.Name, types.MergePatchType, []byte(`{"data":{"used":"MA=="}}`), metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a record of a join token that an administrator changes: %v", err)
	}
	c := r.http(nil)
	for _, path := range []string{"/api/v1/nodes", "/version", "/api"} {
		refused(t, r.call(c, "GET", path, "", "Authorization", "Bearer "+token.String()), 401, "invalid bearer token")
	}
	tr, err := r.admin().AuthenticationV1().TokenReviews().Create(within(t), &authenticationv1.TokenReview{
		Spec: authenticationv1.TokenReviewSpec{Token: token.String()},
	}, metav1.CreateOptions{})
	if err != nil || tr.Status.Authenticated {
		t.Errorf("%v %+v", err, tr)
	}
}

// Others can verify service account tokens: the keys are published to those who hold one.
func TestIssuerDiscovery(t *testing.T) {
	r := start(t, nil)
	tr, err := r.admin().CoreV1().ServiceAccounts("default").CreateToken(within(t), "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := r.http(nil)
	for path, words := range map[string]string{"/.well-known/openid-configuration": pki.DefaultIssuer, "/openid/v1/jwks": `"kty":"EC"`} {
		if a := r.call(c, "GET", path, "", "Authorization", "Bearer "+tr.Status.Token); a.code != 200 || !strings.Contains(a.body, words) {
			t.Errorf("%s: %d %s", path, a.code, a.body)
		}
		refused(t, r.call(c, "GET", path, ""), 401, "Unauthorized")
	}
}

// Further paths of the wiring are behind authentication and authorization too.
func TestExtraPaths(t *testing.T) {
	r := start(t, func(c *Config) {
		c.Paths = map[string]http.Handler{"/cluster/status": http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "fine") })}
	})
	if a := r.call(r.adminHTTP(), "GET", "/cluster/status", ""); a.code != 200 || a.body != "fine" {
		t.Errorf("%d %s", a.code, a.body)
	}
	refused(t, r.call(r.http(nil), "GET", "/cluster/status", ""), 401, "Unauthorized")
	refused(t, r.call(r.http(nil), "GET", "/cluster/status", "", "Authorization", "Bearer alice-token"), 403, `User "alice" cannot get path "/cluster/status"`)
}

// A label that has a role aggregated grants its rules to whoever has the other: it takes the rights that the role
// grants, and so does taking an aggregation away.
func TestAggregationIsNoEscalation(t *testing.T) {
	r := start(t, nil)
	ctx := within(t)
	admin := r.admin().RbacV1()
	for _, role := range []*rbacv1.ClusterRole{
		{ObjectMeta: metav1.ObjectMeta{Name: "labeller"}, Rules: []rbacv1.PolicyRule{
			{Verbs: []string{"get", "update"}, APIGroups: []string{rbacv1.GroupName}, Resources: []string{"clusterroles"}},
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
		ObjectMeta: metav1.ObjectMeta{Name: "labeller"}, Subjects: []rbacv1.Subject{userSubject("mallory")},
		RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "labeller"},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	mallory := r.client("mallory").RbacV1().ClusterRoles()
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
	eventually(t, func() error { return change("held", label) }) // the binding takes an instant to have effect
	if err := change("cluster-admin", label); !apierrors.IsForbidden(err) {
		t.Errorf("cluster-admin is made a part of view: %v", err)
	}
	if err := change("view", func(c *rbacv1.ClusterRole) { c.AggregationRule = nil }); !apierrors.IsForbidden(err) {
		t.Errorf("view is aggregated no more: %v", err)
	}
}
