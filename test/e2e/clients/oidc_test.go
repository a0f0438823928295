package clients

import (
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"maps"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	authenticationv1 "k8s.io/api/authentication/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
	"keelson.dev/keelson/test/testenv"
)

// Configuration of the replicas for the two issuers.
const (
	peopleIssuer = `- issuer:
    url: URL
    audiences: [keelson, kubectl]
    audienceMatchPolicy: MatchAny
    certificateAuthority: |
CA
  claimValidationRules:
  - {expression: claims.email_verified == true, message: the address must be verified}
  claimMappings:
    username: {expression: '"people:" + claims.email'}
    uid: {claim: sub}
    groups: {expression: 'dyn(claims.groups).map(g, "people:" + g)'}
    extra: [{key: example.org/department, valueExpression: claims.department}]
  userValidationRules:
  - {expression: "!('people:banned' in user.groups)", message: the banned stay out}
`
	robotsIssuer = `- issuer:
    url: URL
    audiences: [keelson]
    certificateAuthority: |
CA
  claimMappings:
    username: {claim: sub, prefix: "robots:"}
    groups: {claim: roles, prefix: "robots:"}
`
)

// oidcTest is a test with two OpenID Connect issuers outside of the cluster.
type oidcTest struct {
	*testing.T
	people, robots *issuertest.Provider
}

// trustIssuers makes the replicas trust exactly these issuers.
func (l oidcTest) trustIssuers(issuers ...*issuertest.Provider) {
	l.Helper()
	text := "apiVersion: apiserver.config.k8s.io/v1\nkind: AuthenticationConfiguration\njwt:\n"
	for _, p := range issuers {
		form := robotsIssuer
		if p == l.people {
			form = peopleIssuer
		}
		ca := "      " + strings.ReplaceAll(strings.TrimSpace(string(outside.ca)), "\n", "\n      ")
		text += strings.NewReplacer("URL", p.URL, "CA", ca).Replace(form)
	}
	outside.setFile(l.T, "authentication.yaml", text)
}

// annClaims returns ann's claims with changes.
func (l oidcTest) annClaims(change map[string]any) map[string]any {
	c := map[string]any{
		"sub": "17", "email": "ann@example.org", "email_verified": true, "groups": []string{"tea", "cups"},
		"department": "kitchen",
	}
	maps.Copy(c, change)
	return c
}

// authenticateAt returns a replica's user for a token; the name is "" if the token is refused.
func authenticateAt(t testing.TB, replica, token string) (authenticationv1.UserInfo, error) {
	t.Helper()
	review, err := testenv.TokenClientAt(t, replica, token).AuthenticationV1().SelfSubjectReviews().
		Create(context.Background(), &authenticationv1.SelfSubjectReview{}, metav1.CreateOptions{})
	if apierrors.IsUnauthorized(err) {
		return authenticationv1.UserInfo{}, nil
	}
	if err != nil {
		return authenticationv1.UserInfo{}, err
	}
	return review.Status.UserInfo, nil
}

// awaitUser waits until a token authenticates a user at every replica. For user "" it waits until
// the token is refused with 401.
func awaitUser(t testing.TB, what, token, user string) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		testenv.Eventually(t, soon, func() error {
			u, err := authenticateAt(t, replica, token)
			if err == nil && u.Username != user {
				err = fmt.Errorf("%s takes %s as one for %q, want %q", replica, what, u.Username, user)
			}
			return err
		})
	}
}

// requireUser checks that every replica authenticates a token as a user.
func requireUser(t testing.TB, what, token, user string) {
	t.Helper()
	for _, replica := range testenv.Replicas() {
		if u, err := authenticateAt(t, replica, token); err != nil || u.Username != user {
			t.Errorf("%s takes %s as one for %q, want %q: %v", replica, what, u.Username, user, err)
		}
	}
}

// F20 F23: tokens of two issuers, validated and mapped by expressions, are accepted at every
// replica. Forged tokens, expired tokens and tokens for another audience are refused. Keys are
// rotated and issuers are added and removed while the replicas run.
func TestOpenIDConnect(t *testing.T) {
	t.Parallel()
	l := oidcTest{t, issuertest.On(t, outside.listenOutside(t, peoplePort), outside.cert),
		issuertest.On(t, outside.listenOutside(t, robotsPort), outside.cert)}
	key := l.newKey("first")
	l.trustIssuers(l.people)
	ann, robot := l.people.Token(l.annClaims(nil)),
		l.robots.Token(map[string]any{"sub": "mop", "roles": []string{"cleaner"}})
	awaitUser(t, "ann's token", ann, "people:ann@example.org")
	requireUser(t, "a token of an issuer that is not trusted", robot, "")
	requireUser(t, "a token for the other audience",
		l.people.Token(l.annClaims(map[string]any{"aud": []string{"kubectl", "x"}})),
		"people:ann@example.org")
	for _, replica := range testenv.Replicas() {
		u, err := authenticateAt(t, replica, ann)
		if got := fmt.Sprintf("%s %v %v", u.UID, u.Groups, u.Extra["example.org/department"]); err != nil ||
			got != "17 [people:tea people:cups system:authenticated] [kitchen]" {
			t.Errorf("%s maps the claims to %s, %v", replica, got, err)
		}
	}
	for what, token := range l.invalidTokens(key) {
		requireUser(t, what, token, "")
	}
	l.checkKubectl(ann)

	l.newKey("second")
	renewed := l.people.Token(l.annClaims(nil))
	// Keys are asked for once a second at most, and the bad tokens above have just asked for some.
	awaitUser(t, "a token by the new key", renewed, "people:ann@example.org")
	awaitUser(t, "a token signed by the previous key", ann, "")

	l.trustIssuers(l.people, l.robots)
	awaitUser(t, "a token of the issuer that was added", robot, "robots:mop")
	requireUser(t, "a token of the issuer that stayed", renewed, "people:ann@example.org")
	outside.setFile(t, "authentication.yaml", "kind: Nonsense\n")
	l.awaitRejectedFile()
	requireUser(t, "a token while the file is wrong", renewed, "people:ann@example.org")
	l.trustIssuers(l.robots)
	awaitUser(t, "a token of the issuer that was taken out", renewed, "")
	requireUser(t, "a token of the issuer that is left", robot, "robots:mop")
}

