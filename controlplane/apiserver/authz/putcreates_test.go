package authz_test

import (
	"errors"
	"testing"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/await"
)

// An update that creates the object requires the permission to create, and passes the admission of
// new objects (F29).
func TestUpdatesThatCreateNeedCreatePermission(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	admin := r.AdminHTTP()
	const leases = "/apis/coordination.k8s.io/v1/namespaces/default/leases/"
	lease := func(name string) string {
		return `{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"` + name +
			`"},"spec":{"holderIdentity":"h"}}`
	}
	may := func(user, group, resource string, verbs ...string) {
		r.Must(&rbacv1.Role{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: user},
			Rules: []rbacv1.PolicyRule{{Verbs: verbs, APIGroups: []string{group}, Resources: []string{resource}}}})
		r.Must(apiservertest.RoleBinding("default", user, "Role", user, apiservertest.UserSubject(user)))
		asked := &authorizationv1.SubjectAccessReview{Spec: authorizationv1.SubjectAccessReviewSpec{User: user,
			ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: "default", Verb: "update", Group: group,
				Resource: resource}}}
		await.Until(apiservertest.Within(t), t, await.Patience, time.Millisecond,
			"the permission of "+user, func() error {
				// the authorizer reads the Role from a cache, which may lag
				got, err := r.Admin().AuthorizationV1().SubjectAccessReviews().Create(t.Context(), asked,
					metav1.CreateOptions{})
				if err == nil && !got.Status.Allowed {
					err = errors.New("the permission is not effective yet")
				}
				return err
			})
	}
	may("keeper", "coordination.k8s.io", "leases", "get", "update")
	cert := r.Cert(pki.Client("keeper"))
	keeper := r.HTTP(&cert)
	apiservertest.Refused(t, r.Call(keeper, "PUT", leases+"a", lease("a")), 403, `cannot create resource "leases"`)
	if a := r.Call(admin, "PUT", leases+"a", lease("a")); a.Code != 201 {
		t.Fatalf("%d %s", a.Code, a.Body)
	}
	if a := r.Call(keeper, "GET", leases+"a", ""); a.Code != 200 {
		t.Fatalf("%d %s", a.Code, a.Body)
	}
	nowhere := "/apis/coordination.k8s.io/v1/namespaces/nowhere/leases/a"
	apiservertest.Refused(t, r.Call(admin, "PUT", nowhere, lease("a")), 404, `namespaces "nowhere" not found`)
	apiservertest.Refused(t, r.Call(admin, "PUT", leases+"b",
		`{"apiVersion":"coordination.k8s.io/v1","kind":"Lease","metadata":{"name":"b"},`+
			`"spec":{"leaseDurationSeconds":0}}`),
		422, "spec.leaseDurationSeconds")

	// Nobody gives rights away by an update that they could not give by a creation.
	may("rolekeeper", "rbac.authorization.k8s.io", "roles", "create", "update")
	other := r.Cert(pki.Client("rolekeeper"))
	apiservertest.Refused(t, r.Call(r.HTTP(&other), "PUT",
		"/apis/rbac.authorization.k8s.io/v1/namespaces/default/roles/all",
		`{"apiVersion":"rbac.authorization.k8s.io/v1","kind":"Role","metadata":{"name":"all"},"rules":[{"verbs":["*"],`+
			`"apiGroups":["*"],"resources":["*"]}]}`),
		403, "attempting to grant RBAC permissions not currently held")
}
