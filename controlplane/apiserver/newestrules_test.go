package apiserver

import (
	"net/http"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// Who was told of a binding may use it at once, also at a replica that has not heard of it yet. F30
func TestNobodyIsRefusedByOldRules(t *testing.T) {
	r := start(t, nil)
	const pods = "/api/v1/namespaces/default/pods"
	alice := func(verb, path, body string) answer {
		return r.call(r.http(nil), verb, path, body, "Authorization", "Bearer alice-token")
	}
	refused(t, alice("GET", pods, ""), 403, "cannot list resource")
	release, asked := r.store.hold()
	defer release()
	_, err := r.admin().RbacV1().RoleBindings("default").Create(within(t), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "alice"}, RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "alice"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan answer, 1)
	go func() { answered <- alice("GET", pods, "") }()
	select {
	case <-asked:
		release()
	case a := <-answered:
		t.Fatalf("answered by what was known: %d %s", a.code, a.body)
	}
	if a := <-answered; a.code != http.StatusOK {
		t.Errorf("%d %s", a.code, a.body)
	}
	// A refusal is one soon, too, while the newest rules are not to be had.
	release, _ = r.store.hold()
	defer release()
	r.must(newPod("p"))
	refused(t, alice("DELETE", pods+"/p", ""), 403, "cannot delete resource")
}

// Who was told that a namespace is labelled for administrative access to devices may claim it at once, also at a replica
// that has not heard of the label yet. F30
func TestNoDeviceAdminIsRefusedByAnOldLabel(t *testing.T) {
	r := start(t, nil)
	c := r.adminHTTP()
	const claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
	const claim = `{"metadata":{"name":"c"},"spec":{"devices":{"requests":[{"name":"r","exactly":{"deviceClassName":"c","adminAccess":true}}]}}}`
	refused(t, r.call(c, "POST", claims, claim), 422, "admin access to devices requires")
	release, asked := r.store.hold()
	defer release()
	label := r.call(c, "PATCH", "/api/v1/namespaces/default", `{"metadata":{"labels":{"resource.kubernetes.io/admin-access":"true"}}}`,
		"Content-Type", "application/merge-patch+json")
	if label.code != http.StatusOK {
		t.Fatalf("%d %s", label.code, label.body)
	}
	answered := make(chan answer, 1)
	go func() { answered <- r.call(c, "POST", claims, claim) }()
	select {
	case <-asked:
		release()
	case a := <-answered:
		t.Fatalf("answered by what was known: %d %s", a.code, a.body)
	}
	if a := <-answered; a.code != http.StatusCreated {
		t.Errorf("%d %s", a.code, a.body)
	}
}
