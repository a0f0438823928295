package nodegateway_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"
	v1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/agent/session"
	"keelson.dev/keelson/controlplane/client"
	"keelson.dev/keelson/controlplane/pki"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// createToken creates a token.
func (b *testEnv) createToken(g pki.Grant) pki.Token {
	b.t.Helper()
	tok := pki.NewToken(pki.RoleNode, b.trust.SigningCA().Cert)
	g.Expires = time.Now().Add(time.Hour)
	b.createObject(tokenKey.Record(tok, g))
	return tok
}

// enrollNode requests the certificate of a node with a key; nil = a new key.
func (b *testEnv) enrollNode(token, node string, key *ecdsa.PrivateKey) error {
	b.t.Helper()
	return b.enrollAt(b.replicaAddresses()[0], token, node, key)
}

func (b *testEnv) enrollAt(address, token, node string, key *ecdsa.PrivateKey) error {
	b.t.Helper()
	if key == nil {
		key = newKey(b.t)
	}
	_, err := b.enrollCertificate(address, token, node, key)
	return err
}

// enrollCertificate requests a node certificate and returns it.
func (b *testEnv) enrollCertificate(address, token, node string, key *ecdsa.PrivateKey) (certPEM []byte, err error) {
	b.t.Helper()
	conn, err := grpc.NewClient("passthrough:///"+address,
		grpc.WithTransportCredentials(credentials.NewTLS(
			&tls.Config{RootCAs: b.trust.Pool(), ServerName: "127.0.0.1"})))
	if err != nil {
		b.t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(b.ctx, patience)
	defer cancel()
	q := &fleetv1.EnrollRequest{Token: token, NodeName: node, CsrDer: certificateRequest(b.t, node, key)}
	for {
		got, err := fleetv1.NewEnrollmentClient(conn).Enroll(ctx, q)
		// An unauthenticated connection has a deadline of seconds, which a busy machine may exceed:
		// an agent retries with its key.
		if status.Code(err) != codes.Unavailable || !strings.Contains(err.Error(), "error reading from server") {
			return got.GetCertificatePem(), err
		}
		b.enrollRetries.Add(1)
	}
}

// certificateRequest returns a certificate request for a node.
func certificateRequest(t *testing.T, node string, key *ecdsa.PrivateKey) []byte {
	t.Helper()
	csr, err := x509.CreateCertificateRequest(rand.Reader, &x509.CertificateRequest{
		Subject: pkix.Name{CommonName: "system:node:" + node, Organization: []string{"system:nodes"}},
	}, key)
	if err != nil {
		t.Fatal(err)
	}
	return csr
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
	b := newTestEnv(t, "cp1")
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
		t.Fatal(err)
	}
	err := b.enrollNode(b.token, "w1", nil)
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "--names w1 --replace") {
		t.Errorf("the name of a Node that exists: %v", err)
	}
	if err := b.enrollNode(b.createToken(pki.Grant{Uses: 1, Names: []string{"w1"}}).String(), "w1",
		nil); status.Code(err) !=
		codes.PermissionDenied {
		t.Errorf("with a token for the name alone: %v", err)
	}
	again := b.createToken(pki.Grant{Uses: 5, Names: []string{"w1"}, Replace: true}).String()
	if err := b.enrollNode(again, "w1", nil); err != nil {
		t.Errorf("with a token that replaces it: %v", err)
	}
	if err := b.enrollNode(again, "w2", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("with a token for another name: %v", err)
	}
	// A client without a valid token does not learn which Nodes exist.
	wrong := b.createToken(pki.Grant{Uses: 1})
	wrong.Secret = strings.Repeat("a", len(wrong.Secret))
	if here, nowhere := b.enrollNode(wrong.String(), "w1", nil), b.enrollNode(wrong.String(), "w7", nil); here == nil ||
		here.Error() != nowhere.Error() {
		t.Errorf("the response to an invalid token is %v for a Node that exists and %v for another", here, nowhere)
	}
}

