package accept

import (
	"context"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"keelson.dev/keelson/controlplane/nodegateway/wire"
	"keelson.dev/keelson/internal/clusterid"
)

// A replica sends its cluster identity to agents and refuses an agent that knows a later
// incarnation of the cluster. It serves agents of releases without identities, and agents that send
// invalid ones. F53
func TestAgentOfALaterIncarnationIsRefused(t *testing.T) {
	own, known := clusterid.Identity{Cluster: "c", Incarnation: 5}, true
	a := &Acceptor{cfg: AcceptorConfig{Lifetime: wire.NewLifetime("cp2"), Identity: func() (clusterid.Identity, bool) {
		return own, known
	}}}
	for _, c := range []struct {
		what, sends string
		refused     bool
	}{
		{"release without identities", "", false},
		{"agent of an earlier incarnation", "c/0", false},
		{"agent of this incarnation", "c/5", false},
		{"agent of a later incarnation", "c/6", true},
		{"agent of another cluster", "d/6", false},
		{"nonsense", "c/six", false},
		{"incarnation beyond the bound", "c/18446744073709551615", false},
	} {
		ctx := context.Background()
		if c.sends != "" {
			ctx = metadata.NewIncomingContext(ctx, metadata.Pairs(clusterid.Key, c.sends))
		}
		var sent metadata.MD
		err := a.compareIdentity(ctx, func(md metadata.MD) error { sent = md; return nil })
		if refused := status.Code(err) == codes.FailedPrecondition && strings.Contains(err.Error(), "cp2"); refused !=
			c.refused || !refused && err != nil {
			t.Errorf("%s: %v", c.what, err)
		}
		if got := strings.Join(sent.Get(clusterid.Key), ","); got != "c/5" {
			t.Errorf("%s: received %q", c.what, got)
		}
	}
	known = false
	err := a.compareIdentity(context.Background(), func(metadata.MD) error {
		t.Error("an identity that is not known was sent")
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}
