package server

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
)

// hardened is a replica that was made and started with nothing but its address, and somebody whom it does not know.
type hardened struct {
	*plane
	cfg      Config
	stranger *http.Client
}

// planted is what a Secret holds.
const planted = "pL4nted-S3cret-at-rest"

// The checklist of docs/reference/hardening.md, asked of a replica that was made and started with nothing but its address: what it leaves on
// its disk, and whom it lets do what. The names of the subtests are those in the document's table.
func TestHardenedDefaults(t *testing.T) {
	p := newPlane(t, 1, nil)
	secret := &v1.Secret{ObjectMeta: metav1.ObjectMeta{Name: "s"}, StringData: map[string]string{"k": planted}}
	if _, err := p.client("cp1").CoreV1().Secrets("default").Create(t.Context(), secret, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	h := &hardened{plane: p, cfg: p.members["cp1"].cfg,
		stranger: &http.Client{Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}, Timeout: soon}}
	defer h.stranger.CloseIdleConnections()
	t.Run("files", h.files)
	t.Run("anonymous", h.anonymous)
	t.Run("profiling", h.profiling)
	t.Run("authorization", h.authorization)
	t.Run("tls", h.tls)
	t.Run("addresses", h.addresses)
	t.Run("audit", h.audit)
	t.Run("tokens", h.tokens)
	t.Run("client certificates", h.clientCertificates)
	t.Run("at rest", h.atRest)
}

// refused says that a stranger gets none of what he asks the API for.
func (h *hardened) refused(t *testing.T, paths ...string) {
	t.Helper()
	for _, path := range paths {
		resp, err := h.stranger.Get("https://" + datadir.HostPort(h.cfg.Advertise, h.cluster.APIPort) + path)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
		if resp.StatusCode != http.StatusUnauthorized && resp.StatusCode != http.StatusForbidden {
			t.Errorf("a stranger asks for %s and gets %d", path, resp.StatusCode)
		}
	}
}

func (h *hardened) files(t *testing.T) {
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
			t.Errorf("%s has mode %v: others may use it", path, info.Mode())
		}
		if s, ok := info.Sys().(*syscall.Stat_t); !ok || int(s.Uid) != os.Geteuid() {
			t.Errorf("%s is not its daemon's", path)
		}
		return nil
	})
	for _, must := range []string{"pki/ca.key", "pki/sa.key", "pki/store.keys", "pki/encryption.key", datadir.AdminFile, "audit/audit.log"} {
		if _, serr := os.Stat(filepath.Join(h.cfg.DataDir, must)); serr != nil {
			t.Errorf("this test has not seen %s: %v", must, serr)
		}
	}
	if err != nil || seen < 15 {
		t.Errorf("%d files were looked at, %v", seen, err)
	}
}

func (h *hardened) anonymous(t *testing.T) {
	h.refused(t, "/api/v1/secrets", "/api/v1/nodes", "/apis", "/metrics", "/cluster/status", "/flagz", "/openapi/v3")
}

func (h *hardened) profiling(t *testing.T) {
	h.refused(t, "/debug/pprof", "/debug/pprof/heap", "/debug/pprof/profile?seconds=1")
}

func (h *hardened) authorization(t *testing.T) {
	nobody := h.rest("cp1")
	nobody.Impersonate.UserName = "nobody"
	cs, err := kubernetes.NewForConfig(nobody)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range []string{"/api/v1/secrets", "/api/v1/pods", "/cluster/status"} {
		if code := 0; cs.RESTClient().Get().RequestURI(path).Do(t.Context()).StatusCode(&code).Error() == nil || code != http.StatusForbidden {
			t.Errorf("a user without any role asks for %s and gets %d", path, code)
		}
	}
}

func (h *hardened) tls(t *testing.T) {
	for what, port := range map[string]int{"the API": h.cluster.APIPort, "agents": h.cluster.FleetPort, "replicas": h.cluster.PeerPort} {
		old, err := tls.Dial("tcp", datadir.HostPort(h.cfg.Advertise, port), &tls.Config{InsecureSkipVerify: true, MaxVersion: tls.VersionTLS12})
		if err == nil {
			old.Close()
			t.Errorf("the port for %s speaks TLS 1.2", what)
		}
	}
	if c, err := tls.Dial("tcp", datadir.HostPort(h.cfg.Advertise, h.cluster.APIPort), &tls.Config{InsecureSkipVerify: true}); err != nil {
		t.Errorf("this test finds nothing: %v", err)
	} else {
		c.Close()
	}
	if resp, err := h.stranger.Get("http://" + datadir.HostPort(h.cfg.Advertise, h.cluster.APIPort) + "/api"); err == nil {
		resp.Body.Close()
		if resp.StatusCode != http.StatusBadRequest {
			t.Errorf("the API answers plain HTTP with %d", resp.StatusCode)
		}
	}
}

func (h *hardened) addresses(t *testing.T) {
	for _, port := range []int{h.cluster.APIPort, h.cluster.FleetPort, h.cluster.PeerPort} {
		if c, err := tls.Dial("tcp", datadir.HostPort("127.0.0.1", port), &tls.Config{InsecureSkipVerify: true}); err == nil {
			c.Close()
			t.Errorf("port %d listens at another address than --advertise-address", port)
		}
	}
}

func (h *hardened) audit(t *testing.T) {
	eventually(t, func() error {
		raw, err := os.ReadFile(filepath.Join(h.cfg.DataDir, "audit", "audit.log"))
		if err == nil && !bytes.Contains(raw, []byte(`"resource":"secrets"`)) {
			err = io.ErrUnexpectedEOF
		}
		if bytes.Contains(raw, []byte(planted)) {
			t.Error("the audit log holds what is in a Secret")
		}
		return err
	})
}

func (h *hardened) tokens(t *testing.T) {
	got, err := h.client("cp1").CoreV1().ServiceAccounts("default").CreateToken(t.Context(), "default", &authenticationv1.TokenRequest{}, metav1.CreateOptions{})
	if err != nil || time.Until(got.Status.ExpirationTimestamp.Time) > 61*time.Minute {
		t.Errorf("a token that nobody asked to live long lives until %v, %v", got.Status.ExpirationTimestamp, err)
	}
	list, err := h.client("cp1").CoreV1().Secrets("").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Items {
		if s.Type == v1.SecretTypeServiceAccountToken {
			t.Errorf("a token without an end was made unasked: %s/%s", s.Namespace, s.Name)
		}
	}
}

func (h *hardened) atRest(t *testing.T) {
	err := filepath.WalkDir(h.cfg.DataDir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		if bytes.Contains(raw, []byte(planted)) {
			t.Errorf("%s holds a Secret in clear", strings.TrimPrefix(path, h.cfg.DataDir))
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}