// newKey makes the issuer of people sign with a new key and remove the previous key.
func (l oidcTest) newKey(id string) *rsa.PrivateKey {
	l.Helper()
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		l.Fatal(err)
	}
	l.people.Sign(id, jose.RS256, key, &key.PublicKey)
	return key
}

// invalidTokens returns tokens that must be refused, by their defect. key is the issuer's.
func (l oidcTest) invalidTokens(key *rsa.PrivateKey) map[string]string {
	l.Helper()
	now, hour := time.Now().Unix(), int64(3600)
	out := map[string]string{
		"a token of an unverified address": l.people.Token(l.annClaims(map[string]any{"email_verified": false})),
		"a token of a banned user":         l.people.Token(l.annClaims(map[string]any{"groups": []string{"banned"}})),
		"a token without the groups":       l.people.Token(l.annClaims(map[string]any{"groups": nil})),
		"an expired token":                 l.people.Token(l.annClaims(map[string]any{"exp": now - hour})),
		"a token of tomorrow": l.people.Token(l.annClaims(map[string]any{"nbf": now + 24*hour,
			"exp": now + 25*hour})),
		"a token for another audience": l.people.Token(l.annClaims(map[string]any{"aud": "bank"})),
		"a token without an audience":  l.people.Token(l.annClaims(map[string]any{"aud": []string{}})),
		"a token in another's name":    l.robots.Token(l.annClaims(map[string]any{"iss": l.people.URL})),
		"an unsigned token":            l.people.Unsigned(`{"alg":"none"}`, l.annClaims(nil), nil),
		"an unsigned token of a key": l.people.Unsigned(`{"alg":"none","kid":"first"}`,
			l.annClaims(nil), []byte("x")),
	}
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		l.Fatal(err)
	}
	out["a token by another key of that name"] = l.signToken(jose.RS256, other)
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		l.Fatal(err)
	}
	out["a token whose secret is the public key"] = l.signToken(jose.HS256, public)
	out["a token whose secret is the public key's PEM"] =
		l.signToken(jose.HS256, pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}))
	out["a token whose secret is the public key's modulus"] = l.signToken(jose.HS256, key.N.Bytes())
	return out
}

// signToken returns ann's token signed by the caller's key, with the key ID of the issuer.
func (l oidcTest) signToken(alg jose.SignatureAlgorithm, key any) string {
	l.Helper()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: alg, Key: key},
		(&jose.SignerOptions{}).WithHeader("kid", "first"))
	if err != nil {
		l.Fatal(err)
	}
	return l.people.SignedBy(s, l.annClaims(nil))
}

// awaitRejectedFile waits until every replica has counted a configuration file that it rejects.
func (l oidcTest) awaitRejectedFile() {
	l.Helper()
	for _, replica := range testenv.Replicas() {
		cs := testenv.ClientAt(l, replica)
		testenv.Eventually(l, soon, func() error {
			raw, err := cs.CoreV1().RESTClient().Get().AbsPath("/metrics").DoRaw(context.Background())
			if err != nil {
				return err
			}
			for line := range strings.Lines(string(raw)) {
				if strings.HasPrefix(line,
					`keelson_access_configuration_reloads_total{part="authentication",status="failure"}`) {
					return nil
				}
			}
			return fmt.Errorf("%s has counted no failure", replica)
		})
	}
}

// checkKubectl checks the user that kubectl reports for a token.
func (l oidcTest) checkKubectl(token string) {
	l.Helper()
	for _, k := range kubectlPrograms() {
		requireWhoAmI(l, k, token, "people:ann@example.org", "17", "[people:tea people:cups system:authenticated]",
			"Extra: example.org/department", "[kitchen]")
		if out, err := runWithToken(l.T, k, token+"x", "auth", "whoami"); err == nil ||
			!strings.Contains(out, "must be logged in") {
			l.Errorf("%s with a damaged token: %v\n%s", filepath.Base(k), err, out)
		}
	}
}
