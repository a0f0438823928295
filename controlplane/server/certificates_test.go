package server

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	certificatesv1 "k8s.io/api/certificates/v1"
	v1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"keelson.dev/keelson/controlplane/pki"
)

// applicant is somebody with a key who asks for a certificate.
type applicant struct {
	t   *testing.T
	key *ecdsa.PrivateKey
}

func newApplicant(t *testing.T) *applicant {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &applicant{t, key}
}

// asks is a request for a certificate.
func (a *applicant) asks(name, signer string, r *x509.CertificateRequest, usages ...certificatesv1.KeyUsage) *certificatesv1.CertificateSigningRequest {
	a.t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, r, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	hour := int32(3600)
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name}, Spec: certificatesv1.CertificateSigningRequestSpec{
		Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
		SignerName: signer, Usages: usages, ExpirationSeconds: &hour,
	}}
}

// keyPEM is the key as kubeconfigs hold it.
func (a *applicant) keyPEM() []byte {
	a.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// with is a client that shows the certificate.
func (a *applicant) with(cfg *rest.Config, chain []byte) *kubernetes.Clientset {
	a.t.Helper()
	next := rest.AnonymousClientConfig(cfg)
	next.CertData, next.KeyData = chain, a.keyPEM()
	cs, err := kubernetes.NewForConfig(next)
	if err != nil {
		a.t.Fatal(err)
	}
	return cs
}

// approve writes that a request is approved.
func approve(t *testing.T, cs *kubernetes.Clientset, name string) {
	t.Helper()
	ctx := context.Background()
	eventually(t, func() error {
		c, err := cs.CertificatesV1().CertificateSigningRequests().Get(ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		c.Status.Conditions = append(c.Status.Conditions, certificatesv1.CertificateSigningRequestCondition{
			Type: certificatesv1.CertificateApproved, Status: v1.ConditionTrue, Reason: "Test"})
		_, err = cs.CertificatesV1().CertificateSigningRequests().UpdateApproval(ctx, name, c, metav1.UpdateOptions{})
		return err
	})
}

// decided waits until a request has a certificate or has failed.
func decided(t *testing.T, cs *kubernetes.Clientset, name string) (chain []byte, failed string) {
	t.Helper()
	eventually(t, func() error {
		c, err := cs.CertificatesV1().CertificateSigningRequests().Get(context.Background(), name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		chain, failed = c.Status.Certificate, ""
		for _, k := range c.Status.Conditions {
			if k.Type == certificatesv1.CertificateFailed {
				failed = k.Reason + ": " + k.Message
			}
		}
		if len(chain) == 0 && failed == "" {
			return fmt.Errorf("%s is undecided: %v", name, c.Status.Conditions)
		}
		return nil
	})
	return chain, failed
}

// Who asks for a client certificate and is approved logs in with it, as that name in those groups, for as long as was
// asked for. Nobody becomes an administrator or a replica so; a node's request for itself is approved where a role lets it,
// and a server of a node gets what a caller can check.
func TestCertificatesLogIn(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	admin := p.client("cp1")
	a := newApplicant(t)
	ask := func(cs *kubernetes.Clientset, c *certificatesv1.CertificateSigningRequest) error {
		_, err := cs.CertificatesV1().CertificateSigningRequests().Create(ctx, c, metav1.CreateOptions{})
		return err
	}
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	subject := func(name string, groups ...string) *x509.CertificateRequest {
		return &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: groups}}
	}

	must(ask(admin, a.asks("ann", certificatesv1.KubeAPIServerClientSignerName, subject("ann", "team"), certificatesv1.UsageClientAuth)))
	approve(t, admin, "ann")
	chain, failed := decided(t, admin, "ann")
	if failed != "" {
		t.Fatal(failed)
	}
	who, err := a.with(p.rest("cp1"), chain).AuthenticationV1().SelfSubjectReviews().Create(ctx, &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	must(err)
	if u := who.Status.UserInfo; u.Username != "ann" || strings.Join(u.Groups, " ") != "team system:authenticated" {
		t.Errorf("logged in as %s in %q", u.Username, u.Groups)
	}
	cert, err := pki.DecodeCert(chain)
	must(err)
	if left := time.Until(cert.NotAfter); left > time.Hour || left < 50*time.Minute {
		t.Errorf("good for %v, asked for an hour", left)
	}

	err = ask(admin, a.asks("root", certificatesv1.KubeAPIServerClientSignerName, subject("eve", "system:masters"), certificatesv1.UsageClientAuth))
	if !apierrors.IsForbidden(err) {
		t.Errorf("asked for system:masters: %v", err)
	}
	must(ask(admin, a.asks("replica", certificatesv1.KubeAPIServerClientSignerName, subject("cp1", "keelson:replicas"), certificatesv1.UsageClientAuth)))
	approve(t, admin, "replica")
	if chain, failed := decided(t, admin, "replica"); len(chain) > 0 || !strings.HasPrefix(failed, "SignerValidationFailure: ") {
		t.Errorf("asked for a replica's certificate: %q, %d bytes", failed, len(chain))
	}

	for part, group := range map[string]string{"nodeclient": "boot", "selfnodeclient": "system:nodes"} {
		_, err := admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: part},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:certificates.k8s.io:certificatesigningrequests:" + part},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: group}}}, metav1.CreateOptions{})
		must(err)
	}
	boot := p.rest("cp1")
	boot.Impersonate = rest.ImpersonationConfig{UserName: "newcomer", Groups: []string{"boot"}}
	_, err = admin.RbacV1().ClusterRoleBindings().Create(ctx, &rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "ask"},
		RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node"},
		Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "boot"}}}, metav1.CreateOptions{})
	must(err)
	first, err := kubernetes.NewForConfig(boot)
	must(err)
	node := subject("system:node:w1", "system:nodes")
	must(ask(first, a.asks("first", certificatesv1.KubeAPIServerClientKubeletSignerName, node, "digital signature", "client auth")))
	chain, failed = decided(t, admin, "first")
	if failed != "" {
		t.Fatal(failed)
	}
	w1 := a.with(p.rest("cp1"), chain)
	must(ask(w1, a.asks("renewed", certificatesv1.KubeAPIServerClientKubeletSignerName, node, "digital signature", "client auth")))
	if chain, failed := decided(t, admin, "renewed"); len(chain) == 0 {
		t.Errorf("a node's own renewal: %s", failed)
	}

	serving := *node
	serving.IPAddresses = []net.IP{net.IPv4(192, 0, 2, 7)}
	must(ask(w1, a.asks("serving", certificatesv1.KubeletServingSignerName, &serving, "digital signature", "server auth")))
	approve(t, admin, "serving")
	if chain, failed = decided(t, admin, "serving"); failed != "" {
		t.Fatal(failed)
	}
	cert, err = pki.DecodeCert(chain)
	must(err)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: p.ca.CA.Pool(), DNSName: "192.0.2.7"}); err != nil {
		t.Errorf("the server's certificate: %v", err)
	}
	if err := p.knock(t, "cp1", &tls.Config{InsecureSkipVerify: true, Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: a.key}}}); err == nil {
		t.Error("a server's certificate of a node lets in a replica")
	}
	p.stockKubectlDecides(a.asks("by-hand", certificatesv1.KubeAPIServerClientSignerName, subject("bob"), certificatesv1.UsageClientAuth), a)
}

