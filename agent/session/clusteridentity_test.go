package session

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/internal/clusterid"
	fleetv1 "keelson.dev/keelson/proto/fleet/v1"
)

// identityReplica serves sessions and standby streams with an identity; "" = a release without
// identities.
type identityReplica struct {
	fleetv1.UnimplementedFleetServer
	identity string
	received chan string // the identities that the agent sent, one per session
}

func (r *identityReplica) sendIdentity(ctx context.Context) error {
	if r.identity == "" {
		return nil
	}
	return grpc.SetHeader(ctx, metadata.Pairs(clusterid.Key, r.identity))
}

func (r *identityReplica) Session(stream fleetv1.Fleet_SessionServer) error {
	r.received <- strings.Join(metadata.ValueFromIncomingContext(stream.Context(), clusterid.Key), ",")
	if err := r.sendIdentity(stream.Context()); err != nil {
		return err
	}
	err :=
		stream.Send(
			&fleetv1.ControlMessage{
				Kind: &fleetv1.ControlMessage_Welcome{Welcome: &fleetv1.Welcome{Epoch: 1, HeartbeatMillis: 1000}}})
	if err == nil {
		<-stream.Context().Done()
	}
	return err
}

func (r *identityReplica) Standby(stream fleetv1.Fleet_StandbyServer) error {
	if err := r.sendIdentity(stream.Context()); err != nil {
		return err
	}
	err := stream.Send(&fleetv1.StandbyDown{Kind: &fleetv1.StandbyDown_Replicas{Replicas: &fleetv1.ReplicaList{}}})
	if err == nil {
		<-stream.Context().Done()
	}
	return err
}

// startIdentityReplica starts a replica and returns the agent's link to it.
func startIdentityReplica(t *testing.T, s *Session, identity string) (*replicaLink, *identityReplica) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r := &identityReplica{identity: identity, received: make(chan string, 8)}
	g := grpc.NewServer()
	fleetv1.RegisterFleetServer(g, r)
	go func() { _ = g.Serve(ln) }()
	t.Cleanup(g.Stop)
	conn, err := s.dialReplica(ln.Addr().String(), insecure.NewCredentials())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return &replicaLink{address: ln.Addr().String(), conn: conn, stop: func() {}}, r
}

func newIdentitySession(t *testing.T, dir string) *Session {
	t.Helper()
	var d net.Dialer
	s := New(Config{NodeName: "w1", StateDir: dir, RunDir: dir,
		Dial: func(ctx context.Context, address string) (net.Conn, error) {
			return d.DialContext(ctx, "tcp", address)
		}})
	if err := s.cluster.loadRecord(); err != nil {
		t.Fatal(err)
	}
	s.creds.id = &identity{}
	return s
}

// An agent records the latest identity of its cluster. It refuses sessions with replicas of an
// earlier identity, also after a restart. It leaves its session when another replica shows a later
// identity. A replica of a release without identities is accepted. F53
func TestAgentLeavesAbandonedReplicas(t *testing.T) {
	dir := t.TempDir()
	s := newIdentitySession(t, dir)
	opens := func(shows, sends string) (ended chan error) {
		t.Helper()
		l, r := startIdentityReplica(t, s, shows)
		ctx, cancel := context.WithCancel(t.Context())
		t.Cleanup(cancel)
		ended = make(chan error, 1)
		go func() { ended <- s.runSession(ctx, l) }()
		select {
		case got := <-r.received:
			if got != sends {
				t.Errorf("to a replica of %q the agent sent %q, want %q", shows, got, sends)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("no session with a replica of %q", shows)
		}
		return ended
	}
	latest := func(want string) {
		t.Helper()
		deadline := time.After(20 * time.Second)
		for {
			now, changed := s.cluster.latestIdentity()
			if now.String() == want {
				return
			}
			select {
			case <-changed:
			case <-deadline:
				t.Fatalf("the agent has recorded %s, want %s", now, want)
			}
		}
	}
	refused := func(what string, ended chan error) {
		t.Helper()
		select {
		case err := <-ended:
			var abandoned *clusterid.AbandonedError
			if status.Code(err) != codes.FailedPrecondition && !errors.As(err, &abandoned) ||
				!strings.Contains(err.Error(), "abandoned") {
				t.Errorf("%s: session ended with %v", what, err)
			}
		case <-time.After(20 * time.Second):
			t.Fatalf("%s: the session goes on", what)
		}
	}
	first := opens("c/0", "")
	latest("c/0")
	second := opens("c/5", "c/0")
	latest("c/5")
	refused("session with a replica that is abandoned since", first)
	refused("abandoned replica", opens("c/0", "c/5"))
	unknown := opens("", "c/5")

	// Another replica shows a later identity on its standby stream.
	l, _ := startIdentityReplica(t, s, "c/9")
	ctx, cancel := context.WithCancel(t.Context())
	standby := make(chan error, 1)
	go func() { standby <- s.runStandby(ctx, l) }()
	refused("session with a replica of the identity before", second)
	latest("c/9")
	cancel()
	<-standby
	select {
	case err := <-unknown:
		t.Errorf("the session with a replica without an identity ended: %v", err)
	default:
	}

	s = newIdentitySession(t, dir) // the agent restarts
	refused("abandoned replica after a restart", opens("c/5", "c/9"))
}
