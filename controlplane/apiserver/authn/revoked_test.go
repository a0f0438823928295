package authn_test

import (
	"bufio"
	"crypto/tls"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// A revoked node certificate no longer authenticates, and its open watches end. A certificate
// issued after the revocation is valid. Only the operator's verb may write a revocation record.
func TestRevokedCertificate(t *testing.T) {
	r := apiservertest.StartReplica(t, nil)
	issue := func(at time.Time) *tls.Config {
		c, err := r.Trust.CA.Issue(pki.Client(api.NodeUserPrefix+"w1", api.GroupNodes), at)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{RootCAs: r.Trust.Pool(), ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"},
			Certificates: []tls.Certificate{c.TLS}}
	}
	ask := func(conf *tls.Config, path string) (*tls.Conn, *http.Response) {
		t.Helper()
		c, err := tls.Dial("tcp", r.Addr, conf)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(apiservertest.Far)); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(c, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		return c, resp
	}
	old := issue(time.Now())
	watch, resp := ask(old, "/api/v1/services?watch=true")
	if resp.StatusCode != http.StatusOK {
		t.Fatal(resp.Status)
	}
	record := pki.Revocation{Node: "w1", At: time.Now()}.Record()
	if _, err := r.Admin().CoreV1().Secrets(record.Namespace).Create(apiservertest.Within(t), record,
		metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a revocation that an administrator writes by hand: %v", err)
	}
	system := api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}
	if _, err := client.Create(apiservertest.Within(t),
		client.New(r.Server.Backend(), r.Kinds).As(system).ForClusterVerb(), record); err != nil {
		t.Fatal(err)
	}
	apiservertest.AwaitClosed(t, "the watch of a revoked node", watch)
	if _, resp := ask(old, "/api/v1/services"); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("a call of a revoked node: %s", resp.Status)
	} else if raw, _ := io.ReadAll(resp.Body); !strings.Contains(string(raw), "revoked") {
		t.Errorf("the refusal does not say why: %s", raw)
	}
	rev, _ := pki.ParseRevocation(record)
	if _, resp := ask(issue(rev.After()), "/api/v1/services"); resp.StatusCode != http.StatusOK {
		t.Errorf("a certificate that was issued afterwards: %s", resp.Status)
	}
}