// A client with a token that the cluster has not stored yet gets an error to retry, and the attempt
// is not counted. When the token is stored, or none is pending, the response is final.
func TestTokensThatAreNotStoredYet(t *testing.T) {
	b := newTestEnv(t, "cp1")
	made := pki.NewToken(pki.RoleNode, b.trust.SigningCA().Cert)
	b.tokensPending.Store(true)
	for range 200 {
		if err := b.enrollNode(made.String(), "w1", nil); status.Code(err) != codes.Unavailable ||
			!strings.Contains(err.Error(), "not stored yet") {
			t.Fatalf("a token that is not stored yet: %v", err)
		}
	}
	b.createObject(tokenKey.Record(made, pki.Grant{Uses: 1, Expires: time.Now().Add(time.Hour)}))
	if err := b.enrollNode(made.String(), "w1", nil); err != nil {
		t.Errorf("after it is stored: %v", err)
	}
	b.tokensPending.Store(false)
	if err := b.enrollNode(pki.NewToken(pki.RoleNode, b.trust.SigningCA().Cert).String(), "w2",
		nil); status.Code(err) !=
		codes.Unauthenticated {
		t.Errorf("a token that was never created: %v", err)
	}
}

// A token can be used as often as it states; an agent that missed the response retries with its
// key.
func TestUsesOfAToken(t *testing.T) {
	b := newTestEnv(t, "cp1")
	once, key := b.createToken(pki.Grant{Uses: 1}), newKey(t)
	for range 2 {
		if err := b.enrollNode(once.String(), "w1", key); err != nil {
			t.Fatal(err)
		}
	}
	if err := b.enrollNode(once.String(), "w1", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the same name with another key: %v", err)
	}
	if err := b.enrollNode(once.String(), "w2", key); status.Code(err) != codes.Unauthenticated {
		t.Errorf("another name: %v", err)
	}
	// A record that was written by hand admits no node.
	forged := pki.NewToken(pki.RoleNode, b.trust.SigningCA().Cert)
	b.createObject(pki.TokenKey("another key").Record(forged, pki.Grant{Uses: 9, Expires: time.Now().Add(time.Hour)}))
	if err := b.enrollNode(forged.String(), "w3", nil); status.Code(err) != codes.Unauthenticated {
		t.Errorf("a token with a record that the cluster did not create: %v", err)
	}
	// Together as well as one after the other.
	five := b.createToken(pki.Grant{Uses: 5})
	ended := make(chan error)
	for i := range 12 {
		go func() { ended <- b.enrollNode(five.String(), fmt.Sprintf("many%d", i), nil) }()
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

// Machines that join at once with one token take down a use each, one after the other: none of them tries in vain.
func TestJoinsAtOnceSpendOneAfterTheOther(t *testing.T) {
	const machines = 40
	b := newTestEnv(t, "cp1")
	var all sync.WaitGroup
	for i := range machines {
		all.Go(func() {
			if err := b.enrollNode(b.token, fmt.Sprint("m", i), nil); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	// A client that was cut off may have been cut off during the attempt, which is then repeated.
	if tries, again := b.tokenUses.Load(), b.enrollRetries.Load(); tries < machines || tries > machines+again {
		t.Errorf("%d machines joined, %d of them were cut off once, and it was tried %d times to take that down",
			machines, again, tries)
	}
}

// Of machines that enroll the same new name at once, each with a valid token, one succeeds. It may
// repeat the request, and the others are told which machine has the name and until when.
func TestNameIsOneMachines(t *testing.T) {
	b := newTestEnv(t, "cp1", "cp2")
	const machines = 8
	tokens, keys, ended := make([]string, machines), make([]*ecdsa.PrivateKey, machines), make([]error, machines)
	for i := range machines {
		tokens[i], keys[i] = b.createToken(pki.Grant{Uses: 3}).String(), newKey(t)
	}
	var all sync.WaitGroup
	for i := range machines {
		all.Go(func() { ended[i] = b.enrollAt(b.replicaAddresses()[i%2], tokens[i], "w1", keys[i]) })
	}
	all.Wait()
	winner := -1
	for i, err := range ended {
		switch {
		case err == nil && winner < 0:
			winner = i
		case err == nil:
			t.Errorf("machines %d and %d have the same name", winner, i)
		case status.Code(err) != codes.PermissionDenied ||
			!strings.Contains(err.Error(), "another machine joins as w1"):
			t.Error(err)
		}
	}
	if winner < 0 {
		t.Fatal("no machine has the name")
	}
	if err := b.enrollNode(tokens[winner], "w1", keys[winner]); err != nil {
		t.Errorf("it repeats the request: %v", err)
	}
	loser := (winner + 1) % machines
	if err := b.enrollNode(tokens[loser], "w2", keys[loser]); err != nil {
		t.Errorf("one that was refused, by another name: %v", err)
	}
	// Once it had its time without making its Node, another may have the name, and the first is out.
	long := pki.Claim{Node: "w1", Key: "the first", At: time.Now().Add(-pki.ClaimLife)}.Record()
	have, err := client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, long.Name)
	if err != nil {
		t.Fatal(err)
	}
	have.Data = long.Data
	if _, err := client.Update(b.ctx, b.client, have); err != nil {
		t.Fatal(err)
	}
	if err := b.enrollNode(tokens[loser], "w1", keys[loser]); err != nil {
		t.Fatal(err)
	}
	s, err := client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, pki.RevocationName("w1"))
	if err != nil {
		t.Fatalf("what the first was given is not revoked: %v", err)
	}
	if r, ok := pki.ParseRevocation(s); !ok || r.Named || time.Since(r.At) > time.Minute {
		t.Errorf("%+v", r)
	}
	// The Node ends the claim.
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
		t.Fatal(err)
	}
	if _, err := client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, long.Name); !apierrors.IsNotFound(err) {
		t.Errorf("the claim outlives the making of the Node: %v", err)
	}
}

// A token for any name does not put out a Node that joined by replacing another, when its claim on the name has had its time.
func TestReplacedNodeStays(t *testing.T) {
	b := newTestEnv(t, "cp1")
	if _, err := client.Create(b.ctx, b.client, &v1.Node{ObjectMeta: metav1.ObjectMeta{Name: "w1"}}); err != nil {
		t.Fatal(err)
	}
	key := newKey(t)
	again := b.createToken(pki.Grant{Uses: 1, Names: []string{"w1"}, Replace: true})
	cert, err := b.enrollCertificate(b.replicaAddresses()[0], again.String(), "w1", key)
	if err != nil {
		t.Fatal(err)
	}
	startSession(b, b.certificateClient(cert, key, b.replicaAddresses()[0]), "w1")
	long := pki.Claim{Node: "w1", Key: "its own", At: time.Now().Add(-pki.ClaimLife)}.Record()
	have, err := client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, long.Name)
	if err != nil {
		t.Fatal(err)
	}
	have.Data = long.Data
	if _, err := client.Update(b.ctx, b.client, have); err != nil {
		t.Fatal(err)
	}
	if err := b.enrollNode(b.token, "w1", nil); status.Code(err) != codes.PermissionDenied ||
		!strings.Contains(err.Error(), "node w1 exists") {
		t.Errorf("another machine by this name: %v", err)
	}
	_, err = client.Get[*v1.Secret](b.ctx, b.client, pki.TokenNamespace, pki.RevocationName("w1"))
	if !apierrors.IsNotFound(err) {
		t.Errorf("the certificate of the Node was revoked: %v", err)
	}
	if err := b.enrollNode(b.createToken(pki.Grant{Uses: 1, Names: []string{"w1"}, Replace: true}).String(),
		"w1", nil); err !=
		nil {
		t.Errorf("with a token that replaces it: %v", err)
	}
}

