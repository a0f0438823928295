package clients

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"keelson.dev/keelson/test/testenv"
)

// accessFlags have the lab's replicas follow the files of the folder that they see as /etc/keelson.
var accessFlags = []string{
	"--authentication-config=/etc/keelson/authentication.yaml",
	"--authorization-config=/etc/keelson/authorization.yaml",
	"--authentication-token-webhook-config-file=/etc/keelson/tokens.kubeconfig",
	"--authentication-token-webhook-version=v1",
	"--authentication-token-webhook-cache-ttl=1h", // cached responses stay valid, however long the tests take
}

// The addresses of servers that are no part of the cluster, on a host that is neither a replica nor a worker.
const (
	outsideHost  = "registry"
	outsideIP    = "10.89.0.5"
	peoplePort   = 8441 // an OpenID Connect issuer
	robotsPort   = 8442 // another one
	tokensPort   = 8443 // answers TokenReviews
	policyPort   = 8444 // answers SubjectAccessReviews
	recorderPort = 8445 // an admission webhook by URL
)

// Default contents of the files.
const (
	noIssuers   = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt: []\n"
	nodeAndRBAC = "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthorizationConfiguration\n" +
		"authorizers: [{type: Node, name: node}, {type: RBAC, name: rbac}]\n"
)

// outside is the world around the cluster: the replicas' files, and the certificate of all servers at outsideIP.
var outside outsideServer

type outsideServer struct {
	folder string
	cert   tls.Certificate
	ca     []byte // the certificate in PEM
}

// writeFiles writes the files with which the replicas start.
func (w *outsideServer) writeFiles(folder string) error {
	cert, key, err := newCertificate(outsideIP)
	if err != nil {
		return err
	}
	w.folder, w.ca = folder, cert
	if w.cert, err = tls.X509KeyPair(cert, key); err != nil {
		return err
	}
	for name, text := range map[string]string{
		"authentication.yaml": noIssuers, "authorization.yaml": nodeAndRBAC,
		"tokens.kubeconfig": w.webhookKubeconfig(tokensPort, "/tokens"),
		"policy.kubeconfig": w.webhookKubeconfig(policyPort, "/policy"),
	} {
		if err := w.replaceFile(name, text); err != nil {
			return err
		}
	}
	return nil
}

// replaceFile replaces a file atomically.
func (w *outsideServer) replaceFile(name, text string) error {
	path := filepath.Join(w.folder, name)
	if err := os.WriteFile(path+".new", []byte(text), 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// setFile changes a file of the replicas until the test ends.
func (w *outsideServer) setFile(t *testing.T, name, text string) {
	t.Helper()
	if !slices.Equal(testenv.Lab().Config.ControlPlaneFlags, accessFlags) ||
		testenv.Lab().Config.ControlPlaneFiles != w.folder {
		skipOrFail(t, "the lab that is up was made without the files of these tests: take it down with "+
			"'kctl lab down', "+
			"so that one is made")
	}
	before, err := os.ReadFile(filepath.Join(w.folder, name))
	if err == nil {
		err = w.replaceFile(name, text)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.replaceFile(name, string(before)); err != nil {
			t.Error(err)
		}
	})
}

func (w *outsideServer) webhookKubeconfig(port int, path string) string {
	conf, err := json.Marshal(map[string]any{ // YAML may be JSON
		"apiVersion": "v1", "kind": "Config", "current-context": "x",
		"clusters": []any{map[string]any{"name": "c", "cluster": map[string]any{
			"server": fmt.Sprintf("https://%s:%d%s", outsideIP, port, path), "certificate-authority-data": w.ca,
		}}},
		"contexts": []any{map[string]any{"name": "x", "context": map[string]any{"cluster": "c"}}},
	})
	if err != nil {
		panic(err) // it is made of strings
	}
	return string(conf)
}

// listenOutside listens on one of the ports outside of the cluster.
func (w *outsideServer) listenOutside(t *testing.T, port int) net.Listener {
	t.Helper()
	l, err := testenv.Host(t, outsideHost).Listen(fmt.Sprintf("%s:%d", outsideIP, port))
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// serveHTTPS serves HTTPS on one of the ports until the test ends or stop is called.
func (w *outsideServer) serveHTTPS(t *testing.T, port int, h http.HandlerFunc) (stop func()) {
	t.Helper()
	l := tls.NewListener(w.listenOutside(t, port), &tls.Config{Certificates: []tls.Certificate{w.cert},
		MinVersion: tls.VersionTLS12})
	srv := &http.Server{Handler: h, ReadHeaderTimeout: 10 * time.Second}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	stopped := false
	stop = func() {
		if stopped {
			return
		}
		stopped = true
		_ = srv.Close()
		<-done
	}
	t.Cleanup(stop)
	return stop
}

// newCertificate returns a server certificate and its key in PEM format. The name may be an
// address.
func newCertificate(name string) (cert, key []byte, err error) {
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	if err != nil {
		return nil, nil, err
	}
	tmpl := &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(24 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if ip := net.ParseIP(name); ip != nil {
		tmpl.IPAddresses = []net.IP{ip}
	} else {
		tmpl.DNSNames = []string{name}
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, k.Public(), k)
	if err != nil {
		return nil, nil, err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	if err != nil {
		return nil, nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw}), nil
}

// testCertificate is newCertificate for a test.
func testCertificate(t testing.TB, name string) (cert, key []byte) {
	t.Helper()
	cert, key, err := newCertificate(name)
	if err != nil {
		t.Fatal(err)
	}
	return cert, key
}
