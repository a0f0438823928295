package authn_test

import (
	"context"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"keelson.dev/keelson/controlplane/apiserver"
	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authn"
	"keelson.dev/keelson/controlplane/pki"
)

// secretTokens is a replica with a service account and a Secret that holds its token, as the token
// controller creates it.
type secretTokens struct {
	*apiservertest.Replica
	ctx     context.Context
	account *corev1.ServiceAccount
	token   string
}

func (s *secretTokens) sign(secret string) string {
	s.TB.Helper()
	token, err := s.Tokens.SignForSecret(pki.SecretClaims{
		Namespace: "default", ServiceAccount: pki.Ref{Name: s.account.Name, UID: string(s.account.UID)}, Secret: secret,
	})
	if err != nil {
		s.TB.Fatal(err)
	}
	return token
}

func (s *secretTokens) hold(name, token string) {
	s.Must(&corev1.Secret{Type: corev1.SecretTypeServiceAccountToken,
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: name,
			Annotations: map[string]string{corev1.ServiceAccountNameKey: s.account.Name}},
		Data: map[string][]byte{"token": []byte(token)}})
}

func (s *secretTokens) patch(patch string) {
	s.TB.Helper()
	if _, err := s.Admin().CoreV1().Secrets("default").Patch(s.ctx, "held", types.MergePatchType, []byte(patch),
		metav1.PatchOptions{}); err != nil {
		s.TB.Fatal(err)
	}
}

// awaitResponse waits until a request with a token of the account gets the code and words, because
// the cache may lag.
func (s *secretTokens) awaitResponse(token string, code int, words string) {
	s.TB.Helper()
	c := s.HTTP(nil)
	apiservertest.Eventually(s.TB, func() error {
		a := s.Call(c, "GET", "/api/v1/namespaces/default/pods", "", "Authorization", "Bearer "+token)
		if a.Code != code || !strings.Contains(strings.ReplaceAll(a.Body, `\"`, `"`), words) {
			return fmt.Errorf("%d %s, want %d %s", a.Code, a.Body, code, words)
		}
		return nil
	})
}

func startSecretTokens(t *testing.T, change func(*apiserver.Config)) *secretTokens {
	s := &secretTokens{Replica: apiservertest.StartReplica(t, change), ctx: apiservertest.Within(t)}
	s.account =
		s.Must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default",
			Name: "robot"}}).(*corev1.ServiceAccount)
	s.token = s.sign("held")
	s.hold("held", s.token)
	return s
}

const robotIsKnown = `User "system:serviceaccount:default:robot" cannot list resource "pods"`

// A token in a Secret authenticates while the Secret holds it, the Secret is not marked invalid,
// and the account exists.
func TestSecretTokens(t *testing.T) {
	s := startSecretTokens(t, nil)
	s.awaitResponse(s.token, 403, robotIsKnown)
	review := func(audiences ...string) authenticationv1.TokenReviewStatus {
		t.Helper()
		got, err := s.Admin().AuthenticationV1().TokenReviews().Create(s.ctx, &authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: s.token, Audiences: audiences}}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return got.Status
	}
	if got := review(); !got.Authenticated || got.User.UID != string(s.account.UID) || len(got.User.Extra) > 0 ||
		strings.Join(got.User.Groups, " ") != "system:serviceaccounts system:serviceaccounts:default "+
			"system:authenticated" {
		t.Errorf("%+v", got)
	}
	if got := review("vault"); got.Authenticated {
		t.Errorf("for another audience: %+v", got)
	}

	// Nobody is let in by a token that no Secret holds, even when its signature is good.
	s.awaitResponse(s.sign("absent"), 401, "its Secret no longer exists")
	s.hold("other", s.sign("held"))
	s.awaitResponse(s.sign("other"), 401, "its Secret contains another token")

	s.patch(`{"metadata":{"labels":{"kubernetes.io/legacy-token-invalid-since":"2026-01-01"}}}`)
	s.awaitResponse(s.token, 401, "remove the label")
	s.patch(`{"metadata":{"labels":{"kubernetes.io/legacy-token-invalid-since":null}}}`)
	s.awaitResponse(s.token, 403, robotIsKnown)

	s.patch(`{"data":{"token":null}}`)
	s.awaitResponse(s.token, 401, "its Secret contains another token")
	s.patch(`{"stringData":{"token":"` + s.token + `"}}`)
	s.awaitResponse(s.token, 403, robotIsKnown)

	// A Secret that is being deleted counts as gone at once.
	s.patch(`{"metadata":{"finalizers":["example.com/wait"]}}`)
	if err := s.Admin().CoreV1().Secrets("default").Delete(s.ctx, "held", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.awaitResponse(s.token, 401, "its Secret no longer exists")
}

// The token of a deleted account does not authenticate as a new account with the same name.
func TestSecretTokensExpireWithAccount(t *testing.T) {
	s := startSecretTokens(t, nil)
	s.awaitResponse(s.token, 403, robotIsKnown)
	if err := s.Admin().CoreV1().ServiceAccounts("default").Delete(s.ctx, "robot", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	s.awaitResponse(s.token, 401, `serviceaccount "robot" no longer exists`)
	s.Must(&corev1.ServiceAccount{ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: "robot"}})
	s.awaitResponse(s.token, 401, `serviceaccount "robot" has another UID`)
}

// The Secret records the day of the token's last use. This costs one write a day.
func TestSecretTokenLastUse(t *testing.T) {
	var ahead atomic.Int64
	s := startSecretTokens(t, func(c *apiserver.Config) {
		c.Clock = func() time.Time { return time.Now().Add(time.Duration(ahead.Load())) }
	})
	used := func() (day, version string) {
		t.Helper()
		o, err := s.Admin().CoreV1().Secrets("default").Get(s.ctx, "held", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return o.Labels[authn.LastUsedLabel], o.ResourceVersion
	}
	today := func() string { return time.Now().Add(time.Duration(ahead.Load())).UTC().Format(time.DateOnly) }
	if day, _ := used(); day != "" {
		t.Errorf("used on %q before it was", day)
	}
	before := today()
	s.awaitResponse(s.token, 403, robotIsKnown)
	day, version := used()
	if day != before && day != today() {
		t.Errorf("used on %q, want %s", day, before)
	}
	for range 3 {
		s.awaitResponse(s.token, 403, robotIsKnown)
	}
	if _, now := used(); now != version && today() == before {
		t.Errorf("the same day wrote again: %s, then %s", version, now)
	}
	ahead.Store(int64(48 * time.Hour))
	s.awaitResponse(s.token, 403, robotIsKnown)
	if day, _ := used(); day != today() {
		t.Errorf("two days later: used on %q, want %s", day, today())
	}
}
