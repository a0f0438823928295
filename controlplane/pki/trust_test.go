package pki

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

var t0 = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// at is a clock that tests set.
type at struct{ time.Time }

func (a *at) now() time.Time { return a.Time }

func newTrust(t *testing.T) *Trust {
	t.Helper()
	tr, err := NewTrust("lab", t0)
	if err != nil {
		t.Fatal(err)
	}
	return tr
}

func TestInitWritesOnceAndLoads(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "a", "pki")
	made, err := Init(dir, "lab", t0)
	if err != nil {
		t.Fatal(err)
	}
	got, err := Load(dir)
	if err != nil {
		t.Fatal(err)
	}
	if !got.CA.Cert.Equal(made.CA.Cert) || !got.ServiceKey.Equal(made.ServiceKey) ||
		!bytes.Equal(got.EncryptionKey, made.EncryptionKey) || got.ClusterName() != "lab" {
		t.Error("what was loaded is not what was made")
	}
	for _, name := range []string{FileCACert, FileCAKey, FileServiceKey, FileEncryptionKey} {
		info, err := os.Stat(filepath.Join(dir, name))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, mode %v, want 0600", name, err, info.Mode())
		}
	}
	before, _ := os.ReadFile(filepath.Join(dir, FileCAKey))
	if _, err := Init(dir, "other", t0); !errors.Is(err, ErrExists) {
		t.Errorf("a second Init: %v, want ErrExists", err)
	}
	after, _ := os.ReadFile(filepath.Join(dir, FileCAKey))
	if !bytes.Equal(before, after) {
		t.Error("the second Init changed the CA's key")
	}
	entries, _ := os.ReadDir(filepath.Dir(dir))
	if len(entries) != 1 {
		t.Errorf("%d entries beside the folder, want none left over", len(entries)-1)
	}
}

func TestLoadRefusesWhatDoesNotFit(t *testing.T) {
	if _, err := Load(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("an empty folder: %v, want fs.ErrNotExist", err)
	}
	for name, content := range map[string]string{
		FileCAKey: "no pem", FileEncryptionKey: "abcd", FileServiceKey: "-----BEGIN X-----\n-----END X-----\n",
	} {
		dir := filepath.Join(t.TempDir(), "pki")
		if _, err := Init(dir, "lab", t0); err != nil {
			t.Fatal(err)
		}
		if err := WriteFile(filepath.Join(dir, name), []byte(content)); err != nil {
			t.Fatal(err)
		}
		if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), dir) {
			t.Errorf("%s = %q: %v, want an error naming the folder", name, content, err)
		}
	}
	a, b := newTrust(t), newTrust(t)
	mixed := &Trust{CA: &CA{Cert: a.CA.Cert, key: b.CA.key}, ServiceKey: a.ServiceKey, EncryptionKey: a.EncryptionKey}
	data, err := mixed.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := UnmarshalTrust(data); err == nil || !strings.Contains(err.Error(), "does not match") {
		t.Errorf("key of another CA: %v", err)
	}
}