// stockKubectlDecides approves and denies with the kubectl of this machine, where there is one.
func (p *plane) stockKubectlDecides(c *certificatesv1.CertificateSigningRequest, a *applicant) {
	t := p.t
	programs, _ := filepath.Glob("/usr/lib/google-cloud-sdk/bin/kubectl.1.*")
	if len(programs) == 0 {
		t.Log("no stock kubectl on this machine: approving by the API alone was tested")
		return
	}
	admin := p.client("cp1")
	home := t.TempDir()
	run := func(program string, args ...string) string {
		t.Helper()
		cmd := exec.Command(program, append([]string{"--kubeconfig", p.founded.Kubeconfig, "--server", p.rest("cp1").Host}, args...)...)
		cmd.Env = []string{"HOME=" + home, "PATH=" + os.Getenv("PATH")}
		out, err := cmd.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", filepath.Base(program), args, err, out)
		}
		return string(out)
	}
	for i, program := range programs {
		for verb, want := range map[string]string{"approve": "Approved,Issued", "deny": "Denied"} {
			one := c.DeepCopy()
			one.Name = fmt.Sprintf("%s-%d-%s", c.Name, i, verb)
			if _, err := admin.CertificatesV1().CertificateSigningRequests().Create(context.Background(), one, metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if row := strings.Fields(run(program, "get", "csr", one.Name, "--no-headers")); row[len(row)-1] != "Pending" || row[len(row)-2] != "60m" {
				t.Errorf("%s: %q", filepath.Base(program), row)
			}
			run(program, "certificate", verb, one.Name)
			eventually(t, func() error {
				if row := strings.Fields(run(program, "get", "csr", one.Name, "--no-headers")); row[len(row)-1] != want {
					return fmt.Errorf("%s %s: %q, want %s", filepath.Base(program), verb, row, want)
				}
				return nil
			})
		}
	}
}
