package authn_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	authenticationv1 "k8s.io/api/authentication/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"keelson.dev/keelson/controlplane/apiserver/apiservertest"
	"keelson.dev/keelson/controlplane/apiserver/authn/issuer/issuertest"
	"keelson.dev/keelson/controlplane/pki"
)

// becomes waits until a token authenticates a user; "" = no user.
func becomes(t *testing.T, r *apiservertest.Replica, token, user string) {
	t.Helper()
	apiservertest.Eventually(t, func() error {
		u, code := r.WhoAmI(token)
		if u.Username != user || (user == "") != (code == http.StatusUnauthorized) {
			return fmt.Errorf("the token is %q, %d; want %q", u.Username, code, user)
		}
		return nil
	})
}

const oidcConfig = `
apiVersion: apiserver.config.k8s.io/%s
kind: AuthenticationConfiguration
jwt:
- issuer:
    url: %s
    audiences: [keelson]
    certificateAuthority: |
%s
  claimMappings:
    username:
      expression: '"%s:" + claims.sub'
`

func indented(text string) string {
	return "      " + strings.ReplaceAll(strings.TrimSpace(text), "\n", "\n      ")
}

// F23: tokens of the issuers in the file authenticate. A removed issuer no longer does, an added
// issuer does, keys rotate, and an invalid file changes nothing.
func TestAuthenticationConfiguration(t *testing.T) {
	one, two := issuertest.New(t), issuertest.New(t)
	say := func(version, prefix string, p *issuertest.Provider) string {
		return fmt.Sprintf(oidcConfig, version, p.URL, indented(p.CA()), prefix)
	}
	a := apiservertest.NewConfigFiles(t)
	a.Authn.ConfigFile = a.WriteFile("authn.yaml", say("v1", "one", one))
	r := a.StartReplica()
	becomes(t, r, one.Token(nil), "one:alice")
	if _, code := r.WhoAmI(two.Token(nil)); code != http.StatusUnauthorized {
		t.Errorf("an issuer that no file names: %d", code)
	}
	one.Rotate("next")
	if u, _ := r.WhoAmI(one.Token(nil)); u.Username != "one:alice" {
		t.Errorf("after a rotation: %+v", u)
	}
	a.WriteFile("authn.yaml", say("v1beta1", "two", two))
	becomes(t, r, two.Token(nil), "two:alice")
	becomes(t, r, one.Token(nil), "")
	a.WriteFile("authn.yaml", "kind: Nonsense")
	a.WriteFile("authn.yaml", say("v1", "again", one)+"unknownField: true\n")
	a.WriteFile("authn.yaml", say("v1", "again", one))
	becomes(t, r, one.Token(nil), "again:alice")
	becomes(t, r, two.Token(nil), "")
	review, err := r.Admin().AuthenticationV1().TokenReviews().Create(apiservertest.Within(t),
		&authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: strings.Repeat("a.", 512<<10)},
		}, metav1.CreateOptions{})
	if err != nil || review.Status.Authenticated || !strings.Contains(review.Status.Error, "bytes") {
		t.Errorf("a review of a token of 1 MiB: %+v, %v", review.Status, err)
	}
	review, err = r.Admin().AuthenticationV1().TokenReviews().Create(apiservertest.Within(t),
		&authenticationv1.TokenReview{
			Spec: authenticationv1.TokenReviewSpec{Token: one.Token(nil), Audiences: []string{"vault"}},
		}, metav1.CreateOptions{})
	if err != nil || review.Status.Authenticated {
		t.Errorf("a token of an issuer, reviewed for an audience that is not this API: %+v, %v", review.Status, err)
	}
}

// Static tokens come from a file that is followed; strangers may come only where the configuration
// says.
func TestStaticTokensAndAnonymous(t *testing.T) {
	a := apiservertest.NewConfigFiles(t)
	a.Authn.TokenFile = a.WriteFile("tokens.csv", "secret-1,bob,17,\"dev,ops\"\n")
	a.Authn.ConfigFile = a.WriteFile("authn.yaml", `
apiVersion: apiserver.config.k8s.io/v1
kind: AuthenticationConfiguration
anonymous:
  enabled: true
  conditions: [{path: /livez}, {path: /version}]
`)
	r := a.StartReplica()
	if u, _ := r.WhoAmI("secret-1"); u.Username != "bob" || u.UID != "17" ||
		strings.Join(u.Groups, ",") != "dev,ops,system:authenticated" {
		t.Errorf("got %+v", u)
	}
	for path, want := range map[string]int{"/livez": 200, "/version": 200, "/readyz": 401, "/livez/ping": 401,
		"/api": 401, "/api/v1/pods": 401} {
		if got := r.Call(r.Unauthenticated(), http.MethodGet, path, ""); got.Code != want {
			t.Errorf("a stranger at %s: %d, want %d: %s", path, got.Code, want, got.Body)
		}
		if got := r.Call(r.Unauthenticated(), http.MethodGet, path, "", "Authorization", "Bearer secret-1"); got.Code ==
			401 {
			t.Errorf("bob at %s: %d: %s", path, got.Code, got.Body)
		}
	}
	a.WriteFile("tokens.csv", "secret-2,bob,17\n")
	becomes(t, r, "secret-2", "bob")
	becomes(t, r, "secret-1", "")
}

