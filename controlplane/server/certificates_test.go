package server_test

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
	"keelson.dev/keelson/controlplane/server/servertest"
)

// certificateRequester requests certificates for one key.
type certificateRequester struct {
	t   *testing.T
	key *ecdsa.PrivateKey
}

func newCertificateRequester(t *testing.T) *certificateRequester {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return &certificateRequester{t, key}
}

// newRequest returns a request for a certificate.
func (a *certificateRequester) newRequest(
	name, signer string, r *x509.CertificateRequest, usages ...certificatesv1.KeyUsage,
) *certificatesv1.CertificateSigningRequest {
	a.t.Helper()
	der, err := x509.CreateCertificateRequest(rand.Reader, r, a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	hour := int32(3600)
	return &certificatesv1.CertificateSigningRequest{ObjectMeta: metav1.ObjectMeta{Name: name},
		Spec: certificatesv1.CertificateSigningRequestSpec{
			Request:    pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE REQUEST", Bytes: der}),
			SignerName: signer, Usages: usages, ExpirationSeconds: &hour,
		}}
}

// keyPEM returns the key as in a kubeconfig.
func (a *certificateRequester) keyPEM() []byte {
	a.t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(a.key)
	if err != nil {
		a.t.Fatal(err)
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// clientWith returns a client that authenticates with the certificate.
func (a *certificateRequester) clientWith(cfg *rest.Config, chain []byte) *kubernetes.Clientset {
	a.t.Helper()
	next := rest.AnonymousClientConfig(cfg)
	next.CertData, next.KeyData = chain, a.keyPEM()
	cs, err := kubernetes.NewForConfig(next)
	if err != nil {
		a.t.Fatal(err)
	}
	return cs
}

// approveRequest approves a request.
func approveRequest(t *testing.T, cs *kubernetes.Clientset, name string) {
	t.Helper()
	ctx := context.Background()
	servertest.Eventually(t, func() error {
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

// awaitDecision waits until a request has a certificate or has failed.
func awaitDecision(t *testing.T, cs *kubernetes.Clientset, name string) (chain []byte, failed string) {
	t.Helper()
	servertest.Eventually(t, func() error {
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

// A user with an approved client certificate logs in with the requested name and groups, for the
// requested time. No certificate of administrators or replicas is issued. A node's request for
// itself is approved if a role allows it. A node's server gets a certificate that clients can
// verify.
func TestCertificateRequests(t *testing.T) {
	p := newPlane(t, 1, nil)
	ctx := context.Background()
	admin := p.Client("cp1")
	a := newCertificateRequester(t)

	mustSucceed(t, createSigningRequest(ctx, admin,
		a.newRequest("ann", certificatesv1.KubeAPIServerClientSignerName, newSubject("ann", "team"),
			certificatesv1.UsageClientAuth)))
	approveRequest(t, admin, "ann")
	chain, failed := awaitDecision(t, admin, "ann")
	if failed != "" {
		t.Fatal(failed)
	}
	who, err := a.clientWith(p.RESTConfig("cp1"), chain).AuthenticationV1().SelfSubjectReviews().Create(ctx,
		&authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	mustSucceed(t, err)
	if u := who.Status.UserInfo; u.Username != "ann" || strings.Join(u.Groups, " ") != "team system:authenticated" {
		t.Errorf("logged in as %s in %q", u.Username, u.Groups)
	}
	cert, err := pki.DecodeCert(chain)
	mustSucceed(t, err)
	if left := time.Until(cert.NotAfter); left > time.Hour || left < 50*time.Minute {
		t.Errorf("the certificate is valid for %v, want an hour", left)
	}

	err = createSigningRequest(ctx, admin, a.newRequest("root", certificatesv1.KubeAPIServerClientSignerName,
		newSubject("eve", "system:masters"),
		certificatesv1.UsageClientAuth))
	if !apierrors.IsForbidden(err) {
		t.Errorf("request for system:masters: %v", err)
	}
	mustSucceed(t, createSigningRequest(ctx, admin,
		a.newRequest("replica", certificatesv1.KubeAPIServerClientSignerName,
			newSubject("cp1", "keelson:replicas"),
			certificatesv1.UsageClientAuth)))
	approveRequest(t, admin, "replica")
	if chain, failed := awaitDecision(t, admin, "replica"); len(chain) > 0 ||
		!strings.HasPrefix(failed, "SignerValidationFailure: ") {
		t.Errorf("request for a replica's certificate: %q, %d bytes", failed, len(chain))
	}

	checkNodeCertificates(ctx, t, p, a)
	p.decideWithKubectl(a.newRequest("by-hand", certificatesv1.KubeAPIServerClientSignerName, newSubject("bob"),
		certificatesv1.UsageClientAuth), a)
}

// checkNodeCertificates requests the client certificate of a node, renews it, and requests the
// serving certificate of the node.
func checkNodeCertificates(ctx context.Context, t *testing.T, p *plane, a *certificateRequester) {
	t.Helper()
	admin := p.Client("cp1")
	for part, group := range map[string]string{"nodeclient": "boot", "selfnodeclient": "system:nodes"} {
		_, err := admin.RbacV1().ClusterRoleBindings().Create(ctx,
			&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: part},
				RoleRef: rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole",
					Name: "system:certificates.k8s.io:certificatesigningrequests:" + part},
				Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: group}}},
			metav1.CreateOptions{})
		mustSucceed(t, err)
	}
	boot := p.RESTConfig("cp1")
	boot.Impersonate = rest.ImpersonationConfig{UserName: "new-node", Groups: []string{"boot"}}
	_, err := admin.RbacV1().ClusterRoleBindings().Create(ctx,
		&rbacv1.ClusterRoleBinding{ObjectMeta: metav1.ObjectMeta{Name: "ask"},
			RoleRef:  rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "system:node"},
			Subjects: []rbacv1.Subject{{APIGroup: rbacv1.GroupName, Kind: "Group", Name: "boot"}}},
		metav1.CreateOptions{})
	mustSucceed(t, err)
	first, err := kubernetes.NewForConfig(boot)
	mustSucceed(t, err)
	node := newSubject("system:node:w1", "system:nodes")
	mustSucceed(t, createSigningRequest(ctx, first,
		a.newRequest("first", certificatesv1.KubeAPIServerClientKubeletSignerName, node,
			"digital signature", "client auth")))
	chain, failed := awaitDecision(t, admin, "first")
	if failed != "" {
		t.Fatal(failed)
	}
	w1 := a.clientWith(p.RESTConfig("cp1"), chain)
	mustSucceed(t, createSigningRequest(ctx, w1,
		a.newRequest("renewed", certificatesv1.KubeAPIServerClientKubeletSignerName, node,
			"digital signature", "client auth")))
	if chain, failed := awaitDecision(t, admin, "renewed"); len(chain) == 0 {
		t.Errorf("renewal by the node: %s", failed)
	}

	serving := *node
	serving.IPAddresses = []net.IP{net.IPv4(192, 0, 2, 7)}
	mustSucceed(t, createSigningRequest(ctx, w1,
		a.newRequest("serving", certificatesv1.KubeletServingSignerName, &serving,
			"digital signature", "server auth")))
	approveRequest(t, admin, "serving")
	if chain, failed = awaitDecision(t, admin, "serving"); failed != "" {
		t.Fatal(failed)
	}
	cert, err := pki.DecodeCert(chain)
	mustSucceed(t, err)
	if _, err := cert.Verify(x509.VerifyOptions{Roots: p.Trust.CA.Pool(), DNSName: "192.0.2.7"}); err != nil {
		t.Errorf("the server's certificate: %v", err)
	}
	if err := p.DialPeer(t, "cp1", &tls.Config{InsecureSkipVerify: true,
		Certificates: []tls.Certificate{{Certificate: [][]byte{cert.Raw}, PrivateKey: a.key}}}); err == nil {
		t.Error("a node's serving certificate is accepted on the peer port")
	}
}

func createSigningRequest(
	ctx context.Context, cs *kubernetes.Clientset, c *certificatesv1.CertificateSigningRequest,
) error {
	_, err := cs.CertificatesV1().CertificateSigningRequests().Create(ctx, c, metav1.CreateOptions{})
	return err
}

func mustSucceed(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newSubject returns the subject of a certificate request for a user in groups.
func newSubject(name string, groups ...string) *x509.CertificateRequest {
	return &x509.CertificateRequest{Subject: pkix.Name{CommonName: name, Organization: groups}}
}

// decideWithKubectl approves and denies requests with the installed kubectl, if there is one.
func (p *plane) decideWithKubectl(c *certificatesv1.CertificateSigningRequest, a *certificateRequester) {
	t := p.T
	programs, _ := filepath.Glob("/usr/lib/google-cloud-sdk/bin/kubectl.1.*")
	if len(programs) == 0 {
		t.Log("no kubectl is installed: only the API was tested")
		return
	}
	admin := p.Client("cp1")
	home := t.TempDir()
	run := func(program string, args ...string) string {
		t.Helper()
		cmd := exec.Command(program, append([]string{"--kubeconfig", p.Founded.Kubeconfig, "--server",
			p.RESTConfig("cp1").Host}, args...)...)
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
			if _, err := admin.CertificatesV1().CertificateSigningRequests().Create(context.Background(), one,
				metav1.CreateOptions{}); err != nil {
				t.Fatal(err)
			}
			if row := strings.Fields(run(program, "get", "csr", one.Name, "--no-headers")); row[len(row)-1] !=
				"Pending" || row[len(row)-2] != "60m" {
				t.Errorf("%s: %q", filepath.Base(program), row)
			}
			run(program, "certificate", verb, one.Name)
			servertest.Eventually(t, func() error {
				if row := strings.Fields(run(program, "get", "csr", one.Name, "--no-headers")); row[len(row)-1] !=
					want {
					return fmt.Errorf("%s %s: %q, want %s", filepath.Base(program), verb, row, want)
				}
				return nil
			})
		}
	}
}
