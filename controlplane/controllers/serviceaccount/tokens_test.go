package serviceaccount_test

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/controllers/engine"
	"keelson.dev/keelson/controlplane/controllers/serviceaccount"
	"keelson.dev/keelson/controlplane/controllers/testcluster"
	"keelson.dev/keelson/internal/virtual"
)

// A Secret that requests an account's token gets it, keeps it, and is deleted with the account,
// even if another account of that name has been created since.
func TestSecretsGetTokens(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		w := testcluster.StartCluster(t, testcluster.Options{Controllers: func(d engine.Deps) []*engine.Descriptor {
			return []*engine.Descriptor{serviceaccount.NewTokens(d, serviceaccount.FixedRoots("PEM"),
				testcluster.FakeToken)}
		}})
		account := func() *corev1.ServiceAccount {
			t.Helper()
			a, err := client.Create(w.Ctx, w.Admin,
				&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "robot"}})
			if err != nil {
				t.Fatal(err)
			}
			return a
		}
		secret := func(name, account string) {
			t.Helper()
			w.CreateObject(&corev1.Secret{Type: corev1.SecretTypeServiceAccountToken,
				ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
					Annotations: map[string]string{corev1.ServiceAccountNameKey: account}},
				Data: map[string][]byte{"own": []byte("kept")}})
		}
		get := func(name string) (*corev1.Secret, error) {
			return client.Get[*corev1.Secret](w.Ctx, w.Admin, "default", name)
		}
		filled := func(name string, of *corev1.ServiceAccount) {
			t.Helper()
			w.Eventually(name, func() error {
				s, err := get(name)
				if err != nil {
					return err
				}
				token, _ := testcluster.FakeToken(of, name)
				got := fmt.Sprintf("%s|%s|%s|%s|%s", s.Data["token"], s.Data["ca.crt"], s.Data["namespace"],
					s.Data["own"], s.Annotations[corev1.ServiceAccountUIDKey])
				if want := fmt.Sprintf("%s|PEM|default|kept|%s", token, of.UID); got != want {
					return fmt.Errorf("has %s, want %s", got, want)
				}
				return nil
			})
		}
		gone := func(name string) {
			t.Helper()
			w.Eventually(name+" goes", func() error {
				if s, err := get(name); !apierrors.IsNotFound(err) {
					return fmt.Errorf("%v, %v", s, err)
				}
				return nil
			})
		}
		w.CreateObject(&corev1.Secret{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "opaque",
			Annotations: map[string]string{corev1.ServiceAccountNameKey: "nobody"}}})
		first := account()
		secret("one", "robot")
		filled("one", first)
		secret("early", "nobody")
		gone("early")

		// Lost data are restored; an existing token is not replaced.
		s, err := get("one")
		if err != nil {
			t.Fatal(err)
		}
		s = s.DeepCopy()
		delete(s.Data, "namespace")
		s.Data["ca.crt"] = []byte("forged")
		if _, err := client.Update(w.Ctx, w.Admin, s); err != nil {
			t.Fatal(err)
		}
		filled("one", first)

		if err := client.Delete[*corev1.ServiceAccount](w.Ctx, w.Admin, "default", "robot",
			metav1.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		second := account()
		gone("one")
		secret("two", "robot")
		filled("two", second)
		if o, err := get("opaque"); err != nil || len(o.Data) > 0 {
			t.Errorf("a Secret of another type: %v, %v", api.Object(o), err)
		}
	})
}