func TestTrustTravels(t *testing.T) {
	a := newTrust(t)
	data, err := a.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	b, err := UnmarshalTrust(data)
	if err != nil {
		t.Fatal(err)
	}
	// Certificates issued by the joined replica are trusted by the first one.
	c, err := b.CA.Issue(ReplicaPeer("cp2"), t0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Cert.Verify(x509.VerifyOptions{Roots: a.Pool(), CurrentTime: t0}); err != nil {
		t.Error(err)
	}
}

func TestServingNames(t *testing.T) {
	ca := newTrust(t).CA
	c, err := ca.Issue(ReplicaServing("cp1", net.ParseIP("10.96.0.1"), "cp1.example.com", "192.0.2.7", "cp1"), t0)
	if err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{"kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "localhost", "127.0.0.1", "::1", "10.96.0.1",
		"cp1", "cp1.example.com", "192.0.2.7"} {
		if err := c.Cert.VerifyHostname(host); err != nil {
			t.Errorf("%s: %v", host, err)
		}
	}
	if err := c.Cert.VerifyHostname("example.com"); err == nil {
		t.Error("the certificate is good for example.com")
	}
	if got := t0.Sub(c.Cert.NotBefore); got != Backdate {
		t.Errorf("valid from %v before now, want %v", got, Backdate)
	}
	if got := c.Cert.NotAfter.Sub(t0); got != DefaultLife {
		t.Errorf("valid for %v, want %v", got, DefaultLife)
	}
}

func TestNoCertificateOutlivesItsCA(t *testing.T) {
	ca := newTrust(t).CA
	late := ca.Cert.NotAfter.Add(-time.Hour)
	c, err := ca.Issue(Admin(), late)
	if err != nil {
		t.Fatal(err)
	}
	if !c.Cert.NotAfter.Equal(ca.Cert.NotAfter) {
		t.Errorf("ends %v, the CA %v", c.Cert.NotAfter, ca.Cert.NotAfter)
	}
}

func request(t *testing.T, tmpl x509.CertificateRequest) []byte {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	der, err := x509.CreateCertificateRequest(rand.Reader, &tmpl, key)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func TestSignAgent(t *testing.T) {
	ca := newTrust(t).CA
	name := func(cn string, o ...string) x509.CertificateRequest {
		return x509.CertificateRequest{Subject: pkix.Name{CommonName: cn, Organization: o}}
	}
	good := request(t, name("system:node:w1", "system:nodes"))
	out, err := ca.SignAgent(good, "w1", 0, t0)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := DecodeCert(out)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: ca.Pool(), CurrentTime: t0,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}); err != nil {
		t.Error(err)
	}
	if _, err := cert.Verify(x509.VerifyOptions{Roots: ca.Pool(), CurrentTime: t0,
		KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err == nil {
		t.Error("an agent's certificate may serve: it could pose as a replica")
	}

	withIP := name("system:node:w1", "system:nodes")
	withIP.IPAddresses = []net.IP{net.IPv4(192, 0, 2, 1)}
	forged := bytes.Clone(good)
	forged[len(forged)-1] ^= 1
	for what, c := range map[string]struct {
		csr  []byte
		node string
	}{
		"another node":        {good, "w2"},
		"no node":             {request(t, name("system:node:", "system:nodes")), ""},
		"masters":             {request(t, name("system:node:w1", "system:masters")), "w1"},
		"nodes and masters":   {request(t, name("system:node:w1", "system:nodes", "system:masters")), "w1"},
		"no group":            {request(t, name("system:node:w1")), "w1"},
		"a user":              {request(t, name("w1", "system:nodes")), "w1"},
		"a name of its own":   {request(t, withIP), "w1"},
		"forged signature":    {forged, "w1"},
		"no request":          {[]byte("hello"), "w1"},
		"PEM of a wrong kind": {ca.PEM(), "w1"},
	} {
		if _, err := ca.SignAgent(c.csr, c.node, 0, t0); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v, want ErrRequest", what, err)
		}
	}
}

// The serving certificate of a node contains only the address from which the node connected. With a
// name of its choice the node could impersonate the API server.
func TestSignServing(t *testing.T) {
	ca := newTrust(t).CA
	ask := x509.CertificateRequest{Subject: pkix.Name{CommonName: "system:node:w1",
		Organization: []string{"system:nodes"}},
		IPAddresses: []net.IP{net.IPv4(10, 96, 0, 1), net.IPv4(192, 0, 2, 1), net.ParseIP("2001:db8::1"),
			net.IPv4(127, 0, 0, 1)}}
	for seen, want := range map[string]string{"192.0.2.1": "[192.0.2.1]", "::ffff:192.0.2.1": "[192.0.2.1]",
		"2001:db8::1": "[2001:db8::1]", "192.0.2.9": "[]",
		"127.0.0.1": "[]"} {
		out, err := ca.SignServing(request(t, ask), "w1", netip.MustParseAddr(seen), 0, t0)
		if err != nil {
			t.Fatal(err)
		}
		cert, err := DecodeCert(out)
		if err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprint(cert.IPAddresses); got != want || len(cert.DNSNames) > 0 {
			t.Errorf("seen at %s it is named %s %v, want %s", seen, got, cert.DNSNames, want)
		}
		for usage, good := range map[x509.ExtKeyUsage]bool{x509.ExtKeyUsageServerAuth: true,
			x509.ExtKeyUsageClientAuth: false} {
			_, err := cert.Verify(x509.VerifyOptions{Roots: ca.Pool(), CurrentTime: t0,
				KeyUsages: []x509.ExtKeyUsage{usage}})
			if (err == nil) != good {
				t.Errorf("usage %v: %v", usage, err)
			}
		}
	}
	ask.DNSNames = []string{"kubernetes.default.svc"}
	for what, c := range map[string]struct {
		csr  []byte
		node string
	}{"a host": {request(t, ask), "w1"}, "another node": {request(t, ask), "w2"},
		"no request": {[]byte("hello"), "w1"}} {
		if _, err := ca.SignServing(c.csr, c.node, netip.MustParseAddr("192.0.2.1"), 0,
			t0); !errors.Is(err, ErrRequest) {
			t.Errorf("%s: %v, want ErrRequest", what, err)
		}
	}
}

func TestRotatorRenewsAtTwoThirds(t *testing.T) {
	clock := &at{t0}
	issued, fail := 0, false
	ca := newTrust(t).CA
	r := NewRotator(func(now time.Time) (*tls.Certificate, error) {
		if fail {
			return nil, errors.New("no")
		}
		issued++
		c, err := ca.Issue(Profile{CommonName: "x", Life: 3*time.Hour - Backdate}, now)
		if err != nil {
			return nil, err
		}
		return &c.TLS, nil
	}, clock.now)
	get := func(want int) {
		t.Helper()
		if _, err := r.GetCertificate(nil); err != nil {
			t.Fatal(err)
		}
		if issued != want {
			t.Fatalf("%v after the start: %d certificates issued, want %d", clock.Sub(t0), issued, want)
		}
	}
	get(1)
	clock.Time = t0.Add(2*time.Hour - Backdate - time.Second)
	get(1)
	fail = true
	clock.Time = clock.Add(2 * time.Second)
	get(1) // the renewal failed; the previous certificate is still valid
	fail = false
	get(1) // the renewal is not retried at every handshake
	clock.Time = clock.Add(retryIssue)
	get(2)
	fail = true
	clock.Time = clock.Add(24 * time.Hour)
	if _, err := r.GetCertificate(nil); err == nil {
		t.Error("an expired certificate was handed out")
	}
}

// handshake runs both ends over a pipe and returns their errors.
func handshake(t *testing.T, server, client *tls.Config) (serverErr, clientErr error, s *tls.Conn) {
	t.Helper()
	a, b := net.Pipe()
	sc, cc := tls.Server(a, server), tls.Client(b, client)
	done := make(chan error, 1)
	go func() {
		err := sc.Handshake()
		if err != nil {
			a.Close()
		} else {
			_, err = sc.Write([]byte("x")) // in TLS 1.3 the client observes a rejection with the first data
		}
		done <- err
	}()
	clientErr = cc.Handshake()
	if clientErr == nil {
		_, clientErr = cc.Read(make([]byte, 1))
	} else {
		b.Close()
	}
	serverErr = <-done
	t.Cleanup(func() { a.Close(); b.Close() })
	return serverErr, clientErr, sc
}

func TestTransport(t *testing.T) {
	clock := &at{t0}
	tr, foreign := newTrust(t), newTrust(t)
	rot := func(ca *CA, p Profile) *Rotator { return ca.Rotator(p, clock.now) }
	serving := rot(tr.CA, ReplicaServing("cp1", nil))
	peer := rot(tr.CA, ReplicaPeer("cp1"))
	pool := tr.Pool()
	agent := rot(tr.CA, Client("system:node:w1", "system:nodes"))

	for _, c := range []struct {
		name           string
		server, client *tls.Config
		ok             bool
	}{
		{"admin", ServerTLS(pool, serving, clock.now), ClientTLS(pool, rot(tr.CA, Admin()), "localhost", clock.now),
			true},
		{"token only", ServerTLS(pool, serving, clock.now), ClientTLS(pool, nil, "kubernetes", clock.now), true},
		{"client of another CA", ServerTLS(pool, serving, clock.now),
			ClientTLS(pool, rot(foreign.CA, Admin()), "localhost", clock.now), false},
		{"server of another CA", ServerTLS(pool, rot(foreign.CA, ReplicaServing("cp1", nil)), clock.now),
			ClientTLS(pool, nil, "localhost", clock.now), false},
		{"replica to replica", PeerTLS(pool, peer, clock.now), PeerTLS(pool, rot(tr.CA, ReplicaPeer("cp2")), clock.now),
			true},
		// F51
		{"agent to the store", PeerTLS(pool, peer, clock.now), ClientTLS(pool, agent, PeerServerName, clock.now),
			false},
		// F51
		{"admin to the store", PeerTLS(pool, peer, clock.now),
			ClientTLS(pool, rot(tr.CA, Admin()), PeerServerName, clock.now), false},
		// F51
		{"nobody to the store", PeerTLS(pool, peer, clock.now), ClientTLS(pool, nil, PeerServerName, clock.now), false},
		{"replica to an API that is no peer", ServerTLS(pool, serving, clock.now),
			PeerTLS(pool, peer, clock.now), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			serverErr, clientErr, s := handshake(t, c.server, c.client)
			if ok := serverErr == nil && clientErr == nil; ok != c.ok {
				t.Fatalf("server: %v, client: %v; want success %v", serverErr, clientErr, c.ok)
			}
			if c.ok && s.ConnectionState().Version != tls.VersionTLS13 {
				t.Error("not TLS 1.3")
			}
		})
	}
	clock.Time = t0.Add(-time.Hour)
	early := ClientTLS(pool, nil, "localhost", clock.now)
	clock.Time = t0
	if _, err := serving.Certificate(); err != nil {
		t.Fatal(err)
	}
	clock.Time = t0.Add(-time.Hour)
	if _, clientErr, _ := handshake(t, ServerTLS(pool, serving, clock.now), early); clientErr == nil {
		t.Error("a certificate from the future was accepted")
	}
}