// The leader removes the records of tokens that have expired, and of revocations that cover no certificate any more.
func TestSpentRecordsGo(t *testing.T) {
	b := newTestEnv(t, "cp1")
	tok := pki.NewToken(pki.RoleNode, b.trust.SigningCA().Cert)
	past := tokenKey.Record(tok, pki.Grant{Uses: 1, Expires: time.Now().Add(-time.Hour)})
	old := pki.Revocation{Node: "old", At: time.Now().Add(-25 * time.Hour)}.Record()
	recent := pki.Revocation{Node: "recent", At: time.Now().Add(-23 * time.Hour)}.Record()
	for _, s := range []*v1.Secret{past, old, recent} {
		b.createObject(s)
	}
	fleet := b.replicas["cp1"].fleet
	gone := func(s *v1.Secret) bool {
		_, err := client.Get[*v1.Secret](b.ctx, b.client, s.Namespace, s.Name)
		return apierrors.IsNotFound(err)
	}
	b.awaitCondition("the removal of the records", func() error {
		ctx, cancel := context.WithTimeout(b.ctx, heartbeat)
		defer cancel()
		if err := fleet.RunSweeper(ctx, b.client); !errors.Is(err, context.DeadlineExceeded) {
			return err
		}
		if !gone(past) || !gone(old) {
			return errors.New("they are there")
		}
		return nil
	})
	if good, _ := pki.ParseToken(b.token); gone(recent) || gone(tokenKey.Record(good, pki.Grant{})) {
		t.Error("a record went that has its effect")
	}
}