// F24: a TokenReview webhook authenticates clients. Its responses are cached, and requests are
// unauthorized while the webhook is unavailable.
func TestTokenReviewWebhook(t *testing.T) {
	for _, version := range []string{"v1", "v1beta1"} {
		t.Run(version, func(t *testing.T) {
			var asked atomic.Int32
			a := apiservertest.NewConfigFiles(t)
			a.Authn.WebhookVersion = version
			a.Authn.WebhookConfig = a.StartWebhook("hook", func(w http.ResponseWriter, r *http.Request) {
				asked.Add(1)
				var q authenticationv1.TokenReview
				if err := json.NewDecoder(r.Body).Decode(&q); err != nil ||
					q.APIVersion != "authentication.k8s.io/"+version {
					http.Error(w, "unexpected", http.StatusBadRequest)
					return
				}
				if q.Spec.Token == "broken" {
					http.Error(w, "unexpected", http.StatusBadRequest)
					return
				}
				if q.Spec.Token == "good" {
					q.Status.Authenticated = true
					q.Status.User = authenticationv1.UserInfo{Username: "carol", Groups: []string{"hooked"},
						Extra: map[string]authenticationv1.ExtraValue{"k": {"v"}}}
				}
				_ = json.NewEncoder(w).Encode(q)
			})
			r := a.StartReplica()
			for range 3 {
				if u, _ := r.WhoAmI("good"); u.Username != "carol" || u.Groups[0] != "hooked" ||
					u.Extra["k"][0] != "v" {
					t.Errorf("got %+v", u)
				}
				if _, code := r.WhoAmI("bad"); code != http.StatusUnauthorized {
					t.Errorf("a bad token: %d", code)
				}
			}
			if n := asked.Load(); n == 2 {
				if _, code := r.WhoAmI("broken"); code != http.StatusUnauthorized {
					t.Errorf("a token about which the service says nothing: %d", code)
				}
				asked.Store(n)
			} else {
				t.Errorf("the service was asked %d times about two tokens", n)
			}
			if u, _ := r.WhoAmI("alice-token"); u.Username != "alice" || asked.Load() != 2 {
				t.Errorf("a token that another verifier knows: %+v, asked %d times", u, asked.Load())
			}
		})
	}
}

// What a service has said of tokens is remembered when other files change, and not when the way to
// it does.
func TestAnswersAboutTokensOutliveOtherFiles(t *testing.T) {
	var asked atomic.Int32
	a := apiservertest.NewConfigFiles(t)
	a.Authn.TokenFile = a.WriteFile("tokens.csv", "secret-1,bob,17\n")
	a.Authn.WebhookVersion = "v1"
	a.Authn.WebhookConfig = a.StartWebhook("hook", func(w http.ResponseWriter, r *http.Request) {
		var q authenticationv1.TokenReview
		_ = json.NewDecoder(r.Body).Decode(&q)
		if q.Spec.Token == "good" {
			asked.Add(1)
			q.Status.Authenticated, q.Status.User.Username = true, "carol"
		}
		_ = json.NewEncoder(w).Encode(q)
	})
	r := a.StartReplica()
	becomes(t, r, "good", "carol")
	a.WriteFile("tokens.csv", "secret-2,bob,17\n")
	becomes(t, r, "secret-2", "bob")
	becomes(t, r, "good", "carol")
	if n := asked.Load(); n != 1 {
		t.Errorf("after a change of another file the service was asked %d times about one token", n)
	}
	config, err := os.ReadFile(a.Authn.WebhookConfig)
	if err != nil {
		t.Fatal(err)
	}
	a.WriteFile("hook", string(config)+"\n")
	apiservertest.Eventually(t, func() error {
		becomes(t, r, "good", "carol")
		if n := asked.Load(); n != 2 {
			return fmt.Errorf("after a change of the way to it the service was asked %d times", n)
		}
		return nil
	})
}

