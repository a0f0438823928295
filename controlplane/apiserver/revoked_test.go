package apiserver

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
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
)

// A node's certificate that was revoked is no identity any more, and what is open under it ends; one that was issued
// afterwards is good. Nobody writes such a record but the verb.
func TestRevokedCertificate(t *testing.T) {
	r := start(t, nil)
	issue := func(at time.Time) *tls.Config {
		c, err := r.trust.CA.Issue(pki.Client(api.NodeUserPrefix+"w1", api.GroupNodes), at)
		if err != nil {
			t.Fatal(err)
		}
		return &tls.Config{RootCAs: r.trust.Pool(), ServerName: "127.0.0.1", NextProtos: []string{"http/1.1"}, Certificates: []tls.Certificate{c.TLS}}
	}
	ask := func(conf *tls.Config, path string) (*tls.Conn, *http.Response) {
		t.Helper()
		c, err := tls.Dial("tcp", r.addr, conf)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		if err := c.SetDeadline(time.Now().Add(far)); err != nil {
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
	if _, err := r.admin().CoreV1().Secrets(record.Namespace).Create(within(t), record, metav1.CreateOptions{}); !apierrors.IsForbidden(err) {
		t.Errorf("a revocation that an administrator writes by hand: %v", err)
	}
	system := api.User{Name: api.UserAPIServer, Groups: []string{api.GroupMasters}}
	if _, err := client.Create(within(t), client.New(r.Backend(), r.cfg.Kinds).As(system).ForClusterVerb(), record); err != nil {
		t.Fatal(err)
	}
	ended(t, "the watch of a revoked node", watch)
	if _, resp := ask(old, "/api/v1/services"); resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("a call of a revoked node: %s", resp.Status)
	} else if raw, _ := io.ReadAll(resp.Body); !strings.Contains(string(raw), "revoked") {
		t.Errorf("the refusal does not say why: %s", raw)
	}
	rev, _ := pki.RevocationOf(record)
	if _, resp := ask(issue(rev.After()), "/api/v1/services"); resp.StatusCode != http.StatusOK {
		t.Errorf("a certificate that was issued afterwards: %s", resp.Status)
	}
}
