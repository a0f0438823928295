package authn_test

import (
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// F22, F25: a service account token authenticates until the object that it is bound to is deleted.
func TestServiceAccountTokens(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	ctx := apiservertest.Within(t)
	admin := r.Admin()
	pod, err := admin.CoreV1().Pods("default").Create(ctx, apiservertest.NewPod("p"), metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	tr, err := admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{
			BoundObjectRef: &authenticationv1.BoundObjectReference{APIVersion: "v1", Kind: "Pod",
				Name: "p", UID: pod.UID},
		}}, metav1.CreateOptions{})
	if err != nil || tr.Status.Token == "" ||
		tr.Status.ExpirationTimestamp.Time.Before(time.Now().Add(50*time.Minute)) {
		t.Fatalf("%v %+v", err, tr)
	}
	review := func() authenticationv1.TokenReviewStatus {
		t.Helper()
		got, err := admin.AuthenticationV1().TokenReviews().Create(ctx,
			&authenticationv1.TokenReview{Spec: authenticationv1.TokenReviewSpec{Token: tr.Status.Token}},
			metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return got.Status
	}
	s := review()
	if !s.Authenticated || s.User.Username != "system:serviceaccount:default:default" ||
		s.User.Extra["authentication.kubernetes.io/pod-name"][0] != "p" {
		t.Errorf("%+v", s)
	}
	bearer := []string{"Authorization", "Bearer " + tr.Status.Token}
	c := r.HTTP(nil)
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...), 403,
		`User "system:serviceaccount:default:default" cannot list resource "pods"`)
	if err := admin.CoreV1().Pods("default").Delete(ctx, "p", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	// it has heard of that
	r.Await(func() bool { return r.Call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...).Code != 403 })
	apiservertest.Refused(t, r.Call(c, "GET", "/api/v1/namespaces/default/pods", "", bearer...), 401,
		`pod "p" no longer exists`)
	if s := review(); s.Authenticated || !strings.Contains(s.Error, "no longer exists") {
		t.Errorf("%+v", s)
	}
	// A request that makes no sense says why.
	short := int64(5)
	_, err = admin.CoreV1().ServiceAccounts("default").CreateToken(ctx, "default",
		&authenticationv1.TokenRequest{Spec: authenticationv1.TokenRequestSpec{ExpirationSeconds: &short}},
		metav1.CreateOptions{})
	if !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "may not specify a duration less than 10 minutes") {
		t.Errorf("%v", err)
	}
}

// A join token is valid for the node gateway only. It authenticates no user of the API, neither as
// a bearer token nor in a TokenReview.
func TestJoinTokenAuthenticatesNoUser(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	token := pki.NewToken(pki.RoleNode, r.Trust.CA.Cert)
	record := r.Trust.TokenKey().Record(token, pki.Grant{Expires: time.Now().Add(time.Hour), Uses: 1})
	if _, err := r.Admin().CoreV1().Secrets(record.Namespace).Create(apiservertest.Within(t), record,
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a record of a join token that an administrator writes: %v", err)
	}
	other := record.DeepCopy()
	other.Type = corev1.SecretTypeOpaque
	r.Must(other) // what does not claim to be one is a Secret like any other
	if err := r.Admin().CoreV1().Secrets(record.Namespace).Delete(apiservertest.Within(t), record.Name,
		metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	system := api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}
	if _, err := client.Create(apiservertest.Within(t),
		client.New(r.Server.Backend(), r.Kinds).As(system).ForClusterVerb(), record); err != nil {
		t.Fatal(err)
	}
	if _, err := r.Admin().CoreV1().Secrets(record.Namespace).Patch(apiservertest.Within(t), record.Name,
		types.MergePatchType, []byte(`{"data":{"used":"MA=="}}`), metav1.PatchOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a record of a join token that an administrator changes: %v", err)
	}
	c := r.HTTP(nil)
	for _, path := range []string{"/api/v1/nodes", "/version", "/api"} {
		apiservertest.Refused(t, r.Call(c, "GET", path, "", "Authorization", "Bearer "+token.String()), 401,
			"invalid bearer token")
	}
	tr, err := r.Admin().AuthenticationV1().TokenReviews().Create(apiservertest.Within(t),
		&authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: token.String()},
		}, metav1.CreateOptions{})
	if err != nil || tr.Status.Authenticated {
		t.Errorf("%v %+v", err, tr)
	}
}

// The keys that verify service account tokens are published to every client with such a token.
func TestIssuerDiscovery(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	tr, err := r.Admin().CoreV1().ServiceAccounts("default").CreateToken(apiservertest.Within(t), "default",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	c := r.HTTP(nil)
	for path, words := range map[string]string{"/.well-known/openid-configuration": pki.DefaultIssuer,
		"/openid/v1/jwks": `"kty":"EC"`} {
		if a := r.Call(c, "GET", path, "", "Authorization", "Bearer "+tr.Status.Token); a.Code != 200 ||
			!strings.Contains(a.Body, words) {
			t.Errorf("%s: %d %s", path, a.Code, a.Body)
		}
		apiservertest.Refused(t, r.Call(c, "GET", path, ""), 401, "Unauthorized")
	}
}