func TestPinnedTLS(t *testing.T) {
	clock := &at{t0}
	tr, foreign := newTrust(t), newTrust(t)
	token := NewToken(RoleNode, tr.CA.Cert)
	try := func(ca *CA, p Profile) (learned *x509.Certificate, err error) {
		_, err, _ = handshake(t, ServerTLS(ca.Pool(), ca.Rotator(p, clock.now), clock.now),
			PinnedTLS(token, func(c *x509.Certificate) { learned = c }, clock.now))
		return learned, err
	}
	learned, err := try(tr.CA, ReplicaServing("cp1", nil))
	if err != nil || !learned.Equal(tr.CA.Cert) {
		t.Errorf("our server: %v, learned %v", err, learned)
	}
	if learned, err := try(foreign.CA, ReplicaServing("cp1", nil)); !errors.Is(err, ErrWrongCA) || learned != nil {
		t.Errorf("another cluster: %v, want ErrWrongCA", err)
	}
	// A member of the cluster without a serving certificate cannot impersonate a replica by sending
	// the CA certificate.
	agent, err := tr.CA.Issue(Client("system:node:w1", "system:nodes"), t0)
	if err != nil {
		t.Fatal(err)
	}
	chain := []*x509.Certificate{agent.Cert, tr.CA.Cert}
	if _, err := checkPinned(token, chain, t0); !errors.Is(err, ErrWrongCA) {
		t.Errorf("an agent as server: %v, want ErrWrongCA", err)
	}
	// Neither can an outsider by sending the public CA certificate with a certificate of another
	// CA.
	other, err := foreign.CA.Issue(ReplicaServing("cp1", nil), t0)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := checkPinned(token, []*x509.Certificate{other.Cert, tr.CA.Cert}, t0); !errors.Is(err, ErrWrongCA) {
		t.Errorf("a foreign leaf: %v, want ErrWrongCA", err)
	}
}