// Bootstrap tokens are Secrets, and end with them.
func TestBootstrapTokens(t *testing.T) {
	a := apiservertest.NewConfigFiles(t)
	a.Authn.BootstrapTokens = true
	r := a.StartReplica()
	ctx := apiservertest.Within(t)
	secrets := r.Admin().CoreV1().Secrets("kube-system")
	put := func(id string, change map[string]string) {
		t.Helper()
		data := map[string]string{"token-id": id, "token-secret": "0123456789abcdef",
			"usage-bootstrap-authentication": "true"}
		for k, v := range change {
			data[k] = v
		}
		_, err := secrets.Create(ctx, &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: "bootstrap-token-" + id}, Type: corev1.SecretTypeBootstrapToken,
			StringData: data,
		}, metav1.CreateOptions{})
		if err != nil {
			t.Fatal(err)
		}
	}
	put("good01", map[string]string{"auth-extra-groups": "system:bootstrappers:workers",
		"expiration": time.Now().Add(time.Hour).Format(time.RFC3339)})
	put("ended1", map[string]string{"expiration": time.Now().Add(-time.Hour).Format(time.RFC3339)})
	put("badend", map[string]string{"expiration": "tomorrow"})
	put("other1", map[string]string{"usage-bootstrap-authentication": "false"})
	put("groups", map[string]string{"auth-extra-groups": "system:masters"})
	put("swap01", map[string]string{"token-id": "swap02"})
	becomes(t, r, "good01.0123456789abcdef", "system:bootstrap:good01")
	u, _ := r.WhoAmI("good01.0123456789abcdef")
	if strings.Join(u.Groups, ",") != "system:bootstrappers,system:bootstrappers:workers,system:authenticated" {
		t.Errorf("groups %v", u.Groups)
	}
	for _, id := range []string{"ended1", "badend", "other1", "groups", "swap01", "swap02", "nobody"} {
		if _, code := r.WhoAmI(id + ".0123456789abcdef"); code != http.StatusUnauthorized {
			t.Errorf("%s: %d", id, code)
		}
	}
	if _, code := r.WhoAmI("good01.0123456789abcdee"); code != http.StatusUnauthorized {
		t.Errorf("another secret: %d", code)
	}
	if err := secrets.Delete(ctx, "bootstrap-token-good01", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	becomes(t, r, "good01.0123456789abcdef", "")
}

// A proxy with a certificate of its own authority is believed; headers of anybody else mean
// nothing.
func TestAuthenticatingProxy(t *testing.T) {
	proxies, err := pki.NewTrust("proxies", time.Now())
	if err != nil {
		t.Fatal(err)
	}
	a := apiservertest.NewConfigFiles(t)
	h := &a.Authn.RequestHeader
	h.ClientCAFile, h.AllowedNames = a.WriteFile("proxy-ca.pem", string(proxies.CA.PEM())), []string{"front"}
	h.UsernameHeaders, h.GroupHeaders, h.ExtraPrefixes, h.UIDHeaders = []string{"X-Remote-User"},
		[]string{"X-Remote-Group"}, []string{"X-Remote-Extra-"}, []string{"X-Remote-Uid"}
	r := a.StartReplica()
	as := func(trust *pki.Trust, name string) (authenticationv1.UserInfo, int) {
		t.Helper()
		issued, err := trust.CA.Issue(pki.Client(name), time.Now())
		if err != nil {
			t.Fatal(err)
		}
		got := r.Call(r.HTTP(&issued.TLS), http.MethodPost, "/apis/authentication.k8s.io/v1/selfsubjectreviews",
			`{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}`, "Content-Type", "application/json",
			"X-Remote-User", "dave", "X-Remote-Group", "a", "X-Remote-Group", "b", "X-Remote-Extra-Example.org%2fk",
			"v", "X-Remote-Uid", "9")
		var review authenticationv1.SelfSubjectReview
		_ = json.Unmarshal([]byte(got.Body), &review)
		return review.Status.UserInfo, got.Code
	}
	u, _ := as(proxies, "front")
	if u.Username != "dave" || u.UID != "9" || strings.Join(u.Groups, ",") != "a,b,system:authenticated" ||
		u.Extra["example.org/k"][0] != "v" {
		t.Errorf("got %+v", u)
	}
	if u, code := as(proxies, "back"); code != http.StatusUnauthorized {
		t.Errorf("a proxy of another name: %+v, %d", u, code)
	}
	if u, _ := as(r.Trust, "front"); u.Username != "front" {
		t.Errorf("a user of that name with headers is %+v", u)
	}
}
