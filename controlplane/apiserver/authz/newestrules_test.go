package authz_test

import (
	"net/http"
	"testing"

	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
)

// A binding is effective as soon as its creation is acknowledged, even at a replica that has not
// received it yet. F30
func TestNewestRulesDecide(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	const pods = "/api/v1/namespaces/default/pods"
	alice := func(verb, path, body string) apiservertest.Response {
		return r.Call(r.HTTP(nil), verb, path, body, "Authorization", "Bearer alice-token")
	}
	apiservertest.Refused(t, alice("GET", pods, ""), 403, "cannot list resource")
	release, asked := r.Store.Hold()
	defer release()
	_, err := r.Admin().RbacV1().RoleBindings("default").Create(apiservertest.Within(t), &rbacv1.RoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "alice"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "view"},
		Subjects:   []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: rbacv1.UserKind, Name: "alice"}},
	}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	answered := make(chan apiservertest.Response, 1)
	go func() { answered <- alice("GET", pods, "") }()
	select {
	case <-asked:
		release()
	case a := <-answered:
		t.Fatalf("answered by what was known: %d %s", a.Code, a.Body)
	}
	if a := <-answered; a.Code != http.StatusOK {
		t.Errorf("%d %s", a.Code, a.Body)
	}
	// A refusal is one soon, too, while the newest rules are not to be had.
	release, _ = r.Store.Hold()
	defer release()
	r.Must(apiservertest.NewPod("p"))
	apiservertest.Refused(t, alice("DELETE", pods+"/p", ""), 403, "cannot delete resource")
}

// After the label for administrative access to devices is acknowledged, claims with this access
// are accepted at once, even at a replica that has not received the label yet. F30
func TestNewestNamespaceLabelDecides(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	c := r.AdminHTTP()
	const claims = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaims"
	const claim = `{"metadata":{"name":"c"},"spec":{"devices":{"requests":[{"name":"r",` +
		`"exactly":{"deviceClassName":"c","adminAccess":true}}]}}}`
	apiservertest.Refused(t, r.Call(c, "POST", claims, claim), 422, "admin access to devices requires")
	release, asked := r.Store.Hold()
	defer release()
	label := r.Call(c, "PATCH", "/api/v1/namespaces/default",
		`{"metadata":{"labels":{"resource.kubernetes.io/admin-access":"true"}}}`,
		"Content-Type", "application/merge-patch+json")
	if label.Code != http.StatusOK {
		t.Fatalf("%d %s", label.Code, label.Body)
	}
	answered := make(chan apiservertest.Response, 1)
	go func() { answered <- r.Call(c, "POST", claims, claim) }()
	select {
	case <-asked:
		release()
	case a := <-answered:
		t.Fatalf("answered by what was known: %d %s", a.Code, a.Body)
	}
	if a := <-answered; a.Code != http.StatusCreated {
		t.Errorf("%d %s", a.Code, a.Body)
	}
}
