package pki

import (
	"crypto/tls"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// end is a replica's end of the connections between replicas.
type end struct {
	dir string
	*Peers
}

func newEnd(t *testing.T, from *Trust, name string, clock *at, life time.Duration) end {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "pki")
	if err := from.Save(dir); err != nil {
		t.Fatal(err)
	}
	p := ReplicaPeer(name)
	p.Life = life
	peers, err := NewPeers(dir, p, clock.now)
	if err != nil {
		t.Fatal(err)
	}
	return end{dir, peers}
}

func (e end) reload(t *testing.T, want bool) {
	t.Helper()
	if changed, err := e.Reload(); err != nil || changed != want {
		t.Fatalf("reload: %v %v, want %v", changed, err, want)
	}
}

// meet connects two ends and returns the serial number of the certificate that the server received.
func meet(t *testing.T, server, client end) (serial string, err error) {
	t.Helper()
	serverErr, clientErr, s := handshake(t, server.Server(), client.Client())
	if serverErr != nil {
		return "", serverErr
	}
	if clientErr != nil {
		return "", clientErr
	}
	return s.ConnectionState().PeerCertificates[0].SerialNumber.String(), nil
}

// Peer certificates are renewed before they expire, and new connections use the new ones. A replica
// with an expired certificate is rejected. F51
func TestPeersRenew(t *testing.T) {
	clock := &at{t0}
	tr := newTrust(t)
	const life = 3*time.Hour - Backdate
	a, b := newEnd(t, tr, "cp1", clock, life), newEnd(t, tr, "cp2", clock, life)
	first, err := meet(t, a, b)
	if err != nil {
		t.Fatal(err)
	}
	clock.Time = t0.Add(time.Hour)
	if again, err := meet(t, a, b); err != nil || again != first {
		t.Fatalf("an hour later: certificate %s, %v; want %s still", again, err, first)
	}
	for range 4 { // far beyond the life of the first certificate
		clock.Time = clock.Add(2*time.Hour + time.Minute)
		next, err := meet(t, a, b)
		if err != nil || next == first {
			t.Fatalf("%s later: certificate %s, %v; want another than %s", clock.Sub(t0), next, err, first)
		}
		first = next
	}
	// A replica that cannot renew its certificate.
	stuck := PeerTLS(tr.Pool(), tr.CA.Rotator(Profile{CommonName: "cp3", Organizations: []string{GroupReplicas},
		DNSNames: []string{PeerServerName}, Server: true, Client: true, Life: life}, func() time.Time {
		return t0
	}), clock.now)
	if serverErr, _, _ := handshake(t, a.Server(), stuck); serverErr == nil ||
		!strings.Contains(serverErr.Error(), "expired") {
		t.Errorf("an expired replica as client: %v", serverErr)
	}
	if _, clientErr, _ := handshake(t, stuck, a.Client()); clientErr == nil ||
		!strings.Contains(clientErr.Error(), "expired") {
		t.Errorf("an expired replica as server: %v", clientErr)
	}
}

// Certificates of other clients are rejected on both ends. F51
func TestPeersRefuseOthers(t *testing.T) {
	clock := &at{t0}
	tr, foreign := newTrust(t), newTrust(t)
	a := newEnd(t, tr, "cp1", clock, 0)
	other := newEnd(t, foreign, "cp2", clock, 0)
	if _, err := meet(t, a, other); err == nil {
		t.Error("a replica of another cluster was let in")
	}
	if _, err := meet(t, other, a); err == nil {
		t.Error("a replica of another cluster was called")
	}
	agent := tr.CA.Rotator(Client("system:node:w1", "system:nodes"), clock.now)
	if serverErr, clientErr, _ := handshake(t, a.Server(),
		ClientTLS(tr.Pool(), agent, PeerServerName, clock.now)); serverErr == nil && clientErr == nil {
		t.Error("an agent was let in")
	}
	serving := tr.CA.Rotator(ReplicaServing("cp1", nil, PeerServerName), clock.now)
	conf := ServerTLS(tr.Pool(), serving, clock.now)
	conf.ClientAuth = tls.RequireAndVerifyClientCert
	if serverErr, clientErr, _ := handshake(t, conf, a.Client()); serverErr == nil && clientErr == nil {
		t.Error("a server of the cluster that is no replica was taken for one")
	}
}

