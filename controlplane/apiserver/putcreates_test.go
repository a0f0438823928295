package apiserver

import (
	"errors"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/wait"
)

// An update that creates is judged as a creation: by the right to create, and by what admission asks of new objects
// (F29).
func TestUpdatesThatCreateAreJudgedAsCreations(t *testing.T) {
	r := start(t, nil)
	admin := r.adminHTTP()
	const leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases/"
	lease := func(name string) string {
		return `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"` + name + `"},"spec":{"holderIdentity":"h"}}`
	}
	may := func(user, group, resource string, verbs ...string) {
		r.must(&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: user},
			Rules: []rbacv1.PolicyRule{{Verbs: verbs, APIGroups: []string{group}, Resources: []string{resource}}}})
		r.must(roleBinding("default", user, "Role", user, userSubject(user)))
		asked := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "update", Group: group, Resource: resource}}}
		if err := wait.For(within(t), time.Millisecond, func() error { // authorization hears of it a moment later
			got, err := r.admin().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), asked, metav1.CreateOptions{})
			if err == nil && !got.Status.Allowed {
				err = errors.New("it may not yet")
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	may("keeper", "coordination.k8s.io", "leases", "get", "update")
	cert := r.cert(pki.Client("keeper"))
	keeper := r.http(&cert)
	refused(t, r.call(keeper, "PUT", leases+"a", lease("a")), 403, `cannot create resource "leases"`)
	if a := r.call(admin, "PUT", leases+"a", lease("a")); a.code != 201 {
		t.Fatalf("%d %s", a.code, a.body)
	}
	if a := r.call(keeper, "GET", leases+"a", ""); a.code != 200 {
		t.Fatalf("%d %s", a.code, a.body)
	}
	nowhere := "/apis/coordination.k8s.io/v1/namespaces/nowhere/leases/a"
	refused(t, r.call(admin, "PUT", nowhere, lease("a")), 404, `namespaces "nowhere" not found`)
	refused(t, r.call(admin, "PUT", leases+"b", `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"b"},"spec":{"leaseDurationSeconds":0}}`),
		422, "spec.leaseDurationSeconds")

	// Nobody gives rights away by an update that they could not give by a creation.
	may("rolekeeper", "rbac.authorization.k8s.io", "roles", "create", "update")
	other := r.cert(pki.Client("rolekeeper"))
	refused(t, r.call(r.http(&other), "PUT", "/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/all",
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"all"},"rules":[{"verbs":["*"],"apiGroups":["*"],"resources":["*"]}]}`),
		403, "attempting to grant RBAC permissions not currently held")
}
