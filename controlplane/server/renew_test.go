package server_test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// checkClientCertificates checks that a client certificate is renewed only for the user that has
// authenticated with it: not for a user with a token, and not for an impersonated user.
func (h *hardenedReplica) checkClientCertificates(t *testing.T) {
	token, err := h.Client("cp1").CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "default",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	const user = "system:serviceaccount:default:default"
	_, err = h.Client("cp1").RbacV1().ClusterRoles().Create(t.Context(),
		&rbacv1.ClusterRole{ObjectMeta: metav1.ObjectMeta{Name: "renews"},
			Rules: []rbacv1.PolicyRule{{NonResourceURLs: []string{api.PathClusterKubeconfig},
				Verbs: []string{"post"}}}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	_, err = h.Client("cp1").RbacV1().ClusterRoleBindings().Create(t.Context(),
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "renews"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "renews"},
			Subjects: []rbacv1.Subject{{Kind: rbacv1.ServiceAccountKind, Namespace: "default", Name: "default"}}},
		metav1.CreateOptions{})
	if err != nil {
		t.Fatal(err)
	}
	own := newSelfSigned(t, user, api.GroupMasters)
	renew := func(change func(*rest.Config)) (status int, said string) {
		t.Helper()
		cfg := h.RESTConfig("cp1")
		change(cfg)
		cfg.Dial = (&net.Dialer{}).DialContext // a new connection, with or without a certificate
		raw, err := json.Marshal(api.ClusterKubeconfig{CSR: own.request})
		if err != nil {
			t.Fatal(err)
		}
		res := servertest.NewClient(t, cfg).RESTClient().Post().RequestURI(api.PathClusterKubeconfig).Body(raw).Do(
			t.Context()).StatusCode(&status)
		got, err := res.Raw()
		return status, fmt.Sprint(string(got), err)
	}
	withToken := func(cfg *rest.Config) {
		cfg.BearerToken, cfg.CertData, cfg.KeyData = token.Status.Token, own.certificate, own.key
	}
	servertest.Eventually(t, func() error { // the role becomes effective
		if status, said := renew(func(cfg *rest.Config) {
			withToken(cfg)
			cfg.CertData, cfg.KeyData = nil, nil
		}); status == http.StatusForbidden {
			return errors.New(said)
		}
		return nil
	})
	if status, said := renew(withToken); status != http.StatusBadRequest ||
		!strings.Contains(said, "has not authenticated with the client certificate of this connection") {
		t.Errorf("a token with a self-signed certificate for %s: %d %s", api.GroupMasters, status, said)
	}
	if status, said := renew(func(cfg *rest.Config) {
		cfg.Impersonate.UserName, cfg.Impersonate.Groups = user, []string{api.GroupMasters}
	}); status != http.StatusBadRequest {
		t.Errorf("the administrator with impersonation: %d %s", status, said)
	}
	if status, said := renew(func(*rest.Config) {}); status != http.StatusOK {
		t.Errorf("the administrator with a certificate: %d %s", status, said)
	}
}

// selfSignedCertificate is a self-signed certificate with its key, and a request for another
// certificate.
type selfSignedCertificate struct{ certificate, key, request []byte }

func newSelfSigned(t *testing.T, name string, groups ...string) (c selfSignedCertificate) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	subject := pkix.Name{CommonName: name, Organization: groups}
	as := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: subject, NotBefore: time.Now().Add(-time.Hour),
		NotAfter: time.Now().Add(time.Hour),
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}
	der, err := x509.CreateCertificate(rand.Reader, as, as, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
	request, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{Subject: subject}, key)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	block := func(kind string, der []byte) []byte { return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}) }
	return selfSignedCertificate{block("CERTIFICATE", der), block("PRIVATE KEY", raw),
		block("CERTIFICATE REQUEST", request)}
}
