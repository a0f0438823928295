package session

import (
	"encoding/json"
	"os"
	"testing"
	"time"
)

// A node with a wrong clock renews its pods' tokens before the replica regards them as expired, and
// not on every call.
func TestTokensAreRenewedByTheirLife(t *testing.T) {
	now := time.Now()
	for name, c := range map[string]struct {
		expires time.Duration // by the node's clock
		seconds int64
		want    time.Duration
	}{
		"the clocks agree":             {time.Hour, 3600, 48 * time.Minute},
		"the replica gives less":       {10 * time.Minute, 3600, 8 * time.Minute},
		"the node is an hour behind":   {2 * time.Hour, 3600, 48 * time.Minute},
		"the node is two hours ahead":  {-time.Hour, 3600, 48 * time.Minute},
		"the node is half an hour off": {30 * time.Minute, 3600, 24 * time.Minute},
	} {
		if got := tokenRenewalTime(now, now.Add(c.expires), c.seconds).Sub(now); got != c.want {
			t.Errorf("%s: renewed after %s, want %s", name, got, c.want)
		}
	}
}

// The same after a restart: a stored token is not used longer than its lifetime.
func TestKeptTokensAfterTheClockWasSet(t *testing.T) {
	now := time.Now()
	k := tokenKey{Pod: "u", Expiration: 3600}
	data, err := json.Marshal([]cachedToken{{Key: k, Token: "t", Expires: now.Add(5 * time.Hour),
		Renew: now.Add(4 * time.Hour)}})
	if err != nil {
		t.Fatal(err)
	}
	tok := newTokenCache(t.TempDir(), func() {})
	if err := os.WriteFile(tok.file, data, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := tok.loadTokens(now); err != nil {
		t.Fatal(err)
	}
	if got := tok.cached[k].Renew.Sub(now); got != 48*time.Minute {
		t.Errorf("renewed after %s, want 48 minutes", got)
	}
}
