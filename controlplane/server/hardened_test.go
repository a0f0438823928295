package server_test

import (
	"bytes"
	"crypto/tls"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"keelson.dev/keelson/controlplane/datadir"
	"keelson.dev/keelson/controlplane/server"
	"keelson.dev/keelson/controlplane/server/servertest"
)

// hardenedReplica is a replica with default settings except its address, and a client without
// credentials.
type hardenedReplica struct {
	*plane
	cfg      server.Config
	stranger *http.Client
}

// secretValue is the value of a Secret.
const secretValue = "pL4nted-S3cret-at-rest"

// The checklist of docs/reference/hardening.md for a replica with default settings except its
// address: its files, and the access of clients. The names of the subtests are those in the table
// of the document.
func TestHardenedDefaults(t *testing.T) {
	p := newPlane(t, 1, nil)
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": secretValue}}
	if _, err := p.Client("cp1").CoreV1().Secrets("default").Create(t.Context(), secret, metav1.CreateOptions{}); err !=
		nil {
		t.Fatal(err)
	}
	h := &hardenedReplica{plane: p, cfg: p.Members["cp1"].Config,
		stranger: &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
			Timeout: servertest.Patience}}
	defer h.stranger.CloseIdleConnections()
	t.Run("files", h.checkFileModes)
	t.Run("anonymous", h.checkAnonymousAccess)
	t.Run("profiling", h.checkProfilingAccess)
	t.Run("authorization", h.checkAuthorization)
	t.Run("tls", h.checkTLSVersions)
	t.Run("addresses", h.checkListenAddresses)
	t.Run("audit", h.checkAuditLog)
	t.Run("tokens", h.checkTokens)
	t.Run("client certificates", h.checkClientCertificates)
	t.Run("at rest", h.checkEncryptionAtRest)
}

// checkRefused checks that a client without credentials cannot read the paths.
func (h *hardenedReplica) checkRefused(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		resp, err := h.stranger.Get("https://" + datadir.HostPort(h.cfg.Advertise, h.Cluster.APIPort) + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusForbidden {
			t.Errorf("an anonymous request for %s returned %d", path, resp.StatusCode)
		}
	}
}

func (h *hardenedReplica) checkFileModes(t *testing.T) {
	seen := 0
	err := filepath.WalkDir(h.cfg.DataDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		seen++
		if info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s has mode %v, which gives access to others", path, info.Mode())
		}
		if s, ok := info.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Geteuid() {
			t.Errorf("%s is not owned by its daemon", path)
		}
		return nil
	})
	for _, must := range []string{"pki/ca.key", "pki/sa.key", "pki/store.keys", "pki/encryption.key", datadir.AdminFile,
		"audit/audit.log"} {
		if _, serr := os.Stat(filepath.Join(h.cfg.DataDir, must)); serr != nil {
			t.Errorf("%s is missing: %v", must, serr)
		}
	}
	if err != nil || seen < 15 {
		t.Errorf("checked %d files, %v", seen, err)
	}
}

func (h *hardenedReplica) checkAnonymousAccess(t *testing.T) {
	h.checkRefused(t, "/api/v1/secrets", "/api/v1/nodes", "/apis", "/metrics", "/cluster/status",
		"/flagz", "/openapi/v3")
}

func (h *hardenedReplica) checkProfilingAccess(t *testing.T) {
	h.checkRefused(t, "/debug/pprof", "/debug/pprof/heap", "/debug/pprof/profile?seconds=1")
}

func (h *hardenedReplica) checkAuthorization(t *testing.T) {
	nobody := h.RESTConfig("cp1")
	nobody.Impersonate.UserName = "nobody"
	cs, err := kubernetes.NewForConfig(nobody)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/api/v1/secrets", "/api/v1/pods", "/cluster/status"} {
		if code := 0; cs.RESTClient().Get().RequestURI(path).Do(t.Context()).StatusCode(&code).Error() == nil ||
			code != http.StatusForbidden {
			t.Errorf("a request for %s of a user without roles returned %d", path, code)
		}
	}
}

func (h *hardenedReplica) checkTLSVersions(t *testing.T) {
	for what, port := range map[string]int{"the API": h.Cluster.APIPort, "agents": h.Cluster.FleetPort,
		"replicas": h.Cluster.PeerPort} {
		old, err := tls.Dial("tcp", datadir.HostPort(h.cfg.Advertise, port),
			&tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
		if err == nil {
			old.Close()
			t.Errorf("the port for %s accepts TLS 1.2", what)
		}
	}
	if c, err := tls.Dial("tcp", datadir.HostPort(h.cfg.Advertise, h.Cluster.APIPort),
		&tls.Config{InsecureSkipVerify: true}); err != nil {
		t.Errorf("TLS 1.3 is rejected: %v", err)
	} else {
		c.Close()
	}
	if resp, err := h.stranger.Get("http://" + datadir.HostPort(h.cfg.Advertise, h.Cluster.APIPort) + "/api"); err ==
		nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("the API responds to plain HTTP with %d", resp.StatusCode)
		}
	}
}

func (h *hardenedReplica) checkListenAddresses(t *testing.T) {
	for _, port := range []int{h.Cluster.APIPort, h.Cluster.FleetPort, h.Cluster.PeerPort} {
		if c, err := tls.Dial("tcp", datadir.HostPort("127.0.0.1", port), &tls.Config{InsecureSkipVerify: true}); err ==
			nil {
			c.Close()
			t.Errorf("port %d listens at an address other than --advertise-address", port)
		}
	}
}

func (h *hardenedReplica) checkAuditLog(t *testing.T) {
	servertest.Eventually(t, func() error {
		raw, err := os.ReadFile(filepath.Join(h.cfg.DataDir, "audit", "audit.log"))
		if err == nil && !bytes.Contains(raw, []byte(`"resource":"secrets"`)) {
			err = io.ErrUnexpectedEOF
		}
		if bytes.Contains(raw, []byte(secretValue)) {
			t.Error("the audit log contains the value of a Secret")
		}
		return err
	})
}

func (h *hardenedReplica) checkTokens(t *testing.T) {
	got, err := h.Client("cp1").CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "default",
		&authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil || time.Until(got.Status.ExpirationTimestamp.Time) > 61*time.Minute {
		t.Errorf("a token with the default lifetime expires %v, %v", got.Status.ExpirationTimestamp, err)
	}
	list, err := h.Client("cp1").CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		if s.Type == v1.SecretTypeServiceAccountToken {
			t.Errorf("a token without expiry was created: %s/%s", s.Namespace, s.Name)
		}
	}
}

func (h *hardenedReplica) checkEncryptionAtRest(t *testing.T) {
	err := filepath.WalkDir(h.cfg.DataDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, []byte(secretValue)) {
			t.Errorf("%s contains a Secret unencrypted", strings.TrimPrefix(path, h.cfg.DataDir))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
