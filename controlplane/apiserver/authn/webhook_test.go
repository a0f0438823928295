package authn

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"

	"keelson.dev/keelson/controlplane/api"
	"keelson.dev/keelson/internal/virtual"
)

// reviewer responds to TokenReviews without a network.
type reviewer struct {
	asked  int
	mu     sync.Mutex
	answer func(q *authenticationv1.TokenReview) error
}

func (r *reviewer) Post(_ context.Context, question, answer any) error {
	r.mu.Lock()
	r.asked++
	r.mu.Unlock()
	data, err := json.Marshal(question)
	if err != nil {
		return err
	}
	var q authenticationv1.TokenReview
	if err := json.Unmarshal(data, &q); err != nil {
		return err
	}
	if err := r.answer(&q); err != nil {
		return err
	}
	*answer.(*authenticationv1.TokenReview) = q
	return nil
}

func hook(t *testing.T, r *reviewer) *Webhook {
	t.Helper()
	w, err := NewWebhook(r, "v1", []string{"api"}, time.Minute, time.Now)
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// A token is valid for the requested audiences that the webhook confirms. A webhook without support
// for audiences authenticates for the API's audiences only.
func TestWebhookAudiences(t *testing.T) {
	for name, c := range map[string]struct {
		asked, answered, good []string
		ok                    bool
	}{
		"not asked, not answered": {nil, nil, []string{"api"}, true},
		"not asked, answered":     {nil, []string{"api", "x"}, []string{"api"}, true},
		"not asked, for others":   {nil, []string{"x"}, nil, false},
		"asked, answered":         {[]string{"x", "y"}, []string{"y"}, []string{"y"}, true},
		"asked, not answered":     {[]string{"x"}, nil, nil, false},
		"asked for the API":       {[]string{"x", "api"}, nil, []string{"api"}, true},
	} {
		t.Run(name, func(t *testing.T) {
			w := hook(t, &reviewer{answer: func(q *authenticationv1.TokenReview) error {
				q.Status = authenticationv1.TokenReviewStatus{Authenticated: true,
					User: authenticationv1.UserInfo{Username: "u"}, Audiences: c.answered}
				return nil
			}})
			i, ok, err := w.VerifyToken(t.Context(), "t", c.asked)
			if err != nil || ok != c.ok || !slices.Equal(i.Audiences, c.good) {
				t.Errorf("%v, %t, %v", i.Audiences, ok, err)
			}
		})
	}
}

// Responses, including rejections, are cached for their TTL; faults are not cached. Concurrent
// verifications of a token share one request.
func TestWebhookRemembers(t *testing.T) {
	virtual.Test(t, func(t *testing.T) {
		fault := error(nil)
		slow := make(chan struct{})
		close(slow)
		r := &reviewer{}
		r.answer = func(q *authenticationv1.TokenReview) error {
			<-slow
			q.Status.Authenticated = q.Spec.Token == "good"
			q.Status.User.Username = "u"
			return fault
		}
		w := hook(t, r)
		ask := func(token string) bool {
			_, ok, err := w.VerifyToken(t.Context(), token, nil)
			if (err != nil) != (fault != nil) {
				t.Errorf("%v", err)
			}
			return ok
		}
		if !ask("good") || !ask("good") || ask("bad") || ask("bad") || r.asked != 2 {
			t.Errorf("asked %d times", r.asked)
		}
		time.Sleep(time.Minute) // on the synctest clock: the cached responses expire
		fault = errors.New("down")
		if ask("good") || ask("good") || r.asked != 4 {
			t.Errorf("asked %d times when it fails", r.asked)
		}
		fault, slow = nil, make(chan struct{})
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { ask("good") })
		}
		virtual.Wait()
		gone, leave := context.WithCancel(t.Context())
		leave()
		if _, _, err := w.VerifyToken(gone, "good", nil); !errors.Is(err, context.Canceled) {
			t.Errorf("one who does not wait: %v", err)
		}
		close(slow)
		all.Wait()
		if r.asked != 5 {
			t.Errorf("asked %d times by a hundred", r.asked)
		}
	})
}