// Joins, refusals with their reason, and renewals are recorded. If a required record cannot be
// written, the request fails.
func TestJoinsAreRecorded(t *testing.T) {
	b := newTestEnv(t, "cp1")
	tok := b.createToken(pki.Grant{Uses: 1, Names: []string{"w1", "unrecorded"}})
	wrong := tok
	wrong.Secret = strings.Repeat("a", len(wrong.Secret))
	if err := b.enrollNode(tok.String(), "unrecorded", nil); status.Code(err) != codes.Unavailable ||
		!strings.Contains(err.Error(), "the disk is full") {
		t.Errorf("a join that cannot be recorded: %v", err)
	}
	b.startAgent("w9", nil) // which makes its Node
	b.awaitReady("w9", v1.ConditionTrue)
	if _, err := b.rawClient("w9", b.replicaAddresses()[0]).RenewCertificate(b.ctx,
		&fleetv1.RenewRequest{CsrDer: []byte("x")}); err == nil {
		t.Error("nonsense was signed")
	}
	for _, c := range []struct{ token, name string }{
		{tok.String(), "w1"}, {tok.String(), "w1"}, {wrong.String(), "w1"}, {"nonsense", "w1"}, {b.token, "w9"},
		{tok.String(), "Bad Name"},
	} {
		_ = b.enrollNode(c.token, c.name, nil) // as the records say
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	var got []string
	for _, r := range b.records {
		if r.Source != "127.0.0.1" || r.Received.IsZero() || r.Verb == "" || r.Resource != "nodes" ||
			!strings.HasPrefix(r.Method, "/keelson.") {
			t.Errorf("%+v", r)
		}
		known := strings.NewReplacer(tok.ID, "T", b.token[len("keelson1.node."):][:6], "G").Replace(r.User.Name + " " +
			r.Token)
		got = append(got, fmt.Sprintf("%s %s %s: %s", known, r.Subresource, r.Name, status.Code(r.Err)))
		if status.Code(r.Err) == codes.Unauthenticated && r.Reason == "" {
			t.Errorf("it does not say why: %+v", r)
		}
	}
	want := []string{
		"keelson:join-token:G G enrollment w9: OK",
		"system:node:w9  certificate w9: InvalidArgument",
		"keelson:join-token:T T enrollment w1: OK",
		"system:anonymous T enrollment w1: Unauthenticated",
		"system:anonymous T enrollment w1: Unauthenticated",
		"system:anonymous  enrollment w1: Unauthenticated",
		"keelson:join-token:G G enrollment w9: PermissionDenied",
		"system:anonymous  enrollment Bad Name: InvalidArgument",
	}
	if !slices.Equal(got, want) {
		t.Errorf("recorded were\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// The agent's token file goes when the node has its certificate, and is not missed at the next start.
func TestTokenFileGoes(t *testing.T) {
	b := newTestEnv(t, "cp1")
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(b.createToken(pki.Grant{Uses: 1}).String()+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	for range 2 {
		ctx, cancel := context.WithCancel(b.ctx)
		s := session.New(session.Config{
			NodeName: "w1", Join: session.Join{Servers: b.replicaAddresses(), TokenFile: file}, Facts: &v1.Node{},
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
