package accept

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	v1 "k8s.io/api/core/v1"

	"keelson.dev/keelson/controlplane/pki"
	"keelson.dev/keelson/internal/virtual"
)

// Records are deleted only when they have no effect. A token ends at its expiry, a revocation when
// every covered certificate has expired, a claim when its Node exists.
func TestSweeper(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		began := time.Now()
		const hour, life = time.Hour, 30 * 24 * time.Hour
		key := pki.TokenKey("a key")
		token := func(id string, expires time.Duration) *v1.Secret {
			tok := pki.Token{Role: pki.RoleNode, ID: id, Secret: "s"}
			return key.Record(tok, pki.Grant{Expires: began.Add(expires), Uses: 1})
		}
		other := &v1.Secret{Type: v1.SecretTypeOpaque, Data: token("other", -hour).Data}
		other.Name = "of somebody"
		unreadable := pki.Revocation{Node: "unreadable"}.Record()
		unreadable.Data = nil
		records := map[string]*v1.Secret{
			"past":       token("past", -hour),
			"short":      token("short", hour),
			"long":       token("long", 48*hour),
			"revoked":    pki.Revocation{Node: "a", At: began, Named: true}.Record(),
			"other":      other,
			"unreadable": unreadable,
			"claim":      pki.Claim{Node: "absent", Key: "k", At: began}.Record(),
			"made":       pki.Claim{Node: "there", Key: "k", At: began}.Record(),
		}
		var mu sync.Mutex
		gone := map[string]time.Duration{}
		s := sweeper{
			life:       life,
			nodeExists: func(node string) bool { return node == "there" },
			listSecrets: func() (out []*v1.Secret) {
				mu.Lock()
				defer mu.Unlock()
				for _, r := range records {
					out = append(out, r)
				}
				return out
			},
			removeSecret: func(_ context.Context, one *v1.Secret) error {
				mu.Lock()
				defer mu.Unlock()
				for name, r := range records {
					if r == one {
						gone[name] = time.Since(began)
						delete(records, name)
					}
				}
				return nil
			},
		}
		ctx, cancel := context.WithTimeout(t.Context(), 2*life)
		defer cancel()
		if err := s.runSweeps(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		for name, least := range map[string]time.Duration{
			"past": 0, "short": hour, "long": 48 * hour, "revoked": life, "claim": life, "made": pki.ClaimLife,
		} {
			at, ok := gone[name]
			if !ok || at < least || at > least+2*sweepInterval+clockMargin {
				t.Errorf("%s went after %s (%v), want %s", name, at, ok, least)
			}
		}
		var left []string
		for name := range records {
			left = append(left, name)
		}
		slices.Sort(left)
		if !slices.Equal(left, []string{"other", "unreadable"}) {
			t.Errorf("left are %v", left)
		}
	})
}