// The peer CA is rotated step by step. At each step all replicas can connect to each other; at the
// end the previous CA is not trusted.
func TestPeersChangeAuthority(t *testing.T) {
	clock := &at{t0}
	tr := newTrust(t)
	ends := []end{newEnd(t, tr, "cp1", clock, 0), newEnd(t, tr, "cp2", clock, 0)}
	// A removed replica that keeps its old keys and trusts any server.
	former := newEnd(t, tr, "cp3", clock, 0)
	calls := former.Client()
	calls.VerifyConnection = nil
	file := filepath.Join(t.TempDir(), "authority")
	cert, err := MakePeerCA(file, "prod", clock.now())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := MakePeerCA(file, "prod", clock.now()); err == nil {
		t.Error("an authority was overwritten")
	}
	all := func(step string) {
		t.Helper()
		for _, s := range ends {
			for _, c := range ends {
				if _, err := meet(t, s, c); err != nil {
					t.Fatalf("%s: %v", step, err)
				}
			}
		}
	}
	each := func(step string, do func(dir string) error) {
		t.Helper()
		for _, e := range ends {
			if err := do(e.dir); err != nil {
				t.Fatalf("%s: %v", step, err)
			}
			e.reload(t, true)
			e.reload(t, false)
			all(step)
		}
	}
	all("at first")
	each("trust", func(dir string) error { _, err := TrustPeerCA(dir, file); return err })
	each("use", func(dir string) error { _, err := UsePeerCA(dir, file); return err })
	if serverErr, clientErr, _ := handshake(t, ends[0].Server(), calls); serverErr != nil || clientErr != nil {
		t.Errorf("before the former authority is forgotten: %v, %v", serverErr, clientErr)
	}
	each("forget", RemovePreviousPeerCAs)
	if serverErr, _, _ := handshake(t, ends[0].Server(), calls); serverErr == nil {
		t.Error("a holder of the former keys was let in")
	}
	if _, err := meet(t, former, ends[0]); err == nil {
		t.Error("a holder of the former keys was called")
	}
	// A joining replica receives the peer CA with the other keys.
	now, err := Load(ends[0].dir)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := now.Marshal()
	if err != nil {
		t.Fatal(err)
	}
	sent, err := UnmarshalTrust(raw)
	if err != nil {
		t.Fatal(err)
	}
	newcomer := newEnd(t, sent, "cp4", clock, 0)
	if _, err := meet(t, ends[0], newcomer); err != nil {
		t.Errorf("a newcomer: %v", err)
	}
	if got := sent.PeerAuthorities(); len(got) != 1 || !got[0].Equal(cert) {
		t.Errorf("the newcomer believes %v", got)
	}
}

// Unreadable files change nothing.
func TestPeersKeepWhatWorks(t *testing.T) {
	clock := &at{t0}
	tr := newTrust(t)
	a, b := newEnd(t, tr, "cp1", clock, 0), newEnd(t, tr, "cp2", clock, 0)
	for name, text := range map[string]string{
		FilePeers: "nonsense", FilePeersTrusted: string(tr.CA.PEM()) +
			"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n",
	} {
		path := filepath.Join(a.dir, name)
		if err := WriteFile(path, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if changed, err := a.Reload(); err == nil || changed || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v %v, want an error that names it", name, changed, err)
		}
		if _, err := meet(t, a, b); err != nil {
			t.Errorf("after a bad %s: %v", name, err)
		}
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
}