// The size of a response is limited before it is cached. A response without a user name is invalid.
func TestWebhookAnswersAreBounded(t *testing.T) {
	r := &reviewer{answer: func(q *authenticationv1.TokenReview) error {
		q.Status.Authenticated = true
		q.Status.User.Username = "u" + q.Spec.Token
		for i := range 10_000 {
			q.Status.User.Groups = append(q.Status.User.Groups, fmt.Sprint("group-", i))
		}
		return nil
	}}
	w := hook(t, r)
	for i := range 3 {
		if _, ok, err := w.VerifyToken(t.Context(), fmt.Sprint(i), nil); !ok || err != nil {
			t.Errorf("%t, %v", ok, err)
		}
	}
	if w.cache.Len() != 0 {
		t.Errorf("%d answers of hundreds of kilobytes are remembered", w.cache.Len())
	}
	r.answer = func(q *authenticationv1.TokenReview) error { q.Status.Authenticated = true; return nil }
	if _, ok, err := w.VerifyToken(t.Context(), "nobody", nil); ok || err == nil {
		t.Errorf("a user without a name: %t, %v", ok, err)
	}
	r.answer = func(q *authenticationv1.TokenReview) error { q.Status.Error = strings.Repeat("e", 1<<20); return nil }
	if _, ok, err := w.VerifyToken(t.Context(), "error", nil); ok || err == nil || len(err.Error()) > 2048 {
		t.Errorf("%t, an error of %d bytes", ok, len(err.Error()))
	}
	if _, err := NewWebhook(r, "v2", nil, 0, time.Now); err == nil {
		t.Error("a version that is none is taken")
	}
}

// A token file is read completely or rejected, and errors never contain a token.
func TestTokenFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "tokens")
	read := func(text string) (*Static, error) {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return ReadTokenFile(path)
	}
	s, err := read("secret-a,alice,1\nsecret-b,bob,2,\"x,y\",ignored\n\nsecret-c,carol,3,\n")
	if err != nil {
		t.Fatal(err)
	}
	for token, want := range map[string]api.User{
		"secret-a": {Name: "alice", UID: "1"}, "secret-b": {Name: "bob", UID: "2", Groups: []string{"x", "y"}},
		"secret-c": {Name: "carol", UID: "3"},
	} {
		i, ok, err := s.VerifyToken(t.Context(), token, nil)
		if !ok || err != nil || i.User.Name != want.Name || i.User.UID != want.UID ||
			!slices.Equal(i.User.Groups, want.Groups) {
			t.Errorf("%s: %+v, %t, %v", token, i.User, ok, err)
		}
	}
	for text, words := range map[string]string{
		"secret-a,alice":                       "line 1 has 2 columns",
		"secret-a,alice,1\n,bob,2":             "line 2 has no token",
		"secret-a,,1":                          "no user name",
		"secret-a,alice,1\nsecret-a,mallory,2": "line 2 repeats a token",
		"secret-a,alice,1\nsecret-b,\"bob,2":   "line 2",
	} {
		if _, err := read(text); err == nil || !strings.Contains(err.Error(), words) ||
			strings.Contains(err.Error(), "secret-") {
			t.Errorf("%q: %v", text, err)
		}
	}
}

// Bootstrap tokens and their groups must have the defined form. No token grants a group of the
// cluster itself.
func TestBootstrapForms(t *testing.T) {
	for token, want := range map[string]bool{
		"abc123.0123456789abcdef": true, "abc123.0123456789abcde": false, "ABC123.0123456789abcdef": false,
		"abc12.30123456789abcdef": false,
		"abc-23.0123456789abcdef": false, "": false, "abc123": false, "abc123.0123456789abcdef.": false,
	} {
		if _, _, ok := bootstrapParts(token); ok != want {
			t.Errorf("%q: %t", token, ok)
		}
	}
	for group, want := range map[string]bool{
		"system:bootstrappers:a": true, "system:bootstrappers:a:b-c": true, "system:bootstrappers:": false,
		"system:bootstrappers":    false,
		"system:bootstrappers:a-": false, "system:masters": false, "system:bootstrappers:A": false,
		"system:bootstrappers:" + strings.Repeat("a", 257): false,
	} {
		if mayBootstrap(group) != want {
			t.Errorf("%q: %t", group, !want)
		}
	}
}
