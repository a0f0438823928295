package fleet_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// grant makes a token.
func (b *bed) grant(g pki.Grant) pki.Token {
	b.t.Helper()
	tok := pki.NewToken(pki.RoleNode, b.trust.Cert)
	g.Expires = time.Now().Add(time.Hour)
	b.create(tokenKey.Record(tok, g))
	return tok
}

// enroll asks for the certificate of a node with a key, a new one when it is nil.
func (b *bed) enroll(token, node string, key *ecdsa.PrivateKey) error {
	b.t.Helper()
	if key == nil {
		key = newKey(b.t)
	}
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		b.t.Fatal(err)
	}
	conn, err := grpc.NewClient("passthrough:///"+b.addresses()[0],
		grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: b.trust.Pool(), ServerName: "127.0.0.1"})))
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	_, err = fleetv1.NewEnrollmentClient(conn).Enroll(ctx, &fleetv1.EnrollRequest{Token: token, NodeName: node, CsrDer: csr})
	return err
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

// A token cannot enrol the name of a Node that exists, unless it was made for that name.
func TestNameOfAnother(t *testing.T) {
	b := newBed(t, "cp1")
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
		t.Fatal(err)
	}
	err := b.enroll(b.token, "w1", nil)
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "--names w1 --replace") {
		t.Errorf("the name of a Node that exists: %v", err)
	}
	if err := b.enroll(b.grant(pki.Grant{Uses: 1, Names: []string{"w1"}}).String(), "w1", nil); status.Code(err) != codes.PermissionDenied {
		t.Errorf("with a token for the name alone: %v", err)
	}
	again := b.grant(pki.Grant{Uses: 5, Names: []string{"w1"}, Replace: true}).String()
	if err := b.enroll(again, "w1", nil); err != nil {
		t.Errorf("with a token that replaces it: %v", err)
	}
	if err := b.enroll(again, "w2", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("with a token for another name: %v", err)
	}
	// Who has no good token does not learn which Nodes there are.
	wrong := b.grant(pki.Grant{Uses: 1})
	wrong.Secret = strings.Repeat("a", len(wrong.Secret))
	if here, nowhere := b.enroll(wrong.String(), "w1", nil), b.enroll(wrong.String(), "w7", nil); here == nil || here.Error() != nowhere.Error() {
		t.Errorf("a wrong token is told %v for a Node that exists and %v for another", here, nowhere)
	}
}

// A token works as often as it says; an agent that did not hear the answer asks again with its key.
func TestUsesOfAToken(t *testing.T) {
	b := newBed(t, "cp1")
	once, key := b.grant(pki.Grant{Uses: 1}), newKey(t)
	for range 2 {
		if err := b.enroll(once.String(), "w1", key); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.enroll(once.String(), "w1", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the same name with another key: %v", err)
	}
	if err := b.enroll(once.String(), "w2", key); status.Code(err) != codes.Unauthenticated {
		t.Errorf("another name: %v", err)
	}
	// A record that was written by hand lets nobody in.
	forged := pki.NewToken(pki.RoleNode, b.trust.Cert)
	b.create(pki.TokenKey("another key").Record(forged, pki.Grant{Uses: 9, Expires: time.Now().Add(time.Hour)}))
	if err := b.enroll(forged.String(), "w3", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a token whose record is not of the cluster's making: %v", err)
	}
	// Together as well as one after the other.
	five := b.grant(pki.Grant{Uses: 5})
	ended := make(chan error)
	for range 12 {
		go func() { ended <- b.enroll(five.String(), "w4", nil) }()
	}
	in := 0
	for range 12 {
		switch err := <-ended; status.Code(err) {
		case codes.OK:
			in++
		case codes.Unauthenticated, codes.ResourceExhausted:
		default:
			t.Error(err)
		}
	}
	if in != 5 {
		t.Errorf("%d have joined with a token for 5", in)
	}
}

// The agent's token file goes when the node has its certificate, and is not missed at the next start.
func TestTokenFileGoes(t *testing.T) {
	b := newBed(t, "cp1")
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(b.grant(pki.Grant{Uses: 1}).String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for range 2 {
		ctx, cancel := context.WithCancel(b.ctx)
		s := session.New(session.Config{
			NodeName: "w1", Servers: b.addresses(), TokenFile: file, Facts: &v1.Node{},
			StateDir: filepath.Join(dir, "state"), RunDir: filepath.Join(dir, "run"),
		})
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		b.awaitReady("w1", v1.ConditionTrue)
		cancel()
		<-ended
		if _, err := os.Stat(file); !os.IsNotExist(err) {
			t.Errorf("the token is still there: %v", err)
		}
		b.awaitReady("w1", v1.ConditionUnknown)
	}
}
