package session

import (
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"keelson.dev/keelson/agent"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// A replica of the previous release supports neither reviews nor signed server certificates. No
// client is admitted, the error names the replica to upgrade, and the server uses a self-signed
// certificate.
func TestReplicaOfTheReleaseBefore(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	old := grpc.NewServer()
	fleetv1.RegisterFleetServer(old, fleetv1.UnimplementedFleetServer{})
	go func() { _ = old.Serve(ln) }()
	defer old.Stop()
	conn, err := grpc.NewClient("passthrough:///"+ln.Addr().String(),
		grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	s := New(Config{NodeName: "w1", StateDir: t.TempDir(), HTTPS: true, NodeIPs: []string{"192.0.2.1", "2001:db8::1"}})
	s.replicas.linkByAddress["old:6444"] = &replicaLink{address: "old:6444", conn: conn, stop: func() {}}
	v, err := s.ReviewAccess(t.Context(), agent.AccessReview{Token: "t", Verb: "get",
		Subresources: []string{"metrics"}})
	if v.Allowed || v.Authenticated || !errors.Is(err, agent.ErrReviewUnavailable) ||
		!strings.Contains(err.Error(), "old:6444") || !strings.Contains(err.Error(), "upgrade it") {
		t.Errorf("%+v %v", v, err)
	}
	if _, err := s.creds.signServingCertificate(t.Context()); err == nil ||
		!strings.Contains(err.Error(), "Unimplemented") {
		t.Errorf("signed: %v", err)
	}
	if s.ClientCAs() != nil {
		t.Error("it believes in authorities before it has joined")
	}
	cert, err := s.ServingCertificate()
	if err != nil || len(cert.Leaf.IPAddresses) != 2 || cert.Leaf.Subject.CommonName != "w1@self-signed" ||
		time.Until(cert.Leaf.NotAfter) < 24*time.Hour {
		t.Fatalf("%+v %v", cert, err)
	}
	if again, err := s.ServingCertificate(); err != nil || again != cert {
		t.Error("each connection gets another certificate")
	}
}
